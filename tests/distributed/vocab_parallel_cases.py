"""Cases of losses whose classes are split over processes, for test_vocab_parallel.py: compared with the same losses in one
process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_ops import functional as F
from liger_ops._accuracy import Roundings, rounded
from tests.support.checks import assert_no_worse
from tests.support.families import linear_losses, logits_losses
from tests.support.host.process_group import Cases
from tests.support.pairs import pairs_of

CASES = Cases()
LOG_PROBS, DIVERGENCE = "fused_linear_log_probs", "fused_linear_divergence"
WITH_SUM = f"{LOG_PROBS}_with_log_sum_exp"
INPUTS = ("input", "s_input", "t_input", "low_rank_input")
# Names of the results, by their number.
RESULTS = {
    1: ("loss",),
    2: ("divergence", "entropy"),
    3: ("loss", "log_probs", "entropy"),
    4: ("loss", "z_loss", "token_accuracy", "predicted"),
    5: ("log_probs", "entropy", "mean_logits", "log_sum_sq_probs", "is_top1"),
    6: ("log_probs", "entropy", "mean_logits", "log_sum_sq_probs", "is_top1", "log_sum_exp"),
}
LOGITS = ("cross_entropy", "cross_entropy_with_metrics")
LINEAR = tuple(f"fused_linear_cross_entropy{form}" for form in ("", "_with_metrics", "_with_log_probs"))


def listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [*results]


def chunk_sizes(classes: int, ranks: int) -> list[int]:
    each = -(-classes // ranks)
    return [max(0, min(each, classes - rank * each)) for rank in range(ranks)]


class Split:
    """What one process holds of whole tensors."""

    def __init__(self, mesh: Any, classes: int, class_sizes: Sequence[int] | None) -> None:
        self.group = mesh.get_group()
        self.rank, self.ranks, self.classes = self.group.rank(), self.group.size(), classes
        self.sizes = [*(class_sizes or chunk_sizes(classes, self.ranks))]
        self.first = [0, *accumulate(self.sizes)][self.rank]

    def of_classes(self, t: Tensor, dim: int) -> Tensor:
        return t.narrow(dim, self.first, self.sizes[self.rank])

    def of_sequence(self, t: Tensor, dim: int | None) -> Tensor:
        return t if dim is None else t.chunk(self.ranks, dim)[self.rank]


def same_everywhere(name: str, t: Tensor, group: Any) -> None:
    received = [torch.empty_like(t) for _ in range(group.size())]
    dist.all_gather(received, t.contiguous(), group=group)
    for other in received:
        assert torch.equal(torch.nan_to_num(other), torch.nan_to_num(t)), f"{name} differs between ranks"


def run(
    op: Callable, leaves: dict[str, Tensor], arguments: dict[str, Any], upstream: Callable, only: str = ""
) -> tuple[list, dict]:
    """(results, gradients by name). only: the name of the gradient that backward computes; all if empty."""
    leaves = {k: t.detach().clone().requires_grad_(t.requires_grad) for k, t in leaves.items()}
    results = listed(op(**leaves, **arguments))
    wanted = {k: t for k, t in leaves.items() if t.requires_grad and only in (k, "")}
    if not wanted:
        return [t.detach() for t in results], {}
    differentiable = [t for t in results if t.requires_grad]
    grads = torch.autograd.grad(differentiable, [*wanted.values()], [upstream(t) for t in differentiable])
    return [t.detach() for t in results], dict(zip(wanted, grads))


def upstream_of(loss: Tensor) -> Tensor:
    if not loss.dim():
        return torch.tensor(-2.0, dtype=loss.dtype, device=loss.device)
    grad = torch.randn(loss.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return grad.to(loss.dtype).to(loss.device)


@torch.no_grad()
def largest_logit(leaves: dict[str, Tensor]) -> float:
    """The sum of its terms' magnitudes, each of which is rounded."""
    logits = [leaves[f"{model}_input"].abs() @ leaves[f"{model}_weight"].abs().t() for model in "st"]
    return max(float(z.max()) if z.numel() else 0.0 for z in logits)


