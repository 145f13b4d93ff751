"""Rules of the experts, for test_dtensor.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from dtensor_checks import REDUCE, SUM, DTensorCases, Given, R, collectives, gradients_of, randn, spread
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from liger_ops import functional as F

CASES = DTensorCases()
case = CASES.case

# Not divisible by four devices: the last one has no expert. Some ids are of no expert.
TOKEN_COUNT, EXPERTS, INNER, CHOICES = 11, 5, 8, 3
ROUTES = torch.randint(-1, EXPERTS + 1, (TOKEN_COUNT, CHOICES), generator=torch.Generator().manual_seed(2))
ROUTED = dict(x=randn(TOKEN_COUNT, 24), index=ROUTES, weight=randn(TOKEN_COUNT, CHOICES))
SORTED = dict(x=randn(TOKEN_COUNT, 24), tokens_per_expert=torch.tensor([3, 0, 4, 1, 2]))
STRIDED = {dim: _StridedShard(dim, split_factor=2) for dim in (1, 2)}


def expert_weights(transposed: bool) -> dict[str, Tensor]:
    found = dict(gate_up=randn(EXPERTS, 2 * INNER, 24), down=randn(EXPERTS, 24, INNER))
    return {name: w.transpose(1, 2).contiguous() if transposed else w for name, w in found.items()}


EXPERT_ADAPTERS = dict(
    gate_up_a=randn(EXPERTS, 2, 24), gate_up_b=randn(EXPERTS, 2 * INNER, 2), down_a=randn(EXPERTS, 3, INNER),
    down_b=randn(EXPERTS, 24, 3),
)  # fmt: skip


def placed(tensors: dict[str, Tensor], layout: Mapping[str, Any], otherwise: Any = R) -> Given:
    return {name: (t, layout.get(name, otherwise)) for name, t in tensors.items()}


def expert_layouts(of: str, tensors: dict[str, Tensor], interleaved: bool = False, transposed: bool = False) -> Given:
    tokens = ("x", "index", "weight", "tokens_per_expert")
    kind, columns, rows = Shard if interleaved else STRIDED.get, 1 + transposed, 2 - transposed
    layouts = {
        "nothing": {}, "token": dict.fromkeys(tokens, Shard(0)), "expert": {n: Shard(0) for n in tensors if n not in tokens},
        "inner size": dict(
            gate_up=kind(columns), down=Shard(rows), gate_up_bias=kind(1), gate_up_b=kind(1), down_a=Shard(2)
        ),
    }  # fmt: skip
    return placed(tensors, layouts[of])


EXPERT_BIASES = dict(gate_up_bias=randn(EXPERTS, 2 * INNER), down_bias=randn(EXPERTS, 24))
RESULTS = {"nothing": R, "token": Shard(0), "expert": SUM, "inner size": SUM}
for op, tokens in ((F.moe_experts, ROUTED), (F.moe_experts_sorted, SORTED)):
    kinds = [kind for kind in RESULTS if kind != "token" or op is F.moe_experts]
    for interleaved, transposed, biases in ((False, False, {}), (True, True, EXPERT_BIASES)):
        options = dict(interleaved=interleaved, transposed=transposed)
        weights = tokens | expert_weights(transposed) | biases
        name = f"{op.__name__}, {'interleaved, transposed, biases' if biases else 'halves'}"
        layouts = {kind: expert_layouts(kind, weights, **options) for kind in kinds}
        for kind, given in layouts.items():
            case(f"{name}, by {kind}", op, given, RESULTS[kind], **options)
        for pair in itertools.combinations(kinds[1:], 2):
            both = {n: (t, [layouts[kind][n][1] for kind in pair]) for n, t in weights.items()}
            case(f"{name}, by {' and '.join(pair)}", op, both, [[RESULTS[kind] for kind in pair]], **options)
    halves = tokens | expert_weights(False) | EXPERT_BIASES
    case(f"{op.__name__}, halves, biases, by inner size", op, expert_layouts("inner size", halves), SUM)
    twice = {n: (t, [p, p]) for n, (t, p) in expert_layouts("expert", halves).items()}
    case(f"{op.__name__}, by expert twice", op, twice, [[SUM, SUM]])
    adapted = tokens | expert_weights(False) | EXPERT_ADAPTERS
    for kind in kinds:
        scales = dict(gate_up_scale=0.5, down_scale=2.0)
        case(f"{op.__name__}, adapters, by {kind}", op, expert_layouts(kind, adapted), RESULTS[kind], **scales)
PLAIN = ROUTED | expert_weights(False)
case(
    "moe_experts, weights first, by expert",
    partial(F.moe_experts, activation="gelu_tanh", weight_before=True),
    expert_layouts("expert", PLAIN),
    SUM,
)
for kind in ("token", "expert"):
    narrow = expert_layouts(kind, PLAIN | dict(index=ROUTES.int()))
    case(f"moe_experts, 32-bit ids, by {kind}", F.moe_experts, narrow, RESULTS[kind])
case("moe_experts, partial upstream gradient", F.moe_experts, placed(PLAIN, {}), R, upstream=SUM, gradients=R,
     backward={REDUCE: 1})  # fmt: skip


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


CASES.add("moe_experts by expert, plain tokens", experts_and_plain_tokens)


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


CASES.add("moe_experts by expert, tokens by sequence", tokens_by_sequence)


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


CASES.add("experts compiled with fullgraph", compiled_experts)

# ---- Layouts that no rule lists

NARROWER = PLAIN | dict(gate_up=PLAIN["gate_up"][:, :12], down=PLAIN["down"][..., :6])
BY_INNER = dict(gate_up=Shard(1), down=Shard(2))
CASES.refuse({
    "moe_experts, halves by Shard": (
        F.moe_experts, placed(PLAIN, BY_INNER),
        r"moe_experts: gate_up must be Replicate\(\), Shard\(0\) or _StridedShard\(1, split_factor=2\), as gate and up "
        r"are halves, over mesh dimension 0 \(got Shard\(1\)\)",
    ),
    "moe_experts, uneven inner size": (
        partial(F.moe_experts, interleaved=True), placed(NARROWER, BY_INNER),
        r"moe_experts: gate_up must have an inner size divisible by 4, not 6, over mesh dimension 0 \(got Shard\(1\)\)",
    ),
    "moe_experts, tokens and experts": (
        F.moe_experts, placed(PLAIN, {}, Shard(0)),
        r"moe_experts: x must be Replicate\(\), as experts are sharded, over mesh dimension 0 \(got Shard\(0\)\)",
    ),
    "moe_experts, one weight sharded": (
        F.moe_experts, placed(PLAIN, dict(gate_up=Shard(0))),
        r"moe_experts: down must be Shard\(0\) over mesh dimension 0 \(got Replicate\(\)\)",
    ),
    "moe_experts, partial tokens": (
        F.moe_experts, placed(PLAIN, dict(x=SUM)),
        r"moe_experts: x must be Replicate\(\) or Shard\(0\) over mesh dimension 0 \(got Partial\(\)\)",
    ),
    "moe_experts_sorted, sharded rows": (
        F.moe_experts_sorted, placed(SORTED | expert_weights(False), dict(x=Shard(0))),
        r"moe_experts_sorted: x must be Replicate\(\) over mesh dimension 0 \(got Shard\(0\)\)",
    ),
})  # fmt: skip
