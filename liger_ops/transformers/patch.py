"""Patches one model with the operators, and removes them again. See docs/rewriting.md.

`apply_liger_kernel` plans: it finds out what each module computes (probe.py). Then it patches module by module
(modules.py, and heads.py for the loss) and reports. Both halves for experts are in experts.py.

Nothing outside the model changes: neither its classes, nor transformers, nor torch. Parameters, hooks, wrappers and
state_dict keys stay the same.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, overload

from torch import nn

from ..linear.peft import has_adapters
from . import (
    activations,
    adapted_experts,
    convolutions,
    experts,
    gated_norms,
    hyper_connections,
    hyper_layers,
    linears,
    modules,
    packing,
    probe,
    routers,
)
from .coverage import Coverage, Row, coverage_of, others
from .heads import patch_model, release_base
from .options import (
    UNCHANGED,
    Unchanged,
    changes_options,
    checked_options,
    keep_options,
    options_in_force,
    with_options,
)
from .patched import (
    NotUnderstood,
    Options,
    Patched,
    Switches,
    deepcopy_as_patched,
    has_replaced_forward,
    parallelism_of,
    reduce_as_original,
    require_switch,
    restore,
    saved_forwards,
)

logger = logging.getLogger("liger_ops")


class Kind(NamedTuple):
    """A kind of modules that operators replace."""

    name: str
    recognises: Callable[[Any], Any]
    identify: Callable[[Any, Switches], Any]  # what a module computes, or raises NotUnderstood
    patch: Callable[[Any, Any], str]  # given that, patches the module and returns the operator


def with_switch(identify: Callable[[Any], Any], switch: Callable[[Any], str]) -> Callable[[Any, Switches], Any]:
    """Identifies a module whose operator is switched by `switch(what it computes)`."""

    def identified(module: nn.Module, switches: Switches) -> Any:
        found = identify(module)
        require_switch(switches, switch(found))
        return found

    return identified


def identify_mlp(module: nn.Module, switches: Switches) -> probe.MLP:
    mlp = with_switch(probe.identify_mlp, lambda mlp: mlp.switch)(module, switches)
    return dataclasses.replace(mlp, lora=switches["lora"])


# In the order in which they are tried.
KINDS = (
    Kind("rope", lambda module: probe.rotary_methods(type(module)), probe.identify_rotary_module, modules.patch_rotary),
    Kind("conv", convolutions.looks_convolving, convolutions.identify, convolutions.patch),
    Kind("packing", packing.runs_layers, packing.identify_model, packing.patch_model),
    Kind("embedding", probe.is_embedding, probe.identify_embedding, modules.patch_embedding),
    Kind("norm", gated_norms.looks_gated, gated_norms.identify, gated_norms.patch),
    Kind("norm", gated_norms.looks_grouped, gated_norms.identify, gated_norms.patch),
    Kind("norm", probe.looks_like_norm, with_switch(probe.identify_norm, lambda norm: norm.op), modules.patch_norm),
    Kind("activation", activations.looks_like_activation, activations.identify, activations.patch),
    Kind("router", routers.looks_like_router, routers.identify, routers.patch),
    Kind("connection", hyper_connections.looks_like_connection, hyper_connections.identify, hyper_connections.patch),
    Kind("experts", probe.looks_like_experts, experts.identify_operator, experts.patch_experts),
    Kind("mlp", probe.looks_like_mlp, identify_mlp, modules.patch_mlp),
    Kind("layer", probe.has_fusable_norms, with_switch(probe.rms_norms_of, lambda _: "rms_norm"), modules.patch_layer),
    Kind("layer", hyper_layers.adds_to_streams, hyper_layers.identify, hyper_layers.patch),
    Kind("gate", modules.has_gated_addition, modules.identify_gate, modules.patch_gate),
    Kind("lora", adapted_experts.wraps_parameter, adapted_experts.identify, adapted_experts.patch),
    Kind("lora", has_adapters, probe.identify_lora, modules.patch_lora),
)


class Step(NamedTuple):
    """What will be done with one module."""

    path: str
    module: nn.Module
    kind: str
    patch: Callable[[], str] | None  # returns the operator; None if the module is left alone
    reason: str = ""  # why it is left alone


# ---- The report


class Report:
    """The rows of one model. `print(report)` groups them by class, and ends with the share of the parameters that operators
    cover and the options in force."""

    def __init__(self, model_type: str, rows: Iterable[Row], coverage: Coverage | None, options: Options) -> None:
        self.model_type = model_type
        self.rows = list(rows)
        self.coverage = coverage  # None if it is not known, as under FSDP1
        self.options: dict[str, Any] = {
            "switched_off": [name for name, on in options.switches.items() if not on],
            "memory_budget": options.memory_budget,
            "fp8": options.fp8,
        }

    @property
    def replaced(self) -> list[Row]:
        return [row for row in self.rows if row.replacement]

    @property
    def left_alone(self) -> list[Row]:
        return [row for row in self.rows if not row.replacement]

    def as_dict(self) -> dict:
        return {
            "model_type": self.model_type,
            "rows": [row._asdict() for row in self.rows],
            "coverage": self.coverage and self.coverage._asdict(),
            "options": self.options,
        }

    def __str__(self) -> str:
        groups = Counter((row.kind, row.type, row.replacement, row.reason) for row in self.rows)
        lines = [("kind", "class", "modules", "operator", "reason")]
        lines += [(kind, cls, str(n), op or "left alone", reason) for (kind, cls, op, reason), n in groups.items()]
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        off = ", ".join(self.options["switched_off"])
        given = [
            f"{name}={self.options[name]!r}" for name in ("memory_budget", "fp8") if self.options[name] is not None
        ]
        last = [str(self.coverage)] * (self.coverage is not None) + [f"switched off: {off}"] * bool(off) + given
        return "\n".join([f"liger_ops on {self.model_type}", *table, *["; ".join(last)] * bool(last)])

    def __repr__(self) -> str:
        return f"<Report of {self.model_type}: {len(self.replaced)} replaced, {len(self.left_alone)} left alone>"


# ---- Arguments


# Their files are slow to import.
FSDP1 = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
PEFT_TUNER = ("peft.tuners.tuners_utils", "BaseTuner")  # PeftModel.base_model


def is_class(module: Any, name: tuple[str, str]) -> bool:
    return any((cls.__module__, cls.__name__) == name for cls in type(module).__mro__)


def unwrapped(model: Any) -> nn.Module:
    """The model inside torch.compile, DistributedDataParallel, FullyShardedDataParallel or peft."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or is_class(model, FSDP1):
            model = model.module
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif is_class(model, PEFT_TUNER):
            model = model.model
        else:
            return model


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


