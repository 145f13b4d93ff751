"""Patching replaces the class of a module by a subclass with the same name, whose forward calls an operator.

The subclass exists only in this process, so a pickle holds the original class and the options of the patch, with which
the module is patched again once it is loaded.
"""

from __future__ import annotations

import copy
import inspect
import sys
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .reads import NOTHING, Reads, reads_of, while_unchanged

Switches = Mapping[str, bool]
# Of the instances of patched modules.
OWN_ATTRIBUTES = ("liger_mode", "liger_options")


class NotUnderstood(Exception):
    """The reason why no operator replaces a module."""


def original_class(cls: type) -> type[nn.Module]:
    return getattr(cls, "liger_original", cls)


def deepcopy_as_patched(module: nn.Module, memo: dict) -> Any:
    """The __deepcopy__ of patched modules."""
    # copy.deepcopy looks for it on instances, where wrappers that forward attributes find their inner module's: peft's
    # models do. Then it copies the wrapper, not the module.
    caller = sys._getframe(1)
    wanted = caller.f_locals.get("x", module) if caller.f_code is copy.deepcopy.__code__ else module
    if wanted is not module:
        return copy._reconstruct(wanted, memo, *wanted.__reduce_ex__(4))  # type: ignore[attr-defined]
    clone = new_instance(type(module))
    memo[id(module)] = clone
    clone.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return clone


class Patched(nn.Module):
    """Base of the subclasses of patched modules."""

    liger_original: type[nn.Module]
    liger_row: tuple[str, str]  # kind and replacement of the report's Row
    liger_reads: Reads  # what must not change for an operator to replace the module
    liger_reason = ""  # the Row's reason
    liger_is_head = False  # whether the module is a model's head and may compute its loss

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_as_original(self, protocol)

    def __copy__(self) -> Any:
        clone = new_instance(type(self))
        clone.__dict__.update(self.__dict__)
        return clone

    __deepcopy__ = deepcopy_as_patched


class Options(NamedTuple):
    """The arguments of apply_liger_kernel."""

    switches: Switches
    memory_budget: int | None
    fp8: str | None = None
    fp8_filter: Callable[[nn.Module, str], bool] | None = None  # of a call only: not every function can be pickled


def reduce_as_original(module: nn.Module, protocol: Any) -> Any:
    cls: Any = original_class(type(module))
    while "liger_base" in vars(cls):
        cls = cls.liger_base
    state = {k: v for k, v in module.__dict__.items() if k not in OWN_ATTRIBUTES}
    options = module.__dict__.get("liger_options")
    if options is None:
        return new_instance, (cls,), state
    kind, _ = type(module).liger_row  # type: ignore[attr-defined]
    return new_instance, (cls,), (state, kind, options), None, None, load_patched


def new_instance(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def load_patched(module: nn.Module, saved: tuple[dict[str, Any], str, Options]) -> None:
    from .patch import patch_again  # which imports this file

    state, kind, options = saved
    module.__setstate__(state)
    patch_again(module, kind, options)


_subclasses: dict[tuple, type[nn.Module]] = {}


def give_subclass(
    module: nn.Module,
    kind: str,
    replacement: str,
    key: Any,
    members: Callable[[type[nn.Module]], dict[str, Any]],
    follows: Collection[str] | None = None,
    method: str = "forward",
) -> None:
    """Sets the module's class to a subclass with these members. Modules with the same class, kind and key share it.

    follows: if an operator replaces the method, what it reads from the module in every call (reads.py)."""
    cls = type(module)
    reads = NOTHING if follows is None else reads_of(module, method, follows)
    found = _subclasses.get((cls, kind, key, reads))
    if found is None:
        names = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "liger_original": cls,
            "liger_row": (kind, replacement),
            "liger_reads": reads,
        }
        made = names | members(cls)
        if follows is not None:
            made[method] = while_unchanged(made[method], getattr(cls, method), reads)
        found = _subclasses[cls, kind, key, reads] = type(cls.__name__, (Patched, cls), made)
    module.__class__ = found
    rebind_forward(module)


