from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ._operator import operator, widened

ACTIVATIONS = {"activation": ("silu", "gelu", "gelu_tanh")}


@operator(choices=ACTIVATIONS)
def moe_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    *,
    interleaved: bool = False,
    transposed: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    weight_before: bool = False,
    gate_up_a: Tensor | None = None,
    gate_up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    gate_up_scale: float = 1.0,
    down_scale: float = 1.0,
) -> Tensor:
    """The experts of a mixture-of-experts layer: the sum over k of ``weight[t, k] * expert(x[t])``.

    An expert is ``down @ ((up + up_offset) * f(gate))`` with gate and up from ``gate_up @ x``.

    x: (T, H), gate_up: (E, 2 I, H), down: (E, H, I), index: (T, K) indices, weight: (T, K) in x's dtype or fp32,
    gate_up_bias: (E, 2 I), down_bias: (E, H), gate_up_a: (E, r, H), gate_up_b: (E, 2 I, r), down_a: (E, r, I),
    down_b: (E, H, r) -> (T, H) in x's dtype.

    `index` and `weight` are the experts and weights of :func:`moe_router`. f is "silu", with ``sigmoid(alpha * gate)``,
    "gelu" or "gelu_tanh". gate and up are the halves of 2 I, or alternate if `interleaved`. With `transposed`, gate_up
    is (E, H, 2 I) and down is (E, I, H). `limit`: gate is at most limit, up is clamped to [-limit, limit]; it is
    positive. With `weight_before`, the weight scales x instead of the result, and `gate_up_bias` must be None. `alpha`
    is 1 unless f is "silu". Indices outside of [0, E) are dropped. gpt-oss has ``interleaved=True, transposed=True,
    limit=7.0, alpha=1.702, up_offset=1.0``.

    Low-rank adapters (LoRA) of each expert: with `gate_up_a` and `gate_up_b`, an expert's ``gate_up @ x`` becomes
    ``gate_up @ x + gate_up_scale * gate_up_b @ (gate_up_a @ x)``; likewise `down`. They have shapes of their own, which
    do not depend on `transposed`, any strides, and the dtype of x or fp32. No weights are merged.

    Cost: two grouped GEMMs of T K rows in forward, four in backward, two of them for the gradients of the experts'
    weights. Backward needs the tensor arguments but `gate_up_bias`, and of each of the T K rows the 2 I numbers before
    the activation in x's dtype, which it overwrites with their gradient, 12 bytes of routing data or a little more, and
    with `gate_up_a` r numbers in fp32.

    >>> x, index, weight = torch.ones(1, 1), torch.tensor([[1]]), torch.tensor([[0.5]])
    >>> moe_experts(x, torch.ones(2, 2, 1), torch.ones(2, 1, 1), index, weight)
    tensor([[0.3655]])
    """
    tokens, choices = index.shape
    scale = weight.reshape(-1, 1)
    rows = x.repeat_interleave(choices, 0)
    if weight_before:
        rows = (widened(rows) * widened(scale)).to(x.dtype)
    y = experts(
        rows, index.reshape(-1), gate_up, down, gate_up_bias, down_bias, activation, interleaved, transposed, limit,
        alpha, up_offset, adapters_of(gate_up_a, gate_up_b, gate_up_scale, down_a, down_b, down_scale),
    )  # fmt: skip
    y = widened(y) if weight_before else widened(y) * widened(scale)
    # A dropped pair contributes nothing, even if its weight is infinite.
    dropped = ((index < 0) | (index >= gate_up.shape[0])).reshape(-1, 1)
    return y.masked_fill(dropped, 0.0).view(tokens, choices, x.shape[1]).sum(1).to(x.dtype)