def compare(
    name: str,
    split: Split,
    leaves: dict[str, Tensor],
    class_dims: dict[str, int],
    others: dict[str, Any],
    sequence_dim: int | None = None,
    class_sizes: Sequence[int] | None = None,
    only: str = "",
) -> None:
    """leaves: floating-point tensors, whole. class_dims: the dimension of each that is split by class."""

    def part(k: str, t: Tensor) -> Tensor:
        t = split.of_classes(t, class_dims[k]) if k in class_dims else t
        return split.of_sequence(t, sequence_dim) if k in INPUTS else t

    arguments = others | dict(group=split.group.group_name, classes=split.classes, class_sizes=class_sizes)
    if sequence_dim is not None:
        arguments["sequence_dim"] = sequence_dim
    mine = {k: part(k, t).contiguous() for k, t in leaves.items()}
    compute = partial(run, only=only)
    results, grads = compute(getattr(F, name), mine, arguments, upstream_of)
    again = compute(getattr(F, name), mine, arguments, upstream_of)
    for a, b in zip([*results, *grads.values()], [*again[0], *again[1].values()]):
        assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)), "another run gives other bits"
    formula = getattr(F, name).reference

    def wide(t: Any) -> Any:
        return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t

    exact_leaves, exact_others = ({k: wide(t) for k, t in given.items()} for given in (leaves, others))
    truth = compute(formula, exact_leaves, exact_others, upstream_of)
    # What runs without a library.
    exact_mine, exact_arguments = ({k: wide(t) for k, t in given.items()} for given in (mine, arguments))
    of_formula = compute(formula, exact_mine, exact_arguments, upstream_of)
    eager = compute(formula, leaves, others, upstream_of)
    names = RESULTS[len(results)]
    # Logits are rounded to the dtype, in ours as in eager code.
    dtype = next(iter(leaves.values())).dtype

    def flat(found: tuple[list, dict]) -> list[Tensor]:
        return [torch.nan_to_num(t) if t.is_floating_point() else t for t in (*found[0], *found[1].values())]

    def bounds_of(leaves: dict[str, Tensor], precision: torch.dtype) -> Roundings:
        def of_rounded(draw: int) -> list[Tensor]:
            changed = dict(zip(leaves, rounded([*leaves.values()], precision, draw)))
            return flat(compute(formula, changed, exact_others, upstream_of))

        return Roundings(flat(truth), of_rounded, leaves.values(), precision)

    bounds, exact_bounds = bounds_of(leaves, dtype), bounds_of(exact_leaves, torch.float64)
    # All collectives come before the first assertion that may fail on one rank only.
    for what, ours in zip(names, results):
        same_everywhere(what, ours, split.group)
    for what in grads.keys() & INPUTS if sequence_dim is None else ():
        same_everywhere(f"gradient of {what}", grads[what], split.group)
    eps = torch.finfo(dtype).eps
    for i, (what, ours, theirs, exact) in enumerate(zip(names, results, eager[0], truth[0])):
        found = of_formula[0][i]
        if not ours.is_floating_point():
            assert torch.equal(ours, theirs) and torch.equal(found, exact), what
            continue
        # A mean of no targets is NaN.
        assert torch.equal(ours.isnan(), exact.isnan()), f"{what}: NaN at other places"
        ours, theirs, exact, found = map(torch.nan_to_num, (ours, theirs, exact, found))
        scale = 1.0 if name.startswith(LOG_PROBS) else 0.0
        # Logits are rounded to the dtype, in ours as in eager code; errors of a few of them may be small by chance.
        noise = 8 * (torch.finfo(ours.dtype).eps if name == DIVERGENCE else eps)
        assert_no_worse(what, ours, theirs, exact, scale=scale, noise=noise, bounds=(bounds, i))
        assert_no_worse(f"{what} of the formula", found, exact, exact, scale=scale, bounds=(exact_bounds, i))
    rounding = largest_logit(leaves) * eps if name == DIVERGENCE else 0.0
    for i, (what, ours) in enumerate(grads.items()):
        assert ours.dtype == dtype
        whole = truth[1][what]
        theirs, exact = part(what, eager[1][what]), part(what, whole)
        largest = float(whole.abs().max()) if whole.numel() else 0.0
        # Every rank's share of the input's gradient is rounded before the sum.
        noise = eps * (1 + (split.ranks if what in INPUTS else 0)) * 4
        if name == DIVERGENCE:
            # Differences of two probabilities of up to 1, which have the relative error of their logits. They may be
            # much smaller than the probabilities.
            noise, largest = noise + 2 * rounding, max(largest, 1.0)
        of, found, at = f"gradient of {what}", of_formula[1][what], len(results) + i
        assert_no_worse(of, ours, theirs, exact, scale=largest, noise=noise, bounds=(bounds, at))
        assert_no_worse(f"{of} of the formula", found, exact, exact, scale=largest, bounds=(exact_bounds, at))


