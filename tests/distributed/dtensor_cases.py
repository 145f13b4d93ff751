"""Compares operators on DTensors with the same operators on whole tensors. tests/distributed/test_dtensor.py runs the cases in a group
of processes. Everything is float64, so a difference beyond rounding means a wrong rule."""

from __future__ import annotations

import itertools
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
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import liger_ops
import liger_ops.distributed
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

# ---- Rope, alone and after the norms of q and k

Q, K = randn(5, 6, 7, 8).transpose(1, 2), randn(5, 6, 4, 8).transpose(1, 2)  # (B, H, S, D)
COS, SIN = randn(6, 8), randn(6, 8) + 1
OF_HEADS = dict(q_weight=randn(8), k_weight=randn(8) + 1)


def rotary_cases(
    where: str, q: Placement, k: Placement, angles: Placement = R, cos: Tensor = COS, sin: Tensor = SIN
) -> None:
    tensors, placements = dict(q=Q, k=K, cos=cos, sin=sin), dict(q=q, k=k, cos=angles, sin=angles)
    case(f"rope {where}", F.rope, tensors, placements, [q, k])
    weights = dict.fromkeys(OF_HEADS, R)
    case(f"qk_norm_rope {where}", F.qk_norm_rope, {**tensors, **OF_HEADS}, {**placements, **weights}, [q, k])


rotary_cases("replicated", R, R)
rotary_cases("by batch", Shard(0), Shard(0))
rotary_cases("by heads", Shard(1), Shard(1))
rotary_cases("by sequence", Shard(2), Shard(2), Shard(0))
rotary_cases("by heads, one for all", Shard(1), R)
rotary_cases("by batch, with its positions", Shard(0), Shard(0), Shard(0), randn(5, 6, 8), randn(5, 6, 8) + 1)

# ---- Embedding

