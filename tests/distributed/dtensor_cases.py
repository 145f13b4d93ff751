"""Rules of all operators but the losses and the experts, for test_dtensor.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from dtensor_checks import GATHER, REDUCE, SUM, DTensorCases, R, partial_upstream, randn, spread
from pairs import pairs_of
from torch import Tensor
from torch.distributed.tensor import Placement, Shard

from liger_ops import functional as F

CASES = DTensorCases()
case, case_2d = CASES.case, CASES.case_2d

# Sizes that do not divide by four devices.
X, W, B = randn(5, 7, 24), randn(24), randn(24) + 1
DECAY = dict(a_log=randn(24), dt_bias=randn(24))
NUMBERS = dict(alpha_p=randn(1), alpha_n=randn(1))
STREAMS = randn(5, 7, 4, 24)
HYPER = dict(fn=randn(24, 4 * 24) / 10, base=randn(24), scale=randn(3))
hyper_pre = partial(F.hyper_pre, norm_eps=1e-5, eps=1e-4, sinkhorn=3)

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
    case(f"rms_norm_gated {where}", F.rms_norm_gated, dict(x=X, gate=X + 1, weight=W), dict(x=p, gate=p, weight=R), p)
    case(
        f"sigmoid_gate with numbers of rows and a residual {where}",
        F.sigmoid_gate,
        dict(x=X, gate=X[..., :1] + 1, residual=X - 1),
        dict(x=p, gate=p, residual=p),
        p,
    )
    case(
        f"hyper_pre {where}",
        hyper_pre,
        dict(streams=STREAMS, **HYPER),
        dict(streams=p, fn=R, base=R, scale=R),
        [p, p, p],
    )
    case(
        f"hyper_post {where}",
        F.hyper_post,
        dict(y=X, streams=STREAMS, post=randn(5, 7, 4), comb=randn(5, 7, 4, 4)),
        dict(y=p, streams=p, post=p, comb=p),
        p,
    )
    for op in (F.swiglu_packed, F.geglu_packed):
        case(f"{op.__name__} {where}", op, dict(gate_up=X), dict(gate_up=p), p)
    case(f"limited swiglu {where}", partial(F.swiglu, limit=0.5), dict(gate=X, up=X + 1), dict(gate=p, up=p), p)

for where, p, column in (("replicated", R, R), ("by batch", Shard(0), R), ("by columns", Shard(2), Shard(0))):
    case(
        f"causal_conv1d {where}",
        F.causal_conv1d,
        dict(x=X, weight=randn(24, 4), bias=B),
        dict(x=p, weight=column, bias=column),
        p,
    )

for where, p in {"replicated": R, "by batch": Shard(0)}.items():
    case(
        f"causal_conv1d_split {where}",
        partial(F.causal_conv1d_split, sizes=[2, 2, 4, 4], groups=2),
        dict(x=X, weight=randn(16, 4), bias=randn(16)),
        dict(x=p, weight=R, bias=R),
        [p] * 4,
    )
    case(
        f"short_conv {where}",
        F.short_conv,
        dict(bcx=X, weight=randn(8, 3), bias=randn(8)),
        dict(bcx=p, weight=R, bias=R),
        p,
    )

for where, p in {"replicated": R, "by batch": Shard(0), "by sequence": Shard(1), "by columns": Shard(2)}.items():
    for op in (F.swiglu, F.geglu):
        case(f"{op.__name__} {where}", op, dict(gate=X, up=X + 1), dict(gate=p, up=p), p)
    case(f"relu_squared {where}", F.relu_squared, dict(x=X), dict(x=p), p)
    case(f"sigmoid_gate {where}", F.sigmoid_gate, dict(x=X, gate=X + 1), dict(x=p, gate=p), p)
    case(f"xielu {where}", F.xielu, dict(x=X, **NUMBERS), dict(x=p, alpha_p=R, alpha_n=R), p)
    heads = Shard(0) if p == Shard(2) else R
    case(
        f"delta_gates {where}",
        F.delta_gates,
        dict(a=X, b=X + 1, **DECAY),
        dict(a=p, b=p, a_log=heads, dt_bias=heads),
        [p, p],
    )

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
    case(f"rope into halves {where}", partial(F.rope, halves_out=True), tensors, placements, [q, k])
    last = tensors | dict(cos=cos[..., :3], sin=sin[..., :3])
    case(f"rope of the last pairs {where}", partial(F.rope, trailing=True), last, placements, [q, k])
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
for padding in (None, 3):
    for where, rows, columns, result in (("batch", Shard(0), R, Shard(0)), ("columns", R, Shard(1), Shard(2))):
        case(
            f"embedding by {where}{' with padding' * (padding is not None)}", F.embedding,
            dict(input=IDS, weight=randn(10, 24)), dict(input=rows, weight=columns), result, padding_idx=padding,
        )  # fmt: skip

# ---- Divergences and log-probabilities

STUDENT, TEACHER = (randn(5, 7, 24 + i)[..., :24].log_softmax(-1) for i in range(2))
LABELS = torch.randint(-1, 3, (5, 7), generator=torch.Generator().manual_seed(0))
ROWS, REDUCTIONS = (
    {"replicated": R, "by batch": Shard(0), "by sequence": Shard(1)},
    ("none", "sum", "mean", "batchmean"),
)
PAIRS = pairs_of(ROWS, (F.kl_div, F.jsd, F.tvd), REDUCTIONS, (False, True))
for where, p in ROWS.items():
    for op in (F.kl_div, F.jsd, F.tvd):
        tensors = dict(input=STUDENT, target=TEACHER)
        for reduction in REDUCTIONS:
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
                    thorough=(where, op, reduction, bool(labels)) not in PAIRS and not first_only,
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


GIVEN = torch.arange(5 * 7 * 2).view(5, 7, 2) % 24


def weights_of(logits: Tensor, experts: Tensor) -> Tensor:
    return F.moe_router(logits, 2, score="sqrtsoftplus", experts=experts).weights


def differentiable_routing(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found = F.moe_router(logits, 3, statistics=True)
    return found.weights, found.scores, found.z


for where, p in {"replicated": R, "by batch": Shard(0), "by sequence": Shard(1)}.items():
    total = R if p == R else SUM
    case(f"moe_router {where}", differentiable_routing, dict(logits=X), dict(logits=p), [p, total, total])
    case(
        f"moe_router of given experts {where}", weights_of, dict(logits=X, experts=GIVEN), dict(logits=p, experts=p), p
    )

# ---- GEMMs

GATE, DOWN = randn(4, 6, 16), randn(12, 16)
for op in (F.swiglu_linear, F.geglu_linear):
    case(
        f"{op.__name__} by batch",
        op,
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


def adapted(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return F.lora_linear(x, weight, [a], [b], [0.5], bias)


LORA = dict(weight=randn(12, 24), a=randn(3, 24), b=randn(12, 3), bias=randn(12))
for where, p in {"replicated": R, "by batch": Shard(0), "by sequence": Shard(1)}.items():
    case(f"lora_linear {where}", adapted, dict(x=X, **LORA), dict(x=p, **dict.fromkeys(LORA, R)), p)


def product_of_partial_sums(mesh: Any) -> None:
    a, b = randn(8, 12), randn(12, 4)
    found = torch.ops.liger._mm(spread(a, mesh, [SUM]), spread(b, mesh, [SUM]))
    torch.testing.assert_close(found.full_tensor(), a @ b)


CASES.add("GEMM of partial sums", product_of_partial_sums)

# ---- Upstream gradients that are partial sums, as a column-parallel linear layer's backward returns them

for op, tensors, gradients, wanted in (
    (F.rms_norm, dict(x=X, weight=W), [R, R], {REDUCE: 1}),
    (F.rms_norm_gated, dict(x=X, gate=X + 1, weight=W), [R, R, R], {REDUCE: 1}),
    (F.layer_norm, dict(x=X, weight=W, bias=B), [R, R, R], {REDUCE: 1}),
    (F.swiglu, dict(gate=X, up=X + 1), [SUM, SUM], {}),
    (F.sigmoid_gate, dict(x=X, gate=X + 1), [SUM, SUM], {}),
    (F.swiglu_packed, dict(gate_up=X), [SUM], {}),
    (F.relu_squared, dict(x=X), [SUM], {}),
    (F.xielu, dict(x=X, **NUMBERS), [SUM, SUM, SUM], {}),
):
    CASES[f"{op.__name__}, partial upstream gradient"] = partial(
        partial_upstream, op=op, tensors=tensors, gradients=gradients, collectives_wanted=wanted
    )


# ---- A mesh of two dimensions

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

CASES.refuse(
    {
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
        "lora_linear, x by columns": (
            adapted,
            dict(x=(X, Shard(2)), **{name: (t, R) for name, t in LORA.items()}),
            r"lora_linear: x must be Replicate\(\) or sharded along rows over mesh dimension 0 \(got Shard\(2\)\)",
        ),
        "lora_linear, sharded adapter": (
            adapted,
            dict(x=(X, R), **{name: (t, Shard(0) if name == "a" else R) for name, t in LORA.items()}),
            r"lora_linear: a\[0\] must be Replicate\(\) over mesh dimension 0 \(got Shard\(0\)\)",
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
        "swiglu, two ways": (
            F.swiglu,
            dict(gate=(X, Shard(0)), up=(X, Shard(1))),
            r"swiglu: up must be Shard\(0\) over mesh dimension 0 \(got Shard\(1\)\)",
        ),
    }
)
