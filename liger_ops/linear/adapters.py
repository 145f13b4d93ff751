"""Linear projections with low-rank adapters (LoRA)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._runtime.static import static
from .packed import Packed, dequantised

# Gradients of projections, by their place among the operator's results.
X, WEIGHTS, BIASES, A, B = range(5)


def kinds_of(weights: Sequence[Tensor | None], adapters: int) -> list[Sequence[int]]:
    """The places of x, weights, biases, all a and all b among these tensors. An absent weight and its bias, another layer's
    result, are not the operator's."""
    count = len(weights)
    present = [i for i, weight in enumerate(weights) if weight is not None]
    first = 1 + 2 * count
    return [
        [0], [1 + i for i in present], [1 + count + i for i in present],
        range(first, first + adapters), range(first + adapters, first + 2 * adapters),
    ]  # fmt: skip


class _Projections(torch.autograd.Function):
    """Of weights that Python code unpacks, or of act(gate) * up, which backward computes again, in the pass over gate and up
    that it makes anyway. For others the operator itself has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor | None, op: str, options: tuple, scale: list[float], of: list[int],
        states: list[Any], seeds: Tensor | None, dropout: list[float], *parameters: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """up: of the gate x, if there is one. states: of each weight, None if it is not quantised. parameters: weights, biases,
        all a, all b. Where a weight is None, the bias is another layer's result, if given."""
        count = len(states)
        weights, biases, adapters = parameters[:count], parameters[count : 2 * count], parameters[2 * count :]
        a, b = adapters[: len(scale)], adapters[len(scale) :]
        product = x if up is None else getattr(torch.ops.liger, op)(x, up, *options)
        whole = [dequantised(weight, state, x.dtype) for weight, state in zip(weights, states)]
        *outputs, t = torch.ops.liger._lora_projections(product, whole, biases, a, b, scale, of, seeds, dropout)
        ctx.save_for_backward(x, up, t, seeds, *weights, *adapters)
        ctx.op, ctx.options, ctx.scale, ctx.of, ctx.states, ctx.dropout = op, options, scale, of, states, dropout
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, up, t, seeds, *saved = ctx.saved_tensors
        count, adapters = len(ctx.states), len(ctx.scale)
        weights, a, b = saved[:count], saved[count : count + adapters], saved[count + adapters :]
        weights = [dequantised(weight, state, x.dtype) for weight, state in zip(weights, ctx.states)]
        needs_x, needs_up = ctx.needs_input_grad[:2]
        needed = needs_x or needs_up, *ctx.needs_input_grad[9:]
        kinds = kinds_of(weights, adapters)
        out: list[Tensor | None] = [None] * len(needed)

        def compute(x: Tensor, *gradients: int) -> None:
            asked = [i for i in gradients if any(needed[place] for place in kinds[i])]
            if asked:
                wanted = sum(1 << i for i in asked)
                found = torch.ops.liger._lora_projections_bwd(
                    grads, x, weights, a, b, t, wanted, ctx.scale, ctx.of, seeds, ctx.dropout
                )
                for place, gradient in zip((place for i in asked for place in kinds[i]), found):
                    out[place] = gradient if needed[place] else None

        dup = None
        if up is None:
            compute(x, X, WEIGHTS, BIASES, A, B)
        else:
            # These need only the shape of the product.
            compute(x, X, BIASES, B)
            if out[0] is None:
                product = getattr(torch.ops.liger, ctx.op)(x, up, *ctx.options)
            else:
                backward = getattr(torch.ops.liger, f"_{ctx.op}_product_bwd")
                out[0], dup, product = backward(out[0], x, up, *ctx.options)
            compute(product, WEIGHTS, A)
        for i, weight in enumerate(weights):
            if weight is None and needed[1 + count + i]:
                out[1 + count + i] = grads[i]
        return out[0] if needs_x else None, dup if needs_up else None, *[None] * 7, *out[1:]


def parts_of(weight: Tensor | Packed | None) -> tuple[Tensor | None, Any]:
    return (weight.data, weight.state) if isinstance(weight, Packed) else (weight, None)


def seeds_for(dropout: Sequence[float], device: torch.device) -> Tensor | None:
    """Seeds of the masks of adapters with these rates of dropout, or None if nothing is dropped. They come from the device's
    generator, without a copy to the host."""
    if not any(dropout):
        return None
    return torch.randint(-(2**63), 2**63 - 1, (len(dropout),), device=device)


def lora_projections(
    x: Tensor,
    weights: Sequence[Tensor | Packed | None],
    biases: Sequence[Tensor | None],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scale: Sequence[float],
    of: Sequence[int],
    dropout: Sequence[float] = (),
) -> tuple[Tensor, ...]:
    """Several projections of x (..., n), each ``linear(x, weights[i], biases[i])`` plus the adapters j with
    ``of[j] == i``: ``scale[j] * linear(linear(x, a[j]), b[j])``, of x with dropout[j]. Where weights[i] is None, biases[i] is
    another layer's result, (..., m), or None for the sum of the adapters alone."""
    tensors, states = zip(*map(parts_of, weights))
    seeds = seeds_for(dropout, x.device)
    rates = [] if seeds is None else [*static(*dropout)]
    scale, of = [*static(*scale)], list(of)
    if all(state is None for state in states):
        return tuple(torch.ops.liger._lora_projections(x, tensors, biases, a, b, scale, of, seeds, rates)[:-1])
    return _Projections.apply(x, None, "", (), scale, of, list(states), seeds, rates, *tensors, *biases, *a, *b)


def gated_lora_projection(
    op: str,
    options: tuple,
    gate: Tensor,
    up: Tensor,
    weight: Tensor | Packed,
    bias: Tensor | None,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scale: Sequence[float],
    dropout: Sequence[float] = (),
) -> Tensor:
    """``lora_projections`` with one weight, of op(gate, up, *options). op: "swiglu" or "geglu"."""
    tensor, state = parts_of(weight)
    seeds = seeds_for(dropout, gate.device)
    rates = [] if seeds is None else [*static(*dropout)]
    options = (*static(*options),)
    scale, of = [*static(*scale)], [0] * len(scale)
    (out,) = _Projections.apply(gate, up, op, options, scale, of, [state], seeds, rates, tensor, bias, *a, *b)
    return out


def low_rank_input(x: Tensor, a: Sequence[Tensor], scale: Sequence[float], dropout: Sequence[float] = ()) -> Tensor:
    """The `low_rank_input` of a linear loss for x (..., n): ``scale[j] * linear(x, a[j])``, of x with dropout[j], of all
    adapters side by side, (..., r) in fp32. Its `low_rank_weight` holds their B side by side."""
    seeds = seeds_for(dropout, x.device)
    rates = [] if seeds is None else [*static(*dropout)]
    return torch.ops.liger._low_rank_input(x, a, [*static(*scale)], seeds, rates)
