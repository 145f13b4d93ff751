"""quantize_rows, quantize_columns and quantize_both against their formula, bit for bit."""

import math

import pytest
import torch
from checks import CPU_DTYPES, HALF_TYPES, LAYOUTS, OPCHECKS, path_taken, sizes_around_tiles
from pairs import pairwise, sizes_by_device
from quantised import as_bits
from torch import Tensor

from liger_ops import functional as F
from liger_ops.reference import operators

QUANTIZERS = {name: operators()[name] for name in ("quantize_rows", "quantize_columns", "quantize_both")}
each = pytest.mark.parametrize("op", QUANTIZERS.values(), ids=QUANTIZERS)


def check(op, x: Tensor) -> tuple[Tensor, ...]:
    """The formula runs on CPU."""
    ours = op(x)
    for i, (a, b) in enumerate(zip(ours, op.reference(x.cpu()), strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous() and a.device == x.device
        assert torch.equal(as_bits(a.cpu()), as_bits(b)), f"result {i}"
    return ours


@sizes_by_device(
    cpu=[1, 7, 2560],
    cuda=[1, 7, 131, 2560, 16392, *sizes_around_tiles("quantize_rows_e4m3")],
    dtype=CPU_DTYPES,
)
def test_sizes(n, dtype, device):
    torch.manual_seed(0)
    for shape in ((n,), (3, n), (2, 41, n), (256, n)):
        x = 3 * torch.randn(shape, device=device).to(dtype)
        for op in QUANTIZERS.values():
            with path_taken(device):
                check(op, x)


@pytest.mark.parametrize("dtype", [torch.float64])
def test_double(dtype):
    """Is rounded to fp32 first."""
    for op in QUANTIZERS.values():
        check(op, torch.randn(3, 5, dtype=dtype))


@pairwise(layout=LAYOUTS, op=QUANTIZERS)
def test_layouts(layout, op, device):
    torch.manual_seed(0)
    check(QUANTIZERS[op], LAYOUTS[layout](torch.randn(4, 6, 10, 64, device=device)))


@each
def test_many_rows(op, device):
    """More than programs take at once, and a number that no block divides."""
    torch.manual_seed(0)
    check(op, torch.randn(5003, 72, device=device, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_every_value_is_rounded_as_torch_does(dtype, device):
    """To nearest, ties to even; subnormal numbers too. The scale is 1."""
    x = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)
    x = x[x.abs() <= 448]
    for op in (F.quantize_rows, F.quantize_columns):
        q, scale = op(x if op is F.quantize_rows else x.unsqueeze(1))
        assert scale.item() == 1
        assert torch.equal(as_bits(q.cpu().flatten()), as_bits(x.cpu().float().to(torch.float8_e4m3fn)))


@each
def test_zeros_nan_and_infinity(op, device):
    x = torch.randn(8, 8, device=device)
    x[1], x[:, 1] = 0, 0
    x[2, 3], x[4, 5], x[6, 7] = math.nan, math.inf, -math.inf
    check(op, x)
    q, scale = F.quantize_rows(x)
    back = q.float() * scale
    assert scale[1].item() == 1 and (back[1] == 0).all()
    assert back[[2, 4, 6]].isnan().all() and back[[0, 1, 3, 5, 7]].isfinite().all()


@each
def test_tiny_and_huge_numbers(op, device):
    """The inverse of a scale stays finite."""
    x = torch.randn(6, 16, device=device) * torch.tensor([[1e-45], [1e-42], [1e-38], [1e-36], [1e37], [1e-20]]).to(
        device
    )
    results = check(op, x)
    assert all(t.float().isfinite().all() for t in results)


@each
@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 8)])
def test_empty(op, shape, device):
    check(op, torch.randn(shape, device=device))


def test_columns_are_rows_of_the_transpose(device):
    x = torch.randn(2, 5, 48, device=device)
    q, scale, q_t, scale_t = F.quantize_both(x)
    for a, b in zip((q, scale, q_t, scale_t), (*F.quantize_rows(x), *F.quantize_rows(x.view(10, 48).t())), strict=True):
        assert torch.equal(as_bits(a.cpu()), as_bits(b.cpu()))


def test_error_is_half_a_unit(device):
    """At most 1 / 16 of a number, and 2^-10 of the largest one divided by 448."""
    x = torch.randn(64, 512, device=device)
    q, scale = F.quantize_rows(x)
    error, allowed = (q.float() * scale - x).abs(), x.abs() / 16 + scale * 2**-10
    assert (error <= allowed * (1 + 1e-6)).all()


@each
def test_opcheck(op, device):
    overload = getattr(torch.ops.liger, op.__name__).default
    torch.library.opcheck(overload, (torch.randn(4, 6, device=device),), test_utils=OPCHECKS)


@each
def test_compiles_to_one_graph_for_every_size(op, device):
    compiled = torch.compile(lambda x: op(x * 1), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(rows, 4, 16, device=device)
        for a, b in zip(compiled(x), op(x)):
            assert torch.equal(as_bits(a), as_bits(b))


@each
def test_export(op):
    class Module(torch.nn.Module):
        def forward(self, x):
            return getattr(torch.ops.liger, op.__name__)(x)

    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(Module(), (torch.randn(4, 16),), dynamic_shapes=((({0: rows}),)))
    x = torch.randn(7, 16)
    for a, b in zip(exported.module()(x), op(x)):
        assert torch.equal(as_bits(a), as_bits(b))


@each
def test_vmap(op, device):
    x = torch.randn(3, 5, 16, device=device)
    found = torch.func.vmap(op)(x)
    for i in range(3):
        for a, b in zip(found, op(x[i])):
            assert torch.equal(as_bits(a[i].contiguous()), as_bits(b))


@each
def test_runs_are_bitwise_equal_and_capture(op, device):
    x = torch.randn(1000, 160, device=device)
    before = x.clone()
    first = op(x)
    assert all(torch.equal(as_bits(a), as_bits(b)) for a, b in zip(first, op(x))) and torch.equal(x, before)
    if device == "cpu":
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(x)
    graph.replay()
    assert all(torch.equal(as_bits(a), as_bits(b)) for a, b in zip(first, captured))


ERRORS = {
    "integers": (lambda: torch.ones(2, 8, dtype=torch.long), "x must be float32, float16, bfloat16 or float64"),
    "8 bits": (lambda: torch.ones(2, 8).to(torch.float8_e4m3fn), "x must be float32, float16, bfloat16 or float64"),
    "scalar": (lambda: torch.tensor(1.0), "x must have at least one dimension"),
    "gradient": (lambda: torch.ones(2, 8, requires_grad=True), "x must not require a gradient"),
    "sparse": (lambda: torch.eye(8).to_sparse(), "x must be a dense, unquantized tensor"),
}


@each
@pytest.mark.parametrize("case", ERRORS)
def test_errors(op, case):
    argument, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"{op.__name__}: {message}.*got "):
        op(argument())
