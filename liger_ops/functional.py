"""Typed functions over torch.ops.liger.*: the operators with names, defaults and documentation.

Letters: B batch, H heads, S sequence, D head size, n columns of a row, V vocabulary; "..." any leading dimensions.
Activations are fp32, fp16 or bf16 (fp64 on CPU) of any strides; parameters may be fp32 beside half-precision
activations. No function writes to its inputs unless its name ends in an underscore.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "CrossEntropyMetrics",
    "LinearCrossEntropyPlan",
    "LogProbabilities",
    "apply_rotary_pos_emb",
    "cross_entropy",
    "cross_entropy_",
    "cross_entropy_with_metrics",
    "embedding",
    "fused_add_rms_norm",
    "fused_linear_cross_entropy",
    "fused_linear_cross_entropy_heads",
    "fused_linear_cross_entropy_plan",
    "fused_linear_cross_entropy_with_log_probs",
    "fused_linear_cross_entropy_with_metrics",
    "geglu",
    "geglu_linear",
    "geglu_packed",
    "layer_norm",
    "rms_norm",
    "rope",
    "rope_freqs_cis",
    "swiglu",
    "swiglu_linear",
    "swiglu_packed",
]


class CrossEntropyMetrics(NamedTuple):
    """The loss, which alone has a gradient, and what was measured beside it."""

    loss: Tensor
    z_loss: Tensor
    token_accuracy: Tensor
    predicted_tokens: Tensor


class LogProbabilities(NamedTuple):
    """The loss, and for each position the target's log probability and the entropy of the prediction."""

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor


class LinearCrossEntropyPlan(NamedTuple):
    """How a fused linear loss will go through its tokens, and what it will take, in bytes."""

    chunk: int  # tokens whose logits exist at a time
    chunks: int
    workspace: int  # lives no longer than the call
    gradients: int  # made in forward, handed over in backward

    @property
    def peak(self) -> int:
        """Memory above the arguments while forward runs."""
        return self.workspace + self.gradients


# ---- Norms


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama"
) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * (weight + offset)`` over the last dimension.

    x: (..., n), weight: (n,). `casting_mode` says where a row of half precision is rounded: "llama" before it is
    multiplied by the weight, "gemma" and "none" once, at the end.

    >>> x = torch.tensor([[3.0, 4.0]])
    >>> rms_norm(x, torch.ones(2), eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
    return torch.ops.liger.rms_norm(x, weight, eps, offset, casting_mode)


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(s), s)`` with ``s = x + residual``, which is read once.

    x, residual: (..., n), weight: (n,).

    >>> y, s = fused_add_rms_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]]), eps=0.0)
    >>> s
    tensor([[3., 4.]])
    >>> y
    tensor([[0.8485, 1.1314]])
    """
    return torch.ops.liger.fused_add_rms_norm(x, residual, weight, eps, offset, casting_mode)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """:func:`torch.nn.functional.layer_norm` over the last dimension.

    x: (..., n), weight and bias: (n,).

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
    tensor([[-1.,  1.]])
    """
    return torch.ops.liger.layer_norm(x, weight, bias, eps)


# ---- Rotary position embedding


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    mrope_section: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """q and k with the first R columns of every head rotated, in q's and k's own layouts.

    q: (B, Hq, S, D), k: (B, Hk, S, D), cos and sin: (S, R) or (1 or B, S, R) with R <= D. Pairs of columns are
    (i, i + R / 2), or (2 i, 2 i + 1) where `interleaved`. With `mrope_section`, three sizes that add up to R / 2, cos
    and sin have a leading dimension of 3: positions in time, height and width.

    >>> q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> quarter_turn = torch.zeros(1, 2), torch.ones(1, 2)
    >>> rope(q, q, *quarter_turn)[0].flatten()
    tensor([0., 1.])
    """
    sections = None if mrope_section is None else list(mrope_section)
    return torch.ops.liger.rope(q, k, cos, sin, interleaved=interleaved, mrope_section=sections)


def rope_freqs_cis(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """The same from complex angles ``cos + i sin``, which turn pairs of neighbouring columns.

    q: (B, Hq, S, D), k: (B, Hk, S, D), freqs_cis: (S, D / 2) or (1 or B, S, R / 2).

    >>> q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> rope_freqs_cis(q, q, torch.tensor([[1j]]))[0].flatten()
    tensor([0., 1.])
    """
    return torch.ops.liger.rope_freqs_cis(q, k, freqs_cis)


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


# ---- Gated activations


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``; gate, up: (..., n).

    >>> swiglu(torch.tensor([1.0]), torch.tensor([2.0]))
    tensor([1.4621])
    """
    return torch.ops.liger.swiglu(gate, up)


