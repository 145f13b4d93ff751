"""Puts operators into one model, and takes them out again.

A module is patched by giving it a subclass of its own class, with the same name, whose forward calls an operator.
Nothing outside the model changes: not its classes, not transformers, not torch. Parameters, hooks, wrappers and
state_dict keys stay what they are.
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
import functools
import inspect
import itertools
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional as F
from ..nn import embedding_stays_torchs
from ..projections import hooks_of
from . import probe, rewrite
from .deferred import DeferredLogits, LossCall, called
from .probe import NotUnderstood
from .report import Report, Row

SWITCHES = (
    "rope", "rms_norm", "layer_norm", "swiglu", "geglu", "embedding", "cross_entropy", "fused_linear_cross_entropy"
)  # fmt: skip


class Patched:
    """Base of the subclasses that patched modules have."""

    liger_original: type
    liger_row: tuple[str, str]  # kind and replacement, of a Row

    def __reduce_ex__(self, protocol: int) -> Any:
        return reduced(self, protocol)

    def __deepcopy__(self, memo: dict) -> Any:
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone


def reduced(module: nn.Module, protocol: int) -> Any:
    """Pickled as what it was: the subclass exists in this process alone."""
    cls = original_class(type(module))
    while "liger_base" in vars(cls):
        cls = cls.liger_base
    return bare, (cls,), {k: v for k, v in module.__dict__.items() if k != "liger_mode"}


def bare(cls: type) -> Any:
    return cls.__new__(cls)


def original_class(cls: type) -> type:
    return probe.original_class(cls)


_subclasses: dict[tuple, type] = {}


def become(module: nn.Module, kind: str, replacement: str, key: Any, members: Callable[[type], dict[str, Any]]) -> None:
    """Gives the module the subclass of its class that `members` describe: one for all modules with the same key."""
    cls = type(module)
    found = _subclasses.get((cls, kind, key))
    if found is None:
        names = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "liger_original": cls,
            "liger_row": (kind, replacement),
        }
        found = _subclasses[cls, kind, key] = type(cls.__name__, (Patched, cls), names | members(cls))
    module.__class__ = found
    if "_old_forward" in module.__dict__:  # accelerate moves inputs around the forward that it found
        module._old_forward = types.MethodType(found.forward, module)


def restore(module: nn.Module) -> bool:
    cls = type(module)
    if "liger_original" in cls.__dict__:
        module.__class__ = cls.liger_original
    elif issubclass(cls, Patched):  # someone subclassed the class again, as fully_shard does
        bases = tuple(b.liger_original if "liger_original" in b.__dict__ else b for b in cls.__bases__)
        members = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
        module.__class__ = type(cls.__name__, bases, members)
    else:
        return False
    module.__dict__.pop("liger_mode", None)
    if "_old_forward" in module.__dict__:
        module._old_forward = types.MethodType(type(module).forward, module)
    return True


def has_own_forward(module: nn.Module) -> bool:
    """Whether someone replaced this module's forward, other than accelerate, which calls the one that it found."""
    return "forward" in module.__dict__ and "_old_forward" not in module.__dict__


def by_any_name(function: Callable[[nn.Module, Tensor], Tensor]) -> Callable:
    """The function for classes that differ in what they call its tensor."""

    def forward(self: nn.Module, *args: Tensor, **named: Tensor) -> Tensor:
        return function(self, *args, *named.values())

    return forward


# ---- Norms


def patch_norm(module: nn.Module, switches: dict[str, bool]) -> str:
    norm = probe.identify_norm(module)
    if not switches[norm.op]:
        raise NotUnderstood(f"{norm.op} is switched off")

    def forward(self: nn.Module, x: Tensor) -> Tensor:
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

    members = {"forward": by_any_name(forward), "liger_norm": norm}
    for name in ("weight", "bias"):
        if not hasattr(module, name):
            members[name] = None
    become(module, "norm", norm.op, (norm, tuple(members)), lambda cls: members)
    return norm.op


# ---- MLPs


def switch_of(gate: str) -> str:
    return gate.split()[0]


def patch_mlp(module: nn.Module, switches: dict[str, bool]) -> str:
    mlp = probe.identify_mlp(module)
    gate = switch_of(mlp.gate)
    if not switches[gate]:
        raise NotUnderstood(f"{gate} is switched off")
    become(module, "mlp", gate, mlp, lambda cls: {"forward": by_any_name(probe.mlp_forward(mlp))})
    return gate


