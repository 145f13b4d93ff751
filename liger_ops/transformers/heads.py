"""The head of a language model and its loss, which in training is computed without the logits."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..linear.adapters import low_rank_input
from ..linear.layers import autocast_dtype, has_hooks, hooks_of
from ..linear.peft import Adapted, has_adapters, is_lora, read
from .deferred import (
    REPLICATE,
    DeferredLogits,
    LossCall,
    call_head,
    lacks_classes,
    require_all_classes,
    without_deferred,
)
from .modules import lora_forward
from .patched import (
    NotUnderstood,
    Options,
    Patched,
    Switches,
    give_subclass,
    has_replaced_forward,
    inner_function,
    is_fully_sharded,
    is_plain_linear,
    is_wrapper_of,
    original_class,
    restore,
)
from .probe import UNLESS_GATHERED, identify_lora


def output_embedding(model: Any) -> Any:
    """The model's output embedding, perhaps in a wrapper, or None."""
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


# peft's layer of trainable tokens, whose weight is that of its base with some rows of its own.
TOKEN_LAYER = ("peft.tuners.trainable_tokens.layer", "TrainableTokensLayer")


def is_token_layer(module: Any) -> bool:
    cls = original_class(type(module))
    return (cls.__module__, cls.__name__) == TOKEN_LAYER


def head_of(model: Any) -> Any:
    """What computes the model's logits now, or None: in peft's wrappers the copy that is trained (modules_to_save), or the layer
    of trainable tokens."""
    head = output_embedding(model)
    if type(head).__module__ != "peft.utils.other" or has_hooks(head) or has_replaced_forward(head):
        return head
    if type(head).__name__ == "TrainableTokensWrapper":
        return head.token_adapter
    if type(head).__name__ != "ModulesToSaveWrapper":
        return head
    active = [name for name in head.active_adapters if name in head.modules_to_save]
    return head.original_module if head.disable_adapters or not active else head.modules_to_save[active[0]]


# Modules whose hooks only gather and free weights, whatever the head's arguments and results are.
GATHERING_HOOKS = ("torch.distributed.fsdp", "deepspeed.runtime.zero")
# Of distribute_module, which parallelize_module calls.
DISTRIBUTING_HOOKS = "torch.distributed.tensor"


def has_other_hooks(head: nn.Module) -> bool:
    """Whether the head has hooks that expect a single tensor as its input and logits as its output."""
    hooks = itertools.chain.from_iterable(found.values() for found in hooks_of(head))
    known = (*GATHERING_HOOKS, DISTRIBUTING_HOOKS) if column_parallel(head) else GATHERING_HOOKS
    return any(not getattr(inner_function(h), "__module__", "").startswith(known) for h in hooks)


class ColumnParallel(NamedTuple):
    """How ColwiseParallel, a style of parallelize_module, distributes the head."""

    mesh: Any
    input: Callable[[nn.Module, tuple[Tensor], Any], Tensor]  # gives the head complete hidden states, as a DTensor
    output: tuple[Any, ...]  # placements of the logits


def column_parallel(head: nn.Module) -> ColumnParallel | None:
    # Dynamo cannot read the closures of hooks.
    if torch.compiler.is_compiling() or not getattr(head, "_distribute_module_applied", False):
        return None
    from torch.distributed.tensor.parallel import ColwiseParallel

    found: dict[str, Any] = {}
    for hook in (*head._forward_pre_hooks.values(), *head._forward_hooks.values()):
        if getattr(hook, "__module__", "").startswith(DISTRIBUTING_HOOKS):
            found |= inspect.getclosurevars(hook).nonlocals
    given = found.get("input_fn")
    if getattr(given, "func", None) is not ColwiseParallel._prepare_input_fn:
        return None
    return ColumnParallel(found["device_mesh"], found["input_fn"], found["output_fn"].args[0])