def swiglu_packed(gate_up: Tensor) -> Tensor:
    """:func:`swiglu` of one projection's two halves. gate_up: (..., 2 n) -> (..., n).

    >>> swiglu_packed(torch.tensor([1.0, 2.0]))
    tensor([1.4621])
    """
    return torch.ops.liger.swiglu_packed(gate_up)


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear(swiglu(gate, up), weight, bias)``, which keeps gate and up for backward and not their product.

    gate, up: (..., n), weight: (m, n), bias: (m,) -> (..., m).

    >>> swiglu_linear(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([[3.0]]))
    tensor([4.3864])
    """
    return torch.ops.liger.swiglu_linear(gate, up, weight, bias)


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """``gelu(gate) * up``; gate, up: (..., n), approximate: "tanh" or "none".

    >>> geglu(torch.tensor([1.0]), torch.tensor([2.0]))
    tensor([1.6824])
    """
    return torch.ops.liger.geglu(gate, up, approximate)


def geglu_packed(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    """:func:`geglu` of one projection's two halves. gate_up: (..., 2 n) -> (..., n).

    >>> geglu_packed(torch.tensor([1.0, 2.0]))
    tensor([1.6824])
    """
    return torch.ops.liger.geglu_packed(gate_up, approximate)


def geglu_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "tanh"
) -> Tensor:
    """``F.linear(geglu(gate, up, approximate), weight, bias)``, see :func:`swiglu_linear`.

    >>> geglu_linear(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([[3.0]]))
    tensor([5.0472])
    """
    return torch.ops.liger.geglu_linear(gate, up, weight, bias, approximate)


# ---- Embedding


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """:func:`torch.nn.functional.embedding`. input: (...) indices, weight: (classes, n) -> (..., n).

    For torch.compile PyTorch's own is the better one, which :class:`liger_ops.nn.Embedding` takes there.

    >>> embedding(torch.tensor([1, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 4.],
            [1., 2.]])
    """
    return torch.ops.liger.embedding(input, weight, padding_idx)


# ---- Losses


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Cross entropy against class indices over the last dimension, in fp32 whatever the logits are.

    logits: (..., V), target: (...) int64 or int32, weight: (V,). The logits are ``softcap * tanh(logits / softcap)``
    first, if given; ``lse_square_scale * logsumexp^2`` (z-loss) is added to each loss.

    >>> cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, -100]))
    tensor(1.3863)
    """
    return torch.ops.liger.cross_entropy(
        logits, target, weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap
    )


def cross_entropy_(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """:func:`cross_entropy` that computes the gradient at once and writes it over the logits.

    >>> logits = torch.zeros(1, 2)
    >>> cross_entropy_(logits, torch.tensor([0]))
    tensor(0.6931)
    >>> logits
    tensor([[-0.5000,  0.5000]])
    """
    return torch.ops.liger.cross_entropy_(
        logits, target, weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap
    )


def cross_entropy_with_metrics(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
) -> CrossEntropyMetrics:
    """:func:`cross_entropy`, with its z-loss, the accuracy and the predicted tokens.

    >>> result = cross_entropy_with_metrics(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    >>> result.token_accuracy, result.predicted_tokens
    (tensor(1.), tensor([1]))
    """
    return CrossEntropyMetrics(
        *torch.ops.liger.cross_entropy_with_metrics(
            logits, target, weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap
        )
    )


def fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    *,
    logits_scale: float = 1.0,
    token_weight: Tensor | None = None,
    memory_budget: int | None = None,
) -> Tensor:
    """:func:`cross_entropy` of ``logits_scale * (input @ weight.T + bias)``, which never exists as a whole.

    input: (..., n), weight: (V, n), target: (...), bias and ce_weight: (V,), token_weight: (...) a factor for each
    position's loss. `memory_budget`: bytes that the pieces of the logits may take.

    >>> fused_linear_cross_entropy(torch.ones(3, 2), torch.zeros(4, 2), torch.tensor([0, 1, 2]))
    tensor(1.3863)
    """
    return torch.ops.liger.fused_linear_cross_entropy(
        input, weight, target, bias, ce_weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap,
        logits_scale=logits_scale, token_weight=token_weight, memory_budget=memory_budget,
    )  # fmt: skip