IDS = torch.randint(10, (5, 7), generator=torch.Generator().manual_seed(0))
TABLE = dict(input=IDS, weight=randn(10, 24))
for padding in (None, 3):
    where = "with padding " * (padding is not None)
    case(
        f"embedding {where}by batch", F.embedding, TABLE, dict(input=Shard(0), weight=R), Shard(0), padding_idx=padding
    )
    case(
        f"embedding {where}by columns",
        F.embedding,
        TABLE,
        dict(input=R, weight=Shard(1)),
        Shard(2),
        padding_idx=padding,
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


def differentiable_routing(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found = F.moe_router(logits, 3, statistics=True)
    return found.weights, found.scores, found.z


for where, p in {"replicated": R, "by batch": Shard(0), "by sequence": Shard(1)}.items():
    total = R if p == R else SUM
    case(f"moe_router {where}", differentiable_routing, dict(logits=X), dict(logits=p), [p, total, total])

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


def product_of_partial_sums(mesh: Any) -> None:
    a, b = randn(8, 12), randn(12, 4)
    found = torch.ops.liger._mm(spread(a, mesh, [SUM]), spread(b, mesh, [SUM]))
    torch.testing.assert_close(found.full_tensor(), a @ b)


CASES["GEMM of partial sums"] = product_of_partial_sums

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


# ---- Losses: rows over some mesh dimensions, classes over one

TOKENS = torch.randint(22, (5, 8), generator=torch.Generator().manual_seed(1)).masked_fill(torch.eye(5, 8).bool(), -100)
LOGITS, HIDDEN, HEAD, HEAD_BIAS = randn(5, 8, 22), randn(5, 8, 24), randn(22, 24), randn(22)


def loss_placements(rows: Placement, reduction: str) -> Placement:
    return rows if reduction == "none" else SUM if isinstance(rows, Shard) else R


for where, p in {"replicated": R, "by batch": Shard(0), "by sequence": Shard(1), "by class": Shard(2)}.items():
    rows = R if p == Shard(2) else p
    for reduction in ("mean", "sum", "none"):
        # The divisors of a mean are summed over the devices. The facts about classes are gathered inside the operator.
        counted = {REDUCE: 1} if reduction == "mean" and isinstance(rows, Shard) else {}
        case(
            f"cross_entropy {where}, {reduction}", F.cross_entropy, dict(logits=LOGITS, target=TOKENS),
            dict(logits=p, target=rows), loss_placements(rows, reduction), forward=counted, reduction=reduction,
            label_smoothing=0.1, lse_square_scale=1e-2,
        )  # fmt: skip
for where, x, w in (
    ("replicated", R, R),
    ("by batch", Shard(0), R),
    ("by class", R, Shard(0)),
    ("by class and sequence", Shard(1), Shard(0)),
):
    rows = R if w == Shard(0) else x
    for reduction in ("mean", "sum", "none"):
        counted = {REDUCE: 1} if reduction == "mean" and isinstance(rows, Shard) else {}
        case(
            f"fused_linear_cross_entropy {where}, {reduction}", F.fused_linear_cross_entropy,
            dict(input=HIDDEN, weight=HEAD, target=TOKENS, bias=HEAD_BIAS),
            dict(input=x, weight=w, target=rows, bias=w), loss_placements(rows, reduction), forward=counted,
            reduction=reduction, softcap=5.0,
        )  # fmt: skip
TEACHER, TEACHER_HEAD = randn(5, 8, 16), randn(22, 16)
MASK, FACTORS = TOKENS != -100, randn(5, 8).abs()


def linear_divergence(**given: Any) -> Tensor:
    return F.fused_linear_divergence(**given, beta=0.3).divergence


for where, x, w in (
    ("replicated", R, R),
    ("by batch", Shard(0), R),
    ("by sequence", Shard(1), R),
    ("by class", R, Shard(0)),
    ("by class and sequence", Shard(1), Shard(0)),
):
    rows = R if w == Shard(0) else x
    for reduction in ("mean", "sum", "none"):
        counted = {REDUCE: 1} if reduction == "mean" and isinstance(rows, Shard) else {}
        inputs, by_row = dict(s_input=HIDDEN, t_input=TEACHER), dict(mask=MASK, token_weight=FACTORS)
        heads = dict(s_weight=HEAD, t_weight=TEACHER_HEAD, s_bias=HEAD_BIAS, t_bias=HEAD_BIAS)
        case(
            f"fused_linear_divergence {where}, {reduction}", linear_divergence, inputs | by_row | heads,
            dict.fromkeys(inputs, x) | dict.fromkeys(by_row, rows) | dict.fromkeys(heads, w),
            loss_placements(rows, reduction), forward=counted, reduction=reduction,
        )  # fmt: skip
case_2d(
    "fused_linear_divergence by batch, sequence and class",
    linear_divergence,
    dict(s_input=HIDDEN, t_input=TEACHER, mask=MASK, s_weight=HEAD, t_weight=TEACHER_HEAD),
    dict(
        s_input=[Shard(0), Shard(1)], t_input=[Shard(0), Shard(1)], mask=[Shard(0), R], s_weight=[R, Shard(0)],
        t_weight=[R, Shard(0)],
    ),
    [[SUM, R]],
    forward={REDUCE: 1},
    reduction="mean",
)  # fmt: skip


def divergence_of_a_frozen_head(mesh: Any, of_head: Placement = R) -> None:
    hidden, teacher = (spread(t, mesh, [Shard(1)]) for t in (HIDDEN, TEACHER))
    heads = [spread(t, mesh, [of_head]) for t in (HEAD, TEACHER_HEAD)]
    rows = Shard(1) if of_head == R else R
    plain = HIDDEN.clone().requires_grad_()
    found = F.fused_linear_divergence(hidden.requires_grad_(), heads[0], teacher, heads[1], mask=MASK)
    expected = F.fused_linear_divergence(plain, HEAD, TEACHER, TEACHER_HEAD, mask=MASK)
    for a, b in zip(found, expected):
        assert a.placements == (rows,)
        torch.testing.assert_close(a.full_tensor(), b)
    upstream = randn(5, 8)
    (slope,) = torch.autograd.grad(found.divergence, hidden, spread(upstream, mesh, [rows]))
    assert slope.placements == (Shard(1),)
    torch.testing.assert_close(slope.full_tensor(), torch.autograd.grad(expected.divergence, plain, upstream)[0])


CASES["fused_linear_divergence, frozen head"] = divergence_of_a_frozen_head
CASES["fused_linear_divergence, frozen head by class"] = partial(divergence_of_a_frozen_head, of_head=Shard(0))
case_2d(
    "cross_entropy by batch and class",
    F.cross_entropy,
    dict(logits=LOGITS, target=TOKENS),
    dict(logits=[Shard(0), Shard(2)], target=[Shard(0), R]),
    [[SUM, R]],
    forward={REDUCE: 1},
)
case_2d(
    "cross_entropy by batch and sequence",
    F.cross_entropy,
    dict(logits=LOGITS, target=TOKENS),
    dict(logits=[Shard(0), Shard(1)], target=[Shard(0), Shard(1)]),
    [[SUM, SUM]],
    forward={REDUCE: 2},
)
for where, x, w in (
    ("replicated", R, R),
    ("by batch", Shard(0), R),
    ("by class", R, Shard(0)),
    ("by class and sequence", Shard(1), Shard(0)),
):
    rows = R if w == Shard(0) else x
    for ids in (None, 3):
        target = TOKENS if ids is None else torch.stack([TOKENS] * ids, -1)
        case(
            f"fused_linear_log_probs {where}, {ids or 1} ids",
            lambda *given, **named: F.fused_linear_log_probs(*given, entropy=True, **named)[:2],
            dict(input=HIDDEN, weight=HEAD, target=target, bias=HEAD_BIAS),
            dict(input=x, weight=w, target=rows, bias=w), [rows, rows], softcap=5.0,
        )  # fmt: skip
case_2d(
    "fused_linear_cross_entropy by batch, sequence and class",
    F.fused_linear_cross_entropy,
    dict(input=HIDDEN, weight=HEAD, target=TOKENS),
    dict(input=[Shard(0), Shard(1)], weight=[R, Shard(0)], target=[Shard(0), R]),
    [[SUM, R]],
    forward={REDUCE: 1},
)


def with_metrics(mesh: Any) -> None:
    logits, head = spread(LOGITS, mesh, [Shard(2)]), spread(HEAD, mesh, [Shard(0)])
    hidden = spread(HIDDEN, mesh, [Shard(1)]).requires_grad_()
    for found, expected in (
        (F.cross_entropy_with_metrics(logits, TOKENS), F.cross_entropy_with_metrics(LOGITS, TOKENS)),
        (
            F.fused_linear_cross_entropy_with_metrics(hidden, head, TOKENS),
            F.fused_linear_cross_entropy_with_metrics(HIDDEN, HEAD, TOKENS),
        ),
        (
            F.fused_linear_cross_entropy_with_log_probs(hidden, head, TOKENS),
            F.fused_linear_cross_entropy_with_log_probs(HIDDEN, HEAD, TOKENS),
        ),
    ):
        for a, b in zip(found, expected, strict=True):
            assert a.placements == (R,)
            torch.testing.assert_close(a.to_local(), b)


CASES["losses with metrics"] = with_metrics


def frozen_head(mesh: Any) -> None:
    """log_probs of a frozen head, whose gradient of input forward prepares."""
    for ids, w, x in itertools.product((1, 3), (R, Shard(0)), (R, Shard(0), Shard(1))):
        if w == Shard(0) and x == Shard(0):
            continue
        rows = R if w == Shard(0) else x
        target = torch.stack([TOKENS] * ids, -1)
        found, expected = (
            gradients_of(
                lambda h, head=head, y=y: sum(
                    r.sum() for r in F.fused_linear_log_probs(h, head, y, entropy=True, entropy_grad=True)[:2]
                ),
                hidden,
            )
            for hidden, head, y in (
                (spread(HIDDEN, mesh, [x]), spread(HEAD, mesh, [w]), spread(target, mesh, [rows])),
                (HIDDEN, HEAD, target),
            )
        )
        assert found[1].placements == (x,)
        for a, b in zip(found, expected):
            torch.testing.assert_close(a.full_tensor(), b)


CASES["fused_linear_log_probs of a frozen head"] = frozen_head


def gradients_of(function: Callable, *leaves: Tensor) -> list[Tensor]:
    given = [t.detach().clone().requires_grad_() for t in leaves]
    loss = function(*given)
    return [loss.detach(), *torch.autograd.grad(loss, given)]


def plain_beside(mesh: Any) -> None:
    """A plain tensor beside DTensors is replicated, and gets a plain gradient."""
    head = spread(HEAD, mesh, [Shard(0)])
    found = gradients_of(lambda x, w: F.fused_linear_cross_entropy(x, w, TOKENS), HIDDEN, head)
    expected = gradients_of(lambda x, w: F.fused_linear_cross_entropy(x, w, TOKENS), HIDDEN, HEAD)
    assert [isinstance(t, DTensor) for t in found] == [True, False, True]
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in found]
    torch.testing.assert_close(whole, expected)


CASES["plain input of a sharded head"] = plain_beside


def in_loss_parallel(mesh: Any) -> None:
    logits = LOGITS.flatten(0, 1)
    target = TOKENS.flatten()

    def loss_of(x: Tensor) -> Tensor:
        return torch.nn.CrossEntropyLoss(label_smoothing=0.1)(x, target)

    with liger_ops.distributed.loss_parallel():
        parts = spread(logits, mesh, [Shard(1)])
        with CommDebugMode() as mode:
            loss_of(parts)
        found = gradients_of(loss_of, parts)
        # Plain logits, and targets that are probabilities, are PyTorch's.
        plain = gradients_of(loss_of, logits)
        by_probabilities = torch.nn.functional.cross_entropy(logits, logits.softmax(1))
    torch.testing.assert_close(plain, gradients_of(loss_of, logits))
    torch.testing.assert_close(by_probabilities, torch.nn.functional.cross_entropy(logits, logits.softmax(1)))
    assert not collectives(mode), collectives(mode)
    assert found[1].placements == (Shard(1),), found[1].placements
    torch.testing.assert_close([t.full_tensor() for t in found], gradients_of(loss_of, logits))


CASES["torch's cross entropy in loss_parallel"] = in_loss_parallel


def parallel_head(mesh: Any, layout: Placement) -> None:
    torch.manual_seed(0)
    head = liger_ops.nn.LinearLossHead(24, 22, dtype=torch.float64)
    expected = gradients_of(lambda x: head(x, TOKENS, softcap=5.0), HIDDEN)
    whole = head(HIDDEN)
    head.zero_grad()
    head(HIDDEN, TOKENS).backward()
    weight_grad = head.weight.grad.clone()
    head.zero_grad()
    style = liger_ops.distributed.LossHeadParallel(input_layouts=layout)
    parallelize_module(head, mesh, style)
    part = HIDDEN if layout == R else HIDDEN.chunk(mesh.size(), layout.dim)[mesh.get_local_rank()]
    found = gradients_of(lambda x: head(x, TOKENS, softcap=5.0), part)
    assert not isinstance(found[0], DTensor)
    torch.testing.assert_close(found[0], expected[0])
    grad = expected[1] if layout == R else expected[1].chunk(mesh.size(), layout.dim)[mesh.get_local_rank()]
    torch.testing.assert_close(found[1], grad)
    torch.testing.assert_close(head(part), whole)
    head(part, TOKENS).backward()
    torch.testing.assert_close(head.weight.grad.full_tensor(), weight_grad)


CASES["parallel head, replicated input"] = partial(parallel_head, layout=R)
CASES["parallel head, input along the sequence"] = partial(parallel_head, layout=Shard(1))


def compiled_losses(mesh: Any) -> None:
    def losses(x: Tensor, w: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        return F.fused_linear_cross_entropy(2 * x, w, target) + F.cross_entropy(2 * logits, target, reduction="sum")

    x, w = spread(HIDDEN, mesh, [Shard(1)]), spread(randn(24, 24), mesh, [Shard(0)])
    logits, target = spread(randn(5, 8, 24), mesh, [Shard(2)]), spread(TOKENS, mesh, [R])
    runs = (losses, torch.compile(losses, fullgraph=True, backend="aot_eager"))
    found = [gradients_of(lambda *t, run=run: run(*t, target), x, w, logits) for run in runs]
    for a, b in zip(*found):
        torch.testing.assert_close(a.full_tensor(), b.full_tensor())


CASES["losses compiled with fullgraph"] = compiled_losses


# ---- Experts

# Not divisible by four devices: the last one has no expert. Some ids are of no expert.
TOKEN_COUNT, EXPERTS, INNER, CHOICES = 11, 5, 8, 3
ROUTES = torch.randint(-1, EXPERTS + 1, (TOKEN_COUNT, CHOICES), generator=torch.Generator().manual_seed(2))
ROUTED = dict(x=randn(TOKEN_COUNT, 24), index=ROUTES, weight=randn(TOKEN_COUNT, CHOICES))
SORTED = dict(x=randn(TOKEN_COUNT, 24), tokens_per_expert=torch.tensor([3, 0, 4, 1, 2]))
STRIDED = {dim: _StridedShard(dim, split_factor=2) for dim in (1, 2)}


def expert_weights(transposed: bool) -> dict[str, Tensor]:
    found = dict(gate_up=randn(EXPERTS, 2 * INNER, 24), down=randn(EXPERTS, 24, INNER))
    return {name: w.transpose(1, 2).contiguous() if transposed else w for name, w in found.items()}


def expert_layouts(of: str, interleaved: bool, transposed: bool, tokens: dict[str, Tensor]) -> dict[str, Placement]:
    parameters = ("gate_up", "down", "gate_up_bias", "down_bias")
    found = dict.fromkeys((*tokens, *parameters), R)
    if of == "token":
        return found | dict.fromkeys(tokens, Shard(0))
    if of == "expert":
        return found | dict.fromkeys(parameters, Shard(0))
    if of == "inner size":
        kind, columns, rows = Shard if interleaved else STRIDED.get, 1 + transposed, 2 - transposed
        return found | dict(gate_up=kind(columns), down=Shard(rows), gate_up_bias=kind(1))
    return found


EXPERT_BIASES = dict(gate_up_bias=randn(EXPERTS, 2 * INNER), down_bias=randn(EXPERTS, 24))
RESULTS = {"nothing": R, "token": Shard(0), "expert": SUM, "inner size": SUM}
for op, tokens in ((F.moe_experts, ROUTED), (F.moe_experts_sorted, SORTED)):
    kinds = [kind for kind in RESULTS if kind != "token" or op is F.moe_experts]
    for interleaved, transposed, biases in ((False, False, {}), (True, True, EXPERT_BIASES)):
        options = dict(interleaved=interleaved, transposed=transposed)
        weights = tokens | expert_weights(transposed) | biases
        name = f"{op.__name__}, {'interleaved, transposed, biases' if biases else 'halves'}"
        layouts = {
            kind: {k: p for k, p in expert_layouts(kind, interleaved, transposed, tokens).items() if k in weights}
            for kind in kinds
        }
        for kind in kinds:
            case(f"{name}, by {kind}", op, weights, layouts[kind], RESULTS[kind], **options)
        for pair in itertools.combinations(kinds[1:], 2):
            both = {k: [layouts[kind][k] for kind in pair] for k in weights}
            case_2d(
                f"{name}, by {' and '.join(pair)}", op, weights, both, [[RESULTS[kind] for kind in pair]], **options
            )
    halves = tokens | expert_weights(False) | EXPERT_BIASES
    layout = expert_layouts("inner size", False, False, tokens)
    case(f"{op.__name__}, halves, biases, by inner size", op, halves, layout, SUM)
    both = {k: [p, p] for k, p in expert_layouts("expert", False, False, tokens).items()}
    case_2d(f"{op.__name__}, by expert twice", op, halves, both, [[SUM, SUM]])
case(
    "moe_experts, weights first, by expert",
    partial(F.moe_experts, activation="gelu_tanh", weight_before=True),
    ROUTED | expert_weights(False),
    expert_layouts("expert", False, False, ROUTED) | dict(index=R),
    SUM,
)
for kind in ("token", "expert"):
    narrow = dict(ROUTED, index=ROUTES.int()) | expert_weights(False)
    case(f"moe_experts, 32-bit ids, by {kind}", F.moe_experts, narrow, expert_layouts(kind, False, False, ROUTED),
         RESULTS[kind])  # fmt: skip


def experts_and_plain_tokens(mesh: Any) -> None:
    """Plain tokens are replicated, and their gradients are whole. Frozen experts have none."""
    weights = {name: spread(w, mesh, [Shard(0)]) for name, w in expert_weights(False).items()}
    plain = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in ROUTED.items()}
    leaves = [plain["x"], plain["weight"]]
    found, expected = F.moe_experts(**plain, **weights), F.moe_experts(**plain, **expert_weights(False))
    torch.testing.assert_close(found.full_tensor(), expected)
    upstream = randn(*expected.shape)
    gradients = torch.autograd.grad(found, leaves, spread(upstream, mesh, [R]))
    assert not any(isinstance(t, DTensor) for t in gradients)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves, upstream))


