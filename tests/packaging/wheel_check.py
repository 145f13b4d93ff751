"""Installs a wheel into an empty folder and runs it there without a compiler.

    python tests/packaging/wheel_check.py dist/liger_ops-*.whl [--device cuda] [--limit 0.15]

Triton cannot be imported, and PATH is empty: no gcc, no nvcc. Every operator runs forward and backward; on CUDA every
launch must come from a pack. The script then measures, in new processes, the time from `import liger_ops` to the end of
the first step of RMSNorm and cross entropy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

HIDE_TRITON = """
import importlib.metadata, sys

class WithoutTriton:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else self.finder.find_spec(name, path, target)

find = importlib.metadata.Distribution.from_name.__func__

def from_name(cls, name):
    if name == "triton":
        raise importlib.metadata.PackageNotFoundError(name)
    return find(cls, name)

sys.meta_path[:] = map(WithoutTriton, sys.meta_path)
importlib.metadata.Distribution.from_name = classmethod(from_name)
"""

EVERY_OPERATOR = """
import shutil, sys, torch, liger_ops
from tests.support.calls import NAMES, ROWS, RowModule, inputs_of, outputs

target, device = sys.argv[1:]
assert liger_ops.__file__.startswith(target), liger_ops.__file__
assert liger_ops._loaded.library is not None, liger_ops._loaded.tried
assert not any(map(shutil.which, ("gcc", "g++", "cc", "nvcc", "ptxas")))
torch.manual_seed(0)
for row, name in zip(ROWS, NAMES):
    module, inputs = RowModule(row).to(device), inputs_of(row, 4, 128, device, requires_grad=True)
    liger_ops.reset_launch_counts()
    results = [r for r in outputs(module(*inputs)) if r.requires_grad]
    wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    gradients = torch.autograd.grad(results, wanted, [torch.ones_like(r) for r in results])
    assert all(t.isfinite().all() for t in (*results, *gradients)), name
    counts = liger_ops.launch_counts()
    used = {path for path, count in counts.items() if count}
    # In fp32 the products of lora_linear are GEMMs of cuBLAS, and ATen adds up the gradient of few indices.
    of_torch = row.op in ("lora_linear", "embedding")
    assert used == ({"cpu"} if device == "cpu" else set() if of_torch else {"aot"}), (name, counts)
    print(f"{name}: {counts}")
assert "triton" not in sys.modules
print(f"all operators ran: {liger_ops._loaded.library}, Python {sys.version.split()[0]}, torch {torch.__version__}")
"""

COLD_START = """
import sys, time, torch

device = sys.argv[2]
dtype = torch.bfloat16 if device == "cuda" else torch.float32
x = torch.randn(64, 1024, device=device, dtype=dtype, requires_grad=True)
weight = torch.ones(1024, device=device, dtype=dtype, requires_grad=True)
target = torch.randint(1024, (64,), device=device)
synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
synchronize()
start = time.perf_counter()
import liger_ops
torch.ops.liger.cross_entropy(torch.ops.liger.rms_norm(x, weight), target).backward()
synchronize()
print(time.perf_counter() - start)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--limit", type=float, default=0.15, help="time limit of the first step in seconds")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        target, empty = Path(folder) / "target", Path(folder) / "empty"
        empty.mkdir()
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
        subprocess.run([*install, str(arguments.wheel.resolve())], check=True)
        ours = {"PATH": str(empty), "HOME": str(empty), "PYTHONPATH": os.pathsep.join([str(target), str(ROOT)])}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LIGER_OPS_", "CUDA_HOME", "CUDA_PATH"))}

        def run(code: str) -> str:
            command = [sys.executable, "-c", HIDE_TRITON + code, str(target), arguments.device]
            done = subprocess.run(command, cwd=empty, env={**kept, **ours}, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
            return done.stdout

        print(run(EVERY_OPERATOR), end="")
        # The first run also writes bytecode.
        first, *seconds = [float(run(COLD_START)) for _ in range(arguments.runs + 1)]
        median = statistics.median(seconds)
        print(f"cold start {median:.3f} s (runs {', '.join(f'{s:.3f}' for s in seconds)}; just installed {first:.3f})")
        if median > arguments.limit:
            raise SystemExit(f"cold start must take at most {arguments.limit} s (got {median:.3f})")


if __name__ == "__main__":
    main()
