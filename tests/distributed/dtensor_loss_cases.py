"""Rules of the losses, for test_dtensor.py: rows over some mesh dimensions, classes over one."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from dtensor_checks import REDUCE, SUM, DTensorCases, R, collectives, gradients_of, randn, refused, spread
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

import liger_ops
import liger_ops.distributed
from liger_ops import functional as F

CASES = DTensorCases()
case, case_2d = CASES.case, CASES.case_2d

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
T, B = randn(5, 8, 3), randn(22, 3)
for where, x, w in (("by batch", Shard(0), R), ("by class", R, Shard(0))):
    case(
        f"fused_linear_cross_entropy with a low-rank addend {where}", F.fused_linear_cross_entropy,
        dict(input=HIDDEN, weight=HEAD, target=TOKENS, low_rank_input=T, low_rank_weight=B),
        dict(input=x, weight=w, target=x, low_rank_input=x, low_rank_weight=w), loss_placements(x, "sum"),
        reduction="sum", softcap=5.0,
    )  # fmt: skip
    case(
        f"fused_linear_log_probs with a low-rank addend {where}",
        lambda **given: F.fused_linear_log_probs(**given, entropy=True)[:2],
        dict(input=HIDDEN, weight=HEAD, target=TOKENS, low_rank_input=T, low_rank_weight=B),
        dict(input=x, weight=w, target=x, low_rank_input=x, low_rank_weight=w), [x, x], softcap=5.0,
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
case(
    "fused_linear_divergence with a map by batch", lambda **given: F.fused_linear_divergence(**given).divergence,
    dict(s_input=HIDDEN, t_input=TEACHER, s_weight=HEAD, t_weight=randn(50, 16), vocab_map=2 * torch.arange(22)),
    dict(s_input=Shard(0), t_input=Shard(0), s_weight=R, t_weight=R, vocab_map=R), SUM, forward={REDUCE: 1},
    reduction="mean",
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


CASES.add("fused_linear_divergence, frozen head", divergence_of_a_frozen_head)
CASES.add("fused_linear_divergence, frozen head by class", divergence_of_a_frozen_head, of_head=Shard(0))
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


def classes_over_two_dimensions(mesh: Any) -> None:
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    message = r"cross_entropy: logits must .* over one mesh dimension only, over mesh dimension 'tp' \(got Shard\(2\)\)"
    refused(two, F.cross_entropy, dict(logits=(LOGITS, Shard(2)), target=(TOKENS, R)), message)


CASES.add("refused: cross_entropy, classes over two dimensions", classes_over_two_dimensions)
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


CASES.add("losses with metrics", with_metrics)


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


CASES.add("fused_linear_log_probs of a frozen head", frozen_head)


def plain_beside(mesh: Any) -> None:
    """A plain tensor beside DTensors is replicated, and gets a plain gradient."""
    head = spread(HEAD, mesh, [Shard(0)])
    found = gradients_of(lambda x, w: F.fused_linear_cross_entropy(x, w, TOKENS), HIDDEN, head)
    expected = gradients_of(lambda x, w: F.fused_linear_cross_entropy(x, w, TOKENS), HIDDEN, HEAD)
    assert [isinstance(t, DTensor) for t in found] == [True, False, True]
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in found]
    torch.testing.assert_close(whole, expected)


CASES.add("plain input of a sharded head", plain_beside)


def plain_bias(mesh: Any) -> None:
    """Its gradient is summed over the devices, which have different tokens."""

    def losses(x: Any, w: Any, b: Any, t: Any, tw: Any) -> Any:
        divergence = F.fused_linear_divergence(x, w, t, tw, b, reduction="mean").divergence
        return F.fused_linear_cross_entropy(x, w, TOKENS, b) + divergence

    given = (HIDDEN, HEAD, HEAD_BIAS, TEACHER, TEACHER_HEAD)
    layouts = dict(zip(range(5), (Shard(0), R, None, Shard(0), R)))
    parts = [t if layouts[i] is None else spread(t, mesh, [layouts[i]]) for i, t in enumerate(given)]
    found, expected = (
        gradients_of(lambda x, w, b: losses(x, w, b, *tensors[3:]), *tensors[:3]) for tensors in (parts, given)
    )
    assert not isinstance(found[3], DTensor)
    torch.testing.assert_close([t.full_tensor() if isinstance(t, DTensor) else t for t in found], expected)


CASES.add("plain bias beside sharded tokens", plain_bias)


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


CASES.add("torch's cross entropy in loss_parallel", in_loss_parallel)


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


CASES.add("parallel head, replicated input", parallel_head, layout=R)
CASES.add("parallel head, input along the sequence", parallel_head, layout=Shard(1))


def compiled_losses(mesh: Any) -> None:
    def losses(x: Tensor, w: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        return F.fused_linear_cross_entropy(2 * x, w, target) + F.cross_entropy(2 * logits, target, reduction="sum")

    x, w = spread(HIDDEN, mesh, [Shard(1)]), spread(randn(24, 24), mesh, [Shard(0)])
    logits, target = spread(randn(5, 8, 24), mesh, [Shard(2)]), spread(TOKENS, mesh, [R])
    runs = (losses, torch.compile(losses, fullgraph=True, backend="aot_eager"))
    found = [gradients_of(lambda *t, run=run: run(*t, target), x, w, logits) for run in runs]
    for a, b in zip(*found):
        torch.testing.assert_close(a.full_tensor(), b.full_tensor())


CASES.add("losses compiled with fullgraph", compiled_losses)


# ---- Layouts that no rule lists

CASES.refuse(
    {
        "cross_entropy, partial logits": (
            F.cross_entropy,
            dict(logits=(LOGITS, SUM), target=(TOKENS, R)),
            r"cross_entropy: logits must be .* over mesh dimension 0 \(got Partial\(\)\)",
        ),
        "cross_entropy with a group": (
            partial(F.cross_entropy, group="0", classes=22),
            dict(logits=(LOGITS, Shard(2)), target=(TOKENS, R)),
            "cross_entropy: group must be '' for DTensors, which know their mesh",
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
    }
)