CASES["moe_experts by expert, plain tokens"] = experts_and_plain_tokens


def tokens_by_sequence(mesh: Any) -> None:
    """As sequence parallelism: tokens are gathered, the result is scattered."""
    count = 2 * mesh.size()
    tensors = dict(x=randn(count, 24), index=ROUTES[:count], weight=randn(count, CHOICES)) | expert_weights(False)
    leaves = [name for name, t in tensors.items() if t.is_floating_point()]
    plain = {name: t.clone().requires_grad_(name in leaves) for name, t in tensors.items()}
    ours = {name: spread(t, mesh, [Shard(0)]).detach().requires_grad_(name in leaves) for name, t in tensors.items()}
    gathered = {name: ours[name].redistribute(placements=[R]) for name in ROUTED}
    with CommDebugMode() as mode:
        found = F.moe_experts(**ours | gathered).redistribute(placements=[Shard(0)])
    assert collectives(mode) == {"reduce_scatter_tensor": 1}, collectives(mode)
    expected, upstream = F.moe_experts(**plain), randn(count, 24)
    torch.testing.assert_close(found.full_tensor(), expected)
    gradients = torch.autograd.grad(found, [ours[name] for name in leaves], spread(upstream, mesh, [Shard(0)]))
    assert [t.placements for t in gradients] == [(Shard(0),)] * len(leaves)
    for a, b in zip(gradients, torch.autograd.grad(expected, [plain[name] for name in leaves], upstream), strict=True):
        torch.testing.assert_close(a.full_tensor(), b)