def fused_linear_cross_entropy_with_metrics(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    *,
    logits_scale: float = 1.0,
    token_weight: Tensor | None = None,
    memory_budget: int | None = None,
) -> CrossEntropyMetrics:
    """:func:`fused_linear_cross_entropy`, with its z-loss, the accuracy and the predicted tokens.

    >>> hidden, head = torch.eye(2), torch.eye(2)
    >>> fused_linear_cross_entropy_with_metrics(hidden, head, torch.tensor([0, 0])).token_accuracy
    tensor(0.5000)
    """
    return CrossEntropyMetrics(
        *torch.ops.liger.fused_linear_cross_entropy_with_metrics(
            input, weight, target, bias, ce_weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap,
            logits_scale=logits_scale, token_weight=token_weight, memory_budget=memory_budget,
        )
    )  # fmt: skip


def fused_linear_cross_entropy_with_log_probs(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    *,
    logits_scale: float = 1.0,
    token_weight: Tensor | None = None,
    memory_budget: int | None = None,
) -> LogProbabilities:
    """:func:`fused_linear_cross_entropy`, with each target's log probability and each prediction's entropy.

    >>> hidden, head = torch.ones(1, 2), torch.zeros(2, 2)
    >>> fused_linear_cross_entropy_with_log_probs(hidden, head, torch.tensor([0])).log_probs
    tensor([-0.6931])
    """
    return LogProbabilities(
        *torch.ops.liger.fused_linear_cross_entropy_with_log_probs(
            input, weight, target, bias, ce_weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap,
            logits_scale=logits_scale, token_weight=token_weight, memory_budget=memory_budget,
        )
    )  # fmt: skip


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
    """What :func:`fused_linear_cross_entropy` will do with arguments of these sizes.

    `memory_budget` bounds the workspace. Without one, chunks are as large as matrix products need to run at full speed,
    up to 1.25 GiB and 8192 tokens. Smaller chunks cost time, hardly accuracy: in 16 bits, what a token adds to the row of its own class
    is summed apart in fp32, and only the small rest is rounded once a chunk.

    >>> plan = fused_linear_cross_entropy_plan(16384, 4096, 128256, memory_budget=256 << 20)
    >>> plan.chunk, plan.chunks, plan.peak >> 20
    (1024, 16, 1381)
    """
    wanted = 4 * input_grad | 8 * weight_grad | 16 * bias_grad
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
    """One :func:`fused_linear_cross_entropy` a head, of heads that all read the same input.

    input: (..., n), weights: K of (V, n), targets: (K, ...). The losses are (K,), or (K, ...) with reduction "none".

    >>> heads = [torch.zeros(4, 2), torch.zeros(8, 2)]
    >>> fused_linear_cross_entropy_heads(torch.ones(1, 2), heads, torch.tensor([[0], [1]]))
    tensor([1.3863, 2.0794])
    """
    if len(weights) != len(targets):
        raise ValueError(
            "fused_linear_cross_entropy_heads: targets must have one entry a weight, "
            f"{len(weights)} (got {len(targets)})"
        )
    return torch.stack([
        fused_linear_cross_entropy(
            input, weight, target, None, None, reduction, ignore_index, label_smoothing, lse_square_scale, softcap,
            memory_budget=memory_budget,
        )
        for weight, target in zip(weights, targets)
    ])  # fmt: skip
