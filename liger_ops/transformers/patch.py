"""Patches one model with the operators, and removes them again. See docs/rewriting.md.

Nothing outside the model changes: neither its classes, nor transformers, nor torch. Parameters, hooks, wrappers and
state_dict keys stay the same.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any, overload

from torch import nn

from .modules import Step, loss_step, plan, step_of
from .patched import (
    Options,
    Patched,
    Switches,
    deepcopy_as_patched,
    has_replaced_forward,
    parallelism_of,
    reduce_as_original,
    restore,
    saved_forwards,
)
from .probe import NotUnderstood
from .report import Report, Row

SWITCHES = (
    "rope", "rms_norm", "layer_norm", "swiglu", "geglu", "moe_experts", "embedding", "cross_entropy",
    "fused_linear_cross_entropy",
)  # fmt: skip


def unwrapped(model: Any) -> nn.Module:
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


# ---- Arguments


def what_to_pass(given: Any) -> str:
    """What the caller probably meant by an argument that is no model."""
    if isinstance(given, (str, os.PathLike)):
        return (
            f". Load the model first:\n    model = AutoModelForCausalLM.from_pretrained({os.fspath(given)!r})\n"
            "    apply_liger_kernel(model)"
        )
    if hasattr(given, "model_type"):
        return ". Build the model first:\n    model = AutoModelForCausalLM.from_config(config)\n    apply_liger_kernel(model)"
    if hasattr(given, "train"):
        return ". Pass the trainer's model before training starts:\n    apply_liger_kernel(trainer.model)"
    if isinstance(given, type) and given.__name__.startswith("AutoModel"):
        return ". Use liger_ops.transformers.AutoLigerKernelForCausalLM"
    return ""


def check_model(function: str, argument: str, given: Any) -> None:
    if isinstance(given, nn.Module) or (isinstance(given, type) and issubclass(given, nn.Module)):
        return
    name = repr(given) if given is None or isinstance(given, (str, os.PathLike)) else type(given).__name__
    if isinstance(given, type):
        name = f"the class {given.__name__}"
    raise TypeError(
        f"{function}: {argument} must be a torch.nn.Module or a class of them (got {name}){what_to_pass(given)}"
    )


def checked_options(function: str, memory_budget: int | None, switches: Switches) -> Options:
    """With a value for every switch."""
    unknown = switches.keys() - set(SWITCHES)
    if unknown:
        names = ", ".join(sorted(unknown))
        raise TypeError(f"{function}: switches must be of {', '.join(SWITCHES)} (got {names})")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{function}: {name} must be True or False (got {value!r})")
    rule = f"{function}: memory_budget must be a positive number of bytes or None (got {memory_budget!r})"
    if memory_budget is not None and (isinstance(memory_budget, bool) or not isinstance(memory_budget, int)):
        raise TypeError(rule)
    if memory_budget is not None and memory_budget <= 0:
        raise ValueError(rule)
    return Options({name: switches.get(name, True) for name in SWITCHES}, memory_budget)


# ---- Patching


@overload
def apply_liger_kernel(model_or_class: nn.Module, *, memory_budget: int | None = None, **switches: bool) -> Report: ...
@overload
def apply_liger_kernel(
    model_or_class: type[nn.Module], *, memory_budget: int | None = None, **switches: bool
) -> type[nn.Module]: ...
def apply_liger_kernel(
    model_or_class: nn.Module | type[nn.Module], *, memory_budget: int | None = None, **switches: bool
) -> Report | type[nn.Module]:
    """Replaces modules of a model by operators, and reports which were replaced and why others were not.

    Accepts any causal language model of transformers, and other modules whose computation is recognised. Only this
    instance changes. :func:`unpatch` undoes it, and a second call changes nothing. Given a class, returns a subclass
    that patches its instances on construction.

    switches: rope, rms_norm, layer_norm, swiglu, geglu, moe_experts, embedding, cross_entropy,
    fused_linear_cross_entropy. All are on by default.
    memory_budget: the number of bytes of logits that the fused loss may hold at a time.

    A patched model that is pickled, as torch.save does, is patched again when it is loaded.

    In training with labels the model returns no logits, unless its forward is called with ``skip_logits=False``.
    """
    check_model("apply_liger_kernel", "model_or_class", model_or_class)
    options = checked_options("apply_liger_kernel", memory_budget, switches)
    if isinstance(model_or_class, type):
        return patching_class(model_or_class, options)
    model = unwrapped(model_or_class)
    report = Report(
        getattr(getattr(model, "config", None), "model_type", type(model).__name__), run(plan(model), options)
    )
    for module in model.modules():
        keep_options(module, options)
    if not report.replaced and any(options.switches.values()):
        name = type(model).__name__
        warnings.warn(f"liger_ops: {name} is left as it is: {report.rows[-1].reason}", RuntimeWarning, stacklevel=2)
    return report


def run(steps: list[Step], options: Options) -> list[Row]:
    embeddings = [step for step in steps if step.kind == "embedding"]
    rows = [patch_module(step, options) for step in steps if step.kind != "embedding"]
    # Patch embeddings only in models in which something else was recognised.
    return [patch_module(step, options) for step in embeddings] + rows if any(row.replacement for row in rows) else rows


def patch_module(step: Step, options: Options) -> Row:
    path, module, kind, patch = step
    replacement = ""
    try:
        # The last step is for the whole model, which patch_model checks.
        if kind != "loss" and not isinstance(module, Patched) and has_replaced_forward(module):
            if not (kind == "experts" and saved_forwards(module)):
                raise NotUnderstood("its forward was replaced")
        replacement = patch(module, options) + (parallelism_of(module) if kind == "experts" else "")
        reason = getattr(module, "liger_reason", "")
    except NotUnderstood as error:
        reason = str(error)
    return Row(path, type(module).__name__, kind, replacement, reason)


def keep_options(module: nn.Module, options: Options) -> None:
    # The head is patched with its model.
    if isinstance(module, Patched) and type(module).liger_row[0] != "head":
        module.__dict__.setdefault("liger_options", options)


def patch_again(module: nn.Module, kind: str, options: Options) -> None:
    """Patches a module of this kind that comes from a pickle."""
    try:
        step = loss_step(module) if kind == "loss" else step_of("", module)
        reason = patch_module(step, options).reason if step is not None else "computes something else"
    except Exception as error:  # a module that is not complete yet: pickles may hold cycles of modules
        reason = f"{type(error).__name__}: {error}"
    keep_options(module, options)
    if not isinstance(module, Patched):
        name = type(module).__name__
        remedy = "call apply_liger_kernel(model) to patch it"
        warnings.warn(f"liger_ops: {name} is loaded unpatched: {reason}; {remedy}", RuntimeWarning, stacklevel=3)


def patching_class(cls: type[nn.Module], options: Options) -> type[nn.Module]:
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        apply_liger_kernel(self, memory_budget=options.memory_budget, **options.switches)

    members = {
        "__init__": functools.wraps(cls.__init__)(__init__),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": reduce_as_original,
        "__deepcopy__": deepcopy_as_patched,
        "liger_base": cls,
    }
    return type(cls.__name__, (cls,), members)


def unpatch(model: nn.Module) -> int:
    """Gives every module of the model its original class back. Returns the number of patched modules."""
    return sum(restore(module) for module in unwrapped(model).modules())
