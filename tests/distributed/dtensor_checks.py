"""Compares operators on DTensors with the same operators on whole tensors. Everything is float64, so that a difference
beyond rounding means a wrong rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.calls import Row
from tests.support.host.process_group import Cases
from tests.support.rows import Bound, bind

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


# A tensor and its placement, or its placements over a mesh of two dimensions.
Given = dict[str, tuple[Tensor, Any]]
CONSTANTS = ("cos", "sin", "target", "t_input", "t_weight", "t_bias", "token_weight")


def check(
    mesh: Any,
    op: Callable,
    given: Given,
    results: Any,
    forward: dict[str, int] | None = None,
    backward: dict[str, int] | int | None = None,
    upstream: Placement | None = None,
    gradients: Placement | None = None,
    **options: Any,
) -> None:
    """results: the placement of all results, or a list of one for each. upstream: that of the upstream gradients, if it is not
    that of the results. gradients: that of all gradients. forward, backward: the collectives, or the number
    of those that PyTorch chooses. Tensors are differentiated if they want it; if none does, all of
    floating point but CONSTANTS."""
    if any(isinstance(p, list) for _, p in given.values()):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def each(p: Any) -> list[Placement]:
        return p if isinstance(p, list) else [p] * mesh.ndim

    wishes = [name for name, (t, _) in given.items() if t.requires_grad]
    names = wishes or [name for name, (t, _) in given.items() if t.is_floating_point() and name not in CONSTANTS]
    plain = {name: t.detach().clone().requires_grad_(name in names) for name, (t, _) in given.items()}
    ours = {
        name: spread(t.detach(), mesh, each(p)).detach().requires_grad_(name in names) for name, (t, p) in given.items()
    }
    with CommDebugMode() as forward_mode:
        found = listed(op(**ours, **options))
    assert collectives(forward_mode) == (forward or {}), collectives(forward_mode)
    expected = listed(op(**plain, **options))
    wanted = [each(p) for p in (results if isinstance(results, list) else [results] * len(expected))]
    assert [[*out.placements] for out in found] == wanted, [out.placements for out in found]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(whole_of(a), b)
        assert a.shape == b.shape and (a.stride() == b.stride() or a.numel() == 0), (a.stride(), b.stride())

    found, expected = ([out for out in outs if out.requires_grad] for outs in (found, expected))
    grads_out = [randn(*out.shape) for out in expected]
    of_grads_out = [
        [R if p == SUM else p for p in out.placements] if upstream is None else each(upstream) for out in found
    ]
    shares = [spread(g, mesh, p) for g, p in zip(grads_out, of_grads_out)]
    with CommDebugMode() as backward_mode:
        derived = torch.autograd.grad(found, [ours[name] for name in names], shares)
    used = collectives(backward_mode)
    assert (sum(used.values()) if isinstance(backward, int) else used) == (backward or {}), used
    assert gradients is None or {t.placements for t in derived} == {(gradients,)}, [t.placements for t in derived]
    for name, a, b in zip(names, derived, torch.autograd.grad(expected, [plain[n] for n in names], grads_out)):
        torch.testing.assert_close(whole_of(a), b, msg=lambda text, name=name: f"d {name}: {text}")

    detached = {name: t.detach() for name, t in ours.items()}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            again = listed(op(**detached, **options))
            assert [[*out.placements] for out in again] == wanted
            for a, b in zip(again, listed(op(**plain, **options)), strict=True):
                torch.testing.assert_close(whole_of(a), b)


def bound(row: Row) -> Bound:
    # Sizes that do not divide by four devices.
    return bind(row, batch=5, length=7, dtype=torch.float64)


def check_row(mesh: Any, row: Row, inputs: Placement | dict[str, Placement], **more: Any) -> None:
    """The call of a row of calls.py. inputs: one placement for all, beside whole parameters, or one for each tensor."""
    call = bound(row)
    if not isinstance(inputs, dict):
        more = {"results": inputs, **more}
        inputs = dict.fromkeys(call.names, R) | dict.fromkeys(call.names[: len(row.inputs)], inputs)
    given = {name: (t, inputs[name]) for name, t in zip(call.names, call.tensors, strict=True)}
    check(mesh, lambda **named: call.op(*named.values()), given, **more)


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
    def case(self, name: str, op: Callable, given: Given, results: Any, **more: Any) -> None:
        self.add(name, check, op=op, given=given, results=results, **more)

    def refuse(self, layouts: dict[str, tuple[Callable, Given, str]]) -> None:
        for name, (op, arguments, message) in layouts.items():
            self.add(f"refused: {name}", refused, op=op, arguments=arguments, message=message)