# ---- Calls


def in_place(mesh: Any, given: dict[str, Tensor], others: dict[str, Any], among: Sequence[int] | None) -> None:
    """Moves the tensors to the mesh's device, made with the same random numbers on every rank. among: the range of targets."""
    target = others.get("target")
    if among is not None and target is not None:
        others["target"] = torch.where(target == -100, -100, among[0] + target % (among[1] - among[0]))
    for arguments in (given, others):
        for k, t in arguments.items():
            if isinstance(t, Tensor):
                wide = k == "ce_weight" and next(iter(given.values())).dtype == torch.float64
                t = t.double() if wide else t
                arguments[k] = t.detach().to(mesh.device_type).requires_grad_(t.requires_grad)


def nothing_counts(others: dict[str, Any], tokens: Sequence[int]) -> None:
    if "target" in others:
        others["target"].fill_(-100)
    else:
        others["mask"] = torch.zeros(tuple(tokens), dtype=torch.bool)


def on(mesh: Any, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if mesh.device_type == "cuda" and dtype == torch.float64 else dtype


def of_logits(
    mesh: Any, op: str = LOGITS[0], dtype: torch.dtype = torch.float64, shape: Sequence[int] = (3, 5), classes: int = 50,
    among: Sequence[int] | None = None, nothing: bool = False, class_sizes: Callable[[int], list[int]] | None = None,
    scale: float = 1.0, offset: float = 0.0, **case: Any,
) -> None:  # fmt: skip
    given, options = logits_losses.of_cross_entropy((*shape, classes), on(mesh, dtype), **case)
    logits = given.pop("logits")
    others = {k: t for k, t in given.items() if t is not None} | options
    leaves = {"logits": (logits.detach() * scale + offset).requires_grad_()}
    if nothing:
        nothing_counts(others, shape)
    in_place(mesh, leaves, others, among)
    sizes = class_sizes and class_sizes(mesh.size())
    compare(op, Split(mesh, classes, sizes), leaves, {"logits": len(shape)}, others, class_sizes=sizes)


def of_linear(
    mesh: Any, op: str = LINEAR[0], dtype: torch.dtype = torch.float64, shape: Sequence[int] = (2, 6), hidden: int = 8,
    classes: int = 50, among: Sequence[int] | None = None, nothing: bool = False,
    class_sizes: Callable[[int], list[int]] | None = None, sequence_dim: int | None = None, scale: float = 1.5,
    more: dict[str, Any] | None = None, only: str = "", **case: Any,
) -> None:  # fmt: skip
    """scale: of logits. more: arguments of the operator."""
    makers = {
        LOG_PROBS: linear_losses.of_log_probs,
        WITH_SUM: linear_losses.of_log_probs,
        DIVERGENCE: linear_losses.of_divergence,
    }
    make = makers.get(op, linear_losses.of_cross_entropy)
    leaves, others = make((tuple(shape), hidden, classes), on(mesh, dtype), "cpu", **case)
    for k, t in leaves.items():
        if k.endswith("weight") and "low_rank" not in k:
            t.data *= scale
    if nothing:
        nothing_counts(others, shape)
    in_place(mesh, leaves, others, among)
    sizes = class_sizes and class_sizes(mesh.size())
    dims = {k: 0 for k in leaves if k.endswith(("weight", "bias"))}
    compare(op, Split(mesh, classes, sizes), leaves, dims, others | (more or {}), sequence_dim, sizes, only)


def divided(classes: int, sizes: Sequence[int]) -> list[int]:
    """The last rank has the rest."""
    return [*sizes, classes - sum(sizes)]


def named(*parts: Any) -> str:
    return ", ".join(str(part).removeprefix("torch.") for part in parts if part not in (None, "", False))


REDUCTIONS, BETAS, HALVES = ("mean", "sum", "none"), (0.0, 1.0, 0.3), (torch.float32, torch.bfloat16, torch.float16)
UNEVEN: dict[str, dict[str, Any]] = {
    "a rank without classes": dict(
        classes=3, class_sizes=lambda ranks: [2, 0, 1] if ranks == 3 else [0] * (ranks - 1) + [3]
    ),
    "fewer classes than ranks": dict(classes=2),
    "one class": dict(classes=1),
    "explicit sizes": dict(classes=50, class_sizes=lambda ranks: divided(50, [7, 9, 9][: ranks - 1])),
    "targets of one rank": dict(among=(0, 10)),
    "nothing counts": dict(nothing=True),
    "no tokens": dict(shape=(0, 6)),
}

# ---- Logits


for reduction, options, weight, index in pairs_of(
    REDUCTIONS, logits_losses.EXTRAS, (None, "own"), (torch.int64, torch.int32)
):
    case = dict(reduction=reduction, options=options, weight=weight, index=index)
    CASES.add(named("logits", *case.values()), of_logits, **case)
for reduction in REDUCTIONS:
    CASES.add(named("logits, metrics", reduction), of_logits, op=LOGITS[1], reduction=reduction, options="all")
for label, changes in UNEVEN.items():
    for reduction in ("mean", "sum"):
        CASES.add(named("logits", label, reduction), of_logits, reduction=reduction, **changes)
    CASES.add(named("logits, metrics", label), of_logits, op=LOGITS[1], options="smoothing", **changes)
for dtype in HALVES:
    CASES.add(named("logits", dtype), of_logits, dtype=dtype, options="all")
    CASES.add(named("logits, common offset", dtype), of_logits, dtype=dtype, options="smoothing", offset=20.0)
    CASES.add(named("logits, confident", dtype), of_logits, dtype=dtype, scale=10.0)


@CASES.named("logits, equal classes")
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


# ---- Linear cross entropy


for op, reduction, options, weighted, dim in pairs_of(
    LINEAR, REDUCTIONS, linear_losses.CE_OPTIONS, ("", "classes and tokens"), (None, 1)
):
    case = dict(op=op, reduction=reduction, options=options, weighted=weighted, sequence_dim=dim)
    CASES.add(named("linear", *case.values()), of_linear, bias=bool(weighted), **case)
for op, reduction, chunks in pairs_of(LINEAR, REDUCTIONS, (False, True)):
    more = dict(memory_budget=24 * 16 + 4 * 320) if chunks else {}
    case = dict(op=op, reduction=reduction, adapter="same", rank=3, bias=True, more=more)
    CASES.add(named("linear, low-rank addend", op, reduction, chunks and "chunks"), of_linear, **case)
for reduction, dim in zip(REDUCTIONS, (0, 1, -2)):
    case = dict(reduction=reduction, sequence_dim=dim, shape=(6, 12))
    CASES.add(named("linear", reduction, f"sequence_dim {dim}"), of_linear, **case)
# The least budget has one token per chunk; with the others there are several chunks, and two buffers.
for reduction, tokens, dim in pairs_of(REDUCTIONS, (1, 4, 16), (None, 1)):
    case = dict(reduction=reduction, shape=(4, 6), weighted="tokens", options="z-loss", sequence_dim=dim)
    name = named("linear", reduction, f"chunks for {tokens} tokens", dim and "sequence")
    CASES.add(name, of_linear, more=dict(memory_budget=24 * 16 + tokens * 320), **case)
for label, reduction, op, dim in pairs_of(UNEVEN, ("mean", "sum"), LINEAR[::2], (None, 1)):
    case = dict(op=op, sequence_dim=dim, reduction=reduction, bias=dim is None) | UNEVEN[label]
    CASES.add(named("linear", label, reduction, op, dim and "sequence"), of_linear, **case)
for dtype, reduction, frozen, chunks in pairs_of(HALVES, ("mean", "none"), ("", "input", "weight"), (False, True)):
    case = dict(dtype=dtype, reduction=reduction, frozen=frozen, shape=(4, 6))
    more = dict(memory_budget=3000) if chunks else {}
    name = named("linear", dtype, reduction, frozen and f"frozen {frozen}", chunks and "sequence in chunks")
    CASES.add(name, of_linear, sequence_dim=1 if chunks else None, more=more, **case)
# Large enough for the logits-free path of compute capability 9.0.
LARGE: dict[str, dict[str, Any]] = {
    "plain": {},
    "mean of none": dict(nothing=True),
    "z-loss, weights": dict(options="z-loss", weighted="classes and tokens"),
    "overflow": dict(scale=30.0),
    "targets of one rank": dict(among=(0, 100)),
    "without gradients": dict(frozen="input weight"),
    "without gradients, none": dict(frozen="input weight", reduction="none"),
    "frozen weight": dict(frozen="weight"),
    "frozen weight, overflow": dict(frozen="weight", scale=30.0),
    "frozen input": dict(frozen="input"),
    "sum": dict(reduction="sum", options="scale"),
    "fp16": dict(dtype=torch.float16),
    "bias": dict(bias=True),
    "none": dict(reduction="none"),
    "log probabilities": dict(op=LINEAR[2]),
    # Predictions are equal if no two logits are.
    "metrics, softcap": dict(op=LINEAR[1], more=dict(softcap=20.0, label_smoothing=0.1)),
    "even": dict(classes=49152),
}
for label, changes in LARGE.items():
    given: dict[str, Any] = dict(dtype=torch.bfloat16, shape=(2, 1024), hidden=256, classes=50257) | changes
    small, two = ({"more": given.get("more", {}) | dict(memory_budget=mib << 20)} for mib in (110, 260))
    CASES.add(f"large, {label}", of_linear, **given)
    CASES.add(f"large, {label}, sequence", of_linear, **given, sequence_dim=1)
    CASES.add(f"large, {label}, chunks", of_linear, **given | small)
    CASES.add(f"large, {label}, sequence in chunks", of_linear, **given | small, sequence_dim=1)
    CASES.add(f"large, {label}, two buffers", of_linear, **given | dict(shape=(3, 1024)) | two)


# Backward divides the tokens into other chunks than forward, which expects all gradients.
for dim in (None, 1):
    case = dict(reduction="none", dtype=torch.bfloat16, shape=(4, 24), bias=True, more=dict(memory_budget=9000))
    name = named("linear", "gradient of bias alone", dim and "sequence")
    CASES.add(name, of_linear, sequence_dim=dim, only="bias", **case)


# ---- Log-probabilities


FACTS = dict(entropy=True, mean_logits=True, log_sum_sq_probs=True)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "facts": dict(op=WITH_SUM, more=FACTS | dict(is_top1=True)),
    "all options": dict(options="all", more=FACTS | dict(is_top1=True)),
    "chunks": dict(more=dict(entropy=True, memory_budget=2000), shape=(4, 6)),
    "large logits": dict(options="entropy", scale=15.0),
    "bfloat16": dict(op=WITH_SUM, dtype=torch.bfloat16, more=FACTS),
}
FORMS: dict[str, dict[str, Any]] = {
    "": {},
    "sequence": dict(sequence_dim=1),
    "announced": dict(options="entropy, announced"),
    "low-rank addend": dict(adapter="same", rank=3),
}
for label, ids, frozen, form in pairs_of(KINDS, (None, 3), ("", "weight bias", "input"), FORMS):
    case = dict(op=LOG_PROBS, ids=ids, frozen=frozen, bias=True) | FORMS[form] | KINDS[label]
    name = named("log_probs", label, ids and f"{ids} ids", frozen and f"frozen {frozen}", form)
    CASES.add(name, of_linear, **case)