class HeadMode(NamedTuple):
    """What the head returns while its model is called with labels."""

    defers: bool  # deferred logits, for fused_linear_cross_entropy
    wraps: bool  # otherwise: computed logits in DeferredLogits, for cross_entropy
    thread: int = 0  # the thread that calls the model

    def operator(self, head: nn.Module) -> str:
        """The operator that computes the loss."""
        reason = why_logits(head)
        if self.defers and not reason:
            mesh = class_mesh(head)
            over = f", vocab-parallel over {(mesh.mesh_dim_names or ('0',))[0]}" if mesh is not None else ""
            return "fused_linear_cross_entropy" + over
        if not self.wraps:
            raise NotUnderstood(reason)
        return "cross_entropy"

    def is_of_this_thread(self) -> bool:
        # Dynamo cannot trace get_ident.
        return torch.compiler.is_compiling() or self.thread in (0, threading.get_ident())


def why_logits(head: Any) -> str:
    """Why the head must compute its logits, as far as it tells without an input, or ""."""
    hooked = "its head has hooks" if has_other_hooks(head) else ""
    if class_mesh(head) is not None and not has_adapters(head):
        return hooked
    # An unknown forward must be called.
    if has_replaced_forward(head):
        return "its head's forward was replaced"
    if hooked or has_adapters(head) or is_fully_sharded(head):
        return hooked
    if is_token_layer(head):
        base = head.base_layer
        plain = type(base) is nn.Linear and not has_hooks(base) and not has_replaced_forward(base)
        if not plain:
            return f"its head's base is a {type(base).__name__} or hooked"
    # Quantised weights, and weights that something other than FSDP distributes, have other classes.
    cls = type(head.weight)
    return "" if cls in (nn.Parameter, Tensor) else f"its head's weight is {cls.__name__}"


def may_defer(head: Any, input: Tensor) -> bool:
    """Whether the head may compute a loss in place of logits."""
    if why_logits(head):
        return False
    # The own call of a sharded head gathers its weights, and then decides.
    return not has_adapters(head) or is_fully_sharded(head) or adapted_head(head, input) is not None


def class_mesh(head: nn.Module) -> Any:
    """The one-dimensional mesh over which tensor parallelism splits the head's classes, or None. If the head takes
    complete hidden states, its loss needs no complete logits."""
    column = column_parallel(head)
    if column is not None:
        # Under FSDP the loss passes through the hook that distributes the logits.
        return column.mesh if all(p.is_replicate() for p in column.output) or not is_fully_sharded(head) else None
    forward: Any = vars(head).get("forward")
    if getattr(forward, "__module__", "") != "transformers.distributed.tensor_parallel" or is_fully_sharded(head):
        return None
    layer = inspect.getclosurevars(forward).nonlocals.get("self")
    placements = getattr(head.weight, "placements", ())
    quantised = getattr(head, "_hf_quantized_needs_local_tp", False)
    whole_input = layer is not None and layer.input_layouts.is_replicate()
    splits = whole_input and not quantised and [p.is_shard(0) for p in placements] == [True]
    return head.weight.device_mesh if splits else None  # type: ignore[union-attr]


def adapted_head(head: Any, x: Tensor) -> Adapted | None:
    """The weights of a head with adapters, as it computes now, or None if the loss needs its logits."""
    states = read((head,), x)
    return states[0] if states is not None and isinstance(states[0].weight, Tensor) else None