def patch_experts(module: nn.Module, switches: dict[str, bool]) -> str:
    gate = probe.identify_experts(module)
    if not switches[switch_of(gate)]:
        raise NotUnderstood(f"{switch_of(gate)} is switched off")
    packed = probe.PACKED[gate]
    become(module, "experts", switch_of(gate), gate, lambda cls: {"_apply_gate": lambda self, gate_up: packed(gate_up)})
    return switch_of(gate)


# ---- Rotary position embedding


def inner_function(function: Any) -> Any:
    """What decorators wrap."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def calls(wrapper: Any, function: types.FunctionType) -> bool:
    """Whether this is the function, as decorators and methods have it."""
    return getattr(inner_function(wrapper), "__func__", inner_function(wrapper)) is function


def methods_of(cls: type) -> Iterator[tuple[str, Any]]:
    seen = set()
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
    """Methods that rotate, and the functions of their module that they do it with."""
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


def rebound(function: Any, replaced: dict[str, Callable], code: types.CodeType | None = None) -> Any:
    """A copy of a function, and of the decorators around it, that sees `replaced` among its globals; of other code, if any
    is given.

    The copy's globals hold only what its code names and not the module's __name__, by which torch.compile would look
    them up in the module instead.
    """
    cells = function.__closure__
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        inner, code = rebound(wrapped, replaced, code), function.__code__
        cells = tuple(types.CellType(inner) if cell.cell_contents is wrapped else cell for cell in cells or ())
        scope = function.__globals__
    else:
        known, code = function.__globals__, code or function.__code__
        scope = {n: known[n] for n in names_in(code) if n in known} | replaced | {"__builtins__": builtins}
    copy = types.FunctionType(code, scope, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    if wrapped is None:
        del copy.__wrapped__
    else:
        copy.__wrapped__ = inner
    return copy


def copied(function: Any) -> tuple:
    """What a rebound function is a copy of: another may stand in its place by the time of the next model."""
    inner = inner_function(function)
    known = inner.__globals__
    return function, *(id(known[name]) for name in sorted(names_in(inner.__code__)) if name in known)


def names_in(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names


def patch_rotary(module: nn.Module, switches: dict[str, bool]) -> str:
    if not switches["rope"]:
        raise NotUnderstood("rope is switched off")
    methods = rotary_methods(type(module))
    choices = {f: rotary_replacement(f) for used in methods.values() for f in used.values()}
    if all(isinstance(choice, str) for choice in choices.values()):
        raise NotUnderstood("; ".join(dict.fromkeys(choices.values())))

    def members(cls: type) -> dict[str, Any]:
        bound = {}
        for method, used in methods.items():
            replaced = {n: choices[f] for n, f in used.items() if not isinstance(choices[f], str)}
            function = getattr(cls, method)
            code = rewrite.with_shared_projections(inner_function(function), linears)
            bound[method] = rebound(function, replaced | rewrite.HELPERS, code)
        return bound

    linears = rewrite.projections_of(module)
    key = linears, tuple(copied(getattr(type(module), method)) for method in methods)
    become(module, "rope", "rope", key, members)
    return "rope"


# ---- Embeddings


def is_embedding(module: nn.Module) -> bool:
    return original_class(type(module)).forward is nn.Embedding.forward


FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def embedding_forward(self: nn.Embedding, input: Tensor) -> Tensor:
    # A distributed or quantised weight is of another class.
    understood = type(self.weight) in (nn.Parameter, Tensor) and self.weight.dtype in FLOATS
    if understood and not embedding_stays_torchs():
        return F.embedding(input, self.weight, self.padding_idx)
    return original_class(type(self)).forward(self, input)


def patch_embedding(module: nn.Embedding, switches: dict[str, bool]) -> str:
    if not switches["embedding"]:
        raise NotUnderstood("embedding is switched off")
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise NotUnderstood("it has max_norm, scale_grad_by_freq or sparse gradients")
    become(module, "embedding", "embedding", None, lambda cls: {"forward": embedding_forward})
    return "embedding"


# ---- Layers


def is_rms_norm(module: nn.Module) -> bool:
    try:
        return probe.identify_norm(module).op == "rms_norm"
    except NotUnderstood:
        return False


def adds_before_norms(module: nn.Module) -> bool:
    # The source first: to find out what norms compute takes longer.
    norms = frozenset(name for name, child in module.named_children() if looks_like_norm(child))
    forward = inner_function(original_class(type(module)).forward)
    if not norms or rewrite.with_fused_sums(forward, norms) is None:
        return False
    return rewrite.with_fused_sums(forward, rms_norms_of(module)) is not None


def rms_norms_of(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, child in module.named_children() if looks_like_norm(child) and is_rms_norm(child))


def patch_layer(module: nn.Module, switches: dict[str, bool]) -> str:
    if not switches["rms_norm"]:
        raise NotUnderstood("rms_norm is switched off")
    norms = rms_norms_of(module)

    def members(cls: type) -> dict[str, Any]:
        code = rewrite.with_fused_sums(inner_function(cls.forward), norms)
        return {"forward": rebound(cls.forward, rewrite.HELPERS, code)}

    become(module, "layer", "fused_add_rms_norm", (norms, copied(type(module).forward)), members)
    return "fused_add_rms_norm"


# ---- The head and the loss


def head_of(model: nn.Module) -> nn.Module | None:
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


# Whose hooks gather and free the head's weights, whatever goes in and comes out.
GATHERING = ("torch.distributed.fsdp", "deepspeed.runtime.zero")


def watched(head: nn.Module) -> bool:
    """Whether hooks expect logits of the head, or a tensor alone for its input."""
    hooks = itertools.chain.from_iterable(found.values() for found in hooks_of(head))
    return any(not getattr(inner_function(h), "__module__", "").startswith(GATHERING) for h in hooks)


class Mode(NamedTuple):
    """What the head does in a call of its model with labels."""

    fuses: bool  # puts logits off
    keeps: bool  # or else hands on those that are there, to another loss
    thread: int = 0  # whose call that is

    def operator(self, head: nn.Module) -> str:
        """Which one the losses of such calls come from."""
        # Who replaced the head's forward, as tensor parallelism does, gets its logits.
        if self.fuses and not has_own_forward(head):
            return "fused_linear_cross_entropy"
        if not self.keeps:
            raise NotUnderstood("its head's forward was replaced")
        return "cross_entropy"

    def is_mine(self) -> bool:
        # What is compiled neither asks for threads nor runs in two.
        return torch.compiler.is_compiling() or self.thread in (0, threading.get_ident())


def may_defer(head: nn.Module) -> bool:
    """Whether the head may be called for a loss in place of logits."""
    # A weight that is distributed in other ways than FSDP's, or quantised, is of another class.
    whole = type(head.weight) in (nn.Parameter, Tensor) or is_fully_sharded(head)
    return whole and not has_own_forward(head) and not watched(head)


def head_call(self: nn.Linear, input: Tensor) -> Any:
    """Puts the logits off ahead of all hooks: these run once, around what is computed in the end. FSDP frees the
    weights after one call, and two would be two gathers."""
    mode = self.liger_mode
    if mode is None or not mode.is_mine():
        return called(self, input)
    if mode.fuses and may_defer(self):
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        return DeferredLogits(self, input, dtype)
    logits = called(self, input)
    return DeferredLogits(None, logits, logits.dtype) if mode.keeps and type(logits) is Tensor else logits


def head_forward(self: nn.Linear, input: Tensor, liger_call: LossCall | None = None) -> Tensor:
    if liger_call is None:
        return nn.functional.linear(input, self.weight, self.bias)
    return liger_call.run(input, self.weight, self.bias, self.liger_memory_budget)


def patch_loss(model: nn.Module, switches: dict[str, bool], memory_budget: int | None) -> str:
    if not switches["fused_linear_cross_entropy"] and not switches["cross_entropy"]:
        raise NotUnderstood("both losses are switched off")
    original = original_class(type(model)).forward
    parameters = list(inspect.signature(original).parameters)
    if "labels" not in parameters:
        raise NotUnderstood("its forward takes no labels")
    take_head(model, memory_budget)
    mode = Mode(switches["fused_linear_cross_entropy"], switches["cross_entropy"])
    op = mode.operator(head_of(model))
    has_loss = mode.fuses and isinstance(getattr(type(model), "loss_function", None), property)
    loss = model.loss_function if has_loss else None

    def members(cls: type) -> dict[str, Any]:
        forward = model_forward(cls, parameters.index("labels") - 1, mode, memory_budget)
        found = {"forward": forward, "liger_mode": mode}
        return found | {"loss_function": loss_property(cls.loss_function, loss)} if loss else found

    become(model, "loss", op, (original, op, mode, memory_budget, loss), members)
    return op


def loss_property(original: property, loss: Callable) -> property:
    """The model's loss function, which torch.compile leaves to Python where it ends in the call of a sharded head.

    FSDP's hooks break graphs. Here they would break each function between the model's forward and the head.
    """
    uncompiled = torch.compiler.disable(loss)

    def loss_function(self: nn.Module) -> Callable:
        found = original.fget(self)
        head = head_of(self) if found is loss and torch.compiler.is_compiling() else None
        return uncompiled if head is not None and is_fully_sharded(head) else found

    return property(loss_function, original.fset)


def take_head(model: nn.Module, memory_budget: int | None) -> None:
    """Patches the model's head, unless it is."""
    head = head_of(model)
    if head is None:
        raise NotUnderstood("has no output embedding")
    if isinstance(head, Patched):
        return
    if type(head) is not nn.Linear and not (is_fully_sharded(head) and nn.Linear in type(head).__bases__):
        wrapped = "wrapped " if type(head).__name__ == "Linear" else ""
        raise NotUnderstood(f"its head is a {wrapped}{type(head).__name__}")
    members = {"__call__": head_call, "forward": head_forward, "liger_memory_budget": memory_budget}
    become(head, "head", "", memory_budget, lambda cls: members)
    # On the instance from the start: torch.compile guards on where it lies.
    head.liger_mode = None


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether fully_shard manages the module, to which it gives a subclass of its class."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


