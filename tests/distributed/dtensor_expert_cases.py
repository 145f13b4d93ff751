"""Rules of the experts, for test_dtensor.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from dtensor_checks import REDUCE, SUM, DTensorCases, R, collectives, gradients_of, partial_upstream, randn, spread
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from liger_ops import functional as F

CASES = DTensorCases()
case, case_2d = CASES.case, CASES.case_2d

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


def expert_layouts(of: str, interleaved: bool, transposed: bool, tokens: dict[str, Tensor]) -> dict[str, Placement]:
    parameters = ("gate_up", "down", "gate_up_bias", "down_bias", *EXPERT_ADAPTERS)
    found = dict.fromkeys((*tokens, *parameters), R)
    if of == "token":
        return found | dict.fromkeys(tokens, Shard(0))
    if of == "expert":
        return found | dict.fromkeys(parameters, Shard(0))
    if of == "inner size":
        kind, columns, rows = Shard if interleaved else STRIDED.get, 1 + transposed, 2 - transposed
        return found | dict(
            gate_up=kind(columns), down=Shard(rows), gate_up_bias=kind(1), gate_up_b=kind(1), down_a=Shard(2)
        )
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
    adapted = tokens | expert_weights(False) | EXPERT_ADAPTERS
    for kind in kinds:
        layout = expert_layouts(kind, False, False, tokens)
        case(
            f"{op.__name__}, adapters, by {kind}", op, adapted, layout, RESULTS[kind], gate_up_scale=0.5, down_scale=2.0
        )
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

CASES.refuse(
    {
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
    }
)
