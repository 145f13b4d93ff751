"""Calls of the norms over the last dimension, compared with their formulas, and the magnitude of the terms of their
gradients."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from liger_ops._accuracy import compute_dtype
from liger_ops.reference import operators
from tests.support.checks import check_op


@torch.no_grad()
def terms(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, centred: bool = False) -> float:
    """Of the gradients of rows, for upstream gradients of 1. Few columns leave little or nothing of them: one column has
    no variance, and its gradient is zero."""
    if x.numel() == 0:
        return 0.0
    rows = x.double()
    rows = rows - rows.mean(-1, keepdim=True) if centred else rows
    factor = 1.0 if weight is None else float((weight.double() + offset).abs().max())
    return factor * float((rows.square().mean(-1) + eps).rsqrt().max())


@torch.no_grad()
def gated_terms(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, activation: str = "silu",
    gate_first: bool = False, group_size: int | None = None, **_,
) -> float:  # fmt: skip
    """Of the gradients of x and gate."""
    if x.numel() == 0:
        return 0.0
    z = gate.double()
    act = z.sigmoid() if activation == "sigmoid" else torch.nn.functional.silu(z)
    rows = (x.double() * act if gate_first else x.double()).unflatten(-1, (-1, group_size or x.shape[-1]))
    size = terms(rows, None, eps)
    size *= 1.0 if weight is None else float((weight.double() + offset).abs().max())
    return size * max(1.0, float(act.abs().max()), 1.1 * float(x.abs().max()))


def noise(outputs: int, rows: list[Tensor], x: Tensor, weight: Tensor | None, eps: float, **options) -> list[float]:
    """For test_properties.py: the rounding of those terms. rows: the inputs whose gradients are those of x."""
    error = 2 * torch.finfo(compute_dtype([x])).eps * terms(x.detach(), weight, eps, **options)
    return [0.0] * outputs + [error for t in rows if t.requires_grad]


class Norm(NamedTuple):
    """How many tensors of rows, parameters and results an operator has, its kernels, and the terms of its gradients."""

    rows: int
    parameters: int
    results: int
    kernels: tuple[str, str]
    terms: Callable[..., float]


RMS_NORM = "rms_norm_fwd", "rms_norm_bwd"
NORMS = {
    "rms_norm": Norm(1, 1, 1, RMS_NORM, lambda x, w: terms(x, w, 1e-6)),
    "fused_add_rms_norm": Norm(2, 1, 2, RMS_NORM, lambda x, residual, w: terms((x + residual).detach(), w, 1e-6)),
    "layer_norm": Norm(1, 2, 1, ("layer_norm_fwd", "layer_norm_bwd"), lambda x, w, b: terms(x, w, 1e-5, centred=True)),
    "rms_norm_gated": Norm(
        2, 1, 1, ("rms_norm_gated_fwd", "rms_norm_gated_bwd"), lambda *t, **options: gated_terms(*t, 1e-6, **options)
    ),
}


def make(name, shape, dtype, device, parameter_dtype=None) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and upstream gradients."""
    torch.manual_seed(0)  # compared rounding errors must not depend on which tests ran before
    norm = NORMS[name]
    inputs = [torch.randn(shape, dtype=dtype, device=device) for _ in range(norm.rows)]
    columns = dict(dtype=parameter_dtype or dtype, device=device)
    inputs += [torch.randn(shape[-1], **columns) for _ in range(norm.parameters)]
    grads = [torch.randn(shape, dtype=dtype, device=device) for _ in range(norm.results)]
    return [t.requires_grad_() for t in inputs], grads


def check(name, inputs, grads, device, terms=0.0, **options) -> None:
    op, formula = getattr(torch.ops.liger, name), operators()[name].reference
    check_op(lambda *t: op(*t, **options), lambda *t: formula(*t, **options), inputs, grads, device, terms)
