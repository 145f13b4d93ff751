"""Linear projections with low-rank adapters (LoRA)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._wanted import LORA_A, LORA_B, WANT_BIAS, WANT_INPUT, WANT_WEIGHT


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: list[float], of: list[int], count: int, *parameters: Any) -> tuple[Tensor, ...]:
        """count: the number of weights. parameters: weights, biases, all a, all b."""
        weights, biases, adapters = parameters[:count], parameters[count : 2 * count], parameters[2 * count :]
        a, b = adapters[: len(scale)], adapters[len(scale) :]
        *outputs, t = torch.ops.liger._lora_projections(x, weights, biases, a, b, scale, of)
        ctx.save_for_backward(x, t, *weights, *adapters)
        ctx.scale, ctx.of, ctx.count = scale, of, count
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, t, *saved = ctx.saved_tensors
        count, scale = ctx.count, ctx.scale
        weights, a, b = saved[:count], saved[count : count + len(scale)], saved[count + len(scale) :]
        needed = ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]
        # In the order of the operator's results: the bit, and how many gradients it stands for.
        kinds = (
            (WANT_INPUT, 1), (WANT_WEIGHT, count), (WANT_BIAS, count), (LORA_A, len(scale)), (LORA_B, len(scale))
        )  # fmt: skip
        wanted, first, spans = 0, 0, []
        for bit, size in kinds:
            if any(needed[first : first + size]):
                wanted |= bit
                spans.append((first, size))
            first += size
        found = iter(torch.ops.liger._lora_projections_bwd(grads, x, weights, a, b, t, wanted, scale, ctx.of))
        out: list[Tensor | None] = [None] * first
        for start, size in spans:
            for i in range(start, start + size):
                gradient = next(found)
                out[i] = gradient if needed[i] else None
        return out[0], None, None, None, *out[1:]


def lora_projections(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scale: Sequence[float],
    of: Sequence[int],
) -> tuple[Tensor, ...]:
    """Several projections of x (..., n), each ``linear(x, weights[i], biases[i])`` plus the adapters j with
    ``of[j] == i``: ``scale[j] * linear(linear(x, a[j]), b[j])``."""
    return _Projections.apply(x, list(scale), list(of), len(weights), *weights, *biases, *a, *b)
