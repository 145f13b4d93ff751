"""Calls of rope and qk_norm_rope, compared with their formulas."""

import torch
from torch import Tensor

from tests.support.checks import check_op
from tests.support.oracles.rotations import FORMULAS


def heads(batch, count, sequence, size, dtype, device, requires_grad=True):
    """(B, H, S, D), with the memory layout (B, S, H, D) that attention produces."""
    x = torch.randn(batch, sequence, count, size, dtype=dtype, device=device).transpose(1, 2)
    return x.requires_grad_(requires_grad)


def angles(*shape, dtype=torch.float32, device="cpu"):
    """The halves of a row differ, unlike in models, to catch code that reads the wrong half."""
    phase = torch.rand(shape, device=device) * 6.3
    return phase.cos().to(dtype), phase.sin().to(dtype)


def make(
    name, batch, q_heads, k_heads, sequence, size, dtype, device, rotated=None, weight_dtype=None,
    angle_dtype=torch.float32, angle_batch=1,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Inputs, the last of which are cos and sin, and upstream gradients."""
    torch.manual_seed(0)  # compared rounding errors must not depend on which tests ran before
    counts = q_heads, k_heads
    inputs = [heads(batch, count, sequence, size, dtype, device) for count in counts]
    if name == "qk_norm_rope":
        columns = dict(dtype=weight_dtype or dtype, device=device, requires_grad=True)
        inputs += [torch.randn(size, **columns) for _ in counts]
    width = size if rotated is None else rotated
    inputs += angles(angle_batch, sequence, width, dtype=angle_dtype, device=device)
    return inputs, [heads(batch, count, sequence, size, dtype, device, False) for count in counts]


def check(name, inputs, grads, device, **options) -> None:
    (*learned, cos, sin), op, formula = inputs, getattr(torch.ops.liger, name), FORMULAS[name]
    check_op(
        lambda *t: op(*t, cos, sin, **options), lambda *t: formula(*t, cos, sin, **options), learned, grads, device
    )
