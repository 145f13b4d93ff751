"""Batching rules for torch.func.vmap: a row-wise operator takes the batch as one more leading dimension.

Operators without a rule run once per example, and so do calls whose parameters are batched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from ..reference import operators


def in_front(t: Tensor, dim: int | None, size: int) -> Tensor:
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def is_batched(dim: Any) -> bool:
    return any(map(is_batched, dim)) if isinstance(dim, (list, tuple)) else dim is not None


def example(argument: Any, dim: Any, i: int) -> Any:
    """Number i of the batch."""
    if isinstance(dim, (list, tuple)):
        return [example(*pair, i) for pair in zip(argument, dim)]
    return argument if dim is None else argument.select(dim, i)


def rule(op: Callable, rows: int, out_dims: tuple[int, ...]) -> Callable:
    """out_dims: position of the batch dimension in each result; empty: it is the first of every result."""

    def batched(info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any) -> tuple[Any, Any]:
        size = info.batch_size
        tensors = [None if t is None else in_front(t, dim, size) for t, dim in zip(args[:rows], in_dims)]
        # A batch of scalars has no dimension for columns: the batch dimension would be taken for it.
        one_by_one = any(map(is_batched, in_dims[rows:])) or any(t is not None and t.dim() < 2 for t in tensors)
        if one_by_one:
            examples = [op(*(example(*pair, i) for pair in zip(args, in_dims)), **options) for i in range(size)]
            if isinstance(examples[0], Tensor):
                return torch.stack(examples), 0
            # Gradients that are not wanted are None.
            out = tuple(None if each[0] is None else torch.stack(each) for each in zip(*examples))
            return out, tuple(None if t is None else 0 for t in out)
        out = op(*tensors, *args[rows:], **options)
        if out_dims:
            return out, out_dims
        return out, 0 if isinstance(out, Tensor) else (0,) * len(out)

    return batched


def multiply(info: Any, in_dims: tuple[int | None, ...], a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    a, b = (t if dim is None else t.movedim(dim, 0) for t, dim in zip((a, b), in_dims))
    return a @ b, 0


def each_example(op: Any) -> Callable:
    """The kernel of an operator that runs once per example. torch.library.register_vmap takes no keyword-only tensors, and
    PyTorch's own loop takes no lists and asks for a rule in a warning."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        def call(*values: Any) -> Any:
            return op(*values[: len(args)], **dict(zip(kwargs, values[len(args) :])))

        interpreter: Any = retrieve_current_functorch_interpreter()
        return custom_function_call_vmap_helper(interpreter, rule(call, 0, ()), call, *args, *kwargs.values())

    return kernel


def register(library: torch.library.Library) -> None:
    def register_rule(name: str, rows: int, out_dims: tuple[int, ...]) -> None:
        op = getattr(torch.ops.liger, name, None)
        if op is None:
            raise RuntimeError(f"liger_ops: the operator library lacks {name}, which is declared: run `make build`")
        op = op.default
        torch.library.register_vmap(f"liger::{name}", rule(op, rows, out_dims), lib=library)

    for name, operator in operators().items():
        if operator.rows:
            register_rule(name, operator.rows, ())
        if operator.forward_out_dims:
            register_rule(f"_{name}_fwd", operator.rows, operator.forward_out_dims)
    torch.library.register_vmap("liger::_mm", multiply, lib=library)
    for name in sorted(n.removeprefix("liger::") for n in names_without_rule()):
        library.impl(name, each_example(getattr(torch.ops.liger, name).default), "FuncTorchBatched", with_keyset=True)


def names_without_rule() -> list[str]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("liger::")]
    ruled = ("FuncTorchBatched", "CompositeImplicitAutograd")
    rest = [name for name in names if not any(has_kernel(name, key) for key in ruled)]
    # vmap cannot write to tensors that are not batched.
    return [name for name in rest if not torch._C._get_schema(name, "").is_mutable]