for label, frozen, dim in pairs_of(UNEVEN, ("", "weight"), (None, 1)):
    case = dict(frozen=frozen, sequence_dim=dim, ids=2, **KINDS["facts"])
    name = named("log_probs", label, frozen and f"frozen {frozen}", dim and "sequence")
    CASES.add(name, of_linear, **case, **UNEVEN[label])


# ---- Divergences


FROZEN = ("", "weight bias", "input", "input weight bias")
for beta, reduction, frozen, dim in pairs_of(BETAS, REDUCTIONS, FROZEN, (None, 1)):
    case = dict(bias=True) if dim is None else dict(sequence_dim=1, weighted="mask")
    name = named("divergence", f"beta {beta}", reduction, frozen and f"frozen {frozen}", dim and "sequence")
    CASES.add(name, of_linear, op=DIVERGENCE, beta=beta, reduction=reduction, frozen=frozen, **case)
# Several chunks; with 16 bits and a mean, so many that the gradients are computed by blocks of classes.
CHUNKS: dict[str, dict[str, Any]] = {"": {}}
for dtype, budget in ((torch.float64, 3600), (torch.bfloat16, 2400)):
    label = named(dtype) + " in chunks"
    CHUNKS[label] = dict(dtype=dtype, more=dict(memory_budget=budget), shape=(6, 6))
    CHUNKS[f"{label} of a sequence"] = CHUNKS[label] | dict(sequence_dim=0)
