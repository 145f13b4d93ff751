"""Operators that quantise rows, columns or blocks, compared bit for bit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_ops import functional as F
from liger_ops.reference.quantize_blocks import BLOCKS
from tests.support.models.quantised import as_bits

# Operator and options.
QUANTIZERS = {name: (getattr(F, name), {}) for name in ("quantize_rows", "quantize_columns", "quantize_both")}
QUANTIZERS |= {f"quantize_blocks {block}": (F.quantize_blocks, dict(block=block)) for block in BLOCKS}


def assert_same_bits(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(as_bits(a.cpu().contiguous()), as_bits(b.cpu().contiguous())), f"result {i}"


def check(name: str, x: Tensor) -> tuple[Tensor, ...]:
    """Compares a quantiser with its formula, which runs on CPU."""
    op, options = QUANTIZERS[name]
    ours = op(x, **options)
    assert_same_bits(ours, op.reference(x.cpu(), **options))
    # Scales of blocks lie as GEMMs take them.
    assert ours[0].is_contiguous() and (op is F.quantize_blocks or all(t.is_contiguous() for t in ours))
    assert all(t.device == x.device for t in ours)
    return ours
