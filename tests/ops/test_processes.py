"""Forks and the end of a process while operators run, and a soak of few steps."""

import random
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch

from liger_ops.reference import operators
from tests.support.checks import ROOT, run_python

pytestmark = pytest.mark.library
spec = spec_from_file_location("soak", ROOT / "tests/soak.py")
soak = module_from_spec(spec)
spec.loader.exec_module(soak)

DEFINITIONS = """
import os, sys, threading, time, torch, liger_ops

torch.set_num_threads(2)
rows, heads, target = torch.randn(200, 64), torch.randn(400, 64), torch.randint(400, (200,))

# Draws no numbers: a fork may copy the generator's lock while a thread holds it.
def work():
    x = rows.clone().requires_grad_()
    y = torch.ops.liger.rms_norm(x, torch.ones(64))
    return torch.autograd.grad(torch.ops.liger.fused_linear_cross_entropy(y, heads, target), x)[0]

"""

# Threads call operators, forward and backward, with two threads of their own each.
WORKING = """
def forever():
    while True:
        work()
        done.set()

done = threading.Event()
for _ in range(4):
    threading.Thread(target=forever, daemon=True).start()
assert done.wait(60)
"""

# Workers of a DataLoader have one thread too: those of OpenMP do not survive a fork.
FORK = """
def status_of_child():
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        before = liger_ops.launch_counts()["cpu"]
        found = work()
        os._exit(0 if found.isfinite().all() and liger_ops.launch_counts()["cpu"] > before else 1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    return "hangs"

print({status_of_child() for _ in range(20)})
done.clear()
assert done.wait(60)  # the parent's threads go on
os._exit(0)
"""

# Calls that a pool has begun, and those that wait in it, when the main thread ends.
POOL = """
import atexit, concurrent.futures
found, pool = [], concurrent.futures.ThreadPoolExecutor(4)
for _ in range(50):
    pool.submit(work).add_done_callback(lambda future: found.append(bool(future.result().isfinite().all())))
atexit.register(lambda: print(len(found), all(found)))
"""

# Graphs outlive the modules, and a handler of the exit runs one.
GRAPHS = """
import atexit, builtins, torch, liger_ops

x = torch.randn(8, 64, requires_grad=True)
builtins.kept = [torch.ops.liger.swiglu(x, x), torch.ops.liger.cross_entropy(x * 1, torch.zeros(8, dtype=torch.long))]
atexit.register(lambda: print(torch.autograd.grad(builtins.kept[0].sum(), x)[0].shape))
"""


def run(code: str) -> str:
    done = run_python(code)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def test_forks_while_operators_run():
    assert run(DEFINITIONS + WORKING + FORK) == "{0}\n"


def test_the_interpreter_exits_while_a_pool_works():
    assert run(DEFINITIONS + POOL) == "50 True\n"


def test_the_interpreter_exits_with_graphs_alive():
    assert run(GRAPHS) == "torch.Size([8, 64])\n"


# ---- The soak


@pytest.fixture(autouse=True)
def few_measurements(monkeypatch):
    monkeypatch.setattr(soak, "MEASUREMENTS", 16)


def test_a_soak_of_few_steps(device):
    wrong, _ = soak.soak(17, device)
    assert wrong == []


@pytest.mark.parametrize("operator", soak.public_operators(), ids=lambda operator: operator.__name__)
def test_random_calls_are_valid(operator):
    for seed in range(4):
        soak.step(operator, random.Random(seed), "cpu", False)


def test_a_soak_finds_a_leak(monkeypatch):
    """Of 64 KiB per step."""
    leaked: list[bytearray] = []
    monkeypatch.setattr(soak, "step", lambda *_: leaked.append(bytearray(b"x" * (64 << 10))) or [])
    _, (leaking, on_device) = soak.soak(400, "cpu")
    assert leaking > soak.GROWTH and on_device == 0
    monkeypatch.setattr(soak, "step", lambda *_: [])
    _, (steady, _) = soak.soak(400, "cpu")
    assert steady < soak.GROWTH / 4


def test_a_soak_finds_a_wrong_result(monkeypatch):
    op = torch.ops.liger.relu_squared
    monkeypatch.setattr(torch.ops.liger, "relu_squared", lambda x: op(x) + 1)
    monkeypatch.setattr(soak, "public_operators", lambda: [operators()["relu_squared"]])
    wrong, _ = soak.soak(8, "cpu")
    assert wrong and wrong[0].startswith("relu_squared: result: error ")
