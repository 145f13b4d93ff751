"""Rules of all operators but the losses and the experts, for test_dtensor.py."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from dtensor_checks import GATHER, REDUCE, SUM, DTensorCases, R, bound, check_row, randn, spread
from torch import Tensor
from torch.distributed.tensor import Placement, Shard

from liger_ops import functional as F
from liger_ops.distributed._sharding import RULES, Layout
from liger_ops.reference import operators
from tests.support.calls import ROWS, Row, has_rows, row_of
from tests.support.pairs import pairs_of
from tests.support.rows import first_of

CASES = DTensorCases()
case = CASES.case

# Sizes that do not divide by four devices.
X, W = randn(5, 7, 24), randn(24)
BY_ROWS = {"replicated": R, "by batch": Shard(0), "by sequence": Shard(1)}

# ---- Calls of calls.py, whose inputs are rows


def is_of_rows(row: Row) -> bool:
    """A gate before a GEMM may be sharded by batch alone: see GEMMs below."""
    of_rows = operators()[row.op].rows > 0 or row.op == "log_probs"
    return of_rows and has_rows(row) and row.op not in ("swiglu_linear", "geglu_linear")


def add_row(row: Row, where: str, inputs: Placement | dict[str, Placement], **more: Any) -> None:
    """Of several calls of an operator, each has its number."""
    same = [other for other in ROWS if other.op == row.op]
    number = next((i for i, other in enumerate(same) if other is row), 0)
    CASES.add(f"{row.op}{f' {number}' * bool(number)} {where}", check_row, row=row, inputs=inputs, **more)


# Samples and states must be whole.
SPLIT_PARTS = dict(sizes=[2, 2, 8, 4], groups=2)
CONVOLUTIONS = [
    row_of("causal_conv1d", "bias"),
    row_of("causal_conv1d_split", "bias", SPLIT_PARTS),
    row_of("short_conv", "bias"),
]
FIRST = [row for row in first_of(ROWS) if "conv" not in row.op] + CONVOLUTIONS
for row in filter(is_of_rows, ROWS):
    quick = [*BY_ROWS] if any(row is first for first in FIRST) else ["by sequence"]
    for where, p in BY_ROWS.items():
        add_row(row, where, p, thorough=where not in quick)


def layouts_of(op: str, row: Row) -> list[Layout]:
    """What a rule lists for a call of the row. Backward's other tensors are like the first, and all gradients wanted."""
    call, rule = bound(row), RULES[op]
    like_first = SimpleNamespace(ndim=call.tensors[0].ndim, placements=[R])
    given = {a.name: like_first for a in rule.overload._schema.arguments if "Tensor" in str(a.type) and op != row.op}
    given |= row.options | dict(zip(call.names, call.tensors))
    return [*rule.layouts(**rule.defaults | dict(wanted=-1) | given)]


for row in FIRST:
    call, backward = bound(row), RULES.get(f"_{row.op}_bwd")
    columns = Shard(call.tensors[0].ndim - 1)
    if "conv" in row.op:
        for where in ("replicated", "by batch"):
            add_row(row, where, BY_ROWS[where])
    for results, inputs in layouts_of(row.op, row) if row.op in RULES else ():
        if inputs[call.names[0]] == columns:
            add_row(row, "by columns", inputs, results=results)
    if is_of_rows(row) and backward is not None and backward.reduced:
        # As a column-parallel linear layer's backward returns upstream gradients.
        linear = any(SUM in inputs.values() for _, inputs in layouts_of(f"_{row.op}_bwd", row))
        sums = dict(gradients=SUM) if linear else dict(backward=len(call.differentiable(*call.tensors)))
        add_row(row, "with a partial upstream gradient", R, upstream=SUM, **sums)

# The rows are gathered, and in backward again.
case(
    "rms_norm by columns",
    F.rms_norm,
    dict(x=(X, Shard(2)), weight=(W, R)),
    R,
    forward={GATHER: 1},
    backward={GATHER: 1},
)

# ---- Rope, alone and after the norms of q and k

Q, K = randn(5, 6, 7, 8).transpose(1, 2), randn(5, 6, 4, 8).transpose(1, 2)  # (B, H, S, D)
COS, SIN = randn(6, 8), randn(6, 8) + 1
OF_HEADS = dict(q_weight=(randn(8), R), k_weight=(randn(8) + 1, R))


def rotary_cases(
    where: str, q: Placement, k: Placement, angles: Placement = R, cos: Tensor = COS, sin: Tensor = SIN
) -> None:
    heads = dict(q=(Q, q), k=(K, k))
    given = heads | dict(cos=(cos, angles), sin=(sin, angles))
    last = heads | dict(cos=(cos[..., :3], angles), sin=(sin[..., :3], angles))
    case(f"rope {where}", F.rope, given, [q, k])
    case(f"rope into halves {where}", partial(F.rope, halves_out=True), given, [q, k])
    case(f"rope of the last pairs {where}", partial(F.rope, trailing=True), last, [q, k])
    case(f"qk_norm_rope {where}", F.qk_norm_rope, given | OF_HEADS, [q, k])