@operator(choices=ACTIVATIONS)
def moe_experts_sorted(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    tokens_per_expert: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    *,
    interleaved: bool = False,
    transposed: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    gate_up_a: Tensor | None = None,
    gate_up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    gate_up_scale: float = 1.0,
    down_scale: float = 1.0,
) -> Tensor:
    """:func:`moe_experts` for rows that are sorted by expert: the first tokens_per_expert[0] rows go to expert 0.

    x: (N, H), gate_up: (E, 2 I, H), down: (E, H, I), tokens_per_expert: (E) indices, gate_up_bias: (E, 2 I),
    down_bias: (E, H), gate_up_a: (E, r, H), gate_up_b: (E, 2 I, r), down_a: (E, r, I), down_b: (E, H, r) -> (N, H) in
    x's dtype.

    The options are those of :func:`moe_experts`. Rows beyond the sum of `tokens_per_expert` give 0. Counts that are
    negative, or of more rows than there are, are an error on CPU; on CUDA they count as 0, or as the rows that are left.

    Cost: that of :func:`moe_experts`, for N rows.

    >>> moe_experts_sorted(torch.ones(2, 1), torch.ones(1, 2, 1), torch.ones(1, 1, 1), torch.tensor([1]))
    tensor([[0.7311],
            [0.0000]])
    """
    row = torch.arange(x.shape[0], device=x.device)
    expert = (row[:, None] >= tokens_per_expert.cumsum(0)).sum(1)
    return experts(
        x, expert, gate_up, down, gate_up_bias, down_bias, activation, interleaved, transposed, limit, alpha, up_offset,
        adapters_of(gate_up_a, gate_up_b, gate_up_scale, down_a, down_b, down_scale),
    )  # fmt: skip


Adapters = Callable[[Tensor, Tensor, int], Tensor]  # (product, its input, expert) -> the product with adapters


def adapters_of(
    gate_up_a: Tensor | None, gate_up_b: Tensor | None, gate_up_scale: float, down_a: Tensor | None,
    down_b: Tensor | None, down_scale: float,
) -> tuple[Adapters, Adapters]:  # fmt: skip
    def adapters(a: Tensor | None, b: Tensor | None, scale: float) -> Adapters:
        def add(y: Tensor, x: Tensor, e: int) -> Tensor:
            if a is None or b is None:
                return y
            return (y + functional.linear(functional.linear(x.to(a.dtype), a[e]), b[e]) * scale).to(y.dtype)

        return add

    return adapters(gate_up_a, gate_up_b, gate_up_scale), adapters(down_a, down_b, down_scale)


def experts(
    rows: Tensor, expert: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None,
    activation: str, interleaved: bool, transposed: bool, limit: float | None, alpha: float, up_offset: float,
    adapters: tuple[Adapters, Adapters],
) -> Tensor:  # fmt: skip
    """Each row through its expert; rows without one give 0."""

    def apply(e: int, x: Tensor) -> Tensor:
        first, second = (w[e].t() if transposed else w[e] for w in (gate_up, down))
        product = functional.linear(x, first, None if gate_up_bias is None else gate_up_bias[e])
        product = adapters[0](product, x, e)
        gate, up = (product[:, 0::2], product[:, 1::2]) if interleaved else product.chunk(2, -1)
        act = activated(widened(gate), widened(up), activation, limit, alpha, up_offset).to(x.dtype)
        return adapters[1](functional.linear(act, second, None if down_bias is None else down_bias[e]), act, e)

    count = gate_up.shape[0]
    if is_traced(rows, expert):
        # The numbers of rows are unknown: every expert computes all of them.
        y = torch.zeros_like(rows)
        for e in range(count):
            y = torch.where((expert == e)[:, None], apply(e, rows), y)
        return y
    of_expert = [torch.where(expert == e)[0] for e in range(count)]
    dropped = torch.where((expert < 0) | (expert >= count))[0]
    parts = [apply(e, rows[mine]) for e, mine in enumerate(of_expert)]
    y = torch.cat([*parts, rows.new_zeros(len(dropped), rows.shape[1])])
    return y[torch.cat([*of_expert, dropped]).argsort()]


def is_traced(*tensors: Tensor) -> bool:
    """Whether the values of tensors are unavailable: they are compiled, exported or batched."""
    wrapped = any(torch._C._functorch.is_functorch_wrapped_tensor(t) or t.is_meta for t in tensors)
    return torch.compiler.is_compiling() or wrapped or any(type(t) is not Tensor for t in tensors)


def activated(gate: Tensor, up: Tensor, activation: str, limit: float | None, alpha: float, up_offset: float) -> Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "silu":
        f = gate * torch.sigmoid(alpha * gate)
    else:
        f = functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (up + up_offset) * f