for beta, reduction, label in pairs_of(BETAS, REDUCTIONS, CHUNKS):
    case = dict(beta=beta, reduction=reduction, options="all", weighted="mask and weights", bias=True)
    name = named("divergence", f"beta {beta}", reduction, "all options", label)
    CASES.add(name, of_linear, op=DIVERGENCE, **case, **CHUNKS[label])
for label, beta, reduction, frozen, dim in pairs_of(
    [label for label in UNEVEN if "targets" not in label], BETAS, ("mean", "none"), FROZEN[:2], (None, 1)
):
    case = dict(beta=beta, reduction=reduction, frozen=frozen, sequence_dim=dim)
    name = named("divergence", f"beta {beta}", label, reduction, frozen and f"frozen {frozen}", dim and "sequence")
    CASES.add(name, of_linear, op=DIVERGENCE, **case, **UNEVEN[label])
for dtype, reduction, frozen, dim in pairs_of(HALVES, ("mean", "none"), FROZEN[:3], (None, -2)):
    case = dict(dtype=dtype, reduction=reduction, frozen=frozen, beta=0.5, sequence_dim=dim)
    name = named("divergence", dtype, reduction, frozen and f"frozen {frozen}", dim and "sequence")
    CASES.add(name, of_linear, op=DIVERGENCE, **case)
