"""Typed functions over torch.ops.liger.*: the operators with names, defaults and documentation.

The operators are declared in liger_ops/reference and collected here by name. Activations are fp32, fp16 or bf16 (fp64
on CPU) with any strides. Parameters may be fp32 if the activations are half-precision. A function writes to its inputs
only if its name ends in an underscore.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import reference
from .reference._wanted import WANT_BIAS, WANT_INPUT, WANT_WEIGHT
from .reference.fused_linear_cross_entropy import fused_linear_cross_entropy
from .reference.rope import rope

if TYPE_CHECKING:
    # A stub that the build generates, because type checkers cannot follow the lookup below.
    from ._declared import *  # noqa: F403
else:
    globals().update(reference.public_names())


class LinearCrossEntropyPlan(NamedTuple):
    """How a fused linear loss splits its tokens into chunks, and how many bytes it needs."""

    chunk: int  # tokens whose logits exist at the same time
    chunks: int
    workspace: int  # bytes that are freed when the call returns
    gradients: int  # bytes of gradients, computed in forward and returned in backward

    @property
    def peak(self) -> int:
        """Bytes that forward needs in addition to its arguments."""
        return self.workspace + self.gradients


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """:func:`rope` under the name and signature that Hugging Face models call.

    q, k: (B, H, S, D) with `unsqueeze_dim` 1, (B, S, H, D) with 2; cos, sin: (1 or B, S, R).

    >>> q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> apply_rotary_pos_emb(q, q, torch.zeros(1, 1, 2), torch.ones(1, 1, 2), unsqueeze_dim=2)[0].flatten()
    tensor([0., 1.])
    """
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"apply_rotary_pos_emb: unsqueeze_dim must be 1 or 2 (got {unsqueeze_dim})")
    if unsqueeze_dim == 1:
        return rope(q, k, cos, sin)
    q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def fused_linear_cross_entropy_plan(
    tokens: int,
    hidden: int,
    vocabulary: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    input_grad: bool = True,
    weight_grad: bool = True,
    bias_grad: bool = False,
    memory_budget: int | None = None,
) -> LinearCrossEntropyPlan:
    """Chunks and memory of :func:`fused_linear_cross_entropy` for arguments of these sizes.

    `memory_budget` limits the workspace. Without it, chunks are as large as the GEMMs need to run at full speed, up to
    1.25 GiB and 8192 tokens. Smaller chunks cost time but hardly any accuracy: with 16-bit weights, a token's gradient
    of its own class's row is summed separately in fp32, and only the small remainder is rounded once per chunk.

    >>> plan = fused_linear_cross_entropy_plan(16384, 4096, 128256, memory_budget=256 << 20)
    >>> plan.chunk, plan.chunks, plan.peak >> 20
    (1024, 16, 1381)
    """
    wanted = WANT_INPUT * input_grad | WANT_WEIGHT * weight_grad | WANT_BIAS * bias_grad
    plan = torch.ops.liger._fused_linear_cross_entropy_plan(tokens, hidden, vocabulary, dtype, wanted, memory_budget)
    return LinearCrossEntropyPlan(*plan)


def fused_linear_cross_entropy_heads(
    input: Tensor,
    weights: Sequence[Tensor],
    targets: Tensor,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    *,
    memory_budget: int | None = None,
) -> Tensor:
    """One :func:`fused_linear_cross_entropy` per head, for several heads that read the same input.

    input: (..., n), weights: K of (V, n), targets: (K, ...). The losses are (K,), or (K, ...) with reduction "none".

    >>> heads = [torch.zeros(4, 2), torch.zeros(8, 2)]
    >>> fused_linear_cross_entropy_heads(torch.ones(1, 2), heads, torch.tensor([[0], [1]]))
    tensor([1.3863, 2.0794])
    """
    if len(weights) != len(targets):
        raise ValueError(
            "fused_linear_cross_entropy_heads: targets must have one entry per weight, "
            f"{len(weights)} (got {len(targets)})"
        )
    return torch.stack([
        fused_linear_cross_entropy(
            input, weight, target, None, None, reduction, ignore_index, label_smoothing, lse_square_scale, softcap,
            memory_budget=memory_budget,
        )
        for weight, target in zip(weights, targets)
    ])  # fmt: skip


__all__ = sorted({
    *reference.public_names(),
    *(name for name, value in globals().items() if getattr(value, "__module__", None) == __name__),
})  # fmt: skip
# doctest finds the examples of functions from other files through this.
__test__ = reference.operators()
