from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._operator import operator
from .rms_norm import rms_norm
from .rope import rope


@operator(constants=rope.constants, choices=rms_norm.choices)
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    *,
    interleaved: bool = False,
    mrope_section: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`rope` of :func:`rms_norm` of every head of q and k, in one kernel.

    q: (B, Hq, S, D), k: (B, Hk, S, D), q_weight and k_weight: (D,) both in q's dtype or both in fp32, cos and sin:
    (S, R) or (1 or B, S, R) in q's dtype or fp32 with R <= D -> both with the shapes and dtype of q and k.

    The options are those of the two operators. The norm's result is rounded to the dtype of q and k before it is
    rotated, as in models that call one after the other.

    Cost: forward moves 2 (|q| + |k|), backward 3 (|q| + |k|). Backward needs the tensor arguments alone, because it
    computes the statistics again. The gradients of q and k overwrite the upstream gradients.

    >>> q = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2)
    >>> quarter_turn = torch.zeros(1, 2), torch.ones(1, 2)
    >>> qk_norm_rope(q, q, None, None, *quarter_turn, eps=0.0)[0].flatten()
    tensor([-1.1314,  0.8485])
    """
    rows = eps, offset, casting_mode
    q, k = rms_norm.reference(q, q_weight, *rows), rms_norm.reference(k, k_weight, *rows)
    return rope.reference(q, k, cos, sin, interleaved=interleaved, mrope_section=mrope_section)
