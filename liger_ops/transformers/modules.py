"""Patches the kinds of modules that the operators replace, except experts (experts.py) and the head (heads.py)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from ..linear.layers import autocast_dtype
from ..linear.peft import read
from ..linear.project import project_adapted
from ..nn import use_torch_embedding
from . import head_norms, latent_heads, probe, rewrite
from .patched import (
    Norm,
    Switches,
    accept_any_keyword,
    epsilon_of,
    give_subclass,
    inner_function,
    is_distributed,
    original_class,
    require_switch,
)
from .rewrite import rebinding_key, rebound

# ---- Norms


def normed(self: Any, x: Tensor, norm: Norm) -> Tensor:
    """The norm's forward."""
    if is_distributed(x) or is_distributed(self.weight):
        return original_class(type(self)).forward(self, x)
    weight, eps = self.weight, epsilon_of(self, norm.epsilon, x)
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


def patch_norm(module: nn.Module, norm: Norm) -> str:
    def forward(self: Any, x: Tensor) -> Tensor:
        return normed(self, x, norm)

    members: dict[str, Any] = {"forward": accept_any_keyword(forward), "liger_norm": norm}
    for name in ("weight", "bias"):
        if not hasattr(module, name):
            members[name] = None
    follows = "weight", norm.epsilon, *(("bias",) if norm.op == "layer_norm" else ())
    give_subclass(module, "norm", norm.op, (norm, tuple(members)), lambda cls: members, follows)
    return norm.op


# ---- Gated MLPs


def patch_mlp(module: nn.Module, mlp: probe.MLP) -> str:
    forward = accept_any_keyword(probe.mlp_forward(mlp))
    follows = [*mlp.projections, *filter(None, mlp.factors)]
    give_subclass(module, "mlp", mlp.switch, mlp, lambda cls: {"forward": forward}, follows)
    return mlp.switch


# ---- LoRA layers


def lora_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    states = None if args or kwargs else read((self,), x)
    if states is None or not states[0].a:
        return original_class(type(self)).forward(self, x, *args, **kwargs)
    return project_adapted(states, x)[0]


def patch_lora(module: nn.Module, reason: str) -> str:
    members = {"forward": lora_forward, "liger_reason": reason}
    give_subclass(module, "lora", "lora_linear", reason, lambda cls: members)
    return "lora_linear"


# ---- Embeddings

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def embedding_forward(self: nn.Embedding, input: Tensor) -> Tensor:
    # Distributed and quantised weights have other classes.
    understood = type(self.weight) in (nn.Parameter, Tensor) and self.weight.dtype in FLOATS
    if understood and not use_torch_embedding():
        return F.embedding(input, self.weight, self.padding_idx)
    return original_class(type(self)).forward(self, input)


def patch_embedding(module: nn.Module, _: None) -> str:
    follows = "weight", "padding_idx"
    give_subclass(module, "embedding", "embedding", None, lambda cls: {"forward": embedding_forward}, follows)
    return "embedding"


# ---- Decoder layers: a residual addition and the RMSNorm that follows become one operator


def patch_layer(module: nn.Module, norms: frozenset[str]) -> str:
    def members(cls: type[nn.Module]) -> dict[str, Any]:
        code = rewrite.with_fused_norms(inner_function(cls.forward), norms)
        return {"forward": rebound(cls.forward, rewrite.HELPERS, code)}

    give_subclass(module, "layer", "fused_add_rms_norm", (norms, rebinding_key(type(module).forward)), members)
    return "fused_add_rms_norm"


# ---- Gates whose result is added, as that of a shared expert


def has_gated_addition(module: nn.Module) -> bool:
    forward = inner_function(original_class(type(module)).forward)
    return hasattr(forward, "__code__") and rewrite.with_gated_additions(forward) is not None


def identify_gate(module: nn.Module, switches: Switches) -> None:
    require_switch(switches, "sigmoid_gate")


def patch_gate(module: nn.Module, _: None) -> str:
    def members(cls: type[nn.Module]) -> dict[str, Any]:
        code = rewrite.with_gated_additions(inner_function(cls.forward))
        return {"forward": rebound(cls.forward, rewrite.HELPERS, code)}

    give_subclass(module, "gate", "sigmoid_gate", rebinding_key(type(module).forward), members)
    return "sigmoid_gate"


# ---- Rotary position embedding