def restore(module: nn.Module) -> bool:
    """Gives the module its original class back. Returns whether it was patched."""
    cls = type(module)
    if not issubclass(cls, Patched):
        return False
    if "liger_original" in cls.__dict__:
        module.__class__ = cls.liger_original
    else:  # something else made a subclass of the patched class, as fully_shard does
        bases = tuple(b.__dict__.get("liger_original", b) for b in cls.__bases__)
        members = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
        module.__class__ = type(cls.__name__, bases, members)
    for name in OWN_ATTRIBUTES:
        module.__dict__.pop(name, None)
    rebind_forward(module)
    return True


def rebind_forward(module: nn.Module) -> None:
    """Updates the forwards of the module's class that others saved and call: accelerate between its hooks, and the
    parallelism of transformers between its collectives."""
    if "_old_forward" in module.__dict__:
        module.__dict__["_old_forward"] = types.MethodType(type(module).forward, module)
    for holder, name in saved_forwards(module):
        setattr(holder, name, types.MethodType(type(module).forward, module))


def saved_forwards(module: nn.Module) -> list[tuple[Any, str]]:
    """Where the parallelism of transformers, which replaces a module's forward, saves the one that it calls: objects and
    names of their attributes."""
    forward: Any = module.__dict__.get("forward")
    if not getattr(forward, "__module__", "").startswith("transformers.distributed."):
        return []
    waiting: list[tuple[Any, str]] = [(cell, "cell_contents") for cell in forward.__closure__ or ()]
    found = []
    while waiting:
        holder, name = waiting.pop()
        value = getattr(holder, name)
        if isinstance(value, types.MethodType) and value.__self__ is module and value.__name__ == "forward":
            found.append((holder, name))
        elif any(cls.__name__ == "EPImplementation" for cls in type(value).__mro__):
            waiting += [(value, n) for n in vars(value)]
    return found


def parallelism_of(module: nn.Module) -> str:
    """How transformers splits the stack over devices, for a report."""
    for holder, _ in saved_forwards(module):
        if hasattr(holder, "num_local_experts"):
            exchange = inspect.getclosurevars(module.forward).nonlocals["implementation"]
            return f", expert-parallel by {type(exchange).__name__}"
        return ", tensor-parallel"
    return ""


def has_replaced_forward(module: nn.Module) -> bool:
    """Whether the instance has its own forward. Accelerate's does not count: it calls the one that it replaced."""
    return "forward" in module.__dict__ and "_old_forward" not in module.__dict__


def inner_function(function: Any) -> Any:
    """The function inside its decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def is_wrapper_of(wrapper: Any, function: Any) -> bool:
    """Whether the wrapper, a decorated function or a bound method, ends in a call of the function."""
    return getattr(inner_function(wrapper), "__func__", inner_function(wrapper)) is function


def is_distributed(tensor: Tensor | None) -> bool:
    """Whether the tensor is a DTensor, for which the operators have no sharding rules."""
    # isinstance would need DTensor, which is slow to import.
    return hasattr(tensor, "device_mesh")


def accept_any_keyword(function: Callable[[Any, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A forward that accepts its tensor under any keyword, because classes name it differently."""

    def forward(self: nn.Module, *args: Tensor, **named: Tensor) -> Tensor:
        return function(self, *args, *named.values())

    return forward


def require_switch(switches: Switches, op: str) -> None:
    if not switches[op]:
        raise NotUnderstood(f"{op} is switched off")


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether fully_shard manages the module. It replaces the module's class by a subclass."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether it is torch's, alone in a group of fully_shard or not. Subclasses compute something else."""
    return type(module) is nn.Linear or (is_fully_sharded(module) and nn.Linear in type(module).__bases__)


@dataclass(frozen=True)
class Norm:
    op: str  # "rms_norm" or "layer_norm"
    epsilon: str  # name of the module's attribute
    offset: float = 0.0
    casting_mode: str = "llama"
    promotes: bool = False  # whether a wider weight makes the result wider


def epsilon_of(module: nn.Module, attribute: str, x: Tensor) -> float:
    value = getattr(module, attribute)
    # torch's norms compute in fp32 or wider.
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if value is None else value
