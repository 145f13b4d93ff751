"""Compares operators on DTensors with the same operators on whole tensors. tests/test_dtensor.py runs the cases in a group
of processes. Everything is float64, so a difference beyond rounding means a wrong rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from process_group import run_cases
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from liger_ops import functional as F

CASES: dict[str, Callable[..., None]] = {}
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

    constants = ("cos", "sin", "target")
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
        torch.testing.assert_close(a.full_tensor(), b)
        assert a.shape == b.shape and (a.stride() == b.stride() or a.numel() == 0), (a.stride(), b.stride())

    upstream = [randn(*out.shape) for out in expected]
    given = [spread(g, mesh, [R if p == SUM else p for p in out.placements]) for g, out in zip(upstream, found)]
    with CommDebugMode() as backward_mode:
        gradients = torch.autograd.grad(found, [ours[name] for name in names], given)
    assert collectives(backward_mode) == (backward or {}), collectives(backward_mode)
    for name, a, b in zip(names, gradients, torch.autograd.grad(expected, [plain[n] for n in names], upstream)):
        torch.testing.assert_close(a.full_tensor(), b, msg=lambda text, name=name: f"d {name}: {text}")

    detached = {name: t.detach() for name, t in ours.items()}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            again = listed(op(**detached, **options))
            assert [[*out.placements] for out in again] == wanted
            for a, b in zip(again, expected, strict=True):
                torch.testing.assert_close(a.full_tensor(), b)


def case(
    name: str, op: Callable, tensors: dict[str, Tensor], placements: dict[str, Any], results: Any, **more: Any
) -> None:
    assert name not in CASES
    CASES[name] = partial(check, op=op, tensors=tensors, placements=placements, results=results, **more)


# Sizes that do not divide by four devices.
X, W, B = randn(5, 7, 24), randn(24), randn(24) + 1

for where, p in {"replicated": R, "by batch": Shard(0), "by sequence": Shard(1)}.items():
    case(f"rms_norm {where}", F.rms_norm, dict(x=X, weight=W), dict(x=p, weight=R), p)
    case(f"rms_norm without weight {where}", F.rms_norm, dict(x=X), dict(x=p), p)
    case(f"layer_norm {where}", F.layer_norm, dict(x=X, weight=W, bias=B), dict(x=p, weight=R, bias=R), p)
    case(
        f"fused_add_rms_norm {where}",
        F.fused_add_rms_norm,
        dict(x=X, residual=X + 1, weight=W),
        dict(x=p, residual=p, weight=R),
        [p, p],
    )
    for op in (F.swiglu_packed, F.geglu_packed):
        case(f"{op.__name__} {where}", op, dict(gate_up=X), dict(gate_up=p), p)

for where, p in {"replicated": R, "by batch": Shard(0), "by sequence": Shard(1), "by columns": Shard(2)}.items():
    for op in (F.swiglu, F.geglu):
        case(f"{op.__name__} {where}", op, dict(gate=X, up=X + 1), dict(gate=p, up=p), p)
    case(f"relu_squared {where}", F.relu_squared, dict(x=X), dict(x=p), p)

# The rows are gathered, and in backward again.
case(
    "rms_norm by columns",
    F.rms_norm,
    dict(x=X, weight=W),
    dict(x=Shard(2), weight=R),
    R,
    forward={GATHER: 1},
    backward={GATHER: 1},
)

# ---- Rope

Q, K = randn(5, 6, 7, 8).transpose(1, 2), randn(5, 6, 4, 8).transpose(1, 2)  # (B, H, S, D)
COS, SIN = randn(6, 8), randn(6, 8) + 1
for where, p, angles in (
    ("replicated", R, R),
    ("by batch", Shard(0), R),
    ("by heads", Shard(1), R),
    ("by sequence", Shard(2), Shard(0)),
):
    case(
        f"rope {where}",
        F.rope,
        dict(q=Q, k=K, cos=COS, sin=SIN),
        dict(q=p, k=p, cos=angles, sin=angles),
        [p, p],
    )
case(
    "rope by heads, one for all",
    F.rope,
    dict(q=Q, k=K, cos=COS, sin=SIN),
    dict(q=Shard(1), k=R, cos=R, sin=R),
    [Shard(1), R],
)

case(
    "rope by batch, with its positions",
    F.rope,
    dict(q=Q, k=K, cos=randn(5, 6, 8), sin=randn(5, 6, 8) + 1),
    dict(q=Shard(0), k=Shard(0), cos=Shard(0), sin=Shard(0)),
    [Shard(0), Shard(0)],
)

# ---- Embedding

IDS = torch.randint(10, (5, 7), generator=torch.Generator().manual_seed(0))
case("embedding by batch", F.embedding, dict(input=IDS, weight=randn(10, 24)), dict(input=Shard(0), weight=R), Shard(0))
case(
    "embedding by columns", F.embedding, dict(input=IDS, weight=randn(10, 24)), dict(input=R, weight=Shard(1)), Shard(2)
)

# ---- Divergences and log-probabilities

STUDENT, TEACHER = (randn(5, 7, 24 + i)[..., :24].log_softmax(-1) for i in range(2))
LABELS = torch.randint(-1, 3, (5, 7), generator=torch.Generator().manual_seed(0))
for where, p in {"replicated": R, "by batch": Shard(0), "by sequence": Shard(1)}.items():
    for op in (F.kl_div, F.jsd, F.tvd):
        tensors = dict(input=STUDENT, target=TEACHER)
        for reduction in ("none", "sum", "mean", "batchmean"):
            for labels in ({}, dict(shift_labels=LABELS)):
                mean, sharded = reduction in ("mean", "batchmean"), p != R
                result = p if reduction == "none" else SUM if sharded else R
                first_only = op is F.kl_div and reduction == "batchmean" and not labels and p == Shard(1)
                # Each direction needs the divisor of all devices.
                divisor = {REDUCE: 1} if mean and sharded and not first_only else {}
                case(
                    f"{op.__name__}, {reduction} {'with labels ' * bool(labels)}{where}",
                    op,
                    tensors | labels,
                    dict(input=p, target=p, shift_labels=p),
                    result,
                    forward=divisor,
                    backward=divisor,
                    reduction=reduction,
                    ignore_index=-1,
                )
    for ids in ((5, 7), (5, 7, 3)):
        case(
            f"log_probs of {len(ids) - 1} {where}",
            partial(F.log_probs, entropy=True),
            dict(logits=STUDENT, index=torch.randint(24, ids, generator=torch.Generator().manual_seed(0))),
            dict(logits=p, index=p),
            [p, p],
        )

# ---- GEMMs

GATE, DOWN = randn(4, 6, 16), randn(12, 16)
case(
    "swiglu_linear by batch",
    F.swiglu_linear,
    dict(gate=GATE, up=GATE + 1, weight=DOWN),
    dict(gate=Shard(0), up=Shard(0), weight=R),
    Shard(0),
)
case(
    "swiglu_linear by columns",
    F.swiglu_linear,
    dict(gate=GATE, up=GATE + 1, weight=DOWN),
    dict(gate=Shard(2), up=Shard(2), weight=Shard(1)),
    SUM,
)


case(
    "swiglu_linear, sharded weight",
    F.swiglu_linear,
    dict(gate=GATE, up=GATE + 1, weight=DOWN),
    dict(gate=R, up=R, weight=Shard(0)),
    Shard(2),
)

# ---- Upstream gradients that are partial sums, as a column-parallel linear layer's backward returns them


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


for op, tensors, gradients, wanted in (
    (F.rms_norm, dict(x=X, weight=W), [R, R], {REDUCE: 1}),
    (F.layer_norm, dict(x=X, weight=W, bias=B), [R, R, R], {REDUCE: 1}),
    (F.swiglu, dict(gate=X, up=X + 1), [SUM, SUM], {}),
    (F.swiglu_packed, dict(gate_up=X), [SUM], {}),
    (F.relu_squared, dict(x=X), [SUM], {}),
):
    CASES[f"{op.__name__}, partial upstream gradient"] = partial(
        partial_upstream, op=op, tensors=tensors, gradients=gradients, collectives_wanted=wanted
    )

# ---- A mesh of two dimensions


def on_two_dimensions(mesh: Any, **arguments: Any) -> None:
    check(dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), **arguments)


def case_2d(name: str, *arguments: Any, **more: Any) -> None:
    case(name, *arguments, **more)
    CASES[name] = partial(on_two_dimensions, **CASES[name].keywords)


case_2d(
    "rms_norm by batch and sequence",
    F.rms_norm,
    dict(x=X, weight=W),
    dict(x=[Shard(0), Shard(1)], weight=[R, R]),
    [[Shard(0), Shard(1)]],
)
case_2d(
    "swiglu by batch and columns",
    F.swiglu,
    dict(gate=X, up=X),
    dict(gate=[Shard(0), Shard(2)], up=[Shard(0), Shard(2)]),
    [[Shard(0), Shard(2)]],
)


# ---- Layouts that no rule lists

REFUSED = {
    "rms_norm, sharded weight": (
        F.rms_norm,
        dict(x=(X, Shard(1)), weight=(W, Shard(0))),
        r"rms_norm: weight must be Replicate\(\) over mesh dimension 0 \(got Shard\(0\)\)",
    ),
    "swiglu_packed by columns": (
        F.swiglu_packed,
        dict(gate_up=(X, Shard(2))),
        r"swiglu_packed: gate_up must be Replicate\(\) or Shard\(0\) or Shard\(1\) over mesh dimension 0 \(got Shard\(2\)\)",
    ),
    "swiglu, two ways": (
        F.swiglu,
        dict(gate=(X, Shard(0)), up=(X, Shard(1))),
        r"swiglu: up must be Shard\(0\) over mesh dimension 0 \(got Shard\(1\)\)",
    ),
}


def refused(mesh: Any, op: Callable, arguments: dict[str, Any], message: str) -> None:
    try:
        op(**{name: spread(t, mesh, [p]) for name, (t, p) in arguments.items()})
    except Exception as error:
        assert re.search(message, str(error)), str(error)
    else:
        raise AssertionError("it was not refused")


for name, (op, arguments, message) in REFUSED.items():
    CASES[f"refused: {name}"] = partial(refused, op=op, arguments=arguments, message=message)


# ---- torch.compile


def compiled(mesh: Any) -> None:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        y = F.rms_norm(x, weight)
        return F.swiglu(y, F.relu_squared(y))

    results = []
    for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        # torch.compile differentiates no uneven shards, of PyTorch's own operators either.
        x, weight = (spread(t, mesh, [p]).requires_grad_() for t, p in ((randn(5, 8, 24), Shard(1)), (W, R)))
        run(x, weight).sum().backward()
        results.append([x.grad.full_tensor(), weight.grad.full_tensor()])
    torch.testing.assert_close(*results)


CASES["compiled with fullgraph"] = compiled


if __name__ == "__main__":
    run_cases(CASES)
