"""Losses whose classes are split over processes, compared with the same losses in one process. The operators' test files
run the cases in a group of processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from checks import assert_no_worse
from process_group import run_cases
from torch import Tensor

from liger_ops import functional as F
from liger_ops._accuracy import Roundings, rounded

CASES: dict[str, Callable[..., None]] = {}
LOG_PROBS = "vocab_parallel_fused_linear_log_probs"
DIVERGENCE = "vocab_parallel_fused_linear_divergence"
INPUTS = ("input", "s_input", "t_input")
# Names of the results, by their number.
RESULTS = {
    1: ("loss",),
    2: ("divergence", "entropy"),
    3: ("loss", "log_probs", "entropy"),
    4: ("loss", "z_loss", "token_accuracy", "predicted"),
    5: ("log_probs", "entropy", "mean_logits", "log_sum_sq_probs", "is_top1"),
}
LOGITS = ("vocab_parallel_cross_entropy", "vocab_parallel_cross_entropy_with_metrics")
LINEAR = tuple(f"vocab_parallel_fused_linear_cross_entropy{form}" for form in ("", "_with_metrics", "_with_log_probs"))


def case(name: str, function: Callable, *args: Any, **options: Any) -> None:
    assert name not in CASES
    CASES[name] = partial(function, *args, **options)


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
    logits = [leaves[f"{model}_input"] @ leaves[f"{model}_weight"].t() for model in "st"]
    return max(float(z.abs().max()) if z.numel() else 0.0 for z in logits)


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
    formula = getattr(F, name.removeprefix("vocab_parallel_")).reference

    def wide(t: Any) -> Any:
        return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t

    truth = run(formula, {k: wide(t) for k, t in leaves.items()}, {k: wide(t) for k, t in others.items()}, upstream_of)
    eager = run(formula, leaves, others, upstream_of)
    names = RESULTS[len(results)]
    # Logits are rounded to the dtype, in ours as in eager code.
    dtype = next(iter(leaves.values())).dtype

    def flat(found: tuple[list, dict]) -> list[Tensor]:
        return [torch.nan_to_num(t) if t.is_floating_point() else t for t in (*found[0], *found[1].values())]

    def of_rounded() -> list[Tensor]:
        exact_others = {k: wide(t) for k, t in others.items()}
        return flat(run(formula, dict(zip(leaves, rounded([*leaves.values()], dtype))), exact_others, upstream_of))

    bounds = Roundings(flat(truth), of_rounded, leaves.values(), dtype)
    # All collectives come before the first assertion that may fail on one rank only.
    for what, ours in zip(names, results):
        same_everywhere(what, ours, split.group)
    for what in grads.keys() & INPUTS if sequence_dim is None else ():
        same_everywhere(f"gradient of {what}", grads[what], split.group)
    eps = torch.finfo(dtype).eps
    for i, (what, ours, theirs, exact) in enumerate(zip(names, results, eager[0], truth[0])):
        if not ours.is_floating_point():
            assert torch.equal(ours, theirs), what
            continue
        # A mean of no targets is NaN.
        assert torch.equal(ours.isnan(), exact.isnan()), f"{what}: NaN at other places"
        ours, theirs, exact = map(torch.nan_to_num, (ours, theirs, exact))
        scale = 1.0 if name == LOG_PROBS else 0.0
        # Logits are rounded to the dtype, in ours as in eager code; errors of a few of them may be small by chance.
        noise = 8 * (torch.finfo(ours.dtype).eps if name == DIVERGENCE else eps)
        assert_no_worse(what, ours, theirs, exact, scale=scale, noise=noise, bounds=(bounds, i))
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
        assert_no_worse(
            f"gradient of {what}", ours, theirs, exact, scale=largest, noise=noise, bounds=(bounds, len(results) + i)
        )


def make_targets(
    shape: Sequence[int], classes: int, among: Sequence[int] | None = None, ignored: float = 0.25
) -> Tensor:
    g = torch.Generator().manual_seed(11)
    low, high = among or (0, classes)
    target = torch.randint(low, high, tuple(shape), generator=g)
    return target.masked_fill(torch.rand(tuple(shape), generator=g) < ignored, -100)


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
    leaves = {k: t.to(device, dtype).requires_grad_(k not in frozen) for k, t in leaves.items()}
    floats = torch.float64 if dtype == torch.float64 else torch.float32
    of_target = shape if ids is None else (*shape, ids)
    others: dict[str, Any] = dict(target=make_targets(of_target, classes, among, ignored).to(device), **options)
    if weighted:
        others["ce_weight"] = (randn(classes).abs() + 0.1).to(device, floats)
    if token_weighted:
        others["token_weight"] = randn(*shape).abs().to(device, floats)
    sizes = class_sizes and class_sizes(mesh.size())
    compare(op, Split(mesh, classes, sizes), leaves, {"weight": 0, "bias": 0}, others, sequence_dim, sizes)


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


OPTIONS = {
    "plain": {},
    "smoothing": dict(label_smoothing=0.1),
    "z-loss": dict(lse_square_scale=1e-2),
    "softcap": dict(softcap=4.0),
    "all options": dict(label_smoothing=0.2, lse_square_scale=1e-2, softcap=4.0, ignore_index=-100),
}

for reduction in ("mean", "sum", "none"):
    for label, options in OPTIONS.items():
        for weighted in (False, True):
            of = f"{reduction}, {label}{', weighted' if weighted else ''}"
            shared: dict[str, Any] = dict(reduction=reduction, weighted=weighted, **options)
            case(f"logits, {of}", of_logits, **shared)
            case(f"linear, {of}", of_linear, **shared, bias=weighted, token_weighted=weighted)
    case(f"logits, metrics, {reduction}", of_logits, op=LOGITS[1], reduction=reduction, **OPTIONS["all options"])
    for name in LINEAR[1:]:
        form = name.rpartition("with_")[2]
        case(f"linear, {form}, {reduction}", of_linear, op=name, reduction=reduction, **OPTIONS["all options"])
        case(f"linear, {form}, {reduction}, sequence", of_linear, op=name, reduction=reduction, sequence_dim=1)
    for dim in (0, 1, -2):
        case(
            f"linear, {reduction}, sequence_dim {dim}", of_linear, reduction=reduction, sequence_dim=dim, shape=(6, 12)
        )
    small = dict(reduction=reduction, shape=(4, 6), token_weighted=True, lse_square_scale=1e-2)
    # The least budget has one token per chunk; with the others there are several chunks, and two buffers.
    for tokens in (1, 4, 16):
        budget = 24 * 16 + tokens * 320
        case(f"linear, {reduction}, chunks for {tokens} tokens", of_linear, memory_budget=budget, **small)
        case(
            f"linear, {reduction}, chunks for {tokens} tokens of a sequence", of_linear, memory_budget=budget, **small,
            sequence_dim=1,
        )  # fmt: skip


def divided(classes, sizes):
    """The last rank has the rest."""
    return [*sizes, classes - sum(sizes)]


UNEVEN: dict[str, dict[str, Any]] = {
    "a rank without classes": dict(
        classes=3, class_sizes=lambda ranks: [2, 0, 1] if ranks == 3 else [0] * (ranks - 1) + [3]
    ),
    "fewer classes than ranks": dict(classes=2),
    "explicit sizes": dict(classes=50, class_sizes=lambda ranks: divided(50, [7, 9, 9][: ranks - 1])),
    "targets of one rank": dict(among=(0, 10)),
    "no targets": dict(ignored=1.0, reduction="sum"),
    "no targets, a mean": dict(ignored=1.0),
    "no tokens": dict(shape=(0, 6), reduction="sum"),
}
for label, changes in UNEVEN.items():
    case(f"logits, {label}", of_logits, **changes)
    case(f"logits, metrics, {label}", of_logits, op=LOGITS[1], label_smoothing=0.1, **changes)
    case(f"linear, {label}", of_linear, bias=True, **changes)
    case(f"linear, log_probs, {label}", of_linear, op=LINEAR[2], label_smoothing=0.1, **changes)
    case(f"linear, {label}, sequence", of_linear, sequence_dim=1, **changes)

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    of = str(dtype).removeprefix("torch.")
    case(f"logits, {of}", of_logits, dtype=dtype, **OPTIONS["all options"])
    case(
        f"logits, {of}, common offset", of_logits, dtype=dtype, label_smoothing=0.1, offset=20.0, index_type=torch.int32
    )
    case(f"logits, {of}, confident", of_logits, dtype=dtype, scale=30.0)
    for reduction in ("mean", "none"):
        for frozen in ((), ("input",), ("weight",)):
            label = f"{reduction}{', frozen ' + frozen[0] if frozen else ''}"
            shared = dict(dtype=dtype, reduction=reduction, frozen=frozen, shape=(4, 6))
            case(f"linear, {of}, {label}", of_linear, **shared)
            case(f"linear, {of}, {label}, sequence in chunks", of_linear, **shared, sequence_dim=1, memory_budget=3000)


FACTS = dict(entropy=True, mean_logits=True, log_sum_sq_probs=True, is_top1=True)
for label, changes in {
    "plain": {},
    "facts": FACTS,
    "all options": dict(FACTS, softcap=4.0, logits_scale=0.7, temperature=1.5),
    "chunks": dict(entropy=True, memory_budget=2000, shape=(4, 6)),
    "large logits": dict(entropy=True, scale=30.0),
    "bfloat16": dict(dtype=torch.bfloat16, entropy=True, mean_logits=True, log_sum_sq_probs=True),
}.items():
    for ids in (None, 3):
        for frozen in ((), ("weight", "bias"), ("input",)):
            of = f"{label}{f', {ids} ids' if ids else ''}{', frozen ' + frozen[0] if frozen else ''}"
            shared = dict(op=LOG_PROBS, ids=ids, frozen=frozen, bias=True) | changes
            case(f"log_probs, {of}", of_linear, **shared)
            case(f"log_probs, {of}, announced", of_linear, **shared, entropy_grad=True)
            case(f"log_probs, {of}, sequence", of_linear, **shared, sequence_dim=1)
for label, changes in UNEVEN.items():
    given = {k: v for k, v in changes.items() if k != "reduction"}
    for frozen in ((), ("weight",)):
        of = f"{label}{', frozen weight' if frozen else ''}"
        case(f"log_probs, {of}", of_linear, op=LOG_PROBS, frozen=frozen, ids=2, **FACTS, **given)
        case(f"log_probs, {of}, sequence", of_linear, op=LOG_PROBS, frozen=frozen, sequence_dim=1, **FACTS, **given)

ALL_OPTIONS = dict(
    temperature=0.6, s_logits_scale=0.7, t_logits_scale=1.5, s_softcap=3.0, t_softcap=5.0, bias=True, masked=0.3,
    token_weighted=True,
)  # fmt: skip
FROZEN = ((), ("s_weight", "s_bias"), ("s_input",), ("s_input", "s_weight", "s_bias"))
for beta in (0.0, 1.0, 0.3):
    for reduction in ("mean", "sum", "none"):
        shared = dict(beta=beta, reduction=reduction)
        of = f"beta {beta}, {reduction}"
        for frozen in FROZEN:
            label = f"{of}{', frozen ' + ' '.join(frozen) if frozen else ''}"
            case(f"divergence, {label}", of_divergence, **shared, frozen=frozen, bias=True)
            case(f"divergence, {label}, sequence", of_divergence, **shared, frozen=frozen, sequence_dim=1, masked=0.3)
        case(f"divergence, {of}, all options", of_divergence, **shared, **ALL_OPTIONS)
        # Several chunks; with 16 bits and a mean, so many that the gradients are computed by blocks of classes.
        for dtype in (torch.float64, torch.bfloat16):
            label = f"{of}, {str(dtype).removeprefix('torch.')} in chunks"
            chunks = dict(dtype=dtype, memory_budget=3600 if dtype == torch.float64 else 2400, shape=(6, 6))
            case(f"divergence, {label}", of_divergence, **shared, **ALL_OPTIONS, **chunks)
            case(f"divergence, {label} of a sequence", of_divergence, **shared, **ALL_OPTIONS, **chunks, sequence_dim=0)
    for label, changes in UNEVEN.items():
        given = {k: v for k, v in changes.items() if k in ("classes", "class_sizes", "shape")}
        masked = dict(masked=1.0) if "no targets" in label else {}
        if not given and not masked:
            continue
        of = f"beta {beta}, {label.replace('targets', 'positions')}"
        for reduction in ("mean", "none"):
            for frozen in FROZEN[:2]:
                shared = dict(beta=beta, reduction=reduction, frozen=frozen) | given | masked
                name = f"divergence, {of}, {reduction}{', frozen' if frozen else ''}"
                if name not in CASES:
                    case(name, of_divergence, **shared)
                    case(f"{name}, sequence", of_divergence, sequence_dim=1, **shared)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for reduction in ("mean", "none"):
        for frozen in FROZEN[:3]:
            label = (
                f"{str(dtype).removeprefix('torch.')}, {reduction}{', frozen ' + ' '.join(frozen) if frozen else ''}"
            )
            shared = dict(dtype=dtype, reduction=reduction, frozen=frozen, beta=0.5)
            case(f"divergence, {label}", of_divergence, **shared)
            case(f"divergence, {label}, sequence", of_divergence, **shared, sequence_dim=-2)
case("divergence, confident models", of_divergence, scale=60.0, beta=0.5, dtype=torch.float32)
case("divergence, other teacher", of_divergence, dtype=torch.bfloat16, t_dtype=torch.float32, beta=0.5)


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


def counts_collectives(mesh: Any) -> None:
    """One gather of facts for each chunk, 12 bytes per row; the input's gradient reduced for each chunk."""
    group, ranks = mesh.get_group(), mesh.size()
    hidden, classes, shape = 8, 48, (4, 6)
    logits = torch.randn(*shape, classes // ranks, requires_grad=True)
    x, weight = (
        torch.randn(*shape, hidden, requires_grad=True),
        torch.randn(classes // ranks, hidden, requires_grad=True),
    )
    target = make_targets(shape, classes)
    tokens, gather = target.numel(), "allgather_base"

    def of_logits(**options: Any) -> Callable[[], Any]:
        op = F.vocab_parallel_cross_entropy
        return lambda: op(logits, target, group.group_name, classes, **options).sum().backward()

    def of_linear(x: Tensor, **options: Any) -> Callable[[], Any]:
        op = F.vocab_parallel_fused_linear_cross_entropy
        return lambda: op(x, weight, target, group.group_name, classes, **options).sum().backward()

    assert collectives_of(of_logits()) == {(gather, 3 * tokens): 1}
    assert collectives_of(of_logits(label_smoothing=0.1, reduction="none")) == {(gather, 4 * tokens): 1}
    assert collectives_of(of_linear(x)) == {(gather, 3 * tokens): 1, ("allreduce", 0): 1}
    assert collectives_of(of_linear(x, reduction="none")) == {(gather, 3 * tokens): 1, ("allreduce", 0): 1}
    assert collectives_of(of_linear(x.detach())) == {(gather, 3 * tokens): 1}
    part = x.detach().chunk(ranks, 1)[mesh.get_local_rank()].contiguous().requires_grad_()
    found = collectives_of(of_linear(part, sequence_dim=1))
    scattered = {("reduce_scatter_base", tokens * hidden): 1, (gather, tokens * hidden // ranks): 1}
    assert found == {(gather, 3 * tokens): 1} | scattered, found


CASES["collectives, counts"] = counts_collectives


def counts_collectives_of_log_probs(mesh: Any) -> None:
    """One gather of facts for each chunk, 12 bytes per row and 4 per id and fact; the input's gradient reduced once."""
    group, ranks, shape, hidden, classes = mesh.get_group().group_name, mesh.size(), (4, 6), 8, 48
    weight = torch.randn(classes // ranks, hidden)
    for ids, frozen in ((1, False), (1, True), (3, False), (3, True)):
        x, target = torch.randn(*shape, hidden, requires_grad=True), make_targets((*shape, ids), classes)
        head = weight.clone().requires_grad_(not frozen)

        def step(**options: Any) -> Any:
            op = F.vocab_parallel_fused_linear_log_probs
            return op(x, head, target, group, classes, entropy=True, **options)[0].sum().backward()

        gather, tokens = "allgather_base", shape[0] * shape[1]
        assert collectives_of(step) == {(gather, (3 + ids) * tokens): 1, ("allreduce", 0): 1}
        assert collectives_of(partial(step, mean_logits=True)) == {(gather, (4 + ids) * tokens): 1, ("allreduce", 0): 1}


CASES["collectives, log_probs"] = counts_collectives_of_log_probs


def counts_collectives_of_divergence(mesh: Any) -> None:
    """One gather of facts for each chunk, 24 bytes per row; the sums over classes and the gradient of the input reduced.
    The gradient of a mixture needs one more sum over classes."""
    group, ranks, shape, classes = mesh.get_group().group_name, mesh.size(), (4, 6), 48
    heads = [torch.randn(classes // ranks, n) for n in (8, 5)]
    tokens, gather = shape[0] * shape[1], "allgather_base"

    def step(x: Tensor, t: Tensor, trained: bool, **options: Any) -> Any:
        head = heads[0].clone().requires_grad_(trained)
        found = F.vocab_parallel_fused_linear_divergence(x, head, t, heads[1], group, classes, **options)
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
    parts = [a.chunk(ranks, 1)[mesh.get_local_rank()].contiguous() for a in (x, t)]
    parts[0].requires_grad_()
    found = collectives_of(partial(step, *parts, True, reduction="mean", sequence_dim=1))
    inputs = {(gather, tokens * n // ranks): 1 for n in (8, 5)}
    assert found == facts | inputs | {("allreduce", 0): 1, ("reduce_scatter_base", tokens * 8): 1}, found


CASES["collectives, divergence"] = counts_collectives_of_divergence


def refuses(mesh: Any) -> None:
    group, ranks, rank = mesh.get_group().group_name, mesh.size(), mesh.get_local_rank()
    logits, target, weight = torch.randn(2, 5), torch.zeros(2, dtype=torch.long), torch.randn(5, 4)
    x, classes = torch.randn(2, 4), 5 * ranks
    of_logits, of_linear = F.vocab_parallel_cross_entropy, F.vocab_parallel_fused_linear_cross_entropy
    log_probs, divergence = F.vocab_parallel_fused_linear_log_probs, F.vocab_parallel_fused_linear_divergence
    here, there = "vocab_parallel_cross_entropy: ", "vocab_parallel_fused_linear_cross_entropy: "
    for message, call in {
        here + "group must be the name of a process group (got 'none')": lambda: of_logits(logits, target, "none", classes),
        here + "group must be the name of a process group (got '')": lambda: of_logits(logits, target, "", classes),
        here + "classes must be positive (got 0)": lambda: of_logits(logits, target, group, 0),
        here + f"class_sizes must be the classes of each rank, {classes} in all": lambda: of_logits(
            logits, target, group, classes, class_sizes=[classes + 1, *[0] * (ranks - 2), -1]
        ),
        here + f"class_sizes must have one number for each of the {ranks} ranks": lambda: of_logits(
            logits, target, group, classes, class_sizes=[classes]
        ),
        here + f"logits must have 6 classes, those of rank {rank} of {ranks}": lambda: of_logits(
            logits, target, group, 6 * ranks
        ),
        here + f"weight must have shape [{classes}], one value per class": lambda: of_logits(
            logits, target, group, classes, torch.ones(5)
        ),
        there + f"weight must have 6 classes, those of rank {rank} of {ranks}": lambda: of_linear(
            x, weight, target, group, 6 * ranks
        ),
        there + "sequence_dim must be a dimension of input other than the last (got 1)": lambda: of_linear(
            x, weight, target, group, classes, sequence_dim=1
        ),
        there + f"input must have 2 / {ranks} positions along sequence_dim, the same on every rank (got 2)": lambda: (
            of_linear(x, weight, target, group, classes, sequence_dim=0)
        ),
        f"{LOG_PROBS}: weight must have 6 classes, those of rank {rank} of {ranks}": lambda: log_probs(
            x, weight, target, group, 6 * ranks
        ),
        f"{DIVERGENCE}: s_weight must have 6 classes, those of rank {rank} of {ranks}": lambda: divergence(
            x, weight, x, weight, group, 6 * ranks
        ),
        f"{DIVERGENCE}: t_weight must have 5 classes like s_weight (got 4)": lambda: divergence(
            x, weight, x, weight[:4], group, classes
        ),
        f"{DIVERGENCE}: sequence_dim must be a dimension of s_input other than the last (got 1)": lambda: divergence(
            x, weight, x, weight, group, classes, sequence_dim=1
        ),
        f"{DIVERGENCE}: mask must have shape [{2 * ranks}], that of s_input without its last dimension, with the "
        "positions of all ranks (got [2])": lambda: divergence(
            x, weight, x, weight, group, classes, mask=torch.ones(2).bool(), sequence_dim=0
        ),
        there + "ce_weight must not require a gradient (got one that does)": lambda: of_linear(
            x, weight, target, group, classes, ce_weight=torch.ones(classes, requires_grad=True)
        ),
    }.items():  # fmt: skip
        try:
            call()
        except RuntimeError as error:
            assert message in str(error), f"{error}\ninstead of\n{message}"
        else:
            raise AssertionError(f"no error; expected {message}")


CASES["arguments are refused"] = refuses


def compiles(mesh: Any) -> None:
    """One graph, the same on all ranks, with dynamic shapes."""
    group, ranks, rank = mesh.get_group().group_name, mesh.size(), mesh.get_local_rank()
    classes = 7 * ranks - 2
    device = mesh.device_type
    head = torch.randn(classes, 8, generator=torch.Generator().manual_seed(1)).chunk(ranks)[rank].to(device)

    def step(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.vocab_parallel_fused_linear_cross_entropy(2 * x, weight, target, group, classes)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        target = make_targets((tokens,), classes).to(device)
        found = []
        for function in (step, compiled):
            x = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
            weight = head.clone().requires_grad_()
            loss = function(x, weight, target)
            found.append([loss.detach(), *torch.autograd.grad(loss, (x, weight))])
        for a, b in zip(*found):
            torch.testing.assert_close(a, b)


CASES["linear, compiled"] = compiles


def compiles_log_probs(mesh: Any) -> None:
    group, ranks, rank = mesh.get_group().group_name, mesh.size(), mesh.get_local_rank()
    classes, device = 7 * ranks - 2, mesh.device_type
    head = torch.randn(classes, 8, generator=torch.Generator().manual_seed(1)).chunk(ranks)[rank].to(device)

    def step(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        found = F.vocab_parallel_fused_linear_log_probs(2 * x, weight, target, group, classes, entropy=True)
        return found.log_probs.square().sum() + found.entropy.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        target = make_targets((tokens, 2), classes).to(device)
        found = []
        for function in (step, compiled):
            x = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
            found.append([*torch.autograd.grad(function(x, head, target), (x,))])
        for a, b in zip(*found):
            torch.testing.assert_close(a, b)


CASES["log_probs, compiled"] = compiles_log_probs


def compiles_divergence(mesh: Any) -> None:
    group, ranks, rank = mesh.get_group().group_name, mesh.size(), mesh.get_local_rank()
    classes, device = 7 * ranks - 2, mesh.device_type
    g = torch.Generator().manual_seed(1)
    heads = [torch.randn(classes, n, generator=g).chunk(ranks)[rank].to(device) for n in (8, 6)]
    for sequence_dim in (None, 0):
        for reduction in ("mean", "none"):
            for trained in (True, False):

                def step(x: Tensor, head: Tensor, t: Tensor) -> Tensor:
                    options = dict(beta=0.5, reduction=reduction, sequence_dim=sequence_dim)
                    found = F.vocab_parallel_fused_linear_divergence(
                        2 * x, head, t, heads[1], group, classes, **options
                    )
                    return found.divergence.square().sum()

                torch._dynamo.reset()
                compiled = torch.compile(step, fullgraph=True, dynamic=True)
                for tokens in (5, 9):
                    inputs = [torch.randn(tokens, n, generator=g).to(device) for n in (8, 6)]
                    found = []
                    for function in (step, compiled):
                        x, head = inputs[0].clone().requires_grad_(), heads[0].clone().requires_grad_(trained)
                        wanted = (x, head) if trained else (x,)
                        found.append([*torch.autograd.grad(function(x, head, inputs[1]), wanted)])
                    for a, b in zip(*found):
                        torch.testing.assert_close(a, b)


CASES["divergence, compiled"] = compiles_divergence

# Large enough for the logits-free path of compute capability 9.0.
LARGE: dict[str, Callable[..., None]] = {}
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
    LARGE[f"large, {label}"] = partial(of_linear, **given)
    LARGE[f"large, {label}, sequence"] = partial(of_linear, **given, sequence_dim=1)
    LARGE[f"large, {label}, chunks"] = partial(of_linear, **given, memory_budget=110 << 20)
    LARGE[f"large, {label}, sequence in chunks"] = partial(of_linear, **given, sequence_dim=1, memory_budget=110 << 20)
    LARGE[f"large, {label}, two buffers"] = partial(of_linear, **given | dict(shape=(3, 1024)), memory_budget=260 << 20)

if __name__ == "__main__":
    run_cases(CASES | LARGE)
