"""Projections of one input. In backward the input's gradients accumulate inside the GEMMs, where autograd would add them in
passes of their own over tensors of the input's size. A single projection may still have its GEMMs in faster tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as every_module

from ._loader import load

# Elements from which a pass over a tensor takes longer than a function of Python's.
LARGE = 1 << 22
# Without the operator library there is nothing that adds gradients up in passes that are made anyway.
HAS_LIBRARY = load().library is not None


def saves_passes(x: Tensor) -> bool:
    """Whether gradients of x are worth bringing together."""
    if not (HAS_LIBRARY and x.requires_grad and torch.is_grad_enabled()) or torch.is_autocast_enabled(x.device.type):
        return False
    if torch.compiler.is_compiling():
        return True
    # Function transforms would ask these functions for rules of their own.
    return x.numel() >= LARGE and not torch._C._are_functorch_transforms_active()


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Its own and those of every module."""
    return (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
        every_module._global_forward_hooks, every_module._global_forward_pre_hooks,
        every_module._global_backward_hooks, every_module._global_backward_pre_hooks,
    )  # fmt: skip


def has_hooks(module: nn.Module) -> bool:
    return any(hooks_of(module))


def is_bare_linear(module: nn.Module) -> bool:
    """Whether this is nn.Linear itself with nobody's wrapper or hook around it, so that its parameters may be read past
    its forward."""
    if (
        type(module) is not nn.Linear
        or type(module.weight) not in (nn.Parameter, Tensor)
        or "forward" in module.__dict__
    ):
        return False
    return not has_hooks(module)


def may_choose_tiles(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of two matrices, by whichever way is the faster."""
    return torch.ops.liger._mm(a, b) if may_choose_tiles(a) else a @ b


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        rows = x.flatten(0, -2)
        return tuple(
            # A view would be a second owner of memory that backward means to reuse.
            torch.ops.aten._unsafe_view(multiply(rows, weight.t()), (*x.shape[:-1], weight.shape[0]))
            if bias is None
            else functional.linear(x, weight, bias)
            for weight, bias in zip(weights, biases)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        count, needed = len(weights), ctx.needs_input_grad
        rows = x.flatten(0, -2)
        arrived = [(i, grad.flatten(0, -2)) for i, grad in enumerate(grads) if grad is not None]
        dx: Tensor | None = None
        dweights: list[Tensor | None] = [None] * count
        dbiases: list[Tensor | None] = [None] * count
        if needed[0] and arrived:
            if torch.is_grad_enabled():  # somebody differentiates the gradient
                dx = sum(grad @ weights[i] for i, grad in arrived)
            else:
                dx = torch.ops.liger._projections_grad([g for _, g in arrived], [weights[i] for i, _ in arrived])
            dx = dx.view(x.shape)
        for i, grad in arrived:
            if needed[2 + i]:
                dweights[i] = grad.t() @ rows if torch.is_grad_enabled() else multiply(grad.t(), rows)
            if needed[2 + count + i]:
                dbiases[i] = grad.sum(0)
        return dx, None, *dweights, *dbiases


def project(linears: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, ...]:
    """``tuple(linear(x) for linear in linears)``."""
    if (
        saves_passes(x)
        and (len(linears) > 1 or may_choose_tiles(x))
        and x.dim() > 1
        and all(is_bare_linear(linear) and linear.weight.dtype == x.dtype for linear in linears)
    ):
        parameters = [linear.weight for linear in linears] + [linear.bias for linear in linears]
        return _Projections.apply(x, len(linears), *parameters)
    return tuple(linear(x) for linear in linears)
