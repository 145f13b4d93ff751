"""What a layer of torch is, and how it computes now."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from .._runtime.loader import load

# Only the operator library can accumulate gradients inside GEMMs.
HAS_LIBRARY = load().library is not None


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts on the device of x, or None if it is off."""
    device = x.device.type
    # torch raises for the meta device, which has no autocast.
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else None


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
