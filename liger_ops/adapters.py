"""Linear projections with low-rank adapters (LoRA)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._static import static
from ._wanted import LORA_A, LORA_B, WANT_BIAS, WANT_INPUT, WANT_WEIGHT
from .quantised import Packed, dequantised

Kinds = Sequence[tuple[int, Sequence[int]]]


def wanted_gradients(needed: Sequence[bool], kinds: Kinds, only: int = -1) -> tuple[int, list[int]]:
    """The bits of the gradients that are needed, and where the operator's results belong in `needed`. kinds: in their
    order, each bit and the places of its tensors. only: the bits to consider."""
    wanted = 0
    places: list[int] = []
    for bit, of_bit in kinds:
        if bit & only and any(needed[i] for i in of_bit):
            wanted |= bit
            places += of_bit
    return wanted, places


def kinds_of(weights: Sequence[Tensor | None], adapters: int) -> Kinds:
    """Of x, weights, biases, a and b. An absent weight and its bias, another layer's result, are not the operator's."""
    count = len(weights)
    present = [i for i, weight in enumerate(weights) if weight is not None]
    first = 1 + 2 * count
    return (
        (WANT_INPUT, [0]), (WANT_WEIGHT, [1 + i for i in present]), (WANT_BIAS, [1 + count + i for i in present]),
        (LORA_A, range(first, first + adapters)), (LORA_B, range(first + adapters, first + 2 * adapters)),
    )  # fmt: skip


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: list[float], of: list[int], states: list[Any], seeds: Tensor | None,
        dropout: list[float], *parameters: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """states: of each weight, None if it is not quantised. parameters: weights, biases, all a, all b. Where a weight is
        None, the bias is another layer's result, if given."""
        count = len(states)
        weights, biases, adapters = parameters[:count], parameters[count : 2 * count], parameters[2 * count :]
        a, b = adapters[: len(scale)], adapters[len(scale) :]
        whole = [dequantised(weight, state, x.dtype) for weight, state in zip(weights, states)]
        *outputs, t = torch.ops.liger._lora_projections(x, whole, biases, a, b, scale, of, seeds, dropout)
        ctx.save_for_backward(x, t, seeds, *weights, *adapters)
        ctx.scale, ctx.of, ctx.states, ctx.dropout = scale, of, states, dropout
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, t, seeds, *saved = ctx.saved_tensors
        count, scale = len(ctx.states), ctx.scale
        weights, a, b = saved[:count], saved[count : count + len(scale)], saved[count + len(scale) :]
        weights = [dequantised(weight, state, x.dtype) for weight, state in zip(weights, ctx.states)]
        needed = ctx.needs_input_grad[0], *ctx.needs_input_grad[6:]
        wanted, places = wanted_gradients(needed, kinds_of(weights, len(scale)))
        found = torch.ops.liger._lora_projections_bwd(
            grads, x, weights, a, b, t, wanted, scale, ctx.of, seeds, ctx.dropout
        )
        out: list[Tensor | None] = [None] * len(needed)
        for i, gradient in zip(places, found):
            out[i] = gradient if needed[i] else None
        for i, weight in enumerate(weights):
            if weight is None and needed[1 + count + i]:
                out[1 + count + i] = grads[i]
        return out[0], None, None, None, None, None, *out[1:]


class _GatedProjection(torch.autograd.Function):
    """A projection of act(gate) * up. Backward recomputes the product, in the pass over gate and up that it makes anyway."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, op: str, options: tuple, scale: list[float], state: Any, seeds: Tensor | None,
        dropout: list[float], weight: Tensor, bias: Tensor | None, *adapters: Tensor,
    ) -> Tensor:  # fmt: skip
        product = getattr(torch.ops.liger, op)(gate, up, *options)
        of = [0] * len(scale)
        a, b = adapters[: len(scale)], adapters[len(scale) :]
        out, t = torch.ops.liger._lora_projections(
            product, [dequantised(weight, state, product.dtype)], [bias], a, b, scale, of, seeds, dropout
        )
        ctx.save_for_backward(gate, up, t, seeds, weight, *adapters)
        ctx.op, ctx.options, ctx.scale, ctx.of, ctx.state, ctx.dropout = op, options, scale, of, state, dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gate, up, t, seeds, weight, *adapters = ctx.saved_tensors
        weight = dequantised(weight, ctx.state, gate.dtype)
        count = len(ctx.scale)
        a, b = adapters[:count], adapters[count:]
        needed = any(ctx.needs_input_grad[:2]), *ctx.needs_input_grad[8:]
        kinds = kinds_of([weight], count)
        out: list[Tensor | None] = [None] * len(needed)

        def compute(product: Tensor, only: int) -> None:
            wanted, places = wanted_gradients(needed, kinds, only)
            if wanted:
                found = torch.ops.liger._lora_projections_bwd(
                    [grad], product, [weight], a, b, t, wanted, ctx.scale, ctx.of, seeds, ctx.dropout
                )
                for i, gradient in zip(places, found):
                    out[i] = gradient if needed[i] else None

        # Its gradient and those of the bias and b need only the shape of the product.
        compute(gate, WANT_INPUT | WANT_BIAS | LORA_B)
        dgate = dup = None
        if out[0] is None:
            product = getattr(torch.ops.liger, ctx.op)(gate, up, *ctx.options)
        else:
            backward = getattr(torch.ops.liger, f"_{ctx.op}_product_bwd")
            dgate, dup, product = backward(out[0], gate, up, *ctx.options)
        compute(product, WANT_WEIGHT | LORA_A)
        needs_gate, needs_up = ctx.needs_input_grad[:2]
        return dgate if needs_gate else None, dup if needs_up else None, *[None] * 6, *out[1:]


class _LowRankInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: list[float], seeds: Tensor | None, dropout: list[float], *a: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, seeds, *a)
        ctx.scale, ctx.dropout = scale, dropout
        return torch.ops.liger._low_rank_input(x, a, scale, seeds, dropout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, seeds, *a = ctx.saved_tensors
        needed = ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]
        wanted, places = wanted_gradients(needed, ((WANT_INPUT, [0]), (LORA_A, range(1, len(needed)))))
        found = torch.ops.liger._low_rank_input_bwd(grad, x, a, wanted, ctx.scale, seeds, ctx.dropout)
        out: list[Tensor | None] = [None] * len(needed)
        for i, gradient in zip(places, found):
            out[i] = gradient if needed[i] else None
        return out[0], None, None, None, *out[1:]


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
    return _Projections.apply(x, [*static(*scale)], list(of), list(states), seeds, rates, *tensors, *biases, *a, *b)


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
    return _GatedProjection.apply(gate, up, op, options, [*static(*scale)], state, seeds, rates, tensor, bias, *a, *b)


def low_rank_input(x: Tensor, a: Sequence[Tensor], scale: Sequence[float], dropout: Sequence[float] = ()) -> Tensor:
    """The `low_rank_input` of a linear loss for x (..., n): ``scale[j] * linear(x, a[j])``, of x with dropout[j], of all
    adapters side by side, (..., r) in fp32. Its `low_rank_weight` holds their B side by side."""
    seeds = seeds_for(dropout, x.device)
    return _LowRankInput.apply(x, [*static(*scale)], seeds, [] if seeds is None else [*static(*dropout)], *a)
