"""Cases of cross entropy of logits whose classes are split over processes, for test_vocab_parallel_cross_entropy.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from pairs import pairs_of
from process_group import Cases
from vocab_parallel_checks import (
    LOGITS,
    OPTIONS,
    UNEVEN,
    Split,
    check_refused,
    collectives_of,
    compare,
    make_targets,
    share_of,
)

from liger_ops import functional as F

CASES = Cases()


def of_logits(
    mesh: Any,
    op: str = LOGITS[0],
    dtype: torch.dtype = torch.float64,
    shape: Sequence[int] = (3, 5),
    classes: int = 50,
    weighted: bool = False,
    among: Sequence[int] | None = None,
    ignored: float = 0.25,
    class_sizes: Callable[[int], list[int]] | None = None,
    scale: float = 3.0,
    offset: float = 0.0,
    index_type: torch.dtype = torch.int64,
    **options: Any,
) -> None:
    device, g = mesh.device_type, torch.Generator().manual_seed(5)
    dtype = torch.float32 if device == "cuda" and dtype == torch.float64 else dtype
    logits = torch.randn((*shape, classes), generator=g, dtype=torch.float64) * scale + offset
    weight = torch.rand(classes, generator=g, dtype=torch.float64) + 0.1
    others: dict[str, Any] = dict(target=make_targets(shape, classes, among, ignored).to(device, index_type), **options)
    if weighted:
        others["weight"] = weight.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    leaves = {"logits": logits.to(device, dtype).requires_grad_()}
    sizes = class_sizes and class_sizes(mesh.size())
    compare(op, Split(mesh, classes, sizes), leaves, {"logits": len(shape)}, others, class_sizes=sizes)


for reduction, label, weighted in pairs_of(("mean", "sum", "none"), OPTIONS, (False, True)):
    of = f"{reduction}, {label}{', weighted' if weighted else ''}"
    CASES.add(f"logits, {of}", of_logits, reduction=reduction, weighted=weighted, **OPTIONS[label])
for reduction in ("mean", "sum", "none"):
    CASES.add(f"logits, metrics, {reduction}", of_logits, op=LOGITS[1], reduction=reduction, **OPTIONS["all options"])
for label, changes in UNEVEN.items():
    CASES.add(f"logits, {label}", of_logits, **changes)
    CASES.add(f"logits, metrics, {label}", of_logits, op=LOGITS[1], label_smoothing=0.1, **changes)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for label, changes in {
        "": OPTIONS["all options"],
        ", common offset": dict(label_smoothing=0.1, offset=20.0, index_type=torch.int32),
        ", confident": dict(scale=30.0),
    }.items():
        CASES.add(f"logits, {str(dtype).removeprefix('torch.')}{label}", of_logits, dtype=dtype, **changes)


def predicts_the_first_of_equals(mesh: Any) -> None:
    """Also if they belong to several ranks."""
    group, ranks, rank = share_of(mesh)
    classes, op = 5 * ranks, F.cross_entropy_with_metrics
    logits, target = torch.zeros(3, classes), torch.tensor([0, classes - 1, 3])
    logits[1, 1] = logits[1, -1] = logits[2, 3] = logits[2, 4] = 2
    device = mesh.device_type
    found = op(
        logits.chunk(ranks, 1)[rank].contiguous().to(device),
        target.to(device),
        group=group,
        classes=classes,
        reduction="none",
    )
    assert found.predicted_tokens.tolist() == [0, 1, 3] and found.token_accuracy.tolist() == [1, 0, 1]


CASES.add("logits, equal classes", predicts_the_first_of_equals)


def counts_collectives(mesh: Any) -> None:
    """One gather of facts, 12 bytes per row."""
    group, ranks, _ = share_of(mesh)
    classes, shape, op = 48, (4, 6), F.cross_entropy
    logits, target = torch.randn(*shape, classes // ranks, requires_grad=True), make_targets(shape, classes)

    def step(**options: Any) -> None:
        op(logits, target, group=group, classes=classes, **options).sum().backward()

    gather, tokens = "allgather_base", target.numel()
    assert collectives_of(step) == {(gather, 3 * tokens): 1}
    found = collectives_of(partial(step, label_smoothing=0.1, reduction="none"))
    assert found == {(gather, 4 * tokens): 1}


CASES.add("collectives", counts_collectives)


def refuses(mesh: Any) -> None:
    group, ranks, rank = share_of(mesh)
    logits, target, classes = torch.randn(2, 5), torch.zeros(2, dtype=torch.long), 5 * ranks
    op, here = F.cross_entropy, "cross_entropy: "
    check_refused({
        here + "group must be the name of a process group (got 'none')": lambda: op(logits, target, group="none", classes=classes),
        here + "group must be the name of a process group (got '')": lambda: op(logits, target, group="", classes=classes),
        here + "classes must be positive (got 0)": lambda: op(logits, target, group=group, classes=0),
        here + f"class_sizes must be the classes of each rank, {classes} in all": lambda: op(
            logits, target, group=group, classes=classes, class_sizes=[classes + 1, *[0] * (ranks - 2), -1]
        ),
        here + f"class_sizes must have one number for each of the {ranks} ranks": lambda: op(
            logits, target, group=group, classes=classes, class_sizes=[classes]
        ),
        here + f"logits must have 6 classes, those of rank {rank} of {ranks}": lambda: op(
            logits, target, group=group, classes=6 * ranks
        ),
        here + f"weight must have shape [{classes}], one value per class": lambda: op(
            logits, target, torch.ones(5), group=group, classes=classes
        ),
    })  # fmt: skip


CASES.add("arguments are refused", refuses)

ON_GPUS = [name for name in CASES if name.startswith("logits,")]
