"""Reads LoRA layers of peft, which is not imported: what they compute now, or why peft's own forward must run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .layers import HAS_LIBRARY, autocast_dtype, has_hooks, is_bare_linear
from .packed import Packed, is_linear_4bit, packed

# Its base class, and the classes whose forward is understood, with whether autocast keeps the dtype of the base's result.
PEFT_LAYER = ("peft.tuners.lora.layer", "LoraLayer")
PEFT_LINEARS = {
    ("peft.tuners.lora.layer", "Linear"): True,
    ("peft.tuners.lora.bnb", "Linear4bit"): False,
    ("peft.tuners.lora.bnb", "Linear8bitLt"): False,
    ("peft.tuners.lora.gptq", "GPTQLoraLinear"): True,
    ("peft.tuners.lora.awq", "AwqLoraLinear"): False,
    ("peft.tuners.lora.aqlm", "AqlmLoraLinear"): True,
    ("peft.tuners.lora.eetq", "EetqLoraLinear"): False,
    ("peft.tuners.lora.hqq", "HqqLoraLinear"): False,
    ("peft.tuners.lora.te", "TeLinear"): True,
}
# Autocast changes no others.
CAST_BY_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)


class Called(NamedTuple):
    """A layer whose own forward computes its result."""

    layer: nn.Module
    dtype: torch.dtype  # of the input that its adapters take
    reason: str
    keeps_dtype: bool = True  # whether adapters leave the dtype of its result


class Adapted(NamedTuple):
    """A linear layer and its active adapters, each of which adds ``scale[j] * linear(linear(dropout(x), a[j]), b[j])``."""

    weight: Tensor | Packed | Called
    bias: Tensor | None
    a: list[Tensor]
    b: list[Tensor]
    scale: list[float]
    dropout: list[float]


def has_adapters(module: nn.Module) -> bool:
    """Whether this is a LoRA layer, around a module of any class."""
    return any((cls.__module__, cls.__name__) == PEFT_LAYER for cls in type(module).__mro__)


def peft_linear(module: nn.Module) -> Any:
    """The class of PEFT_LINEARS of which a LoRA layer, patched or not, is an instance, or None."""
    cls: Any = getattr(type(module), "liger_original", type(module))
    return next((base for base in cls.__mro__ if (base.__module__, base.__name__) in PEFT_LINEARS), None)


def is_lora(module: nn.Module) -> bool:
    """Whether this is a LoRA layer around a linear layer, patched or not, that computes what `adapted` reads."""
    if type(module) is nn.Linear:
        return False
    base = peft_linear(module)
    cls: Any = getattr(type(module), "liger_original", type(module))
    # Neither a subclass nor other code replaced the forward.
    return base is not None and cls.forward is base.forward and base.forward.__module__ == base.__module__


def base_of(layer: nn.Module) -> Any:
    """The layer that a LoRA layer calls."""
    return layer._modules.get("quant_linear_module") or layer._modules["base_layer"]


def why_not_bare(name: str, linear: Any) -> str:
    """Why the parameters of a linear layer may not be used without calling its forward, or ""."""
    if is_bare_linear(linear):
        return ""
    if type(linear) is not nn.Linear:
        wrapped = "a wrapped " if type(linear).__name__ == "Linear" else ""
        return f"{name} is {wrapped}{type(linear).__name__}"
    if type(linear.weight) not in (nn.Parameter, Tensor):
        return f"the weight of {name} is {type(linear.weight).__name__}"
    return f"{name} is hooked or wrapped"


def read_weight(base: Any, dtype: torch.dtype, casts: bool) -> Tensor | Packed | str:
    """The weight of a linear layer for an input of this dtype, or why its own forward must be called."""
    if is_linear_4bit(base):
        return "base is hooked or wrapped" if has_hooks(base) or "forward" in base.__dict__ else packed(base, dtype)
    if getattr(type(base), "liger_fp8", ""):
        return "base computes in FP8"
    if reason := why_not_bare("base", base):
        return reason
    weight = base.weight
    if casts and weight.dtype in CAST_BY_AUTOCAST:
        weight = weight.to(dtype)
    return weight if weight.dtype == dtype else f"base is {weight.dtype}, its input {dtype}"


def read_adapter(
    layer: Any, adapter: str, dtype: torch.dtype, casts: bool
) -> tuple[Tensor, Tensor, float, float] | str:
    """A, B, scale and rate of dropout of an adapter of a LoRA layer whose input has this dtype, or why peft's own forward
    must run. casts: autocast gives operands this dtype."""
    if adapter in layer.lora_variant:
        return f"is the variant {type(layer.lora_variant[adapter]).__name__.removesuffix('LinearVariant')}"
    # Without nn.Module.__getattr__, which would take half of the time.
    modules = layer._modules
    down, up, dropout = (modules[name]._modules[adapter] for name in ("lora_A", "lora_B", "lora_dropout"))
    if reason := why_not_bare("its A", down) or why_not_bare("its B", up):
        return reason
    if down.bias is not None or up.bias is not None:
        return "its adapter has a bias"
    if has_hooks(dropout) or type(dropout) not in (nn.Identity, nn.Dropout):
        return "its dropout is hooked or replaced"
    rate = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
    a, b, scale = down.weight, up.weight, layer.scaling[adapter]
    if not isinstance(scale, (int, float)):
        return "its scale is no number"
    widened = a.dtype == torch.float32 and dtype in (torch.float16, torch.bfloat16)
    if casts and a.dtype in CAST_BY_AUTOCAST and b.dtype in CAST_BY_AUTOCAST:
        return a.to(dtype), b.to(dtype), scale, rate
    if a.dtype != b.dtype or not (widened or a.dtype == dtype):
        return f"its A is {a.dtype}, its B {b.dtype}, its input {dtype}"
    if widened and not layer.cast_input_dtype_enabled:
        return "does not cast its input"
    return a, b, scale, rate


def adapted(layer: Any, dtype: torch.dtype, casts: bool = False) -> Adapted | str:
    """A linear layer, with adapters or without, as it computes now for an input of this dtype. Or why it must be called
    instead; for a LoRA layer this means peft's own forward. casts: autocast gives operands this dtype."""
    has_base = is_lora(layer)
    base = base_of(layer) if has_base else layer
    read, bias = read_weight(base, dtype, casts), None
    weight: Tensor | Packed | Called
    if isinstance(read, str):
        # DTensors, whose class is slow to import.
        if any(hasattr(t, "device_mesh") for t in base._parameters.values()):
            return read
        cls = peft_linear(layer) if has_base else None
        # peft asks whether autocast is on for GPUs.
        keeps = cls is None or PEFT_LINEARS[cls.__module__, cls.__name__] or not torch.is_autocast_enabled()
        weight = Called(base, dtype, read, keeps)
    else:
        weight, bias = read, base.bias
        if bias is not None and (casts or isinstance(weight, Packed)):
            bias = bias.to(dtype)
    found = Adapted(weight, bias, [], [], [], [])
    if not has_base:
        return found
    merged = bool(layer.merged_adapters)
    if layer.disable_adapters or merged:
        return "is disabled while merged" if layer.disable_adapters and merged else found
    present = layer._modules["lora_A"]._modules
    lists: tuple[list[Any], ...] = found.a, found.b, found.scale, found.dropout
    for adapter in layer.active_adapters:
        if adapter not in present:
            continue
        state = read_adapter(layer, adapter, dtype, casts)
        if isinstance(state, str):
            return state
        for values, value in zip(lists, state):
            values.append(value)
    return found


def read(layers: Sequence[nn.Module], x: Tensor) -> list[Adapted] | None:
    """The layers as they compute now, or None if one of them must be called, or if no operator takes x."""
    if not HAS_LIBRARY or x.dim() < 2 or not x.is_floating_point():
        return None
    given = autocast_dtype(x) if x.dtype in CAST_BY_AUTOCAST else None
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return None
    states = []
    for layer in layers:
        state = adapted(layer, given or x.dtype, casts=given is not None)
        if isinstance(state, str):
            return None
        states.append(state)
    # Few rows, as in generation, have faster kernels in bitsandbytes.
    if any(isinstance(state.weight, Packed) for state in states) and not torch.is_grad_enabled():
        return None
    return states


def input_dtype(state: Adapted, result: Tensor | None) -> torch.dtype:
    """Of the operator that adds the adapters. result: of the layer, if it was called."""
    dtype = state.weight.dtype
    if result is None or result.dtype == dtype:
        return dtype
    # Then peft adds the adapters in fp32. Where autocast casts them, they have its dtype.
    wide, adapters = torch.promote_types(dtype, result.dtype), (*state.a, *state.b)
    return wide if all(t.dtype == wide == torch.float32 for t in adapters) else dtype
