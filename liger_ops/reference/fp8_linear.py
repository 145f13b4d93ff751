from __future__ import annotations

from torch import Tensor

from ._operator import operator
from .fp8_projections import RECIPES, product


@operator(choices={"recipe": RECIPES})
def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: str = "rows") -> Tensor:
    """``F.linear(x, weight, bias)`` whose GEMMs multiply 8-bit numbers (e4m3), quantised by :func:`quantize_rows`.

    x: (..., n), weight: (m, n), bias: (m,) -> (..., m).

    Forward quantises the rows of x and of the weight. The gradient of x multiplies the rows of the upstream gradient by
    the columns of the weight. With the recipe "rows", the gradient of the weight multiplies the columns of the upstream
    gradient by the columns of x, over all T rows; with "rows_hp", it is a GEMM of the unquantised tensors. "tensor" has
    one scale for each of the three tensors, "blocks" those of :func:`quantize_blocks`: one for 128 neighbours along the sum
    in x and in the upstream gradient, and one for 128 x 128 in the weight. Sums are in fp32, but where
    they are not over rows, Hopper GPUs keep fewer digits of them: docs/fp8.md has the bounds and a switch. Gradients that nothing needs are not computed, nor are their operands quantised. The weight is quantised in each call, so that no copy of it can be stale.

    n and m are multiples of 16, with "blocks" of 128. On CUDA, the GPU needs FP8 tensor cores: compute capability 8.9, or
    9.0 and newer; "blocks" needs 9.0, and a torch with CUDA 12.9 or newer. bfloat16 is fast there; float32 and float16 take
    a second pass over the results, but not with "tensor". A CPU computes the same from dequantised numbers.

    Cost: three GEMMs in forward and backward, with "rows_hp" two of them in 8 bits, else all. Backward needs the weight and,
    if that takes a gradient, x: itself with "rows_hp", else T n bytes.

    >>> fp8_linear(torch.ones(1, 16), torch.eye(16))[0, :4]
    tensor([1., 1., 1., 1.])
    """
    return product("fp8_linear", x, ["weight"], [weight], bias, recipe)
