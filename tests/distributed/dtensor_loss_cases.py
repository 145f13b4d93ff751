"""Rules of the losses, for test_dtensor.py: rows over some mesh dimensions, classes over one."""

from __future__ import annotations

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
case = CASES.case

TOKENS = torch.randint(22, (5, 8), generator=torch.Generator().manual_seed(1)).masked_fill(torch.eye(5, 8).bool(), -100)
SEVERAL = torch.stack([TOKENS] * 3, -1)
LOGITS, HIDDEN, HEAD, HEAD_BIAS = randn(5, 8, 22), randn(5, 8, 24), randn(22, 24), randn(22)
TEACHER, TEACHER_HEAD = randn(5, 8, 16), randn(22, 16)
MASK, FACTORS = TOKENS != -100, randn(5, 8).abs()
REDUCTIONS = ("mean", "sum", "none")
# The placements of the hidden states and of the head.
HEADS = {
    "replicated": (R, R), "by batch": (Shard(0), R), "by sequence": (Shard(1), R), "by class": (R, Shard(0)),
    "by class and sequence": (Shard(1), Shard(0)),
}  # fmt: skip


def of_loss(rows: Placement, reduction: str) -> dict[str, Any]:
    """The placement of the loss and the collectives of forward, in which devices add up the divisors of a mean. The facts
    about classes are gathered inside the operator."""
    sharded = rows != R
    results = rows if reduction == "none" else SUM if sharded else R
    return dict(results=results, forward={REDUCE: 1} if reduction == "mean" and sharded else {}, reduction=reduction)


def log_probs(**given: Any) -> tuple[Tensor, ...]:
    return F.fused_linear_log_probs(**given, entropy=True)[:2]


def linear_divergence(**given: Any) -> Tensor:
    return F.fused_linear_divergence(**given, beta=0.3).divergence


for where, p in {"replicated": R, "by batch": Shard(0), "by sequence": Shard(1), "by class": Shard(2)}.items():
    rows = R if p == Shard(2) else p
    for reduction in REDUCTIONS:
        case(
            f"cross_entropy {where}, {reduction}", F.cross_entropy, dict(logits=(LOGITS, p), target=(TOKENS, rows)),
            **of_loss(rows, reduction), label_smoothing=0.1, lse_square_scale=1e-2,
        )  # fmt: skip
for where, (x, w) in HEADS.items():
    rows = R if w == Shard(0) else x
    student = dict(input=(HIDDEN, x), weight=(HEAD, w))
    biased = student | dict(bias=(HEAD_BIAS, w))
    models = dict(
        s_input=(HIDDEN, x), t_input=(TEACHER, x), mask=(MASK, rows), token_weight=(FACTORS, rows), s_weight=(HEAD, w),
        t_weight=(TEACHER_HEAD, w), s_bias=(HEAD_BIAS, w), t_bias=(HEAD_BIAS, w),
    )  # fmt: skip
    for reduction in REDUCTIONS:
        of_one, loss = biased | dict(target=(TOKENS, rows)), of_loss(rows, reduction)
        case(
            f"fused_linear_cross_entropy {where}, {reduction}",
            F.fused_linear_cross_entropy,
            of_one,
            **loss,
            softcap=5.0,
        )
        case(f"fused_linear_divergence {where}, {reduction}", linear_divergence, models, **loss)
    for name, ids in {"1 id": TOKENS, "3 ids": SEVERAL}.items():
        case(f"fused_linear_log_probs {where}, {name}", log_probs, biased | dict(target=(ids, rows)), rows, softcap=5.0)
for where in ("by batch", "by class"):
    x, w = HEADS[where]
    given = dict(
        input=(HIDDEN, x), weight=(HEAD, w), target=(TOKENS, x), low_rank_input=(randn(5, 8, 3), x),
        low_rank_weight=(randn(22, 3), w),
    )  # fmt: skip
    case(f"fused_linear_cross_entropy with a low-rank addend {where}", F.fused_linear_cross_entropy, given,
         **of_loss(x, "sum"), softcap=5.0)  # fmt: skip
    case(f"fused_linear_log_probs with a low-rank addend {where}", log_probs, given, x, softcap=5.0)
case(
    "fused_linear_divergence with a map by batch", lambda **given: F.fused_linear_divergence(**given).divergence,
    dict(
        s_input=(HIDDEN, Shard(0)), t_input=(TEACHER, Shard(0)), s_weight=(HEAD, R), t_weight=(randn(50, 16), R),
        vocab_map=(2 * torch.arange(22), R),
    ),
    **of_loss(Shard(0), "mean"),
)  # fmt: skip

