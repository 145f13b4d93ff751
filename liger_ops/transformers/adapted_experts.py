"""Adapters of peft on the weights of experts (target_parameters).

peft wraps the stack in a ParamWrapper for each weight. During a call it parametrises the weight, which merges the adapter
into a copy of all experts. A patched wrapper tells the stack its adapter instead, and the operator of the stack adds it.
Everything else remains peft's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from . import experts
from .experts import EXPERTS, HIDDEN, INNER, OP, WEIGHTS, Factors
from .patched import (
    NotUnderstood,
    Patched,
    Switches,
    give_subclass,
    has_replaced_forward,
    is_distributed,
    original_class,
    require_switch,
)
from .probe import agrees, described, looks_like_experts, random_tensor, shallow_copy

PARAM_WRAPPER = ("peft.tuners.lora.layer", "ParamWrapper")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
RANK = 2  # of the small copy that is run


def wraps_parameter(module: nn.Module) -> bool:
    return any((cls.__module__, cls.__name__) == PARAM_WRAPPER for cls in type(module).__mro__)


def factors_of(wrapper: Any, adapter: str, transposed: bool) -> tuple[Tensor, Tensor]:
    """a (E, r, in) and b (E, out, r) of the operator: views of peft's parameters."""
    down, up = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    a = down.view(wrapper.num_experts, -1, down.shape[1])
    b = up.view(up.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
    if wrapper._did_swap_in_out_features == transposed:  # A belongs to the results, as in older releases
        a, b = b.mT, a.mT
    return a, b


def in_dtype_of(weight: Tensor, adapter: Tensor) -> Tensor:
    """The operator takes adapters in fp32 or in the dtype of the weight."""
    fits = adapter.dtype == weight.dtype or (adapter.dtype == torch.float32 and weight.dtype != torch.float64)
    return adapter if fits else adapter.to(weight.dtype)


def together(weight: Tensor, found: Sequence[tuple[Tensor, Tensor, float]]) -> Factors:
    """Several adapters as one of all their ranks."""
    cast = [(in_dtype_of(weight, a), in_dtype_of(weight, b), scale) for a, b, scale in found]
    if len(cast) == 1:
        return Factors(*cast[0])
    a, b = torch.cat([a for a, _, _ in cast], 1), torch.cat([b * scale for _, b, scale in cast], 2)
    return Factors(a, b.to(a.dtype), 1.0)


def why_not(wrapper: Any, adapters: Sequence[str]) -> str:
    """Why peft must merge these adapters, or ""."""
    stack, name = wrapper.get_base_layer(), wrapper.parameter_name
    if name not in WEIGHTS or is_parametrized(stack, name):
        return f"adapts {name}" if name not in WEIGHTS else "its weight is parametrised"
    weight = stack._parameters[name]
    if weight.dim() != 3 or weight.dtype not in FLOATS or (weight.is_cuda and weight.dtype == torch.float64):
        return f"its weight is {weight.dtype} with {weight.dim()} dimensions"
    if has_replaced_forward(stack):
        return "the forward of its experts was replaced"
    for adapter in adapters:
        tensors = (weight, wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight)
        if any(map(is_distributed, tensors)):
            return "its weights are sharded"
        if adapter in wrapper.lora_variant or not isinstance(wrapper.scaling[adapter], (int, float)):
            return "is a variant of LoRA"
    return ""


@contextlib.contextmanager
def told(stack: Any, name: str, factors: Factors) -> Iterator[None]:
    before = stack.__dict__.get("liger_adapters", {})
    stack.liger_adapters = {**before, name: factors}
    try:
        yield
    finally:
        if before:
            stack.liger_adapters = before
        else:
            del stack.liger_adapters


def activate_lora(self: Any, active_adapters: list[str]) -> Any:
    adapters, stack = [a for a in active_adapters if a in self.lora_A], self.get_base_layer()
    # It may have been unpatched alone.
    serves = isinstance(stack, Patched) and type(stack).liger_row == ("experts", OP)
    if not adapters or not serves or why_not(self, adapters):
        return original_class(type(self))._activate_lora(self, active_adapters)  # type: ignore[attr-defined]
    found = [(*factors_of(self, a, self.liger_transposed), self.scaling[a]) for a in adapters]
    return told(stack, self.parameter_name, together(self.get_param(), found))


def check_factors(wrapper: Any, adapter: str, transposed: bool) -> None:
    """Compares factors_of with what peft merges, on a small copy."""
    columns, rows = (2 * INNER, HIDDEN) if wrapper.parameter_name == WEIGHTS[0] else (HIDDEN, INNER)
    shape = (EXPERTS, rows, columns) if transposed else (EXPERTS, columns, rows)
    natural = wrapper._did_swap_in_out_features != transposed
    inner, outer = (rows, columns) if natural else (columns, rows)
    parts: dict[str, nn.Module] = {}
    for name, size in (("lora_A", (RANK * EXPERTS, inner)), ("lora_B", (outer, RANK * EXPERTS))):
        linear = nn.Linear(size[1], size[0], bias=False, device="meta")
        linear.weight = nn.Parameter(random_tensor(*size, seed=len(parts)))
        parts[name] = nn.ModuleDict({adapter: linear})
    base = nn.Module()
    base.register_parameter(wrapper.parameter_name, nn.Parameter(torch.zeros(shape, device="cpu")))
    copy: Any = shallow_copy(
        wrapper, _modules={**wrapper._modules, **parts, "base_layer": base}, num_experts=EXPERTS, scaling={adapter: 0.5}
    )
    with torch.no_grad():
        a, b = factors_of(copy, adapter, transposed)
        merged = b @ a * 0.5
        if not agrees(merged.mT if transposed else merged, copy.get_delta_weight(adapter), 1e-5):
            raise NotUnderstood("its adapter has another layout")


def identify(wrapper: Any, switches: Switches) -> bool:
    """Whether the weights of the stack are transposed."""
    require_switch(switches, "lora")
    stack = wrapper.get_base_layer()
    found = experts.identify_operator(stack, switches) if looks_like_experts(stack) else None
    if not isinstance(found, experts.Experts):
        raise NotUnderstood(f"its base is {type(stack).__name__}" if found is None else f"its experts: {found.reason}")
    adapters = [*wrapper.lora_A]
    if reason := why_not(wrapper, adapters):
        raise NotUnderstood(reason)
    try:
        check_factors(wrapper, adapters[0], found.transposed)
    except NotUnderstood:
        raise
    except Exception as error:
        raise NotUnderstood(f"does not run on a small copy ({described(error)})") from None
    return found.transposed


def patch(wrapper: nn.Module, transposed: bool) -> str:
    members = {"_activate_lora": activate_lora, "liger_transposed": transposed}
    give_subclass(wrapper, "lora", OP, ("parameter", transposed), lambda cls: members)
    return OP
