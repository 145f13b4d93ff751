"""Softmax, sparsemax, DyT and PolyNorm."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ...reference._operator import widened
from .. import forms

function, autograd_function = partial(forms.function, __name__), partial(forms.autograd_function, __name__)
layer = partial(forms.layer, __name__)


def softmax(x: Tensor) -> Tensor:
    """Over the last dimension."""
    return widened(x).softmax(-1).to(x.dtype)


def sparsemax(x: Tensor, dim: int) -> Tensor:
    """The point of the simplex that is nearest to x along `dim`: ``relu(x - tau)`` with the tau that makes the sum 1."""
    # A shift changes neither the result nor the gradient. This one keeps the digits of the sums.
    shifted = widened(x) - widened(x.detach()).amax(dim, keepdim=True)
    ordered = shifted.movedim(dim, -1).sort(-1, descending=True).values
    above = ordered.cumsum(-1) - 1
    count = torch.arange(1, x.shape[dim] + 1, device=x.device)
    support = (ordered * count > above).sum(-1, keepdim=True).clamp(min=1)
    tau = (above.gather(-1, support - 1) / support).movedim(-1, dim)
    return (shifted - tau).relu().to(x.dtype)


def dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """``tanh(alpha x) gamma + beta``. x: (..., n), alpha: (1,), gamma, beta: (n,)."""
    y = torch.tanh(widened(alpha) * widened(x)) * widened(gamma)
    return (y if beta is None else y + widened(beta)).to(x.dtype)


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """``w0 norm(x^3) + w1 norm(x^2) + w2 norm(x) + bias`` with ``norm(u) = u / sqrt(mean(u^2) + eps)`` over the last
    dimension. weight: (3,), bias: one element."""
    wide, weights = widened(x), widened(weight)
    y = widened(bias)
    for power, w in zip((3, 2, 1), weights.unbind()):
        u = wide**power
        y = y + w * u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    return y.to(x.dtype)


LigerSoftmaxFunction = autograd_function("LigerSoftmaxFunction", softmax)
LigerSparsemaxFunction = autograd_function("LigerSparsemaxFunction", sparsemax)
LigerDyTFunction = autograd_function("LigerDyTFunction", dyt)
LigerPolyNormFunction = autograd_function("LigerPolyNormFunction", poly_norm)

liger_softmax = function("liger_softmax", softmax)
liger_sparsemax = function("liger_sparsemax", sparsemax)
liger_dyt = function("liger_dyt", dyt)
liger_poly_norm = function("liger_poly_norm", poly_norm)

LigerSoftmax = layer("LigerSoftmax", softmax)
LigerSparsemax = layer("LigerSparsemax", sparsemax)


class LigerDyT(nn.Module):
    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5) -> None:
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha = nn.Parameter(torch.full((1,), float(init_alpha)))
        self.gamma = nn.Parameter(torch.ones(hidden_size))
        self.beta = nn.Parameter(torch.zeros(hidden_size)) if beta else None

    def forward(self, x: Tensor) -> Tensor:
        return dyt(x, self.alpha, self.gamma, self.beta)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, init_alpha={self.init_alpha}, beta={self.beta is not None}"


class LigerPolyNorm(nn.Module):
    def __init__(self, eps: float = 1e-6, in_place: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states: Tensor) -> Tensor:
        return poly_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}"