CASES["moe_experts by expert, tokens by sequence"] = tokens_by_sequence


def compiled_experts(mesh: Any) -> None:
    def layer(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
        y = F.moe_experts(2 * x, gate_up, down, index, weight)
        return y.redistribute(placements=[R]).square() + F.moe_experts_sorted(x, gate_up, down, counts)

    constants = dict(index=spread(ROUTES, mesh, [R]), counts=spread(SORTED["tokens_per_expert"][:4], mesh, [R]))
    # Equal parts.
    given = [ROUTED["x"], ROUTED["weight"], *(w[:4] for w in expert_weights(False).values())]
    leaves = [spread(t, mesh, [p]) for t, p in zip(given, (R, R, Shard(0), Shard(0)))]
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):

        def loss(x: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, run: Callable = run) -> Tensor:
            return run(x=x, weight=weight, gate_up=gate_up, down=down, **constants).sum()

        results.append(gradients_of(loss, *leaves))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.full_tensor(), b.full_tensor())


CASES["experts compiled with fullgraph"] = compiled_experts

CASES["moe_experts by expert, partial upstream gradient"] = partial(
    partial_upstream,
    op=lambda x, weight: F.moe_experts(
        x, *(distribute_tensor(w, x.device_mesh, [R]) if isinstance(x, DTensor) else w for w in expert_weights(False).values()),
        ROUTES, weight,
    ),
    tensors=dict(x=ROUTED["x"], weight=ROUTED["weight"]),
    gradients=[R, R],
    collectives_wanted={REDUCE: 1},
)  # fmt: skip

