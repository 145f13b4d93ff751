"""The ways into blocks of models with hyper-connections, as those of DeepSeek-V4, HYV4 and Glm5Next:
``forward(streams)`` returns the block's input, and the numbers by which the model adds its output, in any order. Heads of such
models return the input alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from ..linear.layers import autocast_dtype
from . import probe
from .patched import NotUnderstood, Switches, give_subclass, is_distributed, original_class, require_switch

OPERATOR = "hyper_pre"
PARAMETERS = ("fn", "base", "scale")


@dataclass(frozen=True)
class Connection:
    prefix: str  # of the parameters' names
    norm: str  # the module that holds the epsilon of the norm, and its attribute
    norm_epsilon: str
    epsilon: str  # name of the module's attribute
    sinkhorn: str | None
    post_scale: str | float
    has_post_epsilon: bool
    order: tuple[int, ...]  # of x, post and comb among the results; one that is no tuple has none

    @property
    def follows(self) -> set[str]:
        """What a call reads from the module."""
        numbers = {self.epsilon, self.sinkhorn or "", self.post_scale if isinstance(self.post_scale, str) else ""}
        return numbers | {self.prefix + name for name in PARAMETERS} | {f"{self.norm}.{self.norm_epsilon}"}

    def __call__(self, module: Any, streams: Tensor) -> Any:
        fn, base, scale = (getattr(module, self.prefix + name) for name in PARAMETERS)
        eps = float(getattr(module, self.epsilon))
        factor = getattr(module, self.post_scale) if isinstance(self.post_scale, str) else self.post_scale
        found = F.hyper_pre(
            streams, fn, base, scale,
            float(getattr(getattr(module, self.norm), self.norm_epsilon)), eps,
            getattr(module, self.sinkhorn) if self.sinkhorn else 1, float(factor), eps if self.has_post_epsilon else 0.0,
        )  # fmt: skip
        return tuple(found[i] for i in self.order) if self.order else found.x


def prefix_of(module: nn.Module) -> str | None:
    names = module._parameters.keys()
    return next((prefix for prefix in ("", "hc_") if names == {prefix + name for name in PARAMETERS}), None)


def looks_like_connection(module: nn.Module) -> bool:
    return "Hyper" in type(module).__name__ and prefix_of(module) is not None


def one_of(values: Any, kind: type, part: str) -> list[str]:
    return [name for name, value in values.items() if type(value) is kind and part in name.lower()]


def candidates(module: Any, streams: int) -> Iterator[Connection]:
    """What a module may compute, by its attributes and the sizes of its parameters."""
    prefix, norms = prefix_of(module), dict(module.named_children())
    width = getattr(module, f"{prefix}fn").shape[0]
    groups = {streams: 1, 2 * streams: 2, streams * (2 + streams): 3}.get(width)
    epsilons, steps = one_of(vars(module), float, "eps"), one_of(vars(module), int, "sinkhorn")
    if groups is None or len(norms) != 1 or len(epsilons) != 1 or len(steps) != (groups == 3):
        raise NotUnderstood("has other parameters, or other numbers than epsilons and steps")
    ((norm, child),) = norms.items()
    of_norm = one_of(vars(child), float, "eps")
    if len(of_norm) != 1 or [*child.parameters(), *child.buffers()]:
        raise NotUnderstood("has no norm without weight")
    common = (prefix or "", norm, of_norm[0], epsilons[0], steps[0] if steps else None)
    if groups == 1:
        yield Connection(*common, 2.0, False, ())
        return
    factors = [
        2.0,
        1.0,
        *(name for name, value in vars(module).items() if type(value) is float and name not in epsilons),
    ]
    for factor, has_epsilon in itertools.product(factors, (False, True)):
        for order in itertools.permutations(range(groups)):
            yield Connection(*common, factor, has_epsilon, order)


def identify(module: Any, switches: Switches) -> Connection:
    require_switch(switches, OPERATOR)
    streams, hidden = getattr(module, "hc_mult", None), 6
    if type(streams) is not int:
        raise NotUnderstood("does not tell its number of streams")
    found = [*candidates(module, streams)]
    first, held = found[0], {}
    # Every number that the module has changes the results.
    for i, name in enumerate(PARAMETERS):
        shape = [*getattr(module, first.prefix + name).shape]
        held[first.prefix + name] = probe.random_tensor(*shape[: 2 - (i == 0)], *[streams * hidden][: i == 0], seed=i)
    numbers: dict[str, Any] = {first.epsilon: 0.03} | ({first.sinkhorn: 3} if first.sinkhorn else {})
    numbers |= {c.post_scale: 1.7 for c in found if isinstance(c.post_scale, str)}
    child = probe.shallow_copy(getattr(module, first.norm), **{first.norm_epsilon: 0.2})

    def copy_of(dtype: torch.dtype) -> nn.Module:
        parameters = {name: nn.Parameter(t.to(dtype), False) for name, t in held.items()}
        return probe.shallow_copy(module, _parameters=parameters, _modules={first.norm: child}, **numbers)

    def run(dtype: torch.dtype, parameters: torch.dtype) -> tuple:
        forward, given = original_class(type(module)).forward, probe.random_tensor(1, 5, streams, hidden, seed=3)
        out = probe.try_call(forward, copy_of(parameters), given.to(dtype))
        if out is None or not all(isinstance(t, Tensor) for t in out):
            raise NotUnderstood("does not run on a small copy")
        return out

    theirs, x = run(torch.float32, torch.float32), probe.random_tensor(1, 5, streams, hidden, seed=3)
    for connection in found:
        with torch.no_grad():
            ours = connection(copy_of(torch.float32), x)
        ours = ours if isinstance(ours, tuple) else (ours,)
        if len(ours) == len(theirs) and all(map(probe.agrees, ours, theirs)):
            break
    else:
        raise NotUnderstood("computes something else")
    # In half precision, numbers for the output stay fp32, as ours do.
    for parameters in (torch.bfloat16, torch.float32):
        with torch.no_grad():
            ours = connection(copy_of(parameters), x.bfloat16())
        ours = ours if isinstance(ours, tuple) else (ours,)
        if [t.dtype for t in ours] != [t.dtype for t in run(torch.bfloat16, parameters)]:
            raise NotUnderstood("its results in half precision have other dtypes")
    return connection


def patch(module: nn.Module, found: Connection) -> str:
    def forward(self: Any, streams: Tensor, *args: Any, **kwargs: Any) -> Any:
        parameters = [getattr(self, found.prefix + name) for name in PARAMETERS]
        # Autocast computes the product in half precision. The original computes fp64 in fp32.
        if (
            args
            or kwargs
            or is_distributed(streams)
            or any(is_distributed(p) or p.dtype not in (torch.float32, streams.dtype) for p in parameters)
            or autocast_dtype(streams) is not None
            or streams.dtype == torch.float64
        ):
            return original_class(type(self)).forward(self, streams, *args, **kwargs)
        return found(self, streams)

    give_subclass(module, "connection", OPERATOR, found, lambda cls: {"forward": forward}, found.follows)
    return OPERATOR
