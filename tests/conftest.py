import hashlib
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import liger_ops
from liger_ops import compat
from liger_ops.linear import project
from tests.support.checks import has_hopper_kernels
from tests.support.host import kernel_process
from tests.support.host.stub_cuda import packs as stub_cuda_packs

# For the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor's own code is not under test here, and probing every vector instruction set is slow.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Inductor's cache on disk stores calls of private operators, which other versions of the checkout may have left there. Under
# one schema they may have meant something else.
libraries = sorted(Path(liger_ops.__file__).parent.glob("lib/libliger_ops*.so"))
files = [Path(__file__).parent / "ops" / "registration.txt", *libraries]
os.environ.setdefault(
    "TORCH_COMPILE_CACHE_KEY_TAG", hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()
)
torch.compiler.config.cache_key_tag = os.environ["TORCH_COMPILE_CACHE_KEY_TAG"]


def pytest_addoption(parser):
    parser.addoption(
        "--tier", choices=["quick", "thorough", "all"], default="all",
        help="quick: make test. thorough: what make test-all runs in addition.",
    )  # fmt: skip
    # For tests/machines.py.
    parser.addoption("--seed", type=int, default=0, help="of the random numbers of every test")
    parser.addoption("--threads", type=int, help="of every test. Default: two for operators, one for models")
    parser.addoption("--no-onednn", action="store_true", help="GEMMs as on CPUs that oneDNN does not serve")


def pytest_configure(config):
    os.environ["LIGER_OPS_TEST_SEED"] = str(config.getoption("--seed"))  # for processes of groups
    if config.getoption("--no-onednn"):
        torch.backends.mkldnn.set_flags(False)


def pytest_collection_modifyitems(config, items):
    """Deselects tests that cannot run here and tests of the other tier, instead of skipping them one by one."""
    # The slowest files start first, so that no worker runs them alone at the end.
    items.sort(key=lambda item: "transformers" not in item.path.parts)
    present = {
        "gpu": torch.cuda.is_available(),
        "hopper": torch.cuda.is_available() and has_hopper_kernels(),
        "kernels": find_spec("kernels") is not None,
        "library": liger_ops._loaded.library is not None,
        "torchtitan": find_spec("torchtitan") is not None,
        "trl": find_spec("trl") is not None,
        "verl": find_spec("verl") is not None,
    }
    if not present["library"] and os.environ.get("LIGER_OPS_LIBRARY") != "0":
        # Formulas would be compared with themselves.
        raise pytest.UsageError("no operator library fits: make build (LIGER_OPS_LIBRARY=0 tests the formulas alone)")
    missing = [name for name, is_present in present.items() if not is_present]
    deselected = {item for item in items if any(item.get_closest_marker(name) for name in missing)}
    tier = config.getoption("--tier")
    if tier != "all":
        deselected |= {item for item in items if bool(item.get_closest_marker("thorough")) != (tier == "thorough")}
    items[:] = [item for item in items if item not in deselected]
    config.hook.pytest_deselected(items=list(deselected))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if arguments.get("device") != "interpreted":
        return None
    option = pyfuncitem.config.getoption
    kernel_process.started().ask(
        path=str(pyfuncitem.path), function=pyfuncitem.originalname, arguments=arguments | {"device": "cpu"}, capability=80,
        seed=option("--seed"), threads=option("--threads") or 1, onednn=not option("--no-onednn"),
    )  # fmt: skip
    return True


@pytest.fixture(autouse=True, scope="module")
def threads(request):
    """Operator tests run with two threads to cover the parallel loops; small models are faster with one."""
    chosen = request.config.getoption("--threads")
    torch.set_num_threads(chosen or (2 if "ops" in request.path.parts else 1))


@pytest.fixture
def liger_kernel_served():
    """liger_ops serves `import liger_kernel`."""
    compat.install()
    yield
    compat.uninstall()


@pytest.fixture
def process_group():
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def as_large_models(monkeypatch):
    """Small tensors take the code path of large ones, which accumulates gradients inside GEMMs."""
    monkeypatch.setattr(project, "LARGE", 0)


@pytest.fixture(autouse=True)
def seeded(request, monkeypatch):
    """Random numbers do not depend on which tests ran before. Another --seed changes those of tests that seed as well."""
    seed, start = request.config.getoption("--seed"), torch.manual_seed
    if seed:
        monkeypatch.setattr(torch, "manual_seed", lambda number: start(number + seed))
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fills torch.empty with NaN, so that an element that no kernel writes fails the test."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def packs_of_the_stub(request):
    """Compiles the test packs if any collected file uses them."""
    if any("stub_cuda" in vars(item.module) or "PACKS" in vars(item.module) for item in request.session.items):
        stub_cuda_packs.ensure()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Tests neither read nor fill the user's kernel cache."""
    os.environ.setdefault("LIGER_OPS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def release_gpu_memory():
    """Frees cached GPU memory after large tests, for other processes on the same GPU."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()
