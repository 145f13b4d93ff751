from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._operator import demand, operator, widened


def _by_section(t: Tensor, columns: Sequence[int]) -> Tensor:
    """t: (3, ..., R) -> (..., R), whose columns are in sections 0, 1, 2, 0, 1, 2."""
    return torch.cat([part[i % 3] for i, part in enumerate(t.split(columns, -1))], -1)


def _rotated(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, trailing: bool = False, halves_out: bool = False
) -> Tensor:
    """x: (B, H, S, D), cos and sin: (S, R) or (1 or B, S, R)"""
    sizes = [cos.shape[-1], x.shape[-1] - cos.shape[-1]]
    rest, head = x.split(sizes[::-1], -1) if trailing else x.split(sizes, -1)[::-1]
    head, cos, sin = widened(head), widened(cos).unsqueeze(-3), widened(sin).unsqueeze(-3)
    if halves_out:
        head = torch.cat((head[..., ::2], head[..., 1::2]), -1)
    if interleaved and not halves_out:
        turned = torch.stack((-head[..., 1::2], head[..., ::2]), -1).flatten(-2)
    else:
        first, second = head.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    rotated = (head * cos + turned * sin).to(x.dtype)
    return torch.cat((rest, rotated) if trailing else (rotated, rest), -1)


@operator(constants=("cos", "sin"))
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    mrope_section: Sequence[int] | None = None,
    trailing: bool = False,
    halves_out: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotary embedding of q and k: rotates the first R columns of every head, and keeps the layouts of q and k.

    q: (B, Hq, S, D), k: (B, Hk, S, D), cos and sin: (S, R) or (1 or B, S, R) in q's dtype or fp32 with R <= D -> both
    with the shapes and dtype of q and k.

    Rotated pairs are columns (i, i + R / 2), or (2 i, 2 i + 1) if `interleaved`. With `mrope_section`, three sizes that
    add up to R / 2, cos and sin have a leading dimension of 3: positions in time, height and width.

    If `trailing`, the last R columns are rotated, in pairs (2 i, 2 i + 1) that have one angle each: cos and sin have
    R / 2 columns, as in DeepSeek-V4. With `halves_out`, the rotated pairs (2 i, 2 i + 1) are written to columns
    (i, i + R / 2), as in DeepSeek-V3; cos and sin are in the order of the results, unless pairs have one angle each.

    Cost: forward and backward move 2 (|q| + |k|) each. Backward needs cos and sin alone, and overwrites the upstream
    gradients, except with `halves_out`.

    >>> q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> quarter_turn = torch.zeros(1, 2), torch.ones(1, 2)
    >>> rope(q, q, *quarter_turn)[0].flatten()
    tensor([0., 1.])
    """
    interleaved = interleaved or trailing
    if mrope_section is not None:
        rotated = 2 * cos.shape[-1] if trailing else cos.shape[-1]
        fits = len(mrope_section) == 3 and 2 * sum(mrope_section) == rotated
        demand(fits, "rope", "mrope_section", f"be three sizes that add up to {rotated} / 2", mrope_section)
        if trailing:
            columns = [*mrope_section]
        else:
            columns = [2 * size for size in mrope_section] if interleaved and not halves_out else [*mrope_section] * 2
        cos, sin = (_by_section(t, columns) for t in (cos, sin))
    if trailing:
        cos, sin = ((torch.cat((t, t), -1) if halves_out else t.repeat_interleave(2, -1)) for t in (cos, sin))
    options = interleaved, trailing, halves_out
    return _rotated(q, cos, sin, *options), _rotated(k, cos, sin, *options)


@operator(constants=("freqs_cis",))
def rope_freqs_cis(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`rope` with complex angles ``cos + i sin`` for pairs of adjacent columns.

    q: (B, Hq, S, D), k: (B, Hk, S, D), freqs_cis: (S, D / 2) or (1 or B, S, R / 2) complex -> both with the shapes and
    dtype of q and k.

    Cost: that of :func:`rope`. Backward needs `freqs_cis` alone.

    >>> q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> rope_freqs_cis(q, q, torch.tensor([[1j]]))[0].flatten()
    tensor([0., 1.])
    """
    demand(freqs_cis.is_complex(), "rope_freqs_cis", "freqs_cis", "be complex", freqs_cis.dtype)
    cos, sin = (t.repeat_interleave(2, -1) for t in (freqs_cis.real, freqs_cis.imag))
    return _rotated(q, cos, sin, True), _rotated(k, cos, sin, True)