def is_new(head: nn.Module | None) -> bool:
    return type(head) is nn.Linear and not has_own_forward(head)


def model_forward(cls: type, labels_at: int, mode: Mode, memory_budget: int | None) -> Callable:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        labels = kwargs.get("labels", args[labels_at] if len(args) > labels_at else None)
        head = head_of(self)
        # resize_token_embeddings puts in another. Who wrapped this forward still calls it once the model is unpatched.
        if is_new(head) and isinstance(self, Patched) and not torch.compiler.is_compiling():
            take_head(self, memory_budget)
        if labels is None or not isinstance(head, Patched) or head.liger_mode is not None:
            return cls.forward(self, *args, **kwargs)
        skip = self.training if skip_logits is None else skip_logits
        thread = 0 if torch.compiler.is_compiling() else threading.get_ident()
        head.liger_mode = Mode(skip and mode.fuses, mode.keeps, thread)
        try:
            out = cls.forward(self, *args, **kwargs)
        finally:
            head.liger_mode = None
        return finished(out)

    # Who unwraps functions stops here.
    del forward.__wrapped__
    forward.__signature__ = inspect.signature(cls.forward)
    return forward


def finished(out: Any) -> Any:
    """A model's output with logits, or without those that were never made."""
    if isinstance(out, tuple) and not hasattr(out, "_fields"):
        out = tuple(item for item in out if not never_made(item))
    return settled(out)