# ---- A mesh of two dimensions

rows, by_row, by_class = [Shard(0), Shard(1)], [Shard(0), R], [R, Shard(0)]
case(
    "fused_linear_divergence by batch, sequence and class", linear_divergence,
    dict(
        s_input=(HIDDEN, rows), t_input=(TEACHER, rows), mask=(MASK, by_row), s_weight=(HEAD, by_class),
        t_weight=(TEACHER_HEAD, by_class),
    ),
    [[SUM, R]], forward={REDUCE: 1}, reduction="mean",
)  # fmt: skip
case(
    "fused_linear_cross_entropy by batch, sequence and class", F.fused_linear_cross_entropy,
    dict(input=(HIDDEN, rows), weight=(HEAD, by_class), target=(TOKENS, by_row)), [[SUM, R]], forward={REDUCE: 1},
)  # fmt: skip
case(
    "cross_entropy by batch and class", F.cross_entropy,
    dict(logits=(LOGITS, [Shard(0), Shard(2)]), target=(TOKENS, by_row)), [[SUM, R]], forward={REDUCE: 1},
)  # fmt: skip
case(
    "cross_entropy by batch and sequence", F.cross_entropy, dict(logits=(LOGITS, rows), target=(TOKENS, rows)),
    [[SUM, SUM]], forward={REDUCE: 2},
)  # fmt: skip


def classes_over_two_dimensions(mesh: Any) -> None:
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    message = r"cross_entropy: logits must .* over one mesh dimension only, over mesh dimension 'tp' \(got Shard\(2\)\)"
    refused(two, F.cross_entropy, dict(logits=(LOGITS, Shard(2)), target=(TOKENS, R)), message)


CASES.add("refused: cross_entropy, classes over two dimensions", classes_over_two_dimensions)

# ---- Frozen heads, whose gradient of the hidden states forward prepares

LEARNED = HIDDEN.clone().requires_grad_()
for where, (x, w) in HEADS.items():
    rows = R if w == Shard(0) else x
    for name, ids in {"1 id": TOKENS, "3 ids": SEVERAL}.items():
        given = dict(input=(LEARNED, x), weight=(HEAD, w), target=(ids, rows))
        case(
            f"fused_linear_log_probs, frozen head {where}, {name}",
            log_probs,
            given,
            rows,
            gradients=x,
            entropy_grad=True,
        )
for where in ("by sequence", "by class and sequence"):
    x, w = HEADS[where]
    given = dict(s_input=(LEARNED, x), s_weight=(HEAD, w), t_input=(TEACHER, x), t_weight=(TEACHER_HEAD, w))
    case(f"fused_linear_divergence, frozen head {where}", partial(F.fused_linear_divergence, mask=MASK), given,
         R if w == Shard(0) else x, gradients=x)  # fmt: skip

# ---- Metrics, plain tensors beside DTensors, and torch's own ways to call

for op in (F.fused_linear_cross_entropy_with_metrics, F.fused_linear_cross_entropy_with_log_probs):
    case(f"{op.__name__} by class and sequence", op,
         dict(input=(HIDDEN, Shard(1)), weight=(HEAD, Shard(0)), target=(TOKENS, R)), R)  # fmt: skip
case("cross_entropy_with_metrics by class", F.cross_entropy_with_metrics,
     dict(logits=(LOGITS, Shard(2)), target=(TOKENS, R)), R)  # fmt: skip


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

CASES.refuse({
    "cross_entropy, partial logits": (
        F.cross_entropy, dict(logits=(LOGITS, SUM), target=(TOKENS, R)),
        r"cross_entropy: logits must be .* over mesh dimension 0 \(got Partial\(\)\)",
    ),
    "cross_entropy with a group": (
        partial(F.cross_entropy, group="0", classes=22), dict(logits=(LOGITS, Shard(2)), target=(TOKENS, R)),
        "cross_entropy: group must be '' for DTensors, which know their mesh",
    ),
    "fused_linear_cross_entropy by hidden": (
        F.fused_linear_cross_entropy, dict(input=(HIDDEN, Shard(2)), weight=(HEAD, Shard(1)), target=(TOKENS, R)),
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
            s_input=(HIDDEN[:, :7], Shard(1)), s_weight=(HEAD, Shard(0)), t_input=(TEACHER[:, :7], Shard(1)),
            t_weight=(TEACHER_HEAD, Shard(0)),
        ),
        r"fused_linear_divergence: s_input must have a multiple of \d positions along the sharded dimension 1 \(got 7\)",
    ),
})  # fmt: skip
