"""Functions and classes with the parameters of liger_kernel's names, which call functions of ours by keyword.

The parameters are rows of `signatures`. As `namedtuple` does, the builders write the code of a function and run it, so
that its signature, its errors, torch.compile and TorchScript work as for a function written by hand.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from . import signatures

# Parameters of liger_kernel's names: the parameter of ours that means the same, if ours has none of that name.
ALIASES = {
    "X": "x", "R": "residual", "W": "weight", "B": "bias", "a": "gate", "b": "up", "y": "gate_up",
    "embeddings": "weight", "indices": "input", "xq": "q", "xk": "k", "_input": "input", "lin_weight": "weight",
    "y_pred": "input", "y_true": "target", "log_q": "input", "log_p": "target", "p": "input", "q": "target",
    "jsd_beta": "beta", "dim": "hidden_size", "with_scale": "elementwise_affine",
    "eps_low": "epsilon_low", "eps_high": "epsilon_high", "input_": "x", "input": "x", "chunk_size": "rows", "V": "values",
    "V_stacked": "values", "affine_scaling_weight": "weight", "affine_shifting_bias": "bias",
}  # fmt: skip
# Parameters that control a kernel or a choice between kernels.
IGNORED = set(
    "BLOCK_SIZE accum_dtype backend ce_impl ce_mode chunk_mem_const chunk_size compiled compute_params impl in_place "
    "inplace jsd_impl jsd_mode m_tiles_per_cluster mode position_ids reduce row_mode size_average tiles_per_reduce "
    "unsqueeze_dim".split()
)


def signature_of(module: str, name: str) -> str:
    """The row of a name that the module defines."""
    stem = module.rpartition(".")[2].upper()
    return getattr(signatures, stem)[name] + (", impl=None, mode=None, backend=None" if stem == "FUNCTIONAL" else "")


def define(name: str, parameters: str, body: str, **scope: Any) -> Any:
    """A function with this code. `scope` holds the names that the body uses."""
    code, file = f"def {name}({parameters}):\n    {body}\n", f"<liger_ops.compat {name}({parameters})>"
    # Tracebacks and TorchScript read the code from here.
    linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
    scope["Tensor"] = Tensor
    exec(compile(code, file, "exec"), scope)
    return scope[name]


def names_of(parameters: str) -> dict[str, str]:
    """The names of the parameters, and the code of their values, which is the same."""
    return {name: name for name in inspect.signature(define("f", parameters, "pass")).parameters}


def call(target: Callable[..., Any], values: Mapping[str, str]) -> str:
    """The code of a call of `target`. values: the code of each argument, by the name that it has in liger_kernel."""
    taken = inspect.signature(target).parameters
    any_name = any(p.kind == p.VAR_KEYWORD for p in taken.values())
    arguments = []
    for name, value in values.items():
        ours = name if name in taken else ALIASES.get(name, name)
        if ours in taken or (any_name and name not in IGNORED):
            arguments.append(f"{ours}={value}")
        elif name not in IGNORED:
            raise TypeError(f"{target} has no parameter {name}")
    return f"operator({', '.join(arguments)})"


def caller(name: str, parameters: str, target: Callable[..., Any]) -> Any:
    made = define(name, parameters, f"return {call(target, names_of(parameters))}", operator=target)
    made.__doc__ = target.__doc__
    return made


def function(module: str, name: str, target: Callable[..., Any]) -> Any:
    """A function that calls the target."""
    made = caller(name, signature_of(module, name), target)
    made.__module__ = module
    return made


def autograd_function(module: str, name: str, target: Callable[..., Any]) -> Any:
    """A class whose `apply` calls the target."""
    apply = caller("apply", signature_of(module, name), target)
    apply.__module__, apply.__qualname__ = module, f"{name}.apply"
    return type(name, (), {"__module__": module, "__doc__": target.__doc__, "apply": staticmethod(apply)})


def layer(module: str, name: str, target: Callable[..., Any], check: Callable[[Any], None] = lambda layer: None) -> Any:
    """A module without parameters: its constructor stores its arguments as attributes and checks them, and `forward`
    passes them to the target with its own arguments."""
    options, tensors = (signature_of(module, row) for row in (name, f"{name}.forward"))
    stored = names_of(options)
    body = "; ".join(["initialize(self)", *(f"self.{option} = {option}" for option in stored), "check(self)"])
    values = names_of(tensors) | {option: f"self.{option}" for option in stored}
    return type(name, (nn.Module,), {
        "__module__": module,
        "__doc__": target.__doc__,
        "__init__": define("__init__", f"self, {options}", body, initialize=nn.Module.__init__, check=check),
        "forward": define("forward", f"self, {tensors}", f"return {call(target, values)}", operator=target),
    })  # fmt: skip