def never_made(item: Any) -> bool:
    return isinstance(item, DeferredLogits) and item.head is not None and not item.is_made()


def settled(item: Any) -> Any:
    """The same with what deferred logits have become, or None, in their place."""
    if isinstance(item, DeferredLogits):
        return None if never_made(item) else item.logits()
    if not any(map(holds_deferred, parts(item))):
        return item
    if isinstance(item, Mapping):
        values = {key: settled(value) for key, value in item.items()}
        if dataclasses.is_dataclass(item):
            return type(item)(**values)
        out = copy.copy(item)
        out.update(values)
        return out
    if isinstance(item, (tuple, list)):
        values = map(settled, item)
        return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
    return dataclasses.replace(item, **{name: settled(value) for name, value in fields_of(item).items()})


def holds_deferred(item: Any) -> bool:
    return isinstance(item, DeferredLogits) or any(map(holds_deferred, parts(item)))


def parts(item: Any) -> Iterable[Any]:
    if isinstance(item, Mapping):
        return item.values()
    return item if isinstance(item, (tuple, list)) else fields_of(item).values()


def fields_of(item: Any) -> dict[str, Any]:
    """What a dataclass is made from."""
    if not dataclasses.is_dataclass(item) or isinstance(item, type):
        return {}
    return {field.name: getattr(item, field.name) for field in dataclasses.fields(item) if field.init}


# ---- A model


def looks_like_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not isinstance(module, nn.modules.batchnorm._NormBase)


def looks_like_mlp(module: nn.Module) -> bool:
    linears = sum(probe.is_linear(child) for child in module.children())
    name = type(module).__name__.lower()
    return linears in (2, 3) and any(word in name for word in ("mlp", "feedforward", "ffn", "expert"))


