"""Manifold-constrained hyper-connections: a layer between streams of residuals."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...reference._operator import widened
from .. import forms

function, autograd_function = partial(forms.function, __name__), partial(forms.autograd_function, __name__)
Coefficients = tuple[Tensor, Tensor, Tensor]
# Above this number of streams, the package warns.
MOST_STREAMS = 16


def sinkhorn(logits: Tensor, tmax: int, eps: float) -> Tensor:
    """A matrix whose rows and columns sum to about 1. logits: (..., h, h)."""
    m = logits.softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(tmax - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


def mhc_coeffs(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor,
    allow_fp32: bool = False, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0, sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> Coefficients:  # fmt: skip
    """The weights of the streams before the layer, behind it, and between the streams, in fp32.

    x: (..., h, c), phi: (h c, h h + 2 h), b: (h h + 2 h,), alphas: one element -> (..., h), (..., h), (..., h, h).
    """
    if not allow_fp32 and x.dtype not in (torch.bfloat16, torch.float16):
        raise AssertionError(f"mhc_coeffs: x must be in fp16 or bf16, or allow_fp32 be given (got {x.dtype})")
    if x.dim() < 2:
        raise AssertionError(f"mhc_coeffs: x must have shape (..., h, c) (got {list(x.shape)})")
    h, c = x.shape[-2:]
    for name, t, shape in (("phi", phi, (h * c, h * h + 2 * h)), ("b", b, (h * h + 2 * h,))):
        if t.shape != shape:
            raise AssertionError(f"mhc_coeffs: {name} must have shape {list(shape)} (got {list(t.shape)})")
    streams = widened(x).flatten(-2)
    mix = streams @ widened(phi) * torch.rsqrt(streams.square().mean(-1, keepdim=True) + rms_eps)
    sizes = [h, h, h * h]
    alphas = (widened(alpha).reshape(()) for alpha in (alpha_pre, alpha_post, alpha_res))
    logits = [m * alpha + of_m for m, alpha, of_m in zip(mix.split(sizes, -1), alphas, widened(b).split(sizes))]
    between = sinkhorn(logits[2].unflatten(-1, (h, h)), tmax, sinkhorn_eps)
    return logits[0].sigmoid() + pre_eps, logits[1].sigmoid() * post_mult, between


def mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """The input of the layer. x: (..., h, c), h_pre: (..., h) -> (..., c)."""
    return (widened(h_pre).unsqueeze(-2) @ widened(x)).squeeze(-2).to(x.dtype)


def mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """The streams behind the layer. x: (..., h, c), f_out: (..., c), h_post: (..., h), h_res: (..., h, h)."""
    mixed = widened(h_res) @ widened(x) + widened(h_post).unsqueeze(-1) * widened(f_out).unsqueeze(-2)
    return mixed.to(x.dtype)


LigerMHCCoeffsFunction = autograd_function("LigerMHCCoeffsFunction", mhc_coeffs)
LigerMHCPreFunction = autograd_function("LigerMHCPreFunction", mhc_pre)
LigerMHCPostResFunction = autograd_function("LigerMHCPostResFunction", mhc_post_res)
liger_mhc_coeffs = function("liger_mhc_coeffs", mhc_coeffs)
liger_mhc_pre = function("liger_mhc_pre", mhc_pre)
liger_mhc_post_res = function("liger_mhc_post_res", mhc_post_res)


def mhc_apply(
    x: Tensor, f_out: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, return_x_in: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """The streams behind the layer, and its input if asked for."""
    x_out = mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, mhc_pre(x, h_pre)) if return_x_in else x_out


def mhc_forward(
    x: Tensor, layer: Callable[[Tensor], Tensor], phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor,
    alpha_res: Tensor, return_coeffs: bool, **options: Any,
) -> Tensor | tuple[Tensor, Coefficients]:  # fmt: skip
    """The streams behind the layer, and the coefficients if asked for. The layer's input has the dtype of its weights."""
    coefficients = h_pre, h_post, h_res = mhc_coeffs(x, phi, b, alpha_pre, alpha_post, alpha_res, **options)
    x_in = mhc_pre(x, h_pre)
    first = next(layer.parameters(), None) if isinstance(layer, nn.Module) else None
    f_out = layer(x_in if first is None else x_in.to(first.dtype))
    x_out = mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, coefficients) if return_coeffs else x_out


liger_mhc_apply = function("liger_mhc_apply", mhc_apply)
liger_mhc_forward = function("liger_mhc_forward", mhc_forward)


class LigerMHC(nn.Module):
    def __init__(
        self, layer: nn.Module, *, hc: int, c: int, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6, post_mult: float = 2.0, phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if hc > MOST_STREAMS:
            warnings.warn(f"LigerMHC: hc should be at most {MOST_STREAMS} (got {hc})", stacklevel=2)
        self.layer, self.hc, self.c, self.tmax, self.allow_fp32 = layer, hc, c, tmax, allow_fp32
        self.rms_eps, self.pre_eps, self.sinkhorn_eps, self.post_mult = rms_eps, pre_eps, sinkhorn_eps, post_mult
        first = next(layer.parameters(), None)
        device = None if first is None else first.device
        outputs = hc * hc + 2 * hc
        self.phi = nn.Parameter(torch.randn(hc * c, outputs, dtype=phi_dtype, device=device) * 0.02)
        self.b = nn.Parameter(torch.zeros(outputs, device=device))
        self.alpha_pre, self.alpha_post, self.alpha_res = (
            nn.Parameter(torch.ones((), device=device)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., hc, c), as the result."""
        if x.shape[-2:] != (self.hc, self.c):
            raise ValueError(f"LigerMHC: x must have shape [..., {self.hc}, {self.c}] (got {list(x.shape)})")
        return liger_mhc_forward(
            x, self.layer, self.phi, self.b, self.alpha_pre, self.alpha_post, self.alpha_res,
            allow_fp32=self.allow_fp32, tmax=self.tmax, rms_eps=self.rms_eps, pre_eps=self.pre_eps,
            sinkhorn_eps=self.sinkhorn_eps, post_mult=self.post_mult,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"hc={self.hc}, c={self.c}, tmax={self.tmax}"
