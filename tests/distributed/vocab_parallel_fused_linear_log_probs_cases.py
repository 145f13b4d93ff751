"""Cases of the log-probabilities of a head whose classes are split over processes, for
test_vocab_parallel_fused_linear_log_probs.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pairs import pairs_of
from process_group import Cases
from torch import Tensor
from vocab_parallel_checks import (
    LOG_PROBS,
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
FACTS = dict(entropy=True, mean_logits=True, log_sum_sq_probs=True, is_top1=True)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "facts": FACTS,
    "all options": dict(FACTS, softcap=4.0, logits_scale=0.7, temperature=1.5),
    "chunks": dict(entropy=True, memory_budget=2000, shape=(4, 6)),
    "large logits": dict(entropy=True, scale=30.0),
    "bfloat16": dict(dtype=torch.bfloat16, entropy=True, mean_logits=True, log_sum_sq_probs=True),
}
FORMS: dict[str, dict[str, Any]] = {"": {}, ", announced": dict(entropy_grad=True), ", sequence": dict(sequence_dim=1)}
for label, ids, frozen, form in pairs_of(KINDS, (None, 3), ((), ("weight", "bias"), ("input",)), FORMS):
    of = f"{label}{f', {ids} ids' if ids else ''}{', frozen ' + frozen[0] if frozen else ''}{form}"
    options = dict(ids=ids, frozen=frozen, bias=True) | KINDS[label] | FORMS[form]
    CASES.add(f"log_probs, {of}", of_linear, op=LOG_PROBS, **options)
for label, ids, frozen in pairs_of(("facts", "all options", "chunks"), (None, 3), ((), ("weight", "bias"))):
    of = f"{label}{f', {ids} ids' if ids else ''}{', frozen weight' if frozen else ''}"
    options = dict(ids=ids, frozen=frozen, bias=True, rank=3) | KINDS[label]
    CASES.add(f"log_probs with a low-rank addend, {of}", of_linear, op=LOG_PROBS, **options)
for label, frozen, dim in pairs_of(UNEVEN, ((), ("weight",)), (None, 1)):
    given = {k: v for k, v in UNEVEN[label].items() if k != "reduction"}
    of = f"{label}{', frozen weight' if frozen else ''}{'' if dim is None else ', sequence'}"
    CASES.add(f"log_probs, {of}", of_linear, op=LOG_PROBS, frozen=frozen, sequence_dim=dim, ids=2, **FACTS, **given)


def counts_collectives(mesh: Any) -> None:
    """One gather of facts for each chunk, 12 bytes per row and 4 per id and fact; the input's gradient reduced once."""
    (group, ranks, _), shape, hidden, classes = share_of(mesh), (4, 6), 8, 48
    weight = torch.randn(classes // ranks, hidden)
    for ids, frozen in ((1, False), (1, True), (3, False), (3, True)):
        x, target = torch.randn(*shape, hidden, requires_grad=True), make_targets((*shape, ids), classes)
        head = weight.clone().requires_grad_(not frozen)

        def step(**options: Any) -> Any:
            op = F.fused_linear_log_probs
            return op(x, head, target, group=group, classes=classes, entropy=True, **options)[0].sum().backward()

        gather, tokens = "allgather_base", shape[0] * shape[1]
        assert collectives_of(step) == {(gather, (3 + ids) * tokens): 1, ("allreduce", 0): 1}
        assert collectives_of(partial(step, mean_logits=True)) == {(gather, (4 + ids) * tokens): 1, ("allreduce", 0): 1}


CASES.add("collectives", counts_collectives)


def refuses(mesh: Any) -> None:
    group, ranks, rank = share_of(mesh)
    x, target, weight, op = (
        torch.randn(2, 4),
        torch.zeros(2, dtype=torch.long),
        torch.randn(5, 4),
        getattr(F, LOG_PROBS),
    )
    message = f"{LOG_PROBS}: weight must have 6 classes, those of rank {rank} of {ranks}"
    check_refused({message: lambda: op(x, weight, target, group=group, classes=6 * ranks)})


CASES.add("arguments are refused", refuses)


def compiles(mesh: Any) -> None:
    group, ranks, rank = share_of(mesh)
    classes, device, g = 7 * ranks - 2, mesh.device_type, torch.Generator().manual_seed(1)
    head = torch.randn(classes, 8, generator=g).chunk(ranks)[rank].to(device)

    def step(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        found = F.fused_linear_log_probs(2 * x, weight, target, group=group, classes=classes, entropy=True)
        return found.log_probs.square().sum() + found.entropy.sum()

    def inputs(tokens: int) -> list[Tensor]:
        x = torch.randn(tokens, 8, generator=g).to(device).requires_grad_()
        return [x, head, make_targets((tokens, 2), classes).to(device)]

    check_compiled(step, inputs)


CASES.add("log_probs, compiled", compiles, thorough=True)

ON_GPUS = [name for name in CASES if name.startswith("log_probs,")]
