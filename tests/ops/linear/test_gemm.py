"""GEMM results do not depend on the chosen tile."""

import itertools
import json

import pytest
import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode

import liger_ops
from liger_ops.linear.project import project
from tests.support.checks import assert_no_worse, has_hopper_kernels
from tests.support.host.stub_cuda import LIBRARIES, ROOT
from tests.support.pairs import pairwise

# The smallest GEMM that the tile table serves.
ROWS, DEPTH, COLUMNS = 2048, 2048, 8192


def gemms_run():
    return json.loads(torch.ops.liger._status())["gemms"]


def operands(rows, depth, columns, dtype, device, transpose=(False, False)):
    torch.manual_seed(0)
    a = torch.randn(*((depth, rows) if transpose[0] else (rows, depth)), device=device).to(dtype)
    b = torch.randn(*((columns, depth) if transpose[1] else (depth, columns)), device=device).to(dtype)
    return a.t() if transpose[0] else a, b.t() if transpose[1] else b


@pairwise(
    transpose=[(False, False), (True, False), (False, True), (True, True)],
    dtype=[torch.float32, torch.float16, torch.bfloat16, torch.float64],
)
def test_small_gemms(dtype, transpose, device):
    a, b = operands(5, 7, 3, dtype, device, transpose)
    assert torch.equal(torch.ops.liger._mm(a, b), a @ b)
    assert torch.ops.liger._mm(a[:0], b).shape == (0, 3)
    assert torch.equal(torch.ops.liger._mm(a[:, :0], b[:0]), torch.zeros(5, 3, dtype=dtype, device=device))


