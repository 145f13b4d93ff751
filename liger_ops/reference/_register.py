"""Registers the formulas as torch.ops.liger.*, for a torch that no operator library fits. Autograd, vmap and
torch.compile treat them like any other PyTorch code."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch

from ._operator import Operator, demand, demand_choice, operators
from .fused_linear_cross_entropy import plan

# Kept alive: a Library unregisters its operators when it is deleted.
library = torch.library.Library("liger", "FRAGMENT")

# No kernel is launched and none is counted.
STATUS: dict[str, Any] = {
    "kernels": {},
    "cpu_calls": 0,
    "devices": [],
    "pack_directory": "",
    "packs": [],
    "jit_enabled": True,
    "jit_compiler": "",
    "jit_cache": "",
}
PRIVATE: dict[str, Callable[..., Any]] = {
    "_status() -> str": lambda: json.dumps(STATUS),
    "_reset_counts() -> ()": lambda: None,
    "_preload(int device, str[] ops) -> (int, int)": lambda device, ops: (0, 0),
    "_fused_linear_cross_entropy_plan(int tokens, int hidden, int vocabulary, ScalarType dtype, int wanted, "
    "int? memory_budget) -> (int, int, int, int)": plan,
}


def checked(operator: Operator) -> Callable[..., Any]:
    """The formula, with checks of its arguments against the declaration."""
    name, parameters = operator.__name__, list(operator.__signature__.parameters)

    @functools.wraps(operator.reference)
    def formula(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(parameters, args)) | kwargs
        for argument, allowed in operator.choices.items():
            if argument in given:
                demand_choice(name, argument, allowed, given[argument])
        for argument in operator.constants:
            learned = given.get(argument) is not None and given[argument].requires_grad
            demand(not (learned and torch.is_grad_enabled()), name, argument, "not require a gradient", "one that does")
        return operator.reference(*args, **kwargs)

    return formula


def register() -> None:
    for name, operator in operators().items():
        library.define(operator.schema, tags=torch.Tag.pt2_compliant_tag)
        formula = checked(operator)
        library.impl(name, formula, "CompositeImplicitAutograd")
        # Without this, vmap would call the formula once per example.
        library.impl(name, formula, "FuncTorchBatchedDecomposition")
    for schema, function in PRIVATE.items():
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CompositeImplicitAutograd")