# ---- Layouts that no rule lists

REFUSED = {
    "rms_norm, sharded weight": (
        F.rms_norm,
        dict(x=(X, Shard(1)), weight=(W, Shard(0))),
        r"rms_norm: weight must be Replicate\(\) over mesh dimension 0 \(got Shard\(0\)\)",
    ),
    "rms_norm, partial x": (
        F.rms_norm,
        dict(x=(X, SUM), weight=(W, R)),
        r"rms_norm: x must be Replicate\(\) or Shard\(0\) or Shard\(1\) over mesh dimension 0 \(got Partial\(\)\)",
    ),
    "swiglu, partial up": (
        F.swiglu,
        dict(gate=(X, R), up=(X, SUM)),
        r"swiglu: up must be .* over mesh dimension 0 \(got Partial\(\)\)",
    ),
    "swiglu_packed by columns": (
        F.swiglu_packed,
        dict(gate_up=(X, Shard(2))),
        r"swiglu_packed: gate_up must be Replicate\(\) or Shard\(0\) or Shard\(1\) over mesh dimension 0 \(got Shard\(2\)\)",
    ),
    "cross_entropy, partial logits": (
        F.cross_entropy,
        dict(logits=(LOGITS, SUM), target=(TOKENS, R)),
        r"cross_entropy: logits must be .* over mesh dimension 0 \(got Partial\(\)\)",
    ),
    "fused_linear_cross_entropy by hidden": (
        F.fused_linear_cross_entropy,
        dict(input=(HIDDEN, Shard(2)), weight=(HEAD, Shard(1)), target=(TOKENS, R)),
        r"fused_linear_cross_entropy: input must be .* over mesh dimension 0 \(got Shard\(2\)\)",
    ),
    "fused_linear_divergence, teacher alone by class": (
        F.fused_linear_divergence,
        dict(s_input=(HIDDEN, R), s_weight=(HEAD, R), t_input=(TEACHER, R), t_weight=(TEACHER_HEAD, Shard(0))),
        r"fused_linear_divergence: t_weight must be Replicate\(\) over mesh dimension 0 \(got Shard\(0\)\)",
    ),
    "fused_linear_divergence by hidden": (
        F.fused_linear_divergence,
        dict(s_input=(HIDDEN, R), s_weight=(HEAD, Shard(1)), t_input=(TEACHER, R), t_weight=(TEACHER_HEAD, R)),
        r"fused_linear_divergence: s_weight must be Replicate\(\), or Shard\(0\) over one mesh dimension, .*\(got Shard\(1\)\)",
    ),
    "fused_linear_divergence, unequal parts of a sequence": (
        F.fused_linear_divergence,
        dict(
            s_input=(HIDDEN[:, :7], Shard(1)),
            s_weight=(HEAD, Shard(0)),
            t_input=(TEACHER[:, :7], Shard(1)),
            t_weight=(TEACHER_HEAD, Shard(0)),
        ),
        r"fused_linear_divergence: s_input must have a multiple of \d positions along the sharded dimension 1 \(got 7\)",
    ),
    "moe_experts, halves by Shard": (
        F.moe_experts,
        {
            name: (t, Shard(1) if name == "gate_up" else Shard(2) if name == "down" else R)
            for name, t in (ROUTED | expert_weights(False)).items()
        },
        r"moe_experts: gate_up must be Replicate\(\), Shard\(0\) or _StridedShard\(1, split_factor=2\), as gate and up "
        r"are halves, over mesh dimension 0 \(got Shard\(1\)\)",
    ),
    "moe_experts, uneven inner size": (
        partial(F.moe_experts, interleaved=True),
        {
            name: (
                t[:, :12] if name == "gate_up" else t[..., :6] if name == "down" else t,
                Shard(1) if name == "gate_up" else Shard(2) if name == "down" else R,
            )
            for name, t in (ROUTED | expert_weights(False)).items()
        },
        r"moe_experts: gate_up must have an inner size divisible by 4, not 6, over mesh dimension 0 \(got Shard\(1\)\)",
    ),
    "moe_experts, tokens and experts": (
        F.moe_experts,
        {name: (t, Shard(0)) for name, t in (ROUTED | expert_weights(False)).items()},
        r"moe_experts: x must be Replicate\(\), as experts are sharded, over mesh dimension 0 \(got Shard\(0\)\)",
    ),
    "moe_experts, one weight sharded": (
        F.moe_experts,
        {name: (t, Shard(0) if name == "gate_up" else R) for name, t in (ROUTED | expert_weights(False)).items()},
        r"moe_experts: down must be Shard\(0\) over mesh dimension 0 \(got Replicate\(\)\)",
    ),
    "moe_experts, partial tokens": (
        F.moe_experts,
        {name: (t, SUM if name == "x" else R) for name, t in (ROUTED | expert_weights(False)).items()},
        r"moe_experts: x must be Replicate\(\) or Shard\(0\) over mesh dimension 0 \(got Partial\(\)\)",
    ),
    "moe_experts_sorted, sharded rows": (
        F.moe_experts_sorted,
        {name: (t, Shard(0) if name == "x" else R) for name, t in (SORTED | expert_weights(False)).items()},
        r"moe_experts_sorted: x must be Replicate\(\) over mesh dimension 0 \(got Shard\(0\)\)",
    ),
    "swiglu, two ways": (
        F.swiglu,
        dict(gate=(X, Shard(0)), up=(X, Shard(1))),
        r"swiglu: up must be Shard\(0\) over mesh dimension 0 \(got Shard\(1\)\)",
    ),
}


def refused(mesh: Any, op: Callable, arguments: dict[str, Any], message: str) -> None:
    try:
        op(**{name: spread(t, mesh, [p] * mesh.ndim) for name, (t, p) in arguments.items()})
    except Exception as error:
        assert re.search(message, str(error)), str(error)
    else:
        raise AssertionError("it was not refused")


for name, (op, arguments, message) in REFUSED.items():
    CASES[f"refused: {name}"] = partial(refused, op=op, arguments=arguments, message=message)


def classes_over_two_dimensions(mesh: Any) -> None:
    two = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    message = r"cross_entropy: logits must .* over one mesh dimension only, over mesh dimension 'tp' \(got Shard\(2\)\)"
    refused(two, F.cross_entropy, dict(logits=(LOGITS, Shard(2)), target=(TOKENS, R)), message)


CASES["refused: cross_entropy, classes over two dimensions"] = classes_over_two_dimensions


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
