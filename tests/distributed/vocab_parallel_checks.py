"""Losses whose classes are split over processes, compared with the same losses in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from checks import assert_no_worse
from torch import Tensor

from liger_ops import functional as F
from liger_ops._accuracy import Roundings, rounded

LOG_PROBS = "fused_linear_log_probs"
DIVERGENCE = "fused_linear_divergence"
INPUTS = ("input", "s_input", "t_input", "low_rank_input")
# Names of the results, by their number.
RESULTS = {
    1: ("loss",),
    2: ("divergence", "entropy"),
    3: ("loss", "log_probs", "entropy"),
    4: ("loss", "z_loss", "token_accuracy", "predicted"),
    5: ("log_probs", "entropy", "mean_logits", "log_sum_sq_probs", "is_top1"),
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


def run(op: Callable, leaves: dict[str, Tensor], arguments: dict[str, Any], upstream: Callable) -> tuple[list, dict]:
    """(results, gradients by name)"""
    leaves = {k: t.detach().clone().requires_grad_(t.requires_grad) for k, t in leaves.items()}
    results = listed(op(**leaves, **arguments))
    wanted = {k: t for k, t in leaves.items() if t.requires_grad}
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
) -> None:
    """leaves: floating-point tensors, whole. class_dims: the dimension of each that is split by class."""

    def part(k: str, t: Tensor) -> Tensor:
        t = split.of_classes(t, class_dims[k]) if k in class_dims else t
        return split.of_sequence(t, sequence_dim) if k in INPUTS else t

    arguments = others | dict(group=split.group.group_name, classes=split.classes, class_sizes=class_sizes)
    if sequence_dim is not None:
        arguments["sequence_dim"] = sequence_dim
    mine = {k: part(k, t).contiguous() for k, t in leaves.items()}
    results, grads = run(getattr(F, name), mine, arguments, upstream_of)
    again = run(getattr(F, name), mine, arguments, upstream_of)
    for a, b in zip([*results, *grads.values()], [*again[0], *again[1].values()]):
        assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)), "another run gives other bits"
    formula = getattr(F, name).reference

    def wide(t: Any) -> Any:
        return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t

    exact_leaves, exact_others = ({k: wide(t) for k, t in given.items()} for given in (leaves, others))
    truth = run(formula, exact_leaves, exact_others, upstream_of)
    # What runs without a library.
    split_formula, exact_mine = getattr(F, name).reference, {k: wide(t) for k, t in mine.items()}
    of_formula = run(split_formula, exact_mine, {k: wide(t) for k, t in arguments.items()}, upstream_of)
    eager = run(formula, leaves, others, upstream_of)
    names = RESULTS[len(results)]
    # Logits are rounded to the dtype, in ours as in eager code.
    dtype = next(iter(leaves.values())).dtype

    def flat(found: tuple[list, dict]) -> list[Tensor]:
        return [torch.nan_to_num(t) if t.is_floating_point() else t for t in (*found[0], *found[1].values())]

    def bounds_of(leaves: dict[str, Tensor], precision: torch.dtype) -> Roundings:
        def of_rounded(draw: int) -> list[Tensor]:
            changed = dict(zip(leaves, rounded([*leaves.values()], precision, draw)))
            return flat(run(formula, changed, exact_others, upstream_of))

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
        scale = 1.0 if name == LOG_PROBS else 0.0
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


def make_targets(
    shape: Sequence[int], classes: int, among: Sequence[int] | None = None, ignored: float = 0.25
) -> Tensor:
    g = torch.Generator().manual_seed(11)
    low, high = among or (0, classes)
    target = torch.randint(low, high, tuple(shape), generator=g)
    return target.masked_fill(torch.rand(tuple(shape), generator=g) < ignored, -100)


def of_linear(
    mesh: Any,
    op: str = LINEAR[0],
    dtype: torch.dtype = torch.float64,
    shape: Sequence[int] = (2, 6),
    hidden: int = 8,
    classes: int = 50,
    bias: bool = False,
    weighted: bool = False,
    token_weighted: bool = False,
    rank: int | None = None,
    among: Sequence[int] | None = None,
    ignored: float = 0.25,
    ids: int | None = None,
    class_sizes: Callable[[int], list[int]] | None = None,
    frozen: Sequence[str] = (),
    sequence_dim: int | None = None,
    scale: float = 3.0,
    **options: Any,
) -> None:
    device, g = mesh.device_type, torch.Generator().manual_seed(5)
    dtype = torch.float32 if device == "cuda" and dtype == torch.float64 else dtype

    def randn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=g, dtype=torch.float64)

    leaves = {"input": randn(*shape, hidden), "weight": randn(classes, hidden) * scale * hidden**-0.5}
    if bias:
        leaves["bias"] = randn(classes)
    if rank is not None:
        leaves |= {"low_rank_input": randn(*shape, rank), "low_rank_weight": randn(classes, rank)}
    leaves = {k: t.to(device, dtype).requires_grad_(k not in frozen) for k, t in leaves.items()}
    floats = torch.float64 if dtype == torch.float64 else torch.float32
    of_target = shape if ids is None else (*shape, ids)
    others: dict[str, Any] = dict(target=make_targets(of_target, classes, among, ignored).to(device), **options)
    if weighted:
        others["ce_weight"] = (randn(classes).abs() + 0.1).to(device, floats)
    if token_weighted:
        others["token_weight"] = randn(*shape).abs().to(device, floats)
    sizes = class_sizes and class_sizes(mesh.size())
    of_classes = {"weight": 0, "bias": 0, "low_rank_weight": 0}
    compare(op, Split(mesh, classes, sizes), leaves, of_classes, others, sequence_dim, sizes)


OPTIONS = {
    "plain": {},
    "smoothing": dict(label_smoothing=0.1),
    "z-loss": dict(lse_square_scale=1e-2),
    "softcap": dict(softcap=4.0),
    "all options": dict(label_smoothing=0.2, lse_square_scale=1e-2, softcap=4.0, ignore_index=-100),
}


def divided(classes, sizes):
    """The last rank has the rest."""
    return [*sizes, classes - sum(sizes)]


UNEVEN: dict[str, dict[str, Any]] = {
    "a rank without classes": dict(
        classes=3, class_sizes=lambda ranks: [2, 0, 1] if ranks == 3 else [0] * (ranks - 1) + [3]
    ),
    "fewer classes than ranks": dict(classes=2),
    "one class": dict(classes=1),
    "explicit sizes": dict(classes=50, class_sizes=lambda ranks: divided(50, [7, 9, 9][: ranks - 1])),
    "targets of one rank": dict(among=(0, 10)),
    "no targets": dict(ignored=1.0, reduction="sum"),
    "no targets, a mean": dict(ignored=1.0),
    "no tokens": dict(shape=(0, 6), reduction="sum"),
}


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


def check_refused(calls: dict[str, Callable[[], Any]]) -> None:
    """calls: by their error messages."""
    for message, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            assert message in str(error), f"{error}\ninstead of\n{message}"
        else:
            raise AssertionError(f"no error; expected {message}")


def check_compiled(step: Callable, inputs: Callable[[int], list[Tensor]]) -> None:
    """One graph, the same on all ranks, with dynamic shapes. inputs: for a number of tokens."""
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        given, found = inputs(tokens), []
        for function in (step, compiled):
            leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
            wanted = [t for t in leaves if t.requires_grad]
            loss = function(*leaves)
            found.append([loss.detach(), *torch.autograd.grad(loss, wanted)])
        for a, b in zip(*found):
            torch.testing.assert_close(a, b)
