"""RMSNorm and LayerNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from . import probe
from .patched import Switches, accept_any_keyword, give_subclass, require_switch
from .probe import NotUnderstood, original_class


def looks_like_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not isinstance(module, nn.modules.batchnorm._NormBase)


def is_rms_norm(module: nn.Module) -> bool:
    try:
        return probe.identify_norm(module).op == "rms_norm"
    except NotUnderstood:
        return False


def patch_norm(module: nn.Module, switches: Switches) -> str:
    norm = probe.identify_norm(module)
    require_switch(switches, norm.op)

    def forward(self: Any, x: Tensor) -> Tensor:
        if probe.is_distributed(x) or probe.is_distributed(self.weight):
            return original_class(type(self)).forward(self, x)
        weight, eps = self.weight, probe.epsilon_of(self, norm.epsilon, x)
        dtype = x.dtype
        if weight is not None and weight.dtype != dtype:
            if norm.promotes:
                dtype = torch.promote_types(dtype, weight.dtype)
            if weight.dtype != torch.float32:
                weight = weight.to(dtype)
            x = x.to(dtype)
        if norm.op == "rms_norm":
            y = F.rms_norm(x, weight, eps, norm.offset, norm.casting_mode)
        else:
            y = F.layer_norm(x, weight, self.bias, eps)
        return y if y.dtype == dtype else y.to(dtype)

    members: dict[str, Any] = {"forward": accept_any_keyword(forward), "liger_norm": norm}
    for name in ("weight", "bias"):
        if not hasattr(module, name):
            members[name] = None
    give_subclass(module, "norm", norm.op, (norm, tuple(members)), lambda cls: members)
    return norm.op
