"""Losses of DTensors: what each device computes on its parts, and how the results lie on the mesh.

Classes may be sharded over one mesh dimension, rows (tokens) over others. A loss whose classes are sharded takes the group
of its mesh dimension, and is the same on all of its devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NoReturn

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ._sharding import on_dtensors, text_of

R = Replicate()


def refuse(op: str, argument: str, rule: str, mesh: Any, dim: int, placement: Placement) -> NoReturn:
    over = repr(mesh.mesh_dim_names[dim]) if mesh.mesh_dim_names else str(dim)
    raise ValueError(f"{op}: {argument} must {rule} over mesh dimension {over} (got {text_of(placement)})")


def placements_of(t: Any, mesh: Any) -> tuple[Placement, ...]:
    """A plain tensor beside DTensors is replicated."""
    return t.placements if isinstance(t, DTensor) else (R,) * mesh.ndim


def part_of(op: str, name: str, t: Any, mesh: Any, placements: Sequence[Placement]) -> Any:
    """The local part of a tensor that must have these placements, or be replicated: then each device takes its part."""
    if t is None:
        return None
    for i, (given, wanted) in enumerate(zip(placements_of(t, mesh), placements)):
        if given not in (wanted, R):
            refuse(op, name, f"be {' or '.join(dict.fromkeys((text_of(wanted), text_of(R))))}", mesh, i, given)
    if isinstance(t, DTensor) and t.placements == tuple(placements):
        return t._local_tensor
    # Before torch 2.13, a result that requires a gradient cannot be detached without grad mode.
    t = t.detach()
    if not isinstance(t, DTensor):
        t = DTensor.from_local(t, mesh, (R,) * mesh.ndim, run_check=False)
    return t.redistribute(mesh, placements)._local_tensor


def spread(t: Tensor, mesh: Any, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(t, mesh, tuple(placements), run_check=False, shape=torch.Size(shape), stride=stride)


class Call:
    """The arguments of one call, and how its rows lie. A subclass finds this out, and which mesh dimension shards classes."""

    OF_ROWS: tuple[str, ...] = ("target", "token_weight", "mask")
    WHOLE: tuple[str, ...] = ("totals", "total")
    # Read where they lie: what the layout is that of, and what forward wrote.
    LOCAL: tuple[str, ...] = ("logits", "stats", "chosen", "of_log_probs", "of_entropy")

    def __init__(self, op: str, given: dict[str, Any]) -> None:
        if given.get("group"):
            raise ValueError(f"{op}: group must be '' for DTensors, which know their mesh (got '{given['group']}')")
        self.op, self.given = op, given
        self.mesh = next(t.device_mesh for t in given.values() if isinstance(t, DTensor))
        self.everywhere = (R,) * self.mesh.ndim

    def lay_out(self, rows: Sequence[Placement], shape: torch.Size, classes: int, split: int | None) -> None:
        self.rows, self.shape, self.classes, self.split = tuple(rows), shape, classes, split
        self.sharded = [i for i, p in enumerate(rows) if isinstance(p, Shard)]

    @property
    def reduced(self) -> bool:
        return self.given.get("reduction", "none") != "none"

    def part(self, name: str, placements: Sequence[Placement]) -> Any:
        return part_of(self.op, name, self.given[name], self.mesh, placements)

    def argument(self, name: str) -> Any:
        """What the operator is given on this device."""
        value = self.given[name]
        if name.startswith("grad"):
            return None if value is None else self.upstream(value)
        if name in self.OF_ROWS or name in self.WHOLE:
            return self.part(name, self.rows if name in self.OF_ROWS else self.everywhere)
        if isinstance(value, DTensor) and name not in self.LOCAL:
            raise ValueError(f"{self.op}: {name} must be a plain tensor (got a DTensor)")
        return value._local_tensor if isinstance(value, DTensor) else value

    def arguments(self) -> dict[str, Any]:
        # DTensor shards as torch.chunk does, so there are no class_sizes.
        group = dict(group="", classes=0, class_sizes=None)
        if self.split is not None:
            group |= dict(group=self.mesh.get_group(self.split).group_name, classes=self.classes)
        return {name: self.argument(name) for name in self.given} | group

    def upstream(self, grad: Any) -> Tensor:
        if not isinstance(grad, DTensor):
            grad = DTensor.from_local(grad, self.mesh, self.everywhere, run_check=False)
        return grad.redistribute(self.mesh, self.everywhere if self.reduced else self.rows)._local_tensor

    def total(self, of_part: Callable[[], Tensor]) -> Tensor | None:
        """What a mean over the rows of all devices divides by; None if each device has all rows."""
        if self.given["reduction"] != "mean" or not self.sharded:
            return None
        total = of_part()
        for i in self.sharded:
            total = funcol.all_reduce(total, "sum", (self.mesh, i))
        return total


# How a result lies.
Result = Callable[[Any, Tensor], Tensor]


def of_loss(call: Call, t: Tensor) -> Tensor:
    """One number per row, or their sum."""
    if not call.reduced:
        return of_rows(call, t)
    return spread(t, call.mesh, [Partial() if isinstance(p, Shard) else R for p in call.rows], ())


def of_rows(call: Call, t: Tensor) -> Tensor:
    return spread(t, call.mesh, call.rows, call.shape)


def of_statistics(call: Call, t: Tensor) -> Tensor:
    """(facts, rows). Only the backward half reads them, on the device that wrote them."""
    placements = [Shard(1) if isinstance(p, Shard) else R for p in call.rows]
    return spread(t, call.mesh, placements, (t.shape[0], prod(call.shape)))


def replicated(call: Call, t: Tensor) -> Tensor:
    return spread(t, call.mesh, call.everywhere, t.shape)


def loss_on_dtensors(
    op: str,
    call_of: Callable[[str, dict[str, Any]], Call],
    results: Sequence[Result],
    gradients: Sequence[Result],
    forms: dict[str, tuple[dict[str, int], Sequence[int]]],
    total: tuple[str, Callable[[Any, dict[str, Any]], Tensor]] | None = None,
) -> None:
    """Registers the rules of an operator, its forms, and their private halves.

    call_of: of a form's name and its arguments. results, gradients: of the private halves. forms: by the end of its name, what
    tells the private forward the form, and which results the form returns; the operator itself is last. total: the argument
    for what a mean divides by, and what computes a device's part of it.
    """

    def run(half: str, places: Sequence[Result], given: dict[str, Any]) -> Any:
        form = next(f for f, (facts, _) in forms.items() if all(given.get(k, 0) & v == v for k, v in facts.items()))
        call = call_of(op + form, given)
        arguments = call.arguments()
        if total and half == "fwd":
            arguments[total[0]] = call.total(lambda: total[1](call, arguments))
        found = getattr(torch.ops.liger, f"_{op}_{half}")(**arguments)
        if isinstance(found, Tensor):
            return places[0](call, found)
        return tuple(None if t is None else place(call, t) for place, t in zip(places, found))

    def without_gradient(form: str, **given: Any) -> Any:
        facts, returned = forms[form]
        found = run("fwd", results, given | facts)
        return found[0] if len(returned) == 1 else tuple(found[i] for i in returned)

    on_dtensors(f"_{op}_fwd")(lambda **given: run("fwd", results, given))
    on_dtensors(f"_{op}_bwd")(lambda **given: run("bwd", gradients, given))
    for form in forms:
        on_dtensors(op + form)(partial(without_gradient, form))


def divisors(call: Call, arguments: dict[str, Any], logits: str, weight: str) -> Tensor:
    """Of a cross entropy's mean. logits, weight: the arguments with the logits' dtype and the weights of classes."""
    floats = torch.promote_types(arguments[logits].dtype, torch.float32)
    target, ignored = arguments["target"], arguments["ignore_index"]
    return torch.ops.liger._cross_entropy_totals(target, arguments[weight], call.classes, ignored, floats)
