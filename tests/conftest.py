import os

import pytest
import torch
from stub_cuda import packs as stub_cuda_packs
from support import interpret

import liger_ops
from liger_ops import compat, projections
from liger_ops.__main__ import operators

# Of the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor compiles around the operators, with or without vectors; trying each instruction set first takes a while.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


def pytest_collection_modifyitems(config, items):
    """Tests that cannot run here are deselected, and counted as such, rather than skipped one by one."""
    # What takes long comes first: at the end one process would wait for another's.
    items.sort(key=lambda item: not item.path.name.startswith("test_transformers"))
    present = {"gpu": torch.cuda.is_available(), "library": liger_ops._loaded.library is not None}
    missing = [name for name, is_present in present.items() if not is_present]
    gone = {item for item in items if any(item.get_closest_marker(name) for name in missing)}
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=list(gone))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(scope="module")
def interpreted(request, tmp_path_factory):
    """What the file's INTERPRETED leaves for each of its INTERPRETED_CASES."""
    folder = tmp_path_factory.mktemp("interpreted")
    return interpret(request.module.INTERPRETED, request.module.INTERPRETED_CASES, folder)


@pytest.fixture(autouse=True, scope="module")
def threads(request):
    """Two where an operator's loops are tested, to share their rows out; small models are quicker with one."""
    stem = request.module.__name__.removeprefix("test_")
    # An operator's tests are in test_<op>.py and test_<op>_<subject>.py.
    torch.set_num_threads(2 if any(f"{stem}_".startswith(f"{op}_") for op in operators()) else 1)


@pytest.fixture
def liger_kernel_served():
    """liger_ops serves `import liger_kernel`."""
    compat.install()
    yield
    compat.uninstall()


@pytest.fixture
def as_large_models(monkeypatch):
    """Small tensors leave gradients that meet to autograd."""
    monkeypatch.setattr(projections, "LARGE", 0)


@pytest.fixture(autouse=True)
def seeded():
    """A test sees the same numbers whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty comes filled with NaN: an element that no kernel writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def packs_of_the_stub(request):
    """Packs are compiled for the files that look at them."""
    if any("stub_cuda" in vars(item.module) or "PACKS" in vars(item.module) for item in request.session.items):
        stub_cuda_packs.ensure()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Tests neither read nor fill the user's kernel cache."""
    os.environ.setdefault("LIGER_OPS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def modest_memory():
    """Processes that share a GPU leave to each other what a large test took."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()