def check_model(function: str, argument: str, given: Any, classes: bool = True) -> None:
    """classes: whether a class will do, too."""
    if isinstance(given, nn.Module) or (classes and isinstance(given, type) and issubclass(given, nn.Module)):
        return
    name = repr(given) if given is None or isinstance(given, (str, os.PathLike)) else type(given).__name__
    if isinstance(given, type):
        name = f"the class {given.__name__}"
    allowed, advice = "a torch.nn.Module", ""
    if classes:
        allowed, advice = "a torch.nn.Module or a class of them", what_to_pass(given)
    raise TypeError(f"{function}: {argument} must be {allowed} (got {name}){advice}")


# ---- Patching


@overload
def apply_liger_kernel(
    model_or_class: nn.Module,
    *,
    memory_budget: int | None | Unchanged = UNCHANGED,
    fp8: str | None | Unchanged = UNCHANGED,
    fp8_filter: linears.Filter | None | Unchanged = UNCHANGED,
    **switches: bool,
) -> Report: ...
@overload
def apply_liger_kernel(
    model_or_class: type[nn.Module],
    *,
    memory_budget: int | None | Unchanged = UNCHANGED,
    fp8: str | None | Unchanged = UNCHANGED,
    fp8_filter: linears.Filter | None | Unchanged = UNCHANGED,
    **switches: bool,
) -> type[nn.Module]: ...
def apply_liger_kernel(
    model_or_class: nn.Module | type[nn.Module],
    *,
    memory_budget: int | None | Unchanged = UNCHANGED,
    fp8: str | None | Unchanged = UNCHANGED,
    fp8_filter: linears.Filter | None | Unchanged = UNCHANGED,
    **switches: bool,
) -> Report | type[nn.Module]:
    """Replaces modules of a model by operators, and reports which were replaced and why others were not.

    Accepts any causal language model of transformers, and other modules whose computation is recognised. Only this
    instance changes. :func:`unpatch` undoes it. A second call changes the options that it gives, and nothing else. Given
    a class, returns a subclass that patches its instances on construction.

    switches: rope, rms_norm, layer_norm, swiglu, geglu, xielu, sigmoid_gate, causal_conv1d, delta_gates, moe_router,
    moe_experts, hyper_pre, hyper_post, embedding, cross_entropy, fused_linear_cross_entropy, lora. All are on by default.
    memory_budget: the number of bytes of logits that the fused loss may hold at a time.
    fp8: a recipe of :func:`fp8_linear`, or torchao's name for it, with which linear layers compute while they train. The
    head, layers that choose experts, adapters of LoRA and those whose sizes are no multiples of 16 (with "blocks" of 128)
    stay as they are.
    fp8_filter: called with each of these layers and its name; those for which it returns False stay as they are, too.

    A patched model that is pickled, as torch.save does, is patched again when it is loaded.

    In training with labels the model returns no logits, unless its forward is called with ``skip_logits=False``.
    """
    check_model("apply_liger_kernel", "model_or_class", model_or_class)
    given = checked_options(
        "apply_liger_kernel", {"memory_budget": memory_budget, "fp8": fp8, "fp8_filter": fp8_filter, **switches}
    )
    if isinstance(model_or_class, type):
        return patching_class(model_or_class, given)
    model = unwrapped(model_or_class)
    release_base(model)
    options = with_options(options_in_force(model), given)
    if changes_options(model, given):
        require_own_forwards(model, given)
        unpatch(model)
    before = [type(module) for module in model.modules()]
    rows = patch_all(plan(model, options))
    rows[-1:-1] = others(model, rows)
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    report = Report(name, rows, coverage_of(model, rows), options)
    if report.replaced:
        keep_options(model, options)
    elif any(options.switches.values()) or options.fp8:
        name = type(model).__name__
        warnings.warn(f"liger_ops: {name} is left as it is: {rows[-1].reason}", RuntimeWarning, stacklevel=2)
    if before != [type(module) for module in model.modules()]:
        logger.info("%s", report)
    return report


