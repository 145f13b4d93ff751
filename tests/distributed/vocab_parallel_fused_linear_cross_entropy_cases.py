"""Cases of the linear cross entropy with a head whose classes are split over processes, for
test_vocab_parallel_fused_linear_cross_entropy.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pairs import pairs_of
from process_group import Cases
from torch import Tensor
from vocab_parallel_checks import (
    LINEAR,
    OPTIONS,
    UNEVEN,
    check_compiled,
    check_refused,
    collectives_of,
    make_targets,
    of_linear,
    share_of,
)

from liger_ops import functional as F

CASES = Cases()
REDUCTIONS = ("mean", "sum", "none")

for reduction, label, weighted in pairs_of(REDUCTIONS, OPTIONS, (False, True)):
    of = f"{reduction}, {label}{', weighted' if weighted else ''}"
    shared: dict[str, Any] = dict(reduction=reduction, weighted=weighted, **OPTIONS[label])
    CASES.add(f"linear, {of}", of_linear, **shared, bias=weighted, token_weighted=weighted)
for name, reduction, chunks in pairs_of(LINEAR, REDUCTIONS, (False, True)):
    of = f"{name}, {reduction}{', chunks' if chunks else ''}"
    options = dict(memory_budget=24 * 16 + 4 * 320) if chunks else {}
    CASES.add(f"low-rank addend, {of}", of_linear, op=name, reduction=reduction, rank=3, bias=True, **options)
for name, reduction, dim in pairs_of(LINEAR[1:], REDUCTIONS, (None, 1)):
    of = f"{name.rpartition('with_')[2]}, {reduction}{'' if dim is None else ', sequence'}"
    options = OPTIONS["all options"] if dim is None else {}
    CASES.add(f"linear, {of}", of_linear, op=name, reduction=reduction, sequence_dim=dim, **options)
for reduction, dim in zip(REDUCTIONS, (0, 1, -2)):
    options = dict(reduction=reduction, sequence_dim=dim, shape=(6, 12))
    CASES.add(f"linear, {reduction}, sequence_dim {dim}", of_linear, **options)
# The least budget has one token per chunk; with the others there are several chunks, and two buffers.
for reduction, tokens, dim in pairs_of(REDUCTIONS, (1, 4, 16), (None, 1)):
    options = dict(memory_budget=24 * 16 + tokens * 320, sequence_dim=dim)
    small = dict(reduction=reduction, shape=(4, 6), token_weighted=True, lse_square_scale=1e-2)
    of = f"{reduction}, chunks for {tokens} tokens{'' if dim is None else ' of a sequence'}"
    CASES.add(f"linear, {of}", of_linear, **options, **small)
for label, changes in UNEVEN.items():
    CASES.add(f"linear, {label}", of_linear, bias=True, **changes)
    CASES.add(f"linear, log_probs, {label}", of_linear, op=LINEAR[2], label_smoothing=0.1, **changes)
    CASES.add(f"linear, {label}, sequence", of_linear, sequence_dim=1, **changes)
for dtype, reduction, frozen, chunks in pairs_of(
    (torch.float32, torch.bfloat16, torch.float16), ("mean", "none"), (None, "input", "weight"), (False, True)
):
    label = f"{reduction}{f', frozen {frozen}' if frozen else ''}{', sequence in chunks' if chunks else ''}"
    options = dict(dtype=dtype, reduction=reduction, frozen=(frozen,), shape=(4, 6))
    options |= dict(sequence_dim=1, memory_budget=3000) if chunks else {}
    CASES.add(f"linear, {str(dtype).removeprefix('torch.')}, {label}", of_linear, **options)


def counts_collectives(mesh: Any) -> None:
    """One gather of facts for each chunk, 12 bytes per row; the input's gradient reduced for each chunk."""
    group, ranks, rank = share_of(mesh)
    hidden, classes, shape, op = 8, 48, (4, 6), F.fused_linear_cross_entropy
    x, weight = (torch.randn(*sizes, hidden, requires_grad=True) for sizes in (shape, (classes // ranks,)))
    target = make_targets(shape, classes)
    tokens, gather = target.numel(), "allgather_base"

    def step(x: Tensor, **options: Any) -> None:
        op(x, weight, target, group=group, classes=classes, **options).sum().backward()

    assert collectives_of(partial(step, x)) == {(gather, 3 * tokens): 1, ("allreduce", 0): 1}
    assert collectives_of(partial(step, x, reduction="none")) == {(gather, 3 * tokens): 1, ("allreduce", 0): 1}
    assert collectives_of(partial(step, x.detach())) == {(gather, 3 * tokens): 1}
    part = x.detach().chunk(ranks, 1)[rank].contiguous().requires_grad_()
    found = collectives_of(partial(step, part, sequence_dim=1))
    scattered = {("reduce_scatter_base", tokens * hidden): 1, (gather, tokens * hidden // ranks): 1}
    assert found == {(gather, 3 * tokens): 1} | scattered, found


CASES.add("collectives", counts_collectives)


def refuses(mesh: Any) -> None:
    group, ranks, rank = share_of(mesh)
    x, target, weight, classes = torch.randn(2, 4), torch.zeros(2, dtype=torch.long), torch.randn(5, 4), 5 * ranks
    op, here = F.fused_linear_cross_entropy, "fused_linear_cross_entropy: "
    check_refused({
        here + f"weight must have 6 classes, those of rank {rank} of {ranks}": lambda: op(
            x, weight, target, group=group, classes=6 * ranks
        ),
        here + "sequence_dim must be a dimension of input other than the last (got 1)": lambda: op(
            x, weight, target, group=group, classes=classes, sequence_dim=1
        ),
        here + f"input must have 2 / {ranks} positions along sequence_dim, the same on every rank (got 2)": lambda: op(
            x, weight, target, group=group, classes=classes, sequence_dim=0
        ),
        here + "ce_weight must not require a gradient (got one that does)": lambda: op(
            x, weight, target, group=group, classes=classes, ce_weight=torch.ones(classes, requires_grad=True)
        ),
    })  # fmt: skip


CASES.add("arguments are refused", refuses)


def compiles(mesh: Any) -> None:
    group, ranks, rank = share_of(mesh)
    classes, device, g = 7 * ranks - 2, mesh.device_type, torch.Generator().manual_seed(1)
    head = torch.randn(classes, 8, generator=g).chunk(ranks)[rank].to(device).requires_grad_()

    def step(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.fused_linear_cross_entropy(2 * x, weight, target, group=group, classes=classes)

    def inputs(tokens: int) -> list[Tensor]:
        x = torch.randn(tokens, 8, generator=g).to(device).requires_grad_()
        return [x, head, make_targets((tokens,), classes).to(device)]

    check_compiled(step, inputs)


CASES.add("linear, compiled", compiles)

# Large enough for the logits-free path of compute capability 9.0.
for label, changes in {
    "plain": {},
    "mean of none": dict(ignored=1.0),
    "z-loss, weights": dict(lse_square_scale=1e-3, weighted=True, token_weighted=True),
    "overflow": dict(scale=60.0),
    "targets of one rank": dict(among=(0, 100)),
    "without gradients": dict(frozen=("input", "weight")),
    "without gradients, none": dict(frozen=("input", "weight"), reduction="none"),
    "frozen weight": dict(frozen=("weight",)),
    "frozen weight, overflow": dict(frozen=("weight",), scale=60.0),
    "frozen input": dict(frozen=("input",)),
    "sum": dict(reduction="sum", logits_scale=0.5),
    "fp16": dict(dtype=torch.float16),
    "bias": dict(bias=True),
    "none": dict(reduction="none"),
    "log probabilities": dict(op=LINEAR[2]),
    "metrics, softcap": dict(op=LINEAR[1], softcap=20.0, label_smoothing=0.1),
    "even": dict(classes=49152),
}.items():
    given: dict[str, Any] = dict(dtype=torch.bfloat16, shape=(2, 1024), hidden=256, classes=50257) | changes
    CASES.add(f"large, {label}", of_linear, **given)
    CASES.add(f"large, {label}, sequence", of_linear, **given, sequence_dim=1)
    CASES.add(f"large, {label}, chunks", of_linear, **given, memory_budget=110 << 20)
    CASES.add(f"large, {label}, sequence in chunks", of_linear, **given, sequence_dim=1, memory_budget=110 << 20)
    CASES.add(f"large, {label}, two buffers", of_linear, **given | dict(shape=(3, 1024)), memory_budget=260 << 20)

ON_CPU = [name for name in CASES if not name.startswith("large,")]
ON_GPUS = [name for name in CASES if name.startswith(("linear,", "large,"))]
