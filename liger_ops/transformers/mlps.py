"""Gated MLPs."""

from __future__ import annotations

from torch import nn

from . import probe
from .patched import Switches, accept_any_keyword, give_subclass, require_switch


def looks_like_mlp(module: nn.Module) -> bool:
    linears = sum(probe.is_linear(child) for child in module.children())
    name = type(module).__name__.lower()
    return linears in (2, 3) and any(word in name for word in ("mlp", "feedforward", "ffn", "expert"))


def switch_of(gate: str) -> str:
    """The switch of a key of probe.GATES."""
    return gate.split()[0]


def patch_mlp(module: nn.Module, switches: Switches) -> str:
    mlp = probe.identify_mlp(module)
    gate = switch_of(mlp.gate)
    require_switch(switches, gate)
    give_subclass(module, "mlp", gate, mlp, lambda cls: {"forward": accept_any_keyword(probe.mlp_forward(mlp))})
    return gate
