from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from ._operator import demand, operator


@operator(rows=1, forward_out_dims=(0, 0))
def lora_linear(
    x: Tensor,
    weight: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scale: Sequence[float],
    bias: Tensor | None = None,
) -> Tensor:
    """A linear layer with low-rank adapters (LoRA): ``F.linear(x, weight, bias)``, plus
    ``scale[i] * F.linear(F.linear(x, a[i]), b[i])`` for every adapter i.

    x: (..., n), weight: (m, n), a: (r, n) each, b: (m, r) each, bias: (m,) -> (..., m).

    Adapters are in float32 or in the dtype of x. In float32 their products are as accurate as in float32, and x is not
    converted: with bfloat16 they are sums of products of bfloat16 pieces, on tensor cores.

    Cost: one GEMM in forward, and in backward one each for x and, if it takes a gradient, weight. The adapters' products
    read x twice, dy twice, and the result and dx once more. Backward needs x, weight, a, b, and r numbers per row.

    >>> lora_linear(torch.ones(1, 2), torch.eye(2), [torch.ones(1, 2)], [torch.ones(2, 1)], [0.5])
    tensor([[2., 2.]])
    """
    for name, given in (("b", b), ("scale", scale)):
        rule = f"have as many entries as a, {len(a)}"
        demand(len(given) == len(a), "lora_linear", name, rule, len(given))
    y = functional.linear(x, weight, bias)
    for down, up, factor in zip(a, b, scale):
        y = y + functional.linear(functional.linear(x.to(down.dtype), down), up) * factor
    return y.to(x.dtype)
