"""RMSNorms with a gate, ``forward(x, gate)``, as linear attention and state space layers end in.

Their class names do not tell whether the gate is applied before or after the norm, by which activation, and over which
groups of columns: the values of a small run do.

RMSNorms of groups of columns, ``forward(x)``, as Qwen4 has them, run as those with a gate that is open.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from . import probe
from .patched import (
    NotUnderstood,
    Switches,
    epsilon_of,
    give_subclass,
    is_distributed,
    original_class,
    require_switch,
)

OPERATOR = "rms_norm_gated"
# Its sigmoid is 1 in every dtype.
OPEN = 128.0


@dataclass(frozen=True)
class GatedNorm:
    arguments: tuple[str, ...]  # names of forward's parameters: x, and the gate if there is one
    epsilon: str  # name of the module's attribute
    offset: float
    activation: str
    gate_first: bool
    group_size: int | None
    casting_mode: str = "llama"
    promotes: bool = False  # whether a wider weight makes the result wider

    @property
    def result_is_wide(self) -> bool:
        """Whether the operator's result has the dtype of a wider weight."""
        return self.casting_mode == "llama" and self.gate_first

    def of(self, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        options = self.offset, self.casting_mode, self.activation
        return F.rms_norm_gated(x, gate, weight, eps, *options, gate_first=self.gate_first, group_size=self.group_size)


def parameters_of_forward(module: nn.Module) -> tuple[str, ...]:
    parameters = [*inspect.signature(original_class(type(module)).forward).parameters.values()][1:]
    positional = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    return tuple(p.name for p in parameters) if positional else ()


def looks_gated(module: nn.Module) -> bool:
    names = parameters_of_forward(module) if probe.looks_like_norm(module) else ()
    return len(names) == 2 and "gate" in names[1]


def looks_grouped(module: nn.Module) -> bool:
    """Whether the module looks like a norm of groups of columns, without a gate."""
    weight = module._parameters.get("weight") if probe.looks_like_norm(module) else None
    if weight is None or weight.dim() != 1 or len(parameters_of_forward(module)) != 1:
        return False
    sizes = [v for name, v in vars(module).items() if "group" in name and type(v) is int]
    return any(1 < v < weight.shape[0] and weight.shape[0] % v == 0 for v in sizes)


def open_gate(x: Tensor) -> Tensor:
    """One row, which all rows share."""
    return x.new_full(x.shape[-1:], OPEN).expand_as(x)


def group_sizes(module: nn.Module, n: int) -> Iterator[int | None]:
    """All columns, then what an integer of the module may mean: columns of a group, or groups."""
    yield None
    numbers = {v for v in vars(module).values() if type(v) is int and 1 < v < n and n % v == 0}
    yield from dict.fromkeys(size for v in sorted(numbers) for size in (v, n // v))


def identify(module: Any, switches: Switches) -> GatedNorm:
    require_switch(switches, "rms_norm")
    cls, names = original_class(type(module)), parameters_of_forward(module)
    parameters = dict(module.named_parameters(recurse=False))
    if [*module.children(), *module.buffers(recurse=False)] or parameters.keys() != {"weight"}:
        raise NotUnderstood("has parameters that no gated norm has")
    if parameters["weight"].dim() != 1:
        raise NotUnderstood("its weight has more than one dimension")
    epsilons = [name for name, v in vars(module).items() if "eps" in name.lower() and isinstance(v, float)]
    if not epsilons:
        raise NotUnderstood("has no epsilon")
    n, gated = parameters["weight"].shape[0], len(names) == 2
    weight = 20 * probe.random_tensor(n, seed=7)

    def run(x: Tensor, gate: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        held = nn.Parameter(weight.to(dtype), False)
        with torch.no_grad():
            given = (x, gate) if gated else (x,)
            return cls.forward(probe.shallow_copy(module, _parameters={"weight": held}), *given), held

    # In the row of small values, epsilon affects the result. Large gates show whether a module clamps.
    x, gate = probe.random_tensor(1, 6, n), 3 * probe.random_tensor(1, 6, n, seed=1)
    x *= torch.tensor([1.0, 1e-3, 30.0, 1.0, 1.0, 1e-2], device="cpu")[:, None]
    gate[:, 4] *= 10
    if not gated:
        gate = open_gate(x)
    try:
        theirs, _ = run(x, gate, torch.float32)
    except Exception as error:
        raise NotUnderstood(f"does not run on rows ({probe.described(error)})") from None
    activations, firsts = (("silu", "sigmoid"), (False, True)) if gated else (("sigmoid",), (False,))
    for choice in itertools.product(epsilons, (0.0, 1.0), activations, firsts, group_sizes(module, n)):
        norm = GatedNorm(names, *choice, casting_mode="gemma")
        exact = norm.of(x.double(), gate.double(), weight.double(), epsilon_of(module, norm.epsilon, x))
        if isinstance(theirs, Tensor) and theirs.shape == exact.shape:
            # Row by row: the row of small values has small results.
            if all(probe.agrees(a, b) for a, b in zip(exact[0], theirs[0])):
                return with_casting(norm, module, run, x, gate)
    raise NotUnderstood("computes something else")


def with_casting(norm: GatedNorm, module: nn.Module, run: Any, x: Tensor, gate: Tensor) -> GatedNorm:
    """With the casting mode that is closest in bf16, for weights of both dtypes."""
    x, gate = x.bfloat16(), gate.bfloat16()
    eps = epsilon_of(module, norm.epsilon, x)
    theirs = [run(x, gate, dtype) for dtype in (torch.bfloat16, torch.float32)]
    if theirs[0][0].dtype != torch.bfloat16:
        raise NotUnderstood("its result in half precision is wider")
    wide = theirs[1][0].dtype == torch.float32

    def distance(mode: str) -> float:
        found = replace(norm, casting_mode=mode)
        return sum(float((found.of(x, gate, w, eps).double() - y.double()).abs().sum()) for y, w in theirs)

    return replace(norm, casting_mode=min(("gemma", "llama"), key=distance), promotes=wide)


def normed(self: Any, norm: GatedNorm, x: Tensor, gate: Tensor) -> Tensor:
    weight: Tensor = self.weight
    dtype = torch.promote_types(x.dtype, weight.dtype) if norm.promotes else x.dtype
    wide = torch.promote_types(x.dtype, gate.dtype)
    if weight.dtype != wide:
        weight = weight.float()
        if norm.promotes and not norm.result_is_wide:
            wide = torch.float32
    y = norm.of(x.to(wide), gate.to(wide), weight, epsilon_of(self, norm.epsilon, x))
    return y.to(dtype)


def understood(x: Any, gate: Any, weight: Tensor) -> bool:
    """Whether a call is like those of the probe. Without a gate the module runs its own statements."""
    if not isinstance(x, Tensor) or not isinstance(gate, Tensor) or any(map(is_distributed, (x, gate, weight))):
        return False
    return x.shape == gate.shape and x.dim() > 0 and x.shape[-1] == weight.shape[0]


def patch(module: nn.Module, norm: GatedNorm) -> str:
    def members(cls: type[nn.Module]) -> dict[str, Any]:
        def forward(self: Any, *args: Any, **named: Any) -> Any:
            given = dict(zip(norm.arguments, args)) | named
            if len(given) == len(args) + len(named) and given.keys() == set(norm.arguments):
                x, *gates = (given[name] for name in norm.arguments)
                gate = gates[0] if gates else open_gate(x) if isinstance(x, Tensor) else None
                if gate is not None and understood(x, gate, self.weight):
                    return normed(self, norm, x, gate)
            return original_class(type(self)).forward(self, *args, **named)

        return {"forward": forward}

    give_subclass(module, "norm", OPERATOR, norm, members, ("weight", norm.epsilon))
    return OPERATOR
