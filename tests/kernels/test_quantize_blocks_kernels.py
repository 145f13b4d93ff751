"""The quantize_blocks kernels, in Triton's interpreter on CPU tensors. It has no instruction that converts to e4m3, so that
all configs run with integer arithmetic here."""

import re

import pytest
import torch
from interpreted import cases
from quantised import as_bits

import liger_ops.kernels as tables
from liger_ops.aot.compile import compile_variant
from liger_ops.reference.quantize_blocks import blocks_in_e4m3, squares_in_e4m3, tensor_in_e4m3

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.quantize.quantize_blocks
from interpreter import find

def run(path, dtype, n, aligned, kernel, by):
    # by: 0 for blocks of rows and columns, 1 for squares, 2 for the tensor.
    torch.manual_seed(0)
    # The rows are padded to 256, and the second tile has few of them.
    rows, written, programs = 150, 256, 3
    wide = torch.randn(rows, 2 * n) * 10.0 ** torch.randint(-3, 3, (rows, 1))
    x = wide.to(dict(fp16=torch.float16, fp32=torch.float32)[dtype])[:, n:]
    x[3], x[:, 1] = 0, 0
    if by != 2:
        x[7, 2], x[140, 3] = float("nan"), float("inf")
    down, across = written // 128, -(-n // 128)
    # The transposed copy is between others.
    before, pitch = 16, written + 32
    q, wider = (torch.full(shape, 0x55, dtype=torch.uint8) for shape in ((written, n), (n, pitch)))
    scale, scale_t = (torch.full(shape, -1.0) for shape in (
        ((across, written), (down, n)), ((down, across + 1), (across, down + 2)), ((1,), (1,)))[by])
    peaks = torch.full((programs,), -1, dtype=torch.int32)
    if by == 2:
        v = find("tensor_peaks").pick(dict(X=dtype), n, aligned)
        v.kernel.function[(programs,)](peaks, x, rows, n, 2 * n, **v.constexprs)
    v = find(kernel).pick(dict(X=dtype, SHARED=int(by > 0)), n, aligned)
    options = {k: 0 if k == "HARDWARE" else o for k, o in v.constexprs.items()}
    def launch(q, q_t, has_q, pitch, count):
        v.kernel.function[(down * across,)](
            q, scale, q_t, scale_t, peaks, x, rows, n, 2 * n, written, has_q, pitch,
            scale.shape[-1], scale_t.shape[-1], count, **options)
    launch(q, wider[:, before:], 1, pitch, (0, -1, programs)[by])
    # Each alone, and by the scale of the first launch.
    alone, alone_t = torch.full_like(q, 0x55), torch.full((n, written), 0x55, dtype=torch.uint8)
    untouched = torch.full_like(q, 0x55)
    launch(alone, untouched, 1, 0, (0, -1, 0)[by])
    launch(untouched, alone_t, 0, written, (0, -1, 0)[by])
    assert (untouched == 0x55).all() and torch.equal(alone, q)
    q_t = wider[:, before : before + written].contiguous()
    wider[:, before : before + written] = 0x55
    assert (wider == 0x55).all() and torch.equal(alone_t, q_t)
    numpy.savez(path, x=x.contiguous(), q=q, scale=scale, q_t=q_t, scale_t=scale_t)
"""
QUICK = [
    ("fp32", 208, True, "quantize_tiles_e4m3", 0),
    ("fp16", 272, True, "quantize_tiles_e4m3", 1),
    ("fp16", 144, True, "quantize_tiles_e4m3", 2),
    ("fp16", 61, False, "quantize_tiles", 0),
    ("fp32", 133, False, "quantize_tiles", 1),
    ("fp32", 61, False, "quantize_tiles", 2),
]
THOROUGH = [("fp16", 133, False, "quantize_tiles_e4m3", by) for by in range(3)]


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    n, by = case[1], case[-1]
    x = torch.zeros(256, n, dtype=interpreted["x"].dtype)
    x[:150] = interpreted["x"]
    quantise = (blocks_in_e4m3, squares_in_e4m3, tensor_in_e4m3)[by]
    for suffix, of in (("", x), ("_t", x.t().contiguous())):
        q, scale = quantise(of)
        assert torch.equal(as_bits(interpreted[f"q{suffix}"]), as_bits(q)), suffix
        found = interpreted[f"scale{suffix}"]
        if by == 2:
            if not suffix:
                assert torch.equal(found, scale.flatten())
            continue
        found = found.t() if by == 0 else found[:, : scale.shape[1]]
        assert torch.equal(as_bits(found.contiguous()), as_bits(scale)), suffix


@pytest.mark.parametrize("shared", range(2))
def test_fp32_is_rounded_once(shared):
    """Through fp16, a number close to the middle of two would become the middle."""
    kernel = tables.find("quantize_tiles_e4m3")
    variant = next(v for v in kernel.variants() if v.choices["X"] == "bf16" and v.choices["SHARED"] == shared)
    text = compile_variant(variant, [kernel.archs[0]]).ptx.decode()
    assert set(re.findall(r"cvt\S*e4m3\S*", text)) == {"cvt.rn.satfinite.e4m3x2.f32"}, variant.name
