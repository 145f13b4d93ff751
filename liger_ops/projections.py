"""Several linear projections of one input. In backward, the input's gradients accumulate inside the GEMMs; autograd
would add them in separate passes. A single projection may still use a faster GEMM.

Projections may be LoRA layers of peft, whose adapters one operator adds. peft itself is not imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as every_module

from ._loader import load
from .adapters import gated_lora_projection, lora_projections
from .quantised import Packed, is_linear_4bit, packed

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


def recipe_of(linear: nn.Module, x: Tensor) -> str:
    """Of a layer that `liger_ops.transformers.linears` has patched, if it computes in FP8 for this input, else "".
    Evaluation and generation stay in the dtype of the weight, and so do DTensors."""
    recipe = getattr(type(linear), "liger_fp8", "")
    if not recipe or not linear.training or any(hasattr(t, "device_mesh") for t in (x, linear.weight)):
        return ""
    return recipe if autocast_dtype(x) is not None or x.dtype == linear.weight.dtype else ""


def projected_in_fp8(linears: Sequence[Any], x: Tensor) -> Tensor | None:
    """The results of several layers side by side, from x quantised once, or None if they must be called."""
    recipes = {recipe_of(linear, x) for linear in linears}
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if len(recipes) > 1 or "" in recipes or len(biases) not in (0, len(linears)):
        return None
    if any(has_hooks(linear) or "forward" in linear.__dict__ for linear in linears):
        return None
    weights = [linear.weight for linear in linears]
    return torch.ops.liger.fp8_projections(x, weights, biases, recipe=recipes.pop())


def split(results: Tensor, linears: Sequence[Any]) -> tuple[Tensor, ...]:
    return results.split([linear.weight.shape[0] for linear in linears], -1)


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


# ---- LoRA layers of peft

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


def project_adapted(states: Sequence[Adapted], x: Tensor) -> tuple[Tensor, ...]:
    called = [state.weight if isinstance(state.weight, Called) else None for state in states]
    layers = [layer.layer for layer in called if layer is not None]
    side_by_side = projected_in_fp8(layers, x) if len(layers) == len(states) > 1 else None
    results: list[Any]
    if side_by_side is not None:
        results = [*split(side_by_side, layers)]
    else:
        results = [layer and layer.layer(x) for layer in called]
    together: dict[torch.dtype, list[int]] = {}
    for i, (state, result) in enumerate(zip(states, results)):
        if called[i] is None or state.a:
            together.setdefault(input_dtype(state, result), []).append(i)
    for dtype, members in together.items():
        # Autocast and quantised layers cast their input, and the latter their result to the input's dtype.
        add_adapters(x, x.to(dtype), members, [states[i] for i in members], results)
    return tuple(results)


def add_adapters(
    x: Tensor, cast: Tensor, members: Sequence[int], states: Sequence[Adapted], results: list[Any]
) -> None:
    """Completes the results of the members. cast: x in the operator's dtype."""
    of = [i for i, state in enumerate(states) for _ in state.a]
    a = [weight for state in states for weight in state.a]
    b = [weight for state in states for weight in state.b]
    scale = [factor for state in states for factor in state.scale]
    dropout = [rate for state in states for rate in state.dropout]
    weights: list[Tensor | Packed | None] = []
    biases: list[Tensor | None] = []
    for i, state in zip(members, states):
        if isinstance(state.weight, Called):
            result, shape = results[i], (*x.shape[:-1], len(state.b[0]))
            joins = type(result) is Tensor and result.dtype == cast.dtype and result.shape == shape
            weights.append(None)
            biases.append(result if joins else None)
        else:
            weights.append(state.weight)
            biases.append(state.bias)
    ys = lora_projections(cast, weights, biases, a, b, scale, of, dropout)
    for i, state, bias, y in zip(members, states, biases, ys):
        if isinstance(state.weight, Packed):
            y = y.to(x.dtype)
        elif isinstance(state.weight, Called) and bias is None:
            y = results[i] + y
            y = y.to(results[i].dtype) if state.weight.keeps_dtype else y
        results[i] = y


# ---- Any projections


def is_projection(module: nn.Module) -> bool:
    """Whether `project` may compute this layer, or its adapters once it has some, without calling it."""
    return is_lora(module) or (hasattr(module, "in_features") and not has_adapters(module))


def is_called(module: nn.Module) -> bool:
    """Whether a LoRA layer must be called because it is hooked or wrapped."""
    return is_lora(module) and (has_hooks(module) or "forward" in module.__dict__)


def project(linears: Sequence[nn.Module], x: Tensor, lora: bool = True) -> tuple[Tensor, ...]:
    """``tuple(linear(x) for linear in linears)``. lora: whether an operator may compute LoRA layers."""
    if lora and any(map(is_lora, linears)) and not any(map(is_called, linears)):
        states = read(linears, x)
        if states is not None and any(state.a for state in states):
            return project_adapted(states, x)
        if states is not None:  # all adapters are merged, disabled or inactive
            linears = [base_of(linear) if is_lora(linear) else linear for linear in linears]
    side_by_side = projected_in_fp8(linears, x) if len(linears) > 1 else None
    if side_by_side is not None:
        return split(side_by_side, linears)
    if (
        saves_passes(x)
        and (len(linears) > 1 or may_choose_gemm(x))
        and x.dim() > 1
        and all(is_bare_linear(linear) and linear.weight.dtype == x.dtype for linear in linears)
    ):
        parameters = [linear.weight for linear in linears] + [linear.bias for linear in linears]
        return _Projections.apply(x, len(linears), *parameters)
    return tuple(linear(x) for linear in linears)


def project_one(linear: nn.Module, x: Tensor, lora: bool = True) -> Tensor:
    """``linear(x)``, in an operator only if it is a LoRA layer."""
    return project((linear,), x, lora)[0] if is_lora(linear) else linear(x)


def project_gated(
    linear: nn.Module, op: str, options: tuple, gate: Tensor, up: Tensor, lora: bool = True
) -> Tensor | None:
    """``linear(op(gate, up, *options))`` for a LoRA layer that one operator computes, or None."""
    if not lora or not is_lora(linear) or is_called(linear):
        return None
    states = read((linear,), gate)
    if states is None or not states[0].a:
        return None
    weight, bias, a, b, scale, dropout = states[0]
    # A layer that is called needs the product. Autocast casts the product, not what it is made of.
    if isinstance(weight, Called) or {gate.dtype, up.dtype} != {weight.dtype}:
        return None
    return gated_lora_projection(op, options, gate, up, weight, bias, a, b, scale, dropout)