def deferring_call(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Defers the logits before any hook runs, so that hooks run once, around the computation of the loss or the logits.

    FSDP gathers the weights before each call and frees them after it, so a second call would gather them again.
    """
    mode = self.liger_mode
    if mode is None or args or kwargs or not mode.is_of_this_thread():
        out = nn.Module.__call__(self, input, *args, **kwargs)
        if not kwargs and not torch.compiler.is_compiling() and lacks_classes(self, out):
            some = f"the head returns {out.shape[-1]} of {self.out_features} logits, those of its rank"
            warnings.warn(f"liger_ops: {some}; {REPLICATE}", RuntimeWarning, stacklevel=2)
        return out
    if mode.defers and may_defer(self, input):
        column = column_parallel(self)
        hidden = input if column is None else column.input(self, (input,), column.mesh)
        return DeferredLogits(self, hidden, autocast_dtype(input) or input.dtype)
    logits = call_head(self, input)
    require_all_classes(self, logits)
    return DeferredLogits(None, logits, logits.dtype) if mode.wraps and type(logits) is Tensor else logits


def head_forward(self: Any, input: Tensor, liger_call: LossCall | None = None) -> Tensor:
    if liger_call is None:
        return nn.functional.linear(input, self.weight, self.bias)
    return liger_call.run(input, self.weight, self.bias, self.liger_memory_budget)


def adapted_head_forward(self: Any, x: Tensor, *args: Any, liger_call: LossCall | None = None, **kwargs: Any) -> Tensor:
    if liger_call is None:
        return lora_forward(self, x, *args, **kwargs)
    state = adapted_head(self, x)
    if state is None:
        return liger_call.run_on_logits(lora_forward(self, x))
    weight, bias, a, b, scale, dropout = state
    x = x.to(weight.dtype)
    addend = (low_rank_input(x, a, scale, dropout), b[0] if len(b) == 1 else torch.cat(b, 1)) if a else ()
    return liger_call.run(x, weight, bias, self.liger_memory_budget, *addend)  # type: ignore[arg-type]


def token_head_forward(self: Any, x: Tensor, *args: Any, liger_call: LossCall | None = None, **kwargs: Any) -> Tensor:
    if liger_call is None:
        return original_class(type(self)).forward(self, x, *args, **kwargs)
    base, adapters = self.base_layer, self.active_adapters
    if self.disable_adapters or not adapters or self.merged:
        if self.merged and (self.disable_adapters or not adapters):
            self.unmerge()
        return liger_call.run(x, base.weight, base.bias, self.liger_memory_budget)
    self._check_overlapping_tokens(adapters)
    # peft adds no bias to these logits.
    return liger_call.run(x, self.get_merged_weights(adapters), None, self.liger_memory_budget)


def patch_model(model: Any, options: Options) -> str:
    """Patches the model's head and its forward. Returns the operator that computes the loss."""
    patched = isinstance(model, Patched) and type(model).liger_row[0] == "loss"
    if has_replaced_forward(model) and not (patched and is_wrapper_of(model.forward, type(model).forward)):
        raise NotUnderstood("its forward was replaced")
    if not patched:
        return patch_loss(model, options.switches, options.memory_budget)
    prepare_head(model, options.memory_budget, options.switches["lora"])
    return loss_operator(model)


def patch_loss(model: nn.Module, switches: Switches, memory_budget: int | None) -> str:
    if not switches["fused_linear_cross_entropy"] and not switches["cross_entropy"]:
        raise NotUnderstood("both losses are switched off")
    original = original_class(type(model)).forward
    parameters = list(inspect.signature(original).parameters)
    if "labels" not in parameters:
        raise NotUnderstood("its forward takes no labels")
    lora = switches["lora"]
    prepare_head(model, memory_budget, lora)
    mode = HeadMode(switches["fused_linear_cross_entropy"], switches["cross_entropy"])
    op = mode.operator(head_of(model))
    has_loss = mode.defers and isinstance(getattr(type(model), "loss_function", None), property)
    loss: Any = model.loss_function if has_loss else None

    def members(cls: Any) -> dict[str, Any]:
        forward = model_forward(cls, parameters.index("labels") - 1, mode, memory_budget, lora)
        found: dict[str, Any] = {"forward": forward, "liger_mode": mode, "liger_reason": property(reason_of_loss)}
        return found | {"loss_function": loss_property(cls.loss_function, loss)} if loss else found

    give_subclass(model, "loss", op, (original, op, mode, memory_budget, lora, loss), members)
    return op


def reason_of_loss(model: Any) -> str:
    """Why the loss needs logits, although the operator for hidden states is switched on."""
    return why_logits(head_of(model)) if type(model).liger_mode.defers else ""


def loss_operator(model: Any) -> str:
    """The operator that computes the losses of a patched model."""
    return type(model).liger_mode.operator(head_of(model))


def loss_property(original: Any, loss: Callable) -> property:
    """The model's loss function, excluded from torch.compile if the head is sharded.

    FSDP's hooks break graphs. Otherwise they would break the graph of every function between the model's forward and
    the head.
    """
    uncompiled = torch.compiler.disable(loss)

    def loss_function(self: nn.Module) -> Callable:
        found = original.fget(self)
        head = head_of(self) if found is loss and torch.compiler.is_compiling() else None
        return uncompiled if head is not None and is_fully_sharded(head) else found

    return property(loss_function, original.fset)


def prepare_head(model: nn.Module, memory_budget: int | None, lora: bool) -> None:
    """Patches the model's head, unless it is patched already. lora: whether operators may compute adapters."""
    head = head_of(model)
    if head is None:
        raise NotUnderstood("has no output embedding")
    if is_patched_head(head):
        return
    if has_adapters(head):
        release_base(model)
        return prepare_adapted_head(head, memory_budget, lora)
    if is_token_layer(head):
        release_base(model)
        members = {"forward": token_head_forward, **members_of_head(memory_budget)}
        give_subclass(head, "head", "", ("tokens", memory_budget), lambda cls: members)
        head.liger_mode = None
        return
    if not is_plain_linear(head):
        wrapped = "wrapped " if type(head).__name__ == "Linear" else ""
        raise NotUnderstood(f"its head is a {wrapped}{type(head).__name__}")
    members = {"forward": head_forward, **members_of_head(memory_budget)}
    give_subclass(head, "head", "", memory_budget, lambda cls: members)
    # Always set it on the instance: torch.compile guards on where the attribute is found.
    head.liger_mode = None


def release_base(model: Any) -> None:
    """If peft has adapted a patched head, the layer that it wraps is no head any more."""
    head = head_of(model)
    if (has_adapters(head) or is_token_layer(head)) and is_patched_head(head.get_base_layer()):
        restore(head.get_base_layer())


def prepare_adapted_head(head: Any, memory_budget: int | None, lora: bool) -> None:
    try:
        reason = identify_lora(head, {"lora": lora})
    except NotUnderstood as error:
        reason = str(error)
    base = head.get_base_layer()
    # FSDP gathers weights. Tensor parallelism has hooks or replaces the forward.
    gathers = reason == UNLESS_GATHERED and not has_hooks(base) and not has_replaced_forward(base)
    if reason and not gathers:
        raise NotUnderstood(f"its head is left to peft: {reason}")
    options = head.__dict__.get("liger_options")
    # It was patched as a LoRA layer, and its row stays that of one.
    restore(head)
    members = {"forward": adapted_head_forward, "liger_reason": reason, **members_of_head(memory_budget)}
    give_subclass(head, "lora", "lora_linear", ("head", reason, memory_budget), lambda cls: members)
    head.liger_mode = None
    if options is not None:
        head.liger_options = options


def members_of_head(memory_budget: int | None) -> dict[str, Any]:
    return {"__call__": deferring_call, "liger_memory_budget": memory_budget, "liger_is_head": True}


def is_patched_head(module: Any) -> bool:
    return isinstance(module, Patched) and module.liger_is_head


def is_unpatched(head: Any, lora: bool) -> bool:
    if has_replaced_forward(head) or is_patched_head(head):
        return False
    return type(head) is nn.Linear or is_token_layer(head) or (lora and is_lora(head))


def model_forward(
    cls: type[nn.Module], labels_position: int, mode: HeadMode, memory_budget: int | None, lora: bool
) -> Callable:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        labels = kwargs.get("labels", args[labels_position] if len(args) > labels_position else None)
        head = head_of(self)
        # resize_token_embeddings installs a new head, and peft one with adapters. Wrappers may call this forward after the
        # model is unpatched.
        if isinstance(self, Patched) and not torch.compiler.is_compiling() and is_unpatched(head, lora):
            with contextlib.suppress(NotUnderstood):
                prepare_head(self, memory_budget, lora)
        if labels is None or not is_patched_head(head) or head.liger_mode is not None:
            return cls.forward(self, *args, **kwargs)
        skip = self.training if skip_logits is None else skip_logits
        thread = 0 if torch.compiler.is_compiling() else threading.get_ident()
        head.liger_mode = HeadMode(skip and mode.defers, mode.wraps, thread)
        try:
            out = cls.forward(self, *args, **kwargs)
        finally:
            head.liger_mode = None
        return without_deferred(out)

    # inspect.unwrap must not go past this function.
    vars(forward).pop("__wrapped__")
    vars(forward)["__signature__"] = inspect.signature(cls.forward)
    return forward
