"""Several linear projections of one input. In backward, the input's gradients accumulate inside the GEMMs; autograd
would add them in separate passes. A single projection may still use a faster GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as every_module

from ._loader import load

# Number of elements from which a pass over a tensor takes longer than a Python autograd function.
LARGE = 1 << 22
# Only the operator library can accumulate gradients inside GEMMs.
HAS_LIBRARY = load().library is not None


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts on the device of x, or None if it is off."""
    device = x.device.type
    # torch raises for the meta device, which has no autocast.
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else None


def saves_passes(x: Tensor) -> bool:
    """Whether it is faster to accumulate the gradients of x inside the GEMMs."""
    if not (HAS_LIBRARY and x.requires_grad and torch.is_grad_enabled()) or autocast_dtype(x) is not None:
        return False
    if torch.compiler.is_compiling():
        return True
    # _Projections has no rules for function transforms.
    return x.numel() >= LARGE and not torch._C._are_functorch_transforms_active()


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """The module's own hooks, and the global hooks of all modules."""
    return (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
        every_module._global_forward_hooks, every_module._global_forward_pre_hooks,
        every_module._global_backward_hooks, every_module._global_backward_pre_hooks,
    )  # fmt: skip


def has_hooks(module: nn.Module) -> bool:
    return any(hooks_of(module))


def is_bare_linear(module: nn.Module) -> bool:
    """Whether this is a plain nn.Linear without wrappers or hooks, so that its parameters may be used without calling
    its forward."""
    if (
        type(module) is not nn.Linear
        or type(module.weight) not in (nn.Parameter, Tensor)
        or "forward" in module.__dict__
    ):
        return False
    return not has_hooks(module)


def may_choose_gemm(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for two matrices, with the faster GEMM."""
    return torch.ops.liger._mm(a, b) if may_choose_gemm(a) else a @ b


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        rows = x.flatten(0, -2)
        return tuple(
            # Not a view: backward reuses this memory only if there is no other reference to it.
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
            if torch.is_grad_enabled():  # double backward
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
        and (len(linears) > 1 or may_choose_gemm(x))
        and x.dim() > 1
        and all(is_bare_linear(linear) and linear.weight.dtype == x.dtype for linear in linears)
    ):
        parameters = [linear.weight for linear in linears] + [linear.bias for linear in linears]
        return _Projections.apply(x, len(linears), *parameters)
    return tuple(linear(x) for linear in linears)