rotary_cases("replicated", R, R)
rotary_cases("by batch", Shard(0), Shard(0))
rotary_cases("by heads", Shard(1), Shard(1))
rotary_cases("by sequence", Shard(2), Shard(2), Shard(0))
rotary_cases("by heads, one for all", Shard(1), R)
rotary_cases("by batch, with its positions", Shard(0), Shard(0), Shard(0), randn(5, 6, 8), randn(5, 6, 8) + 1)

# ---- Embedding

IDS = torch.randint(10, (5, 7), generator=torch.Generator().manual_seed(0))
for padding in (None, 3):
    given = dict(input=(IDS, R), weight=(randn(10, 24), Shard(1)))
    name = f"embedding by columns{' with padding' * (padding is not None)}"
    case(name, F.embedding, given, Shard(2), padding_idx=padding)

# ---- Divergences

STUDENT, TEACHER = (randn(5, 7, 24 + i)[..., :24].log_softmax(-1) for i in range(2))
LABELS = torch.randint(-1, 3, (5, 7), generator=torch.Generator().manual_seed(0))
DIVERGENCES, REDUCTIONS = (F.kl_div, F.jsd, F.tvd), ("none", "sum", "mean", "batchmean")
PAIRS = pairs_of(BY_ROWS, DIVERGENCES, REDUCTIONS, (False, True))
for where, p in BY_ROWS.items():
    for op in DIVERGENCES:
        for reduction in REDUCTIONS:
            for labels in ({}, dict(shift_labels=(LABELS, p))):
                mean, sharded = reduction in ("mean", "batchmean"), p != R
                first_only = op is F.kl_div and reduction == "batchmean" and not labels and p == Shard(1)
                # Each direction needs the divisor of all devices.
                divisor = {REDUCE: 1} if mean and sharded and not first_only else {}
                case(
                    f"{op.__name__}, {reduction} {'with labels ' * bool(labels)}{where}", op,
                    dict(input=(STUDENT, p), target=(TEACHER, p), **labels),
                    p if reduction == "none" else SUM if sharded else R, forward=divisor, backward=divisor,
                    thorough=(where, op, reduction, bool(labels)) not in PAIRS and not first_only,
                    reduction=reduction, ignore_index=-1,
                )  # fmt: skip

# ---- Routers, and log-probabilities of several ids

GIVEN = torch.arange(5 * 7 * 2).view(5, 7, 2) % 24


def weights_of(logits: Tensor, experts: Tensor) -> Tensor:
    return F.moe_router(logits, 2, score="sqrtsoftplus", experts=experts).weights