def norm_heads(norms: head_norms.HeadNorms | None, *heads: Tensor) -> tuple[Tensor, ...]:
    if norms is None:
        return heads
    options = norms.eps, norms.offset, norms.casting_mode
    return tuple(F.rms_norm(x, weight, *options) for x, weight in zip(heads, norms.weights))


def rotate(
    rotary: probe.Rotary,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int,
    norms: head_norms.HeadNorms | None = None,
) -> tuple[Tensor, Tensor]:
    kind = probe.KINDS[rotary.kind]
    table = kind.widen(cos), kind.widen(sin)
    # Under autocast, attention casts q and k to half precision anyway.
    if rotary.promotes and cos.dtype != q.dtype and autocast_dtype(q) is None:
        q, k = (x.to(cos.dtype) for x in norm_heads(norms, q, k))
        norms = None
    elif cos.dtype not in (q.dtype, torch.float32):
        table = table[0].to(q.dtype), table[1].to(q.dtype)
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    if norms is None:
        q, k = F.rope(q, k, *table, interleaved=kind.interleaved, trailing=kind.trailing, halves_out=kind.halves_out)
    else:
        q_weight, k_weight = norms.weights
        options = norms.eps, norms.offset, norms.casting_mode
        q, k = F.qk_norm_rope(q, k, q_weight, k_weight, table[0], table[1], *options, interleaved=kind.interleaved)
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return q, k