def test_errors():
    a = torch.randn(2, 3)
    for b, message in [
        (torch.randn(2, 3), "_mm: b must be a matrix of 3 rows"),
        (torch.randn(3), "_mm: b must be a matrix of 3 rows"),
        (torch.randn(3, 2).double(), "_mm: b must have the dtype of a"),
        (torch.randn(3, 2, device="meta"), "_mm: b must be on"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            torch.ops.liger._mm(a, b)
    with pytest.raises(RuntimeError, match="_mm: a must be a matrix"):
        torch.ops.liger._mm(a[0], a)


@pytest.mark.parametrize("in_dims", [(0, None), (None, 2), (1, 0)], ids=str)
def test_vmap(in_dims, device):
    a, b = torch.randn(3, 4, 5, device=device), torch.randn(3, 5, 6, device=device)
    given = [t[0] if d is None else t.movedim(0, d) for t, d in zip((a, b), in_dims)]
    expected = (a[0] if in_dims[0] is None else a) @ (b[0] if in_dims[1] is None else b)
    torch.testing.assert_close(torch.func.vmap(torch.ops.liger._mm, in_dims)(*given), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows,depth,columns,served",
    [
        (ROWS, DEPTH, COLUMNS, True),
        (4095, 2050, 8200, True),
        # Unaligned result rows; a GEMM too small for the table.
        (4095, 2050, 8195, False),
        (4096, 1024, 50257, False),
        # Too small for the table, and cuBLAS may use split-k, in which case our choice may differ.
        (2**11, 2**15 + 1, 2**9, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("transpose", [(False, False), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_gemms(rows, depth, columns, served, transpose, dtype):
    """Rows are padded. The remainders of odd extents (last rows, columns and terms of the sum) are separate GEMMs."""

    def padded(t):
        wide = t.new_full((t.shape[0], (t.shape[1] + 63) // 64 * 64), float("nan"))
        return wide.narrow(1, 0, t.shape[1]).copy_(t)

    a, b = operands(rows, depth, columns, dtype, "cuda", transpose)
    a = padded(a.t()).t() if transpose[0] else padded(a)
    b = padded(b.t()).t() if transpose[1] else padded(b)
    some = slice(None, None, rows // 64)
    exact = a[some].double() @ b.double()
    liger_ops.reset_launch_counts()
    assert_no_worse("GEMM", torch.ops.liger._mm(a, b)[some], a[some] @ b, exact)
    if served is not None:
        assert gemms_run() == (served and torch.cuda.get_device_capability()[0] == 9)


@pytest.mark.gpu
def test_operators_that_use_the_table():
    """The linear loss, projections with a shared input, and the down projection of an MLP, forward and backward."""
    measured = torch.cuda.get_device_capability()[0] == 9
    x, weight = (
        torch.randn(n, DEPTH, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (4096, COLUMNS)
    )
    target = torch.randint(COLUMNS, (4096,), device="cuda")
    # Without smoothing, the kernel for exponentials replaces the first GEMM.
    for smoothing, gemms in ((0.1, 3), (0.0, 2 if has_hopper_kernels() else 3)):
        liger_ops.reset_launch_counts()
        torch.ops.liger.fused_linear_cross_entropy(x, weight, target, label_smoothing=smoothing).backward()
        assert gemms_run() == gemms * measured
    linears = [torch.nn.Linear(DEPTH, COLUMNS, False, "cuda", torch.bfloat16) for _ in range(2)]
    liger_ops.reset_launch_counts()
    torch.autograd.backward(outputs := project(linears, x), [torch.randn_like(y) for y in outputs])
    assert gemms_run() == 2 * 3 * measured
    down = torch.randn(DEPTH, COLUMNS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gate, up = (y.detach().requires_grad_() for y in outputs)
    liger_ops.reset_launch_counts()
    out = torch.ops.liger.swiglu_linear(gate, up, down)
    out.backward(torch.randn_like(out))
    assert gemms_run() == 3 * measured


@pytest.mark.gpu
def test_gemms_are_deterministic_and_captured():
    a, b = operands(ROWS, DEPTH, COLUMNS, torch.bfloat16, "cuda", (True, False))
    first = torch.ops.liger._mm(a, b)
    assert all(torch.equal(first, torch.ops.liger._mm(a, b)) for _ in range(10))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.ops.liger._mm(a, b)
    captured.zero_()
    graph.replay()
    assert torch.equal(first, captured)


# ---- GEMMs read initialized memory only.


def memory_read(matrix):
    """The rows of a matrix including the padding between them, which some BLAS libraries read."""
    if matrix.numel() == 0:
        return matrix
    rows, row = max(zip(matrix.stride(), matrix.shape))[::-1]
    available = matrix.untyped_storage().nbytes() // matrix.element_size() - matrix.storage_offset()
    return matrix.as_strided((min(max(rows * row, matrix.numel()), available),), (1,))


class Operands(TorchDispatchMode):
    """Checks the operands of every GEMM in the CPU implementations of our operators."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "liger":
            own = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU")
            with self:
                return func._op_dk(getattr(DispatchKey, "CPU" if own else "CompositeExplicitAutograd"), *args, **kwargs)
        at = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "linear": 0}.get(func._schema.name.split("::")[1])
        if at is not None:
            self.seen += 1
            for operand in args[at : at + 2]:
                assert not memory_read(operand).isnan().any(), f"{func} reads memory that was not written"
        return func(*args, **kwargs)


def gemm_calls():
    def leaf(*shape):
        return torch.randn(*shape).bfloat16().requires_grad_()

    # Rows of classes do not fill whole cache lines, and the last chunk is smaller.
    target, budget = torch.randint(75, (90,)), {"memory_budget": 12_000}
    losses = torch.ops.liger
    fused, metrics = losses.fused_linear_cross_entropy, losses.fused_linear_cross_entropy_with_metrics
    log_probs = losses.fused_linear_cross_entropy_with_log_probs
    return {
        "linear loss": lambda: fused(leaf(90, 40), leaf(75, 40), target, **budget),
        "linear loss, with a bias": lambda: fused(leaf(90, 40), leaf(75, 40), target, leaf(75), **budget),
        "linear loss of each token": lambda: fused(leaf(90, 40), leaf(75, 40), target, reduction="none", **budget),
        "linear loss, with metrics": lambda: metrics(leaf(90, 40), leaf(75, 40), target, **budget)[0],
        "linear loss, with log-probs": lambda: log_probs(leaf(90, 40), leaf(75, 40), target, **budget)[0],
        "swiglu_linear": lambda: losses.swiglu_linear(leaf(9, 75), leaf(9, 75), leaf(13, 75), leaf(13)),
        "geglu_linear": lambda: losses.geglu_linear(leaf(9, 75), leaf(9, 75), leaf(13, 75)),
        "projections": lambda: torch.cat(
            project([torch.nn.Linear(75, n, False, dtype=torch.bfloat16) for n in (13, 5)], leaf(9, 75)), -1
        ),
    }


@pytest.mark.parametrize("call", gemm_calls())
@pytest.mark.usefixtures("as_large_models")
def test_gemms_read_initialized_memory_only(call):
    """oneDNN on CPUs with AMX (torch 2.13) multiplies the padding between rows by zero, which gives NaN if the padding
    is uninitialized. The test fills new memory with NaN and inspects operands, so it also works on other CPUs."""
    with Operands() as operands_seen:
        gemm_calls()[call]().sum().backward()
    assert operands_seen.seen >= 3


# ---- GEMMs of which only a part has a plan.


@pytest.fixture(scope="module")
def multiply(tmp_path_factory):
    from torch.utils.cpp_extension import load

    load(
        "multiply_on_cpu",
        [str(ROOT / "tests/support/host/multiply_on_cpu.cpp")],
        extra_include_paths=[str(ROOT / "csrc")],
        extra_ldflags=[str(LIBRARIES / "libliger_runtime.so"), f"-Wl,-rpath,{LIBRARIES}"],
        build_directory=str(tmp_path_factory.mktemp("multiply_on_cpu")),
        is_python_module=False,
    )
    return torch.ops.liger_on_cpu.multiply


@pytest.mark.thorough
@pairwise(
    transpose=[(False, False), (True, False), (False, True), (True, True)],
    into=["rows", "columns"],
    refuse=[False, True],
)
def test_planned_and_remaining_parts_give_the_full_result(multiply, transpose, into, refuse):
    """Rows of every tensor are padded with NaN; the padding is neither read nor written."""

    def padded(t, transposed):
        t = t.t() if transposed else t
        wide = t.new_full((t.shape[0], -(-t.shape[1] // 64) * 64), float("nan"))
        view = wide.narrow(1, 0, t.shape[1]).copy_(t)
        return (view.t() if transposed else view), wide

    torch.manual_seed(0)
    planned = 0
    for rows, depth, columns in itertools.product((1, 7, 8, 33), (1, 8, 12, 41), (1, 8, 17, 24)):
        for beta, alpha in ((0, 1), (1, 1), (1, 0.5), (0, 2.0)):
            a, b, before = (
                torch.randn(*shape).double() for shape in ((rows, depth), (depth, columns), (rows, columns))
            )
            out, memory = padded(before if beta else torch.full_like(before, float("nan")), into == "columns")
            runs = multiply(out, padded(a, transpose[0])[0], padded(b, transpose[1])[0], beta, alpha, refuse)
            planned += runs
            torch.testing.assert_close(out, alpha * (a @ b) + (beta * before if beta else 0))
            assert memory[:, rows if into == "columns" else columns :].isnan().all()
    # The table has no tiles for two transposed operands.
    both = (transpose == (True, True), transpose == (False, False))[into == "columns"]
    assert (planned == 0) == both
