"""Rotary position embedding: modules with a method that calls a rotary function."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..projections import has_hooks
from . import probe, rewrite
from .head_norms import HELPERS, fuse_head_norms, why_separate
from .norms import is_rms_norm, looks_like_norm
from .patched import Switches, give_subclass, has_replaced_forward, require_switch
from .probe import NotUnderstood
from .rebinding import inner_function, rebinding_key, rebound


def methods_of(cls: type) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            return
        for name, value in vars(base).items():
            if name not in seen and isinstance(value, types.FunctionType) and not name.startswith("__"):
                seen.add(name)
                yield name, value


def is_rotary(name: str, value: Any) -> bool:
    return callable(value) and name.startswith("apply_rot") and inspect.isfunction(inner_function(value))


def rotary_methods(cls: type) -> dict[str, dict[str, Any]]:
    """The methods of a class that call rotary functions, with these functions by name."""
    found = {}
    for method, function in methods_of(cls):
        inner = inner_function(function)
        code, scope = getattr(inner, "__code__", None), getattr(inner, "__globals__", {})
        used = {n: scope[n] for n in code.co_names if n in scope and is_rotary(n, scope[n])} if code else {}
        if used:
            found[method] = used
    return found


@functools.lru_cache(None)
def rotary_replacement(function: Any) -> Callable | str:
    try:
        return probe.rotary_function(probe.identify_rotary(function), function)
    except NotUnderstood as reason:
        return str(reason)


def unfit_norms(module: nn.Module, switches: Switches) -> dict[str, str]:
    """For each child that looks like a norm, why it cannot become a part of the rotation, or ""."""
    found = {}
    for name, child in module.named_children():
        if looks_like_norm(child):
            unfit = "is hooked or wrapped" if has_hooks(child) or has_replaced_forward(child) else ""
            unfit = unfit or ("" if is_rms_norm(child) else "is no RMSNorm")
            found[name] = unfit or ("" if switches["rms_norm"] else "stays, because rms_norm is switched off")
    return found


def patch_rotary(module: nn.Module, switches: Switches) -> str:
    require_switch(switches, "rope")
    methods = rotary_methods(type(module))
    choices = {f: rotary_replacement(f) for used in methods.values() for f in used.values()}
    replacements = {f: choice for f, choice in choices.items() if not isinstance(choice, str)}
    if not replacements:
        raise NotUnderstood("; ".join(dict.fromkeys(map(str, choices.values()))))
    unfit, linears = unfit_norms(module, switches), rewrite.projections_of(module)
    norms = frozenset(name for name, reason in unfit.items() if not reason)

    def rotary_of(method: str) -> frozenset[str]:
        """Rotary functions that take norms."""
        used = methods[method].items()
        return frozenset(name for name, f in used if getattr(replacements.get(f), "takes_norms", 0))

    def rewritten(function: Any, method: str) -> rewrite.Rewritten | None:
        merged = fuse_head_norms, norms | rotary_of(method)
        return rewrite.rewritten(inner_function(function), merged, (rewrite.share_projections, linears))

    def members(cls: type) -> dict[str, Any]:
        bound: dict[str, Any] = {"liger_reason": reason}
        for method, used in methods.items():
            replaced = {n: replacements[f] for n, f in used.items() if f in replacements}
            function = getattr(cls, method)
            found = rewritten(function, method)
            helpers = rewrite.HELPERS | HELPERS
            bound[method] = rebound(function, replaced | helpers, found.code if found else None)
        return bound

    originals = {method: getattr(type(module), method) for method in methods}
    found = [rewritten(function, method) for method, function in originals.items()]
    fused = any(code is not None and code.applied[0] for code in found)
    reasons = [
        why_separate(inner_function(function), unfit, rotary_of(method))
        for method, function in originals.items()
        if unfit and not fused
    ]
    reason = next((f"no qk_norm_rope: {text}" for text in reasons if text), "")
    key = linears, norms, reason, tuple(map(rebinding_key, originals.values()))
    replacement = "qk_norm_rope" if fused else "rope"
    give_subclass(module, "rope", replacement, key, members)
    return replacement