def rotate_last(
    rotary: probe.Rotary, x: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor] | None:
    """x with its last columns q rotated from pairs to halves, and k rotated, or None if other code must run."""
    if not is_probed(q, k, cos, sin, 1) or cos.shape[-1] != q.shape[-1] or cos.dtype not in (q.dtype, torch.float32):
        return None
    if is_distributed(x) or (rotary.promotes and cos.dtype != q.dtype and autocast_dtype(q) is None):
        return None
    # One angle for a pair.
    angles = (t[..., : t.shape[-1] // 2] for t in (cos, sin))
    y, _ = F.rope(x, x[:, :0], *angles, trailing=True, halves_out=True)
    return y, F.rope(k, k[:, :0], cos, sin, halves_out=True)[0]


def is_probed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> bool:
    """Whether arguments of these shapes and dtypes are like those of the probe."""
    if not isinstance(k, Tensor) or (q.dim(), k.dim(), cos.dim()) != (4, 4, 3) or unsqueeze_dim not in (1, 2):
        return False
    positions = 3 - unsqueeze_dim
    return (
        q.dtype == k.dtype
        and sin.dtype == cos.dtype
        and q.shape[0] == k.shape[0]
        and q.shape[positions] == k.shape[positions] == cos.shape[1]
        and cos.shape[0] in (1, q.shape[0])
    )


@functools.lru_cache(None)
def rotary_function(rotary: probe.Rotary, original: Callable) -> Callable:
    """A function with the original's signature. Calls with arguments that were not probed go to the original.

    If its attribute `takes_norms` is not 0, the function also takes HeadNorms of that many tensors as `norms`, and
    applies them before it rotates.
    """
    if rotary.kind == "complex":
        return complex_rotary_function(rotary, original)
    defaults = {n: p.default for n, p in inspect.signature(original).parameters.items() if p.default is not p.empty}
    default_dim = defaults.get("unsqueeze_dim", 1)

    if rotary.layout == "SHD":

        def rotated_positions(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs or q.dim() != 3 or k.shape[0] != q.shape[0] or cos.dim() != 2 or len(cos) != len(q):
                return original(q, k, cos, sin, *args, **kwargs)
            q, k = rotate(rotary, q.unsqueeze(0), k.unsqueeze(0), cos.unsqueeze(0), sin.unsqueeze(0), 2)
            return q.squeeze(0), k.squeeze(0)

        return rotated_positions

    if rotary.tensors == 1:

        def rotated_one(
            x: Tensor,
            cos: Tensor,
            sin: Tensor,
            unsqueeze_dim: int = default_dim,
            norms: head_norms.HeadNorms | None = None,
        ) -> Any:
            if not is_probed(x, x, cos, sin, unsqueeze_dim):
                (x,) = norm_heads(norms, x)
                return original(x, cos, sin, unsqueeze_dim)
            none = x[:, :0] if unsqueeze_dim == 1 else x[:, :, :0]
            if norms is not None:
                norms = norms._replace(weights=(*norms.weights, None))
            return rotate(rotary, x, none, cos, sin, unsqueeze_dim, norms)[0]

        return taking_norms(rotated_one, 1)

    # Some functions rotate q alone where they get no k.
    def rotated(
        q: Tensor,
        k: Any = None,
        cos: Any = None,
        sin: Any = None,
        *args: Any,
        norms: head_norms.HeadNorms | None = None,
        **kwargs: Any,
    ) -> Any:
        dim = kwargs.get("unsqueeze_dim", default_dim)
        if args or kwargs.keys() - {"unsqueeze_dim"} or not is_probed(q, k, cos, sin, dim):
            q, k = norm_heads(norms, q, k)
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate(rotary, q, k, cos, sin, dim, norms)

    function: Any = taking_norms(rotated, 2)
    if rotary.kind == "pairs to halves" and default_dim == 1:
        function.rotate_last = functools.partial(rotate_last, rotary)
    return function


def taking_norms(function: Any, tensors: int) -> Callable:
    function.takes_norms = tensors
    return function


def complex_rotary_function(rotary: probe.Rotary, original: Callable) -> Callable:
    heads_last = rotary.layout == "BSHD"

    def rotated(q: Tensor, k: Tensor, freqs_cis: Tensor) -> Any:
        if q.dim() != 4 or k.dim() != 4 or freqs_cis.dim() != 3 or q.dtype != k.dtype:
            return original(q, k, freqs_cis)
        freqs_cis = freqs_cis.to(q.device)
        if not heads_last:
            return F.rope_freqs_cis(q, k, freqs_cis)
        q, k = F.rope_freqs_cis(q.transpose(1, 2), k.transpose(1, 2), freqs_cis)
        return q.transpose(1, 2), k.transpose(1, 2)

    return rotated


def patch_rotary(module: nn.Module, identified: probe.RotaryModule) -> str:
    methods, found, unfit, lora, gates = identified
    linears = rewrite.projections_of(module)
    norms = frozenset(name for name, reason in unfit.items() if not reason)
    joining = [name for name, f in probe.methods_of(type(module)) if name not in methods and latent_heads.with_joins(f)]

    def rotary_of(method: str) -> frozenset[str]:
        """Rotary functions that take norms."""
        return frozenset(name for name, f in methods[method].items() if f in found and found[f].takes_norms)

    def rewritten(function: Any, method: str) -> rewrite.Rewritten | None:
        merged = [(head_norms.fuse_head_norms, norms | rotary_of(method))] if norms else []
        function = inner_function(function)
        sigmoids = rewrite.sigmoids_in(function) if gates else frozenset()
        last = latent_heads.rotating_last(function, methods[method], found)
        return rewrite.rewritten(
            function,
            *merged,
            *([(latent_heads.fuse_queries, last)] if last else []),
            (rewrite.share_projections, linears),
            (rewrite.fuse_gates, sigmoids),
        )

    def members(cls: type) -> dict[str, Any]:
        bound: dict[str, Any] = {"liger_reason": reason}
        for method, used in methods.items():
            replaced = {name: rotary_function(found[f], f) for name, f in used.items() if f in found}
            function = getattr(cls, method)
            changed = rewritten(function, method)
            helpers = rewrite.HELPERS | head_norms.HELPERS | latent_heads.HELPERS
            if not lora:
                helpers[rewrite.PROJECT] = rewrite.project_without_lora
            bound[method] = rebound(function, replaced | helpers, changed.code if changed else None)
        for method in joining:
            function = getattr(cls, method)
            bound[method] = rebound(function, latent_heads.HELPERS, latent_heads.with_joins(function))
        return bound

    originals = {method: getattr(type(module), method) for method in methods}
    changes = [rewritten(function, method) for method, function in originals.items()]
    fused = bool(norms) and any(change is not None and change.applied[0] for change in changes)
    reasons = [
        head_norms.why_separate(inner_function(function), unfit, rotary_of(method))
        for method, function in originals.items()
        if unfit and not fused
    ]
    reason = next((f"no qk_norm_rope: {text}" for text in reasons if text), "")
    functions = [*originals.values(), *(getattr(type(module), method) for method in joining)]
    key = linears, norms, reason, lora, gates, tuple(map(rebinding_key, functions))
    replacement = "qk_norm_rope" if fused else "rope"
    give_subclass(module, "rope", replacement, key, members)
    return replacement