CASES.add("divergence, confident models", of_linear, op=DIVERGENCE, scale=30.0, beta=0.5, dtype=torch.float32)
CASES.add("divergence, other teacher", of_linear, op=DIVERGENCE, dtype=torch.bfloat16, t_dtype=torch.float32, beta=0.5)


# ---- Compilation


def compiles(mesh: Any, op: str, backend: str = "inductor", **options: Any) -> None:
    """One graph, the same on all ranks, with dynamic shapes."""
    group, ranks, rank = share_of(mesh)
    classes, device, g = 7 * ranks - 2, mesh.device_type, torch.Generator().manual_seed(1)
    trained = options.pop("trained", True)
    heads = [torch.randn(classes, n, generator=g).chunk(ranks)[rank].to(device) for n in (8, 6)]

    def step(x: Tensor, head: Tensor, other: Tensor) -> Tensor:
        given = (2 * x, head, other) if other.dtype == torch.long else (2 * x, head, other, heads[1])
        found = listed(getattr(F, op)(*given, group=group, classes=classes, **options))
        return sum(r.square().sum() for r in found if r.requires_grad)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (5, 9):
        x = torch.randn(tokens, 8, generator=g).to(device)
        of_targets = torch.randint(classes, (tokens,), generator=g)
        other = torch.randn(tokens, 6, generator=g) if op == DIVERGENCE else of_targets
        found = []
        for function in (step, compiled):
            leaves = [x.clone().requires_grad_(), heads[0].clone().requires_grad_(trained)]
            loss = function(*leaves, other.to(device))
            found.append([loss.detach(), *torch.autograd.grad(loss, [t for t in leaves if t.requires_grad])])
        for a, b in zip(*found):
            torch.testing.assert_close(a, b)


