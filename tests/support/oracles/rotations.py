"""The formulas of rope and qk_norm_rope as models write them."""

import torch
from torch import Tensor

from liger_ops import functional


def rotate(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, mrope_section=None, trailing=False,
    halves_out=False,
):  # fmt: skip
    """Casts the angles to the dtype of q, as eager models do."""
    cos, sin = (t.to(q.dtype) for t in (cos, sin))
    together = (interleaved or trailing) and not halves_out  # of the pairs in the results
    if mrope_section is not None:
        cos, sin = (by_section(t, mrope_section, together, trailing) for t in (cos, sin))
    if trailing:
        cos, sin = (t.repeat_interleave(2, -1) if together else torch.cat([t, t], -1) for t in (cos, sin))
    cos, sin = (t.unsqueeze(-3) for t in (cos, sin))
    width = cos.shape[-1]

    def apply(x: Tensor) -> Tensor:
        first = x.shape[-1] - width if trailing else 0
        head = x[..., first : first + width]
        if halves_out:
            head = torch.cat([head[..., ::2], head[..., 1::2]], -1)
        turned = head * cos + rotate(head, together) * sin
        return torch.cat((x[..., :first], turned, x[..., first + width :]), -1)

    return apply(q), apply(k)


def by_section(t: Tensor, sections, interleaved: bool, one_per_pair: bool = False) -> Tensor:
    """t: (3, ..., R) -> (..., R). The section of a column selects the first index."""
    which = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    if not one_per_pair:
        which = which.repeat_interleave(2) if interleaved else which.repeat(2)
    return torch.stack([t[w, ..., i] for i, w in enumerate(which.tolist())], -1)


def reference_qk_norm_rope(
    q, k, q_weight, k_weight, cos, sin, eps=1e-6, offset=0.0, casting_mode="llama", interleaved=False,
    mrope_section=None,
):  # fmt: skip
    q, k = (functional.rms_norm.reference(x, w, eps, offset, casting_mode) for x, w in ((q, q_weight), (k, k_weight)))
    return reference(q, k, cos, sin, interleaved, mrope_section)


FORMULAS = {"rope": reference, "qk_norm_rope": reference_qk_norm_rope}
