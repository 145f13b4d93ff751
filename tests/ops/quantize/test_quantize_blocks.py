"""quantize_blocks against its formula, bit for bit. tests/kernels has the transposed copies, which only GEMMs take."""

import math

import pytest
import torch
from checks import CPU_DTYPES, LAYOUTS, OPCHECKS, path_taken
from pairs import pairwise, sizes_by_device
from quantised import as_bits
from torch import Tensor

from liger_ops import functional as F
from liger_ops.reference.quantize_blocks import BLOCKS, for_each

each = pytest.mark.parametrize("block", BLOCKS)


def check(x: Tensor, block: str) -> tuple[Tensor, Tensor]:
    """The formula runs on CPU."""
    ours = F.quantize_blocks(x, block=block)
    for i, (a, b) in enumerate(zip(ours, F.quantize_blocks.reference(x.cpu(), block=block), strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype and a.device == x.device
        assert torch.equal(as_bits(a.cpu()), as_bits(b)), f"result {i}"
    assert ours[0].is_contiguous()
    return ours


@sizes_by_device(cpu=[1, 7, 130, 640], cuda=[1, 7, 131, 264, 2560, 16392], dtype=CPU_DTYPES)
def test_sizes(n, dtype, device):
    torch.manual_seed(0)
    for shape in ((n,), (3, n), (2, 141, n), (256, n)):
        x = 3 * torch.randn(shape, device=device).to(dtype)
        for block in BLOCKS:
            with path_taken(device):
                check(x, block)


@each
def test_double(block):
    """Is rounded to fp32 first."""
    check(torch.randn(3, 5, dtype=torch.float64), block)


@pairwise(layout=LAYOUTS, block=BLOCKS)
def test_layouts(layout, block, device):
    torch.manual_seed(0)
    check(LAYOUTS[layout](torch.randn(4, 6, 10, 64, device=device)), block)


def test_scales_lie_as_scaled_mm_takes_them(device):
    x = torch.randn(7, 300, device=device)
    assert F.quantize_blocks(x)[1].stride() == (1, 7)
    assert F.quantize_blocks(x, block="128x128")[1].is_contiguous()


@each
def test_a_block_has_a_scale_of_its_own(block, device):
    x = torch.randn(256, 256, device=device)
    x[:128, :128] *= 1e20
    q, scale = check(x, block)
    sizes = (128,) if block == "1x128" else (128, 128)
    error, allowed = (q.float() * for_each(scale, q, *sizes) - x).abs(), x.abs() / 16
    assert (error[128:] <= allowed[128:] + 0.02).all() and (error[:, 128:] <= allowed[:, 128:] + 0.02).all()


@each
def test_zeros_nan_and_infinity(block, device):
    x = torch.randn(300, 300, device=device)
    x[1], x[:128, :128] = 0, 0
    x[200, 3], x[140, 150], x[299, 299] = math.nan, math.inf, -math.inf
    _, scale = check(x, block)
    assert scale[0, 0].item() == 1
    if block == "1x128":
        assert scale[200, 0].isnan() and scale[140, 1].isinf() and scale[199].isfinite().all()
    else:
        assert scale[1, 0].isnan() and scale[1, 1].isinf() and scale[0].isfinite().all()


@each
def test_tiny_and_huge_numbers(block, device):
    """The inverse of a scale stays finite."""
    size = torch.tensor([1e-45, 1e-42, 1e-38, 1e-36, 1e37, 1e-20], device=device).repeat_interleave(128)
    results = check(torch.randn(6, 768, device=device) * size, block)
    assert all(t.float().isfinite().all() for t in results)


@each
@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 8)])
def test_empty(block, shape, device):
    check(torch.randn(shape, device=device), block)


@each
def test_opcheck(block, device):
    x = torch.randn(4, 130, device=device)
    torch.library.opcheck(torch.ops.liger.quantize_blocks.default, (x,), dict(block=block), test_utils=OPCHECKS)


@each
def test_compiles_to_one_graph_for_every_size(block, device):
    compiled = torch.compile(
        lambda x: F.quantize_blocks(x * 1, block=block), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (3, 50):
        x = torch.randn(rows, 4, 136, device=device)
        for a, b in zip(compiled(x), F.quantize_blocks(x, block=block)):
            assert a.stride() == b.stride() and torch.equal(as_bits(a), as_bits(b))


@each
def test_export(block):
    class Module(torch.nn.Module):
        def forward(self, x):
            return torch.ops.liger.quantize_blocks(x, block=block)

    # As torch does with sizes of 1, the case of one block is another graph.
    rows = torch.export.Dim("rows", min=129, max=512)
    exported = torch.export.export(Module(), (torch.randn(200, 160),), dynamic_shapes=((({0: rows}),)))
    x = torch.randn(300, 160)
    for a, b in zip(exported.module()(x), F.quantize_blocks(x, block=block)):
        assert torch.equal(as_bits(a), as_bits(b))


@each
def test_vmap(block, device):
    x = torch.randn(3, 5, 136, device=device)
    found = torch.func.vmap(lambda t: F.quantize_blocks(t, block=block))(x)
    for i in range(3):
        for a, b in zip(found, F.quantize_blocks(x[i], block=block)):
            assert torch.equal(as_bits(a[i].contiguous()), as_bits(b))


@each
def test_runs_are_bitwise_equal_and_capture(block, device):
    x = torch.randn(1000, 160, device=device)
    before = x.clone()
    first = F.quantize_blocks(x, block=block)
    again = F.quantize_blocks(x, block=block)
    assert all(torch.equal(as_bits(a), as_bits(b)) for a, b in zip(first, again)) and torch.equal(x, before)
    if device == "cpu":
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = F.quantize_blocks(x, block=block)
    graph.replay()
    assert all(torch.equal(as_bits(a), as_bits(b)) for a, b in zip(first, captured))


ERRORS = {
    "integers": (
        lambda: F.quantize_blocks(torch.ones(2, 8, dtype=torch.long)), "x must be float32, float16, bfloat16 or float64",
    ),
    "scalar": (lambda: F.quantize_blocks(torch.tensor(1.0)), "x must have at least one dimension"),
    "gradient": (lambda: F.quantize_blocks(torch.ones(2, 8, requires_grad=True)), "x must not require a gradient"),
    "sparse": (lambda: F.quantize_blocks(torch.eye(8).to_sparse()), "x must be a dense, unquantized tensor"),
    "block": (lambda: F.quantize_blocks(torch.ones(2, 8), block="1x64"), "block must be '1x128' or '128x128'"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"quantize_blocks: {message}.*got "):
        call()
