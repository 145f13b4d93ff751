"""Cases of divergences of two heads whose classes are split over processes, for
test_vocab_parallel_fused_linear_divergence.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from pairs import pairs_of
from process_group import Cases
from torch import Tensor
from vocab_parallel_checks import (
    DIVERGENCE,
    UNEVEN,
    Split,
    check_compiled,
    check_refused,
    collectives_of,
    compare,
    share_of,
)

from liger_ops import functional as F

CASES = Cases()


def of_divergence(
    mesh: Any,
    dtype: torch.dtype = torch.float64,
    t_dtype: torch.dtype | None = None,
    shape: Sequence[int] = (2, 6),
    classes: int = 50,
    bias: bool = False,
    masked: float | None = None,
    token_weighted: bool = False,
    class_sizes: Callable[[int], list[int]] | None = None,
    frozen: Sequence[str] = (),
    sequence_dim: int | None = None,
    scale: float = 3.0,
    **options: Any,
) -> None:
    """masked: the share of positions that do not count."""
    device, g = mesh.device_type, torch.Generator().manual_seed(5)
    dtype = torch.float32 if device == "cuda" and dtype == torch.float64 else dtype

    def randn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=g, dtype=torch.float64)

    leaves = {}
    for side, hidden in (("s", 8), ("t", 6)):
        leaves |= {
            f"{side}_input": randn(*shape, hidden),
            f"{side}_weight": randn(classes, hidden) * scale * hidden**-0.5,
        }
        if bias:
            leaves[f"{side}_bias"] = randn(classes)
    leaves = {
        k: t.to(device, dtype if k[0] == "s" else t_dtype or dtype).requires_grad_(k[0] == "s" and k not in frozen)
        for k, t in leaves.items()
    }
    others = dict(options)
    if masked is not None:
        others["mask"] = (torch.rand(tuple(shape), generator=g) >= masked).to(device)
    if token_weighted:
        others["token_weight"] = randn(*shape).abs().to(device, torch.promote_types(dtype, torch.float32))
    sizes = class_sizes and class_sizes(mesh.size())
    dims = dict.fromkeys(("s_weight", "t_weight", "s_bias", "t_bias"), 0)
    compare(DIVERGENCE, Split(mesh, classes, sizes), leaves, dims, others, sequence_dim, sizes)


ALL_OPTIONS = dict(
    temperature=0.6, s_logits_scale=0.7, t_logits_scale=1.5, s_softcap=3.0, t_softcap=5.0, bias=True, masked=0.3,
    token_weighted=True,
)  # fmt: skip
FROZEN = ((), ("s_weight", "s_bias"), ("s_input",), ("s_input", "s_weight", "s_bias"))
BETAS, REDUCTIONS = (0.0, 1.0, 0.3), ("mean", "sum", "none")


def name_of(*parts: Any) -> str:
    return "divergence, " + ", ".join(str(part) for part in parts if part)


def said(frozen: Sequence[str]) -> str:
    return f"frozen {' '.join(frozen)}" if frozen else ""


for beta, reduction, frozen, dim in pairs_of(BETAS, REDUCTIONS, FROZEN, (None, 1)):
    options = dict(bias=True) if dim is None else dict(sequence_dim=1, masked=0.3)
    name = name_of(f"beta {beta}", reduction, said(frozen), dim and "sequence")
    CASES.add(name, of_divergence, beta=beta, reduction=reduction, frozen=frozen, **options)
# Several chunks; with 16 bits and a mean, so many that the gradients are computed by blocks of classes.
CHUNKS: dict[str, dict[str, Any]] = {"": {}}
for dtype, budget in ((torch.float64, 3600), (torch.bfloat16, 2400)):
    label = f"{str(dtype).removeprefix('torch.')} in chunks"
    CHUNKS[label] = dict(dtype=dtype, memory_budget=budget, shape=(6, 6))
    CHUNKS[f"{label} of a sequence"] = CHUNKS[label] | dict(sequence_dim=0)
for beta, reduction, label in pairs_of(BETAS, REDUCTIONS, CHUNKS):
    options = dict(beta=beta, reduction=reduction, **ALL_OPTIONS, **CHUNKS[label])
    CASES.add(name_of(f"beta {beta}", reduction, "all options", label), of_divergence, **options)
UNEQUAL: dict[str, dict[str, Any]] = {}
for label, changes in UNEVEN.items():
    given = {k: v for k, v in changes.items() if k in ("classes", "class_sizes", "shape")}
    if "no targets" in label:
        UNEQUAL["no positions"] = dict(masked=1.0)
    elif given:
        UNEQUAL[label] = given
for label, beta, reduction, frozen, dim in pairs_of(UNEQUAL, BETAS, ("mean", "none"), FROZEN[:2], (None, 1)):
    options = dict(beta=beta, reduction=reduction, frozen=frozen, sequence_dim=dim)
    name = name_of(f"beta {beta}", label, reduction, said(frozen), dim and "sequence")
    CASES.add(name, of_divergence, **options, **UNEQUAL[label])
for dtype, reduction, frozen, dim in pairs_of(
    (torch.float32, torch.bfloat16, torch.float16), ("mean", "none"), FROZEN[:3], (None, -2)
):
    name = name_of(str(dtype).removeprefix("torch."), reduction, said(frozen), dim and "sequence")
    options = dict(dtype=dtype, reduction=reduction, frozen=frozen, beta=0.5, sequence_dim=dim)
    CASES.add(name, of_divergence, **options)
CASES.add("divergence, confident models", of_divergence, scale=60.0, beta=0.5, dtype=torch.float32)
CASES.add("divergence, other teacher", of_divergence, dtype=torch.bfloat16, t_dtype=torch.float32, beta=0.5)


def counts_collectives(mesh: Any) -> None:
    """One gather of facts for each chunk, 24 bytes per row; the sums over classes and the gradient of the input reduced.
    The gradient of a mixture needs one more sum over classes."""
    (group, ranks, rank), shape, classes = share_of(mesh), (4, 6), 48
    heads = [torch.randn(classes // ranks, n) for n in (8, 5)]
    tokens, gather = shape[0] * shape[1], "allgather_base"

    def step(x: Tensor, t: Tensor, trained: bool, **options: Any) -> Any:
        head = heads[0].clone().requires_grad_(trained)
        found = F.fused_linear_divergence(x, head, t, heads[1], group=group, classes=classes, **options)
        return found.divergence.sum().backward() if found.divergence.requires_grad else found

    x, t = torch.randn(*shape, 8), torch.randn(*shape, 5)
    for beta in (0.0, 1.0, 0.5):
        for reduction in ("mean", "none"):
            options = dict(beta=beta, reduction=reduction)
            facts = {(gather, 6 * tokens): 1}
            assert collectives_of(partial(step, x, t, False, **options)) == facts | {("allreduce", 0): 1}
            for trained in (True, False):
                now = reduction == "mean" or not trained
                found = collectives_of(partial(step, x.clone().requires_grad_(), t, trained, **options))
                assert found == facts | {("allreduce", 0): 2 + (now and beta == 0.5)}, (options, trained, found)
    parts = [a.chunk(ranks, 1)[rank].contiguous() for a in (x, t)]
    parts[0].requires_grad_()
    found = collectives_of(partial(step, *parts, True, reduction="mean", sequence_dim=1))
    inputs = {(gather, tokens * n // ranks): 1 for n in (8, 5)}
    assert found == facts | inputs | {("allreduce", 0): 1, ("reduce_scatter_base", tokens * 8): 1}, found


CASES.add("collectives", counts_collectives)


def refuses(mesh: Any) -> None:
    group, ranks, rank = share_of(mesh)
    x, weight, classes, op = torch.randn(2, 4), torch.randn(5, 4), 5 * ranks, F.fused_linear_divergence
    check_refused({
        f"{DIVERGENCE}: s_weight must have 6 classes, those of rank {rank} of {ranks}": lambda: op(
            x, weight, x, weight, group=group, classes=6 * ranks
        ),
        f"{DIVERGENCE}: t_weight must have 5 classes like s_weight (got 4)": lambda: op(
            x, weight, x, weight[:4], group=group, classes=classes
        ),
        f"{DIVERGENCE}: sequence_dim must be a dimension of s_input other than the last (got 1)": lambda: op(
            x, weight, x, weight, group=group, classes=classes, sequence_dim=1
        ),
        f"{DIVERGENCE}: mask must have shape [{2 * ranks}], that of s_input without its last dimension, with the "
        "positions of all ranks (got [2])": lambda: op(
            x, weight, x, weight, group=group, classes=classes, mask=torch.ones(2).bool(), sequence_dim=0
        ),
    })  # fmt: skip


CASES.add("arguments are refused", refuses)


def compiles(mesh: Any, sequence_dim: int | None, reduction: str, trained: bool) -> None:
    group, ranks, rank = share_of(mesh)
    classes, device, g = 7 * ranks - 2, mesh.device_type, torch.Generator().manual_seed(1)
    heads = [torch.randn(classes, n, generator=g).chunk(ranks)[rank].to(device) for n in (8, 6)]

    def step(x: Tensor, head: Tensor, t: Tensor) -> Tensor:
        options = dict(beta=0.5, reduction=reduction, sequence_dim=sequence_dim)
        found = F.fused_linear_divergence(2 * x, head, t, heads[1], group=group, classes=classes, **options)
        return found.divergence.square().sum()

    def inputs(tokens: int) -> list[Tensor]:
        x, t = (torch.randn(tokens, n, generator=g).to(device) for n in (8, 6))
        return [x.requires_grad_(), heads[0].clone().requires_grad_(trained), t]

    torch._dynamo.reset()
    check_compiled(step, inputs)


for dim, reduction, trained in pairs_of((None, 0), ("mean", "none"), (True, False)):
    name = name_of("compiled", reduction, "" if trained else "frozen", "" if dim is None else "sequence")
    options = dict(sequence_dim=dim, reduction=reduction, trained=trained)
    CASES.add(name, compiles, thorough=not trained or dim is not None, **options)

ON_GPUS = [name for name in CASES if name.startswith("divergence,")]