def kind_of(module: nn.Module) -> tuple[str, Callable[[nn.Module, dict], str]] | None:
    if rotary_methods(type(module)):
        return "rope", patch_rotary
    if is_embedding(module):
        return "embedding", patch_embedding
    if looks_like_norm(module):
        return "norm", patch_norm
    if hasattr(type(module), "_apply_gate") and getattr(module, "has_gate", True):
        return "experts", patch_experts
    if looks_like_mlp(module):
        return "mlp", patch_mlp
    if adds_before_norms(module):
        return "layer", patch_layer
    return None


def patch_module(path: str, module: nn.Module, switches: dict[str, bool]) -> Row | None:
    if isinstance(module, Patched):
        kind, replacement = type(module).liger_row
        return Row(path, type(module).__name__, kind, replacement, "") if replacement and kind != "loss" else None
    found = kind_of(module)
    if found is None:
        return None
    kind, patch = found
    try:
        if has_own_forward(module):
            raise NotUnderstood("its forward was replaced")
        return Row(path, type(module).__name__, kind, patch(module, switches), "")
    except NotUnderstood as reason:
        return Row(path, type(module).__name__, kind, "", str(reason))


def patch_head(model: nn.Module, switches: dict[str, bool], memory_budget: int | None) -> Row:
    try:
        if has_own_forward(model) and not (isinstance(model, Patched) and calls(model.forward, type(model).forward)):
            raise NotUnderstood("its forward was replaced")
        if isinstance(model, Patched):
            take_head(model, memory_budget)
            return Row("", type(model).__name__, "loss", type(model).liger_mode.operator(head_of(model)), "")
        return Row("", type(model).__name__, "loss", patch_loss(model, switches, memory_budget), "")
    except NotUnderstood as reason:
        return Row("", type(model).__name__, "loss", "", str(reason))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DistributedDataParallel or peft."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def all_switches(given: dict[str, bool]) -> dict[str, bool]:
    unknown = given.keys() - set(SWITCHES)
    if unknown:
        names = ", ".join(sorted(unknown))
        raise TypeError(f"apply_liger_kernel: switches must be of {', '.join(SWITCHES)} (got {names})")
    return {name: bool(given.get(name, True)) for name in SWITCHES}


def apply_liger_kernel(
    model_or_class: nn.Module | type[nn.Module], *, memory_budget: int | None = None, **switches: bool
) -> Report | type[nn.Module]:
    """Puts the operators into a model and reports which module got which, and why others did not.

    Any causal language model of transformers will do, and modules of other origin as far as they are understood. Only
    this instance changes; :func:`unpatch` undoes it; a second call finds nothing left to do. Given a class, returns a
    subclass whose instances are patched when they are made.

    switches: rope, rms_norm, layer_norm, swiglu, geglu, embedding, cross_entropy, fused_linear_cross_entropy, all on by
    default.
    memory_budget: bytes that the fused loss may take for pieces of the logits.

    In training with labels the model returns no logits, unless its forward is called with ``skip_logits=False``.
    """
    chosen = all_switches(switches)
    if isinstance(model_or_class, type):
        return patching_class(model_or_class, memory_budget, chosen)
    model = unwrapped(model_or_class)
    embeddings, others = [], []
    for path, module in model.named_modules():
        (embeddings if is_embedding(module) else others).append((path, module))
    rows = [row for path, module in others if (row := patch_module(path, module, chosen))]
    head = patch_head(model, chosen, memory_budget)
    if head.replacement or any(row.replacement for row in rows):
        # They alone would be no reason to call a model understood.
        rows = [row for path, module in embeddings if (row := patch_module(path, module, chosen))] + rows
    rows.append(head)
    report = Report(getattr(getattr(model, "config", None), "model_type", type(model).__name__), rows)
    if not report.replaced and any(chosen.values()):
        name = type(model).__name__
        warnings.warn(f"liger_ops: {name} is left as it is: {rows[-1].reason}", RuntimeWarning, stacklevel=2)
    return report


def patching_class(cls: type[nn.Module], memory_budget: int | None, switches: dict[str, bool]) -> type[nn.Module]:
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        apply_liger_kernel(self, memory_budget=memory_budget, **switches)

    members = {
        "__init__": functools.wraps(cls.__init__)(__init__),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": reduced,
        "__deepcopy__": Patched.__deepcopy__,
        "liger_base": cls,
    }
    return type(cls.__name__, (cls,), members)


def unpatch(model: nn.Module) -> int:
    """Gives every module of the model its own class back. Returns how many had another."""
    return sum(restore(module) for module in unwrapped(model).modules())
