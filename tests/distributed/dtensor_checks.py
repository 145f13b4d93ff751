"""Compares operators on DTensors with the same operators on whole tensors. Everything is float64, so that a difference
beyond rounding means a wrong rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from process_group import Cases
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

R, SUM = Replicate(), Partial("sum")
GATHER, REDUCE = "all_gather_into_tensor", "all_reduce"


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def spread(t: Tensor, mesh: Any, placements: Sequence[Placement]) -> DTensor:
    """A DTensor of `t`. A partial sum has another share on each device."""
    parts = [R if p == SUM else p for p in placements]
    whole = distribute_tensor(t, mesh, parts)
    if parts == [*placements]:
        return whole
    shares = [(1 + mesh.get_local_rank(i)) for i, p in enumerate(placements) if p == SUM]
    totals = [mesh.size(i) * (mesh.size(i) + 1) / 2 for i, p in enumerate(placements) if p == SUM]
    scale = torch.tensor(shares, dtype=t.dtype).prod() / torch.tensor(totals, dtype=t.dtype).prod()
    return DTensor.from_local(whole.to_local() * scale, mesh, placements, run_check=False)


def whole_of(t: DTensor) -> Tensor:
    """t.full_tensor(), which does not know a lone _StridedShard before torch 2.13."""
    local, placements = t.to_local(), [*t.placements]
    for i, p in enumerate(placements):
        if isinstance(p, _StridedShard):
            parts = [
                torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(t.device_mesh.size(i))
            ]
            torch.distributed.all_gather(parts, local.contiguous(), group=t.device_mesh.get_group(i))
            pieces = zip(*(part.chunk(p.split_factor, p.dim) for part in parts))
            local, placements[i] = torch.cat([part for piece in pieces for part in piece], p.dim), R
    whole = DTensor.from_local(local, t.device_mesh, placements, run_check=False, shape=t.shape, stride=t.stride())
    return whole.full_tensor()


def collectives(mode: CommDebugMode) -> dict[str, int]:
    return {str(name).split(".")[-1]: count for name, count in mode.get_comm_counts().items() if count}


def listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [*results]


def check(
    mesh: Any,
    op: Callable,
    tensors: dict[str, Tensor],
    placements: dict[str, Any],
    results: Any,
    forward: dict[str, int] | None = None,
    backward: dict[str, int] | None = None,
    **options: Any,
) -> None:
    """placements and results have a placement for each mesh dimension, or a single one."""

    def each(p: Any) -> list[Placement]:
        return [p] if isinstance(p, Placement) else [*p]

    constants = ("cos", "sin", "target", "t_input", "t_weight", "t_bias", "token_weight")
    names = [name for name, t in tensors.items() if t.is_floating_point() and name not in constants]
    plain = {name: t.clone().requires_grad_(name in names) for name, t in tensors.items()}
    ours = {
        name: spread(t, mesh, each(placements[name])).detach().requires_grad_(name in names)
        for name, t in tensors.items()
    }
    with CommDebugMode() as forward_mode:
        found = listed(op(**ours, **options))
    assert collectives(forward_mode) == (forward or {}), collectives(forward_mode)
    expected = listed(op(**plain, **options))
    wanted = [each(p) for p in (results if isinstance(results, list) else [results])]
    assert [[*out.placements] for out in found] == wanted, [out.placements for out in found]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(whole_of(a), b)
        assert a.shape == b.shape and (a.stride() == b.stride() or a.numel() == 0), (a.stride(), b.stride())

    upstream = [randn(*out.shape) for out in expected]
    given = [spread(g, mesh, [R if p == SUM else p for p in out.placements]) for g, out in zip(upstream, found)]
    with CommDebugMode() as backward_mode:
        gradients = torch.autograd.grad(found, [ours[name] for name in names], given)
    assert collectives(backward_mode) == (backward or {}), collectives(backward_mode)
    for name, a, b in zip(names, gradients, torch.autograd.grad(expected, [plain[n] for n in names], upstream)):
        torch.testing.assert_close(whole_of(a), b, msg=lambda text, name=name: f"d {name}: {text}")

    detached = {name: t.detach() for name, t in ours.items()}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            again = listed(op(**detached, **options))
            assert [[*out.placements] for out in again] == wanted
            for a, b in zip(again, expected, strict=True):
                torch.testing.assert_close(whole_of(a), b)


def partial_upstream(
    mesh: Any, op: Callable, tensors: dict[str, Tensor], gradients: list[Placement], collectives_wanted: dict[str, int]
) -> None:
    plain = [t.clone().requires_grad_() for t in tensors.values()]
    ours = [spread(t, mesh, [R]).requires_grad_() for t in tensors.values()]
    expected, found = op(*plain), op(*ours)
    upstream = randn(*expected.shape)
    shares = spread(upstream, mesh, [SUM])
    with CommDebugMode() as mode:
        results = torch.autograd.grad(found, ours, shares)
    assert collectives(mode) == collectives_wanted, collectives(mode)
    assert [t.placements[0] for t in results] == gradients, [t.placements for t in results]
    for a, b in zip(results, torch.autograd.grad(expected, plain, upstream), strict=True):
        torch.testing.assert_close(a.full_tensor(), b)


def on_two_dimensions(mesh: Any, **arguments: Any) -> None:
    check(dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), **arguments)


def gradients_of(function: Callable, *leaves: Tensor) -> list[Tensor]:
    given = [t.detach().clone().requires_grad_() for t in leaves]
    loss = function(*given)
    return [loss.detach(), *torch.autograd.grad(loss, given)]


def refused(mesh: Any, op: Callable, arguments: dict[str, Any], message: str) -> None:
    try:
        op(**{name: spread(t, mesh, [p] * mesh.ndim) for name, (t, p) in arguments.items()})
    except Exception as error:
        assert re.search(message, str(error)), str(error)
    else:
        raise AssertionError("it was not refused")


class DTensorCases(Cases):
    def case(
        self, name: str, op: Callable, tensors: dict[str, Tensor], placements: dict[str, Any], results: Any, **more: Any
    ) -> None:
        self.add(name, check, op=op, tensors=tensors, placements=placements, results=results, **more)

    def case_2d(
        self, name: str, op: Callable, tensors: dict[str, Tensor], placements: dict[str, Any], results: Any, **more: Any
    ) -> None:
        self.add(name, on_two_dimensions, op=op, tensors=tensors, placements=placements, results=results, **more)

    def refuse(self, layouts: dict[str, tuple[Callable, dict[str, Any], str]]) -> None:
        for name, (op, arguments, message) in layouts.items():
            self.add(f"refused: {name}", refused, op=op, arguments=arguments, message=message)
