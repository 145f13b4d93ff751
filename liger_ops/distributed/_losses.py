"""Losses of DTensors: what each device computes on its parts, and how the results lie on the mesh.

Classes may be sharded over one mesh dimension, rows (tokens) over others. A loss whose classes are sharded takes the group
of its mesh dimension, and is the same on all of its devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ._sharding import text_of

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
    # Before torch 2.13, a result that requires a gradient cannot be detached without grad mode.
    t = t.detach()
    if not isinstance(t, DTensor):
        t = DTensor.from_local(t, mesh, (R,) * mesh.ndim, run_check=False)
    return t._local_tensor if t.placements == tuple(placements) else t.redistribute(mesh, placements)._local_tensor


def spread(t: Tensor, mesh: Any, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(t, mesh, tuple(placements), run_check=False, shape=torch.Size(shape), stride=stride)


@dataclass
class Rows:
    """How the rows of a loss lie on the mesh, and which mesh dimension shards the classes."""

    op: str
    mesh: Any
    placements: tuple[Placement, ...]
    shape: torch.Size
    classes: int
    split: int | None

    @property
    def sharded(self) -> list[int]:
        return [i for i, p in enumerate(self.placements) if isinstance(p, Shard)]

    @property
    def group(self) -> tuple[str, int, None]:
        """The arguments group, classes and class_sizes. DTensor shards as torch.chunk does."""
        return ("", 0, None) if self.split is None else (self.mesh.get_group(self.split).group_name, self.classes, None)

    def part(self, name: str, t: Any) -> Any:
        return part_of(self.op, name, t, self.mesh, self.placements)

    def whole(self, name: str, t: Any) -> Any:
        return part_of(self.op, name, t, self.mesh, (R,) * self.mesh.ndim)

    def totals(self, target: Tensor, weight: Tensor | None, reduction: str, ignore_index: int, dtype: Any) -> Any:
        """The divisors of a mean over the rows of all devices; None if each device has all rows."""
        if reduction != "mean" or not self.sharded:
            return None
        floats = torch.promote_types(dtype, torch.float32)
        total = torch.ops.liger._cross_entropy_totals(target, weight, self.classes, ignore_index, floats)
        for i in self.sharded:
            total = funcol.all_reduce(total, "sum", (self.mesh, i))
        return total

    def spread(self, t: Tensor | None, reduced: bool = False) -> DTensor | None:
        """A result: one number per row, or their sum."""
        if t is None:
            return None
        if reduced:
            return spread(t, self.mesh, [Partial() if isinstance(p, Shard) else R for p in self.placements], ())
        return spread(t, self.mesh, self.placements, self.shape)

    def spread_statistics(self, stats: Tensor | None) -> DTensor | None:
        """Only the backward half reads them, on the device that wrote them."""
        if stats is None:
            return None
        placements = [Shard(1) if isinstance(p, Shard) else R for p in self.placements]
        return spread(stats, self.mesh, placements, (stats.shape[0], prod(self.shape)))

    def replicated(self, t: Tensor | None) -> DTensor | None:
        return None if t is None else spread(t, self.mesh, (R,) * self.mesh.ndim, t.shape)

    def upstream(self, grad: Any, reduced: bool) -> Tensor:
        """The local part of a loss's gradient."""
        if not isinstance(grad, DTensor):
            grad = DTensor.from_local(grad, self.mesh, (R,) * self.mesh.ndim, run_check=False)
        return grad.redistribute(self.mesh, (R,) * self.mesh.ndim if reduced else self.placements)._local_tensor