def differentiable_routing(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found = F.moe_router(logits, 3, statistics=True)
    return found.weights, found.scores, found.z


for where, p in BY_ROWS.items():
    total, given = R if p == R else SUM, dict(logits=(X, p), experts=(GIVEN, p))
    case(f"moe_router with statistics {where}", differentiable_routing, dict(logits=(X, p)), [p, total, total])
    case(f"moe_router of given experts {where}", weights_of, given, p)
    ids = dict(logits=(STUDENT, p), index=(GIVEN, p))
    case(f"log_probs of 2 ids {where}", partial(F.log_probs, entropy=True), ids, p)

# ---- GEMMs

GATE, DOWN = randn(4, 6, 16), randn(12, 16)
for where, op, p, weight, result in (
    ("by batch", F.swiglu_linear, Shard(0), R, Shard(0)),
    ("by batch", F.geglu_linear, Shard(0), R, Shard(0)),
    ("by columns", F.swiglu_linear, Shard(2), Shard(1), SUM),
    ("with a sharded weight", F.swiglu_linear, R, Shard(0), Shard(2)),
):
    case(f"{op.__name__} {where}", op, dict(gate=(GATE, p), up=(GATE + 1, p), weight=(DOWN, weight)), result)


def adapted(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return F.lora_linear(x, weight, [a], [b], [0.5], bias)


LORA = dict(weight=(randn(12, 24), R), a=(randn(3, 24), R), b=(randn(12, 3), R), bias=(randn(12), R))


def product_of_partial_sums(mesh: Any) -> None:
    a, b = randn(8, 12), randn(12, 4)
    found = torch.ops.liger._mm(spread(a, mesh, [SUM]), spread(b, mesh, [SUM]))
    torch.testing.assert_close(found.full_tensor(), a @ b)


CASES.add("GEMM of partial sums", product_of_partial_sums)

# ---- A mesh of two dimensions

rows, columns = [Shard(0), Shard(1)], [Shard(0), Shard(2)]
case("rms_norm by batch and sequence", F.rms_norm, dict(x=(X, rows), weight=(W, [R, R])), [rows])
case("swiglu by batch and columns", F.swiglu, dict(gate=(X, columns), up=(X, columns)), [columns])

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


CASES.add("compiled with fullgraph", compiled)

# ---- Layouts that no rule lists


def quantised(mesh: Any, op: Any, placement: Placement, results: list[Placement]) -> None:
    whole = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(0))
    found = op(spread(whole, mesh, [placement]))
    for t, expected, p in zip(found, op(whole), results, strict=True):
        assert [*t.placements] == [p]
        local = spread(expected.float(), mesh, [p]).to_local()
        assert torch.equal(t.to_local().float(), local)


for op, p, results in (
    (F.quantize_rows, R, [R, R]),
    (F.quantize_rows, Shard(0), [Shard(0), Shard(0)]),
    (F.quantize_rows, Shard(1), [Shard(1), Shard(1)]),
    (F.quantize_blocks, Shard(0), [Shard(0), Shard(0)]),
    (F.quantize_columns, R, [R, R]),
    (F.quantize_columns, Shard(2), [Shard(0), Shard(0)]),
    (F.quantize_both, R, [R, R, R, R]),
):
    CASES.add(f"{op.__name__} of {p}", quantised, op=op, placement=p, results=results)

IN_FP8 = dict(x=(randn(4, 16), Shard(0)), weight=(randn(32, 16), R))
CASES.refuse({
    "quantize_rows by columns": (F.quantize_rows, dict(x=(X, Shard(2))), "quantize_rows: x must be"),
    "quantize_blocks by columns": (F.quantize_blocks, dict(x=(X, Shard(2))), "quantize_blocks: x must be"),
    "quantize_blocks, squares by rows": (
        lambda x: F.quantize_blocks(x, block="128x128"), dict(x=(X, Shard(0))), "quantize_blocks: x must be",
    ),
    "quantize_columns by rows": (F.quantize_columns, dict(x=(X, Shard(0))), "quantize_columns: x must be"),
    "quantize_both by rows": (F.quantize_both, dict(x=(X, Shard(0))), "quantize_both: x must be"),
    "fp8_linear": (F.fp8_linear, IN_FP8, "fp8_linear: x must be a plain tensor"),
    "fp8_linear, with gradients": (
        lambda x, weight: F.fp8_linear(x.to_local(), weight.requires_grad_()), IN_FP8,
        "fp8_linear: weight must be a plain tensor",
    ),
    "fp8_projections, with gradients": (
        lambda x, weight: F.fp8_projections(x.to_local(), [weight.requires_grad_()] * 2, []), IN_FP8,
        r"fp8_projections: weights\[0\] must be a plain tensor",
    ),
    "fp8_projections": (
        lambda x, weight: F.fp8_projections(x, [weight, weight], []),
        IN_FP8 | dict(x=(randn(4, 16), R)),
        "fp8_projections: x must be a plain tensor",
    ),
})  # fmt: skip

ROWS_ONLY = r"Replicate\(\) or Shard\(0\) or Shard\(1\) over mesh dimension 0"
CASES.refuse({
    "rms_norm, sharded weight": (
        F.rms_norm, dict(x=(X, Shard(1)), weight=(W, Shard(0))),
        r"rms_norm: weight must be Replicate\(\) over mesh dimension 0 \(got Shard\(0\)\)",
    ),
    "rms_norm, partial x": (
        F.rms_norm, dict(x=(X, SUM), weight=(W, R)), rf"rms_norm: x must be {ROWS_ONLY} \(got Partial\(\)\)",
    ),
    "lora_linear, x by columns": (
        adapted, dict(x=(X, Shard(2)), **LORA),
        r"lora_linear: x must be Replicate\(\) or sharded along rows over mesh dimension 0 \(got Shard\(2\)\)",
    ),
    "lora_linear, sharded adapter": (
        adapted, dict(x=(X, R), **LORA | dict(a=(LORA["a"][0], Shard(0)))),
        r"lora_linear: a\[0\] must be Replicate\(\) over mesh dimension 0 \(got Shard\(0\)\)",
    ),
    "swiglu, partial up": (
        F.swiglu, dict(gate=(X, R), up=(X, SUM)), r"swiglu: up must be .* over mesh dimension 0 \(got Partial\(\)\)",
    ),
    "swiglu_packed by columns": (
        F.swiglu_packed, dict(gate_up=(X, Shard(2))),
        rf"swiglu_packed: gate_up must be {ROWS_ONLY} \(got Shard\(2\)\)",
    ),
    "swiglu, two ways": (
        F.swiglu, dict(gate=(X, Shard(0)), up=(X, Shard(1))),
        r"swiglu: up must be Shard\(0\) over mesh dimension 0 \(got Shard\(1\)\)",
    ),
})  # fmt: skip
