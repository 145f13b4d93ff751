"""Decoder layers: a residual addition and the RMSNorm that follows become one operator."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import rewrite
from .norms import is_rms_norm, looks_like_norm
from .patched import Switches, give_subclass, require_switch
from .probe import original_class
from .rebinding import inner_function, rebinding_key, rebound


def has_fusable_norms(module: nn.Module) -> bool:
    # Check the source first: probing norms takes longer.
    norms = frozenset(name for name, child in module.named_children() if looks_like_norm(child))
    forward = inner_function(original_class(type(module)).forward)
    if not norms or rewrite.with_fused_norms(forward, norms) is None:
        return False
    return rewrite.with_fused_norms(forward, rms_norms_of(module)) is not None


def rms_norms_of(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, child in module.named_children() if looks_like_norm(child) and is_rms_norm(child))


def patch_layer(module: nn.Module, switches: Switches) -> str:
    require_switch(switches, "rms_norm")
    norms = rms_norms_of(module)

    def members(cls: type[nn.Module]) -> dict[str, Any]:
        code = rewrite.with_fused_norms(inner_function(cls.forward), norms)
        return {"forward": rebound(cls.forward, rewrite.HELPERS, code)}

    give_subclass(module, "layer", "fused_add_rms_norm", (norms, rebinding_key(type(module).forward)), members)
    return "fused_add_rms_norm"
