"""Activations with trained parameters, as modules ``forward(x)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from ..linear.layers import autocast_dtype
from . import probe
from .patched import NotUnderstood, Switches, give_subclass, is_distributed, original_class, require_switch

OPERATOR = "xielu"
NUMBERS = ("alpha_p", "alpha_n")


@dataclass(frozen=True)
class Xielu:
    beta: float
    eps: float


def looks_like_activation(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    small = all(p.numel() == 1 for p in parameters.values())
    return parameters.keys() == {*NUMBERS} and small and not [*module.children()]


def identify(module: Any, switches: Switches) -> Xielu:
    require_switch(switches, OPERATOR)
    constants = dict(module.named_buffers(recurse=False))
    if constants.keys() != {"beta", "eps"} or any(t.numel() != 1 or t.is_meta for t in constants.values()):
        raise NotUnderstood("has no numbers beta and eps")
    found = Xielu(*(float(constants[name]) for name in ("beta", "eps")))
    x = torch.cat([t * probe.random_tensor(1, 40, seed=i) for i, t in enumerate((3.0, 1.0, 1e-3))])
    parameters = {name: nn.Parameter(probe.random_tensor(1, seed=7 + i), False) for i, name in enumerate(NUMBERS)}
    small = probe.shallow_copy(
        module, _parameters=parameters, _buffers={name: t.detach().cpu().float() for name, t in constants.items()}
    )
    theirs = probe.try_call(original_class(type(module)).forward, small, x)
    p, n = (parameter.double() for parameter in parameters.values())
    exact = F.xielu(x.double(), p, n, found.beta, found.eps)
    if theirs is None or not all(probe.agrees(a, b) for a, b in zip(exact, theirs[0])):
        raise NotUnderstood("computes something else")
    return found


def activated(self: Any, x: Tensor, facts: Xielu) -> Tensor:
    p, n = self.alpha_p, self.alpha_n
    wide = torch.promote_types(x.dtype, p.dtype)
    # Under autocast, the linear layer that follows casts the result to half precision anyway.
    if wide != x.dtype and autocast_dtype(x) is None:
        x = x.to(wide)
    p, n = (t if t.dtype in (x.dtype, torch.float32) else t.to(x.dtype) for t in (p, n))
    return F.xielu(x, p, n, facts.beta, facts.eps)


def patch(module: nn.Module, facts: Xielu) -> str:
    def members(cls: type[nn.Module]) -> dict[str, Any]:
        def forward(self: Any, input: Any) -> Any:
            if not isinstance(input, Tensor) or any(map(is_distributed, (input, *self.parameters()))):
                return original_class(type(self)).forward(self, input)
            return activated(self, input, facts)

        return {"forward": forward}

    give_subclass(module, "activation", OPERATOR, facts, members, NUMBERS)
    return OPERATOR