def require_own_forwards(model: nn.Module, given: Mapping[str, Any]) -> None:
    """A wrapper that replaced a patched forward, as Accelerator.prepare does, would call that forward for ever. The head's
    reads its options from the head."""
    for path, module in model.named_modules():
        patched = isinstance(module, Patched) and not module.liger_is_head
        if patched and has_replaced_forward(module) and not saved_forwards(module):
            raise RuntimeError(
                f"apply_liger_kernel: {', '.join(given)} must be given before something wraps the model's forward (got a "
                f"patched {path or 'model'} whose forward was replaced). Unwrap it first, or unpatch it before it is wrapped"
            )


def step_of(path: str, module: nn.Module, switches: Switches) -> Step | None:
    """How to patch one module, or None if it is of no kind that an operator replaces."""
    if isinstance(module, Patched):
        name, operator = type(module).liger_row
        return Step(path, module, name, lambda: operator) if name not in ("head", "loss") else None
    kind = next((kind for kind in KINDS if kind.recognises(module)), None)
    if kind is None:
        return None
    try:
        if has_replaced_forward(module) and not (kind.name == "experts" and saved_forwards(module)):
            raise NotUnderstood("its forward was replaced")
        return Step(path, module, kind.name, functools.partial(kind.patch, module, kind.identify(module, switches)))
    except NotUnderstood as reason:
        return Step(path, module, kind.name, None, str(reason))


def loss_step(model: nn.Module, options: Options) -> Step:
    """The model's head and its forward, which are patched together."""
    return Step("", model, "loss", functools.partial(patch_model, model, options))


def linear_steps(model: nn.Module, options: Options) -> list[Step]:
    """Linear layers in FP8."""
    if options.fp8 is None:
        return []
    found = linears.chosen(model, options.fp8, options.fp8_filter)
    return [
        Step(path, module, "linear", None if why else functools.partial(linears.patch, module, options.fp8), why)
        for path, module, why in found
    ]


def plan(model: nn.Module, options: Options) -> list[Step]:
    """The steps that patch the model, from the outside to the inside; the loss is the last. Changes nothing."""
    with warnings.catch_warnings():
        # What torch says about inputs of probes is nothing that a user can change.
        warnings.simplefilter("ignore")
        steps = [step for path, module in model.named_modules() if (step := step_of(path, module, options.switches))]
    return [*steps, *linear_steps(model, options), loss_step(model, options)]


def patch_step(step: Step) -> Row:
    replacement, reason = "", step.reason
    if step.patch is not None:
        try:
            replacement = step.patch() + (parallelism_of(step.module) if step.kind == "experts" else "")
            reason = getattr(step.module, "liger_reason", "")
        except NotUnderstood as error:
            reason = str(error)
    return Row(step.path, type(step.module).__name__, step.kind, replacement, reason)


def patch_all(steps: list[Step]) -> list[Row]:
    rows = [patch_step(step) for step in steps if step.kind != "embedding"]
    # Patch embeddings only in models in which something else was recognised.
    embeddings = [step for step in steps if step.kind == "embedding"] if any(row.replacement for row in rows) else []
    return [patch_step(step) for step in embeddings] + rows


def patch_again(module: nn.Module, kind: str, options: Options) -> None:
    """Patches a module of this kind that comes from a pickle."""
    try:
        # The layer passed the filter.
        alone = options._replace(fp8_filter=None)
        steps = linear_steps(module, alone) if kind == "linear" else [step_of("", module, options.switches)]
        step = loss_step(module, options) if kind == "loss" else steps[0]
        reason = patch_step(step).reason if step is not None else "computes something else"
    except Exception as error:  # a module that is not complete yet: pickles may hold cycles of modules
        reason = probe.described(error)
    if isinstance(module, Patched):
        module.__dict__["liger_options"] = options
    else:
        name = type(module).__name__
        remedy = "call apply_liger_kernel(model) to patch it"
        warnings.warn(f"liger_ops: {name} is loaded unpatched: {reason}; {remedy}", RuntimeWarning, stacklevel=3)


def patching_class(cls: type[nn.Module], given: Mapping[str, Any]) -> type[nn.Module]:
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        apply_liger_kernel(self, **given)

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
    check_model("unpatch", "model", model, classes=False)
    count = 0
    for module in unwrapped(model).modules():
        count += restore(module)
        module.__dict__.pop("liger_options", None)
    return count
