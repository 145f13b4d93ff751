"""The kinds of modules that are replaced: how each is recognised, and how it is patched.

`plan` looks at the modules of a model and changes nothing. Each of its steps names the function that patches a module.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional as F
from ..nn import use_torch_embedding
from ..projections import has_hooks
from . import head_norms, probe, rewrite
from .experts import patch_experts
from .heads import patch_model
from .patched import (
    Options,
    Patched,
    Switches,
    accept_any_keyword,
    give_subclass,
    has_replaced_forward,
    require_switch,
    switch_of,
)
from .probe import NotUnderstood, original_class
from .rewrite import inner_function, rebinding_key, rebound

# ---- Norms


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


# ---- Gated MLPs


def looks_like_mlp(module: nn.Module) -> bool:
    linears = sum(probe.is_linear(child) for child in module.children())
    name = type(module).__name__.lower()
    return linears in (2, 3) and any(word in name for word in ("mlp", "feedforward", "ffn", "expert"))


def patch_mlp(module: nn.Module, switches: Switches) -> str:
    mlp = probe.identify_mlp(module)
    gate = switch_of(mlp.gate)
    require_switch(switches, gate)
    give_subclass(module, "mlp", gate, mlp, lambda cls: {"forward": accept_any_keyword(probe.mlp_forward(mlp))})
    return gate


# ---- Experts


def looks_like_experts(module: nn.Module) -> bool:
    return hasattr(type(module), "_apply_gate") and getattr(module, "has_gate", True)


# ---- Embeddings

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def is_embedding(module: nn.Module) -> bool:
    return original_class(type(module)).forward is nn.Embedding.forward


def embedding_forward(self: nn.Embedding, input: Tensor) -> Tensor:
    # Distributed and quantised weights have other classes.
    understood = type(self.weight) in (nn.Parameter, Tensor) and self.weight.dtype in FLOATS
    if understood and not use_torch_embedding():
        return F.embedding(input, self.weight, self.padding_idx)
    return original_class(type(self)).forward(self, input)


def patch_embedding(module: nn.Embedding, switches: Switches) -> str:
    require_switch(switches, "embedding")
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise NotUnderstood("it has max_norm, scale_grad_by_freq or sparse gradients")
    give_subclass(module, "embedding", "embedding", None, lambda cls: {"forward": embedding_forward})
    return "embedding"


# ---- Decoder layers: a residual addition and the RMSNorm that follows become one operator


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


# ---- Rotary position embedding: modules with a method that calls a rotary function


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
        merged = head_norms.fuse_head_norms, norms | rotary_of(method)
        return rewrite.rewritten(inner_function(function), merged, (rewrite.share_projections, linears))

    def members(cls: type) -> dict[str, Any]:
        bound: dict[str, Any] = {"liger_reason": reason}
        for method, used in methods.items():
            replaced = {n: replacements[f] for n, f in used.items() if f in replacements}
            function = getattr(cls, method)
            found = rewritten(function, method)
            helpers = rewrite.HELPERS | head_norms.HELPERS
            bound[method] = rebound(function, replaced | helpers, found.code if found else None)
        return bound

    originals = {method: getattr(type(module), method) for method in methods}
    found = [rewritten(function, method) for method, function in originals.items()]
    fused = any(code is not None and code.applied[0] for code in found)
    reasons = [
        head_norms.why_separate(inner_function(function), unfit, rotary_of(method))
        for method, function in originals.items()
        if unfit and not fused
    ]
    reason = next((f"no qk_norm_rope: {text}" for text in reasons if text), "")
    key = linears, norms, reason, tuple(map(rebinding_key, originals.values()))
    replacement = "qk_norm_rope" if fused else "rope"
    give_subclass(module, "rope", replacement, key, members)
    return replacement


# ---- The plan


class Step(NamedTuple):
    path: str  # in the model
    module: nn.Module
    kind: str  # of a Row
    patch: Callable[[Any, Options], str]  # returns the operator, or raises NotUnderstood


# In the order in which they are tried: kind, whether a module is of it, and what patches it.
KINDS: tuple[tuple[str, Callable[[Any], Any], Callable[[Any, Switches], str]], ...] = (
    ("rope", lambda module: rotary_methods(type(module)), patch_rotary),
    ("embedding", is_embedding, patch_embedding),
    ("norm", looks_like_norm, patch_norm),
    ("experts", looks_like_experts, patch_experts),
    ("mlp", looks_like_mlp, patch_mlp),
    ("layer", has_fusable_norms, patch_layer),
)


def step_of(path: str, module: nn.Module) -> Step | None:
    if isinstance(module, Patched):
        kind, operator = type(module).liger_row
        # These are patched together, in loss_step.
        return Step(path, module, kind, lambda *_: operator) if kind not in ("head", "loss") else None
    for kind, recognises, patch in KINDS:
        if recognises(module):
            return Step(path, module, kind, lambda module, options: patch(module, options.switches))
    return None


def loss_step(model: nn.Module) -> Step:
    """Patches the model's head and its forward together."""
    return Step("", model, "loss", patch_model)


def plan(model: nn.Module) -> list[Step]:
    """The steps that patch a model: its modules from the outside to the inside, then its loss."""
    steps = [step for path, module in model.named_modules() if (step := step_of(path, module))]
    return [*steps, loss_step(model)]