CASES.add("linear, compiled", compiles, op=LINEAR[0], backend="aot_eager")
CASES.add("log_probs, compiled", compiles, op=LOG_PROBS, entropy=True, trained=False, thorough=True)
for dim, reduction, trained in pairs_of((None, 0), ("mean", "none"), (True, False)):
    case = dict(sequence_dim=dim, reduction=reduction, trained=trained, beta=0.5)
    name = named("divergence, compiled", reduction, "" if trained else "frozen", "" if dim is None else "sequence")
    CASES.add(name, compiles, op=DIVERGENCE, thorough=True, **case)


# ---- Collectives


def collectives_of(step: Callable[[], Any]) -> Counter:
    """How often a step calls each collective: (name, elements that this rank sends; 0: not recorded)."""
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    found: Counter = Counter()
    for event in profile.events():
        if event.name.startswith("c10d::"):
            # Of a gather or scatter: the output and the input. The profiler has no shapes of lists.
            sent = event.input_shapes[1] if "base" in event.name else [0]
            found[event.name.removeprefix("c10d::").strip("_"), sent[0]] += 1
    return found


class Share(NamedTuple):
    """Of a group's process."""

    group: str
    ranks: int
    rank: int


def share_of(mesh: Any) -> Share:
    return Share(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


@CASES.named("collectives of logits")
def counts_of_logits(mesh: Any) -> None:
    """One gather of facts, 12 bytes per row."""
    group, ranks, _ = share_of(mesh)
    classes, shape, op = 48, (4, 6), F.cross_entropy
    logits, target = torch.randn(*shape, classes // ranks, requires_grad=True), torch.randint(classes, shape)

    def step(**options: Any) -> None:
        op(logits, target, group=group, classes=classes, **options).sum().backward()

    gather, tokens = "allgather_base", target.numel()
    assert collectives_of(step) == {(gather, 3 * tokens): 1}
    found = collectives_of(partial(step, label_smoothing=0.1, reduction="none"))
    assert found == {(gather, 4 * tokens): 1}


@CASES.named("collectives of the linear cross entropy")
def counts_of_linear(mesh: Any) -> None:
    """One gather of facts for each chunk, 12 bytes per row; the input's gradient reduced for each chunk."""
    group, ranks, rank = share_of(mesh)
    hidden, classes, shape, op = 8, 48, (4, 6), F.fused_linear_cross_entropy
    x, weight = (torch.randn(*sizes, hidden, requires_grad=True) for sizes in (shape, (classes // ranks,)))
    target = torch.randint(classes, shape)
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


@CASES.named("collectives of log-probabilities")
def counts_of_log_probs(mesh: Any) -> None:
    """One gather of facts for each chunk, 12 bytes per row and 4 per id and fact; the input's gradient reduced once."""
    (group, ranks, _), shape, hidden, classes = share_of(mesh), (4, 6), 8, 48
    weight = torch.randn(classes // ranks, hidden)
    for ids, frozen in ((1, False), (1, True), (3, False), (3, True)):
        x, target = torch.randn(*shape, hidden, requires_grad=True), torch.randint(classes, (*shape, ids))
        head = weight.clone().requires_grad_(not frozen)

        def step(**options: Any) -> Any:
            op = F.fused_linear_log_probs
            return op(x, head, target, group=group, classes=classes, entropy=True, **options)[0].sum().backward()

        gather, tokens = "allgather_base", shape[0] * shape[1]
        assert collectives_of(step) == {(gather, (3 + ids) * tokens): 1, ("allreduce", 0): 1}
        assert collectives_of(partial(step, mean_logits=True)) == {(gather, (4 + ids) * tokens): 1, ("allreduce", 0): 1}


@CASES.named("collectives of divergences")
def counts_of_divergences(mesh: Any) -> None:
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


# ---- Errors


@CASES.named("arguments are refused")
def refuses(mesh: Any) -> None:
    group, ranks, rank = share_of(mesh)
    classes, share = 5 * ranks, f"6 classes, those of rank {rank} of {ranks}"
    x, weight, target = torch.randn(2, 4), torch.randn(5, 4), torch.zeros(2, dtype=torch.long)
    logits = partial(F.cross_entropy, torch.randn(2, 5), target, group=group, classes=classes)
    linear = partial(F.fused_linear_cross_entropy, x, weight, target, group=group, classes=classes)
    log_probs = partial(F.fused_linear_log_probs, x, weight, target, group=group, classes=classes)
    models = dict(s_input=x, s_weight=weight, t_input=x, t_weight=weight)
    divergence = partial(F.fused_linear_divergence, **models, group=group, classes=classes)
    of_groups = "group must be the name of a process group (got {})"
    of_mask = f"mask must have shape [{2 * ranks}], that of s_input without its last dimension, with the positions of all ranks"
    wrong: list[tuple[Callable, str, dict[str, Any]]] = [
        (logits, of_groups.format("'none'"), dict(group="none")),
        (logits, of_groups.format("''"), dict(group="")),
        (logits, "classes must be positive (got 0)", dict(classes=0)),
        (logits, f"class_sizes must be the classes of each rank, {classes} in all",
         dict(class_sizes=[classes + 1, *[0] * (ranks - 2), -1])),
        (logits, f"class_sizes must have one number for each of the {ranks} ranks", dict(class_sizes=[classes])),
        (logits, f"logits must have {share}", dict(classes=6 * ranks)),
        (logits, f"weight must have shape [{classes}], one value per class", dict(weight=torch.ones(5))),
        (linear, f"weight must have {share}", dict(classes=6 * ranks)),
        (linear, "sequence_dim must be a dimension of input other than the last (got 1)", dict(sequence_dim=1)),
        (linear, f"input must have 2 / {ranks} positions along sequence_dim, the same on every rank (got 2)",
         dict(sequence_dim=0)),
        (linear, "ce_weight must not require a gradient (got one that does)",
         dict(ce_weight=torch.ones(classes, requires_grad=True))),
        (log_probs, f"weight must have {share}", dict(classes=6 * ranks)),
        (divergence, f"s_weight must have {share}", dict(classes=6 * ranks)),
        (divergence, "t_weight must have 5 classes like s_weight (got 4)", dict(t_weight=weight[:4])),
        (divergence, "sequence_dim must be a dimension of s_input other than the last (got 1)", dict(sequence_dim=1)),
        (divergence, f"{of_mask} (got [2])", dict(mask=torch.ones(2).bool(), sequence_dim=0)),
    ]  # fmt: skip
    for call, message, changes in wrong:
        expected = f"{call.func.__name__}: {message}"
        try:
            call(**changes)
        except RuntimeError as error:
            assert expected in str(error), f"{error}\ninstead of\n{expected}"
        else:
            raise AssertionError(f"no error; expected {expected}")


ON_CPU = [name for name in CASES if not name.startswith("large,")]
ON_GPUS = [name for name in CASES if name.startswith(("logits,", "linear,", "large,", "log_probs,", "divergence,"))]
