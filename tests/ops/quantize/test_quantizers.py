"""Quantisers of rows, columns and blocks against their formulas, bit for bit, and what test_every_operator.py tests of operators
with gradients. tests/kernels has the transposed copies of blocks, which only GEMMs take."""

from functools import partial

import pytest
import torch

from tests.support.checks import CPU_DTYPES, LAYOUTS, OPCHECKS, path_taken, sizes_around_tiles
from tests.support.families.quantizers import QUANTIZERS, assert_same_bits, check
from tests.support.pairs import pairwise, sizes_by_device

each = pytest.mark.parametrize("name", QUANTIZERS)


@sizes_by_device(
    cpu=[1, 7, 130, 2560],
    cuda=[1, 7, 131, 264, 2560, 16392, *sizes_around_tiles("quantize_rows_e4m3")],
    dtype=CPU_DTYPES,
)
def test_sizes(n, dtype, device):
    torch.manual_seed(0)
    for shape in ((n,), (3, n), (2, 141, n), (256, n)):
        x = 3 * torch.randn(shape, device=device).to(dtype)
        for name in QUANTIZERS:
            with path_taken(device):
                check(name, x)


@each
def test_double(name):
    """Is rounded to fp32 first."""
    check(name, torch.randn(3, 5, dtype=torch.float64))


@pairwise(layout=LAYOUTS, name=QUANTIZERS)
def test_layouts(layout, name, device):
    torch.manual_seed(0)
    check(name, LAYOUTS[layout](torch.randn(4, 6, 10, 64, device=device)))


@each
def test_many_rows(name, device):
    """More than programs take at once, and a number that no block divides."""
    torch.manual_seed(0)
    check(name, torch.randn(5003, 72, device=device, dtype=torch.bfloat16))


@each
def test_tiny_and_huge_numbers(name, device):
    """The inverse of a scale stays finite."""
    size = torch.tensor([1e-45, 1e-42, 1e-38, 1e-36, 1e37, 1e-20], device=device).repeat_interleave(128)
    x = torch.randn(6, 768, device=device) * size
    for rows in (x, x.t()):
        assert all(t.float().isfinite().all() for t in check(name, rows))


@each
@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 8)])
def test_empty(name, shape, device):
    check(name, torch.randn(shape, device=device))


@each
def test_opcheck(name, device):
    op, options = QUANTIZERS[name]
    overload = getattr(torch.ops.liger, op.__name__).default
    torch.library.opcheck(overload, (torch.randn(4, 130, device=device),), options, test_utils=OPCHECKS)


@each
def test_compiles_to_one_graph_for_every_size(name, device):
    op, options = QUANTIZERS[name]
    compiled = torch.compile(lambda x: op(x * 1, **options), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 50):
        x = torch.randn(rows, 4, 136, device=device)
        ours, theirs = compiled(x), op(x, **options)
        assert_same_bits(ours, theirs)
        assert [t.stride() for t in ours] == [t.stride() for t in theirs]


@each
def test_export(name):
    op, options = QUANTIZERS[name]

    class Module(torch.nn.Module):
        def forward(self, x):
            return getattr(torch.ops.liger, op.__name__)(x, **options)

    # As torch does with sizes of 1, the case of one block is another graph.
    rows = torch.export.Dim("rows", min=129, max=512)
    exported = torch.export.export(Module(), (torch.randn(200, 160),), dynamic_shapes=((({0: rows}),)))
    x = torch.randn(300, 160)
    assert_same_bits(exported.module()(x), op(x, **options))


@each
def test_vmap(name, device):
    op, options = QUANTIZERS[name]
    x = torch.randn(3, 5, 136, device=device)
    found = torch.func.vmap(partial(op, **options))(x)
    for i in range(3):
        assert_same_bits([t[i] for t in found], op(x[i], **options))


@each
def test_runs_are_bitwise_equal_and_capture(name, device):
    op, options = QUANTIZERS[name]
    x = torch.randn(1000, 160, device=device)
    before, first = x.clone(), op(x, **options)
    assert_same_bits(op(x, **options), first)
    assert torch.equal(x, before)
    if device == "cpu":
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(x, **options)
    graph.replay()
    assert_same_bits(captured, first)


@each
def test_errors(name):
    op, options = QUANTIZERS[name]
    for x, message in (
        (torch.ones(2, 8).to(torch.float8_e4m3fn), "x must be float32, float16, bfloat16 or float64"),
        (torch.tensor(1.0), "x must have at least one dimension"),
    ):
        with pytest.raises(RuntimeError, match=f"^{op.__name__}: {message}.*got "):
            op(x, **options)
