"""Cases of the reference formulas of losses over split classes, for test_vocab_parallel_formulas.py."""

from __future__ import annotations

from typing import Any

import torch
from pairs import pairs_of
from process_group import Cases
from vocab_parallel_checks import DIVERGENCE, LINEAR, LOG_PROBS, LOGITS, Split, listed, make_targets, run, upstream_of

from liger_ops.reference import operators

CASES = Cases()
SHAPE = (2, 6)
# The number of classes, and each rank's. Ranks whose numbers differ must still take the same chunks.
SIZES = {"equal": (11, None), "uneven": (11, [7, 0, 4]), "one class": (1, None)}
BUDGETS = {"": None, ", chunks": 528}
FACTS = dict(entropy=True, mean_logits=True, log_sum_sq_probs=True, is_top1=True)


def equals_the_formula_of_all_classes(
    mesh: Any, name: str, sizes: str, budget: str = "", sequence_dim: int | None = None
) -> None:
    classes, class_sizes = SIZES[sizes]
    split, g = Split(mesh, classes, class_sizes), torch.Generator().manual_seed(5)
    linear, heads = "linear" in name, ("s_", "t_") if name == DIVERGENCE else ("",)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    leaves = {"logits": randn(*SHAPE, classes)}
    if linear:
        leaves = {
            f"{head}{t}": randn(*s) for head in heads for t, s in (("input", (*SHAPE, 5)), ("weight", (classes, 5)))
        }
        leaves[f"{heads[0]}bias"] = randn(classes)
    leaves = {k: t.requires_grad_(not k.startswith("t_")) for k, t in leaves.items()}
    others: dict[str, Any] = dict(memory_budget=BUDGETS[budget]) if linear else {}
    others |= FACTS if name == LOG_PROBS else dict(reduction="none")
    if name != DIVERGENCE:
        others["target"] = make_targets(SHAPE, classes)
    shard = dict(group=split.group.group_name, classes=classes, class_sizes=class_sizes)
    if sequence_dim is not None:
        shard["sequence_dim"] = sequence_dim

    def part(k: str, t: torch.Tensor) -> torch.Tensor:
        if k.endswith("input"):
            return split.of_sequence(t, sequence_dim)
        return split.of_classes(t, -1 if k == "logits" else 0)

    ours = run(operators()[name].reference, {k: part(k, t) for k, t in leaves.items()}, others | shard, upstream_of)
    whole = run(operators()[name.removeprefix("vocab_parallel_")].reference, leaves, others, upstream_of)
    for a, b in zip(listed(ours[0]), listed(whole[0]), strict=True):
        torch.testing.assert_close(a, b)
    for k, gradient in whole[1].items():
        torch.testing.assert_close(ours[1][k], part(k, gradient))


for name, sizes in pairs_of(LOGITS, SIZES):
    CASES.add(f"{name}, {sizes}", equals_the_formula_of_all_classes, name=name, sizes=sizes)
for name, sizes, budget, dim in pairs_of((*LINEAR, LOG_PROBS, DIVERGENCE), SIZES, BUDGETS, (None, 1)):
    of = f"{name}, {sizes}{budget}{'' if dim is None else ', sequence'}"
    CASES.add(of, equals_the_formula_of_all_classes, name=name, sizes=sizes, budget=budget, sequence_dim=dim)
