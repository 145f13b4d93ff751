"""What the tests of the losses of logits share: their tensors, and the comparison with the formulas in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_ops import functional as F
from liger_ops.reference import operators
from tests.support.checks import (
    CPU_DTYPES,
    HALF_TYPES,
    assert_no_worse,
    coarseness,
    gradients,
    like,
    path_taken,
    roundings,
)

Call = tuple[dict[str, Tensor | None], dict[str, Any]]  # tensors and options
INDEX_TYPES = [torch.int64, torch.int32]
# Fewest, widths that no vector length divides, on both sides of the CPU loops' lengths, and a real vocabulary.
SIZES = [1, 2, 7, 33, 136, 1000, 2049, 8192, 9001, 50257]
SHARED: dict[str, Iterable] = dict(n=SIZES, dtype=CPU_DTYPES)


def indices(shape: tuple[int, ...], classes: int, device: str, dtype: torch.dtype, ignored: float) -> Tensor:
    """The first counts."""
    found = torch.randint(max(classes, 1), shape, device=device)
    found[torch.rand(shape, device=device) < ignored] = -100
    found.view(-1)[:1] = 0
    return found.to(dtype)


def of_cross_entropy(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu", weight: str | None = None,
    index: torch.dtype = torch.int64, reduction: str = "mean", options: str = "plain", ignored: float = 0.25,
) -> Call:  # fmt: skip
    """weight: of classes, "fp32", "own" or None."""
    logits = (3 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
    given = dict(logits=logits, target=indices(shape[:-1], shape[-1], device, index, ignored), weight=None)
    if weight is not None:
        given["weight"] = (torch.rand(shape[-1], device=device) + 0.1).to(dtype if weight == "own" else torch.float32)
    return given, dict(EXTRAS[options], reduction=reduction)


EXTRAS: dict[str, dict] = {
    "plain": {},
    "smoothing": dict(label_smoothing=0.1),
    "smoothing alone": dict(label_smoothing=1.0),
    "z-loss": dict(lse_square_scale=1e-3),
    "softcap": dict(softcap=5.0),
    "all": dict(label_smoothing=0.2, lse_square_scale=1e-3, softcap=30.0),
}


def of_log_probs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu", ids: int | None = None,
    index: torch.dtype = torch.int64, options: str = "entropy", ignored: float = 0.25,
) -> Call:  # fmt: skip
    """The first two of several ids are equal."""
    logits = (3 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
    found = indices(shape[:-1] if ids is None else (*shape[:-1], ids), shape[-1], device, index, ignored)
    if ids is not None and ids > 1:
        found[..., 1] = found[..., 0]
    return dict(logits=logits, index=found), LOG_PROBS_OPTIONS[options]


LOG_PROBS_OPTIONS: dict[str, dict] = {
    "plain": {},
    "entropy": dict(entropy=True),
    "temperature": dict(entropy=True, temperature=0.7),
    "softcap": dict(entropy=True, softcap=5.0),
    "all": dict(entropy=True, softcap=5.0, temperature=1.5),
}


def of_divergence(
    name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu", index: Any = None,
    reduction: str = "batchmean", options: Mapping[str, Any] | None = None, ignored: float = 0.25,
) -> Call:  # fmt: skip
    """Distributions. index: the dtype of labels, if there are any."""
    options = {} if options is None else options
    logits, others = (2 * torch.randn(shape, device=device) for _ in range(2))
    x = logits.softmax(-1) if name == "tvd" else logits.log_softmax(-1)
    t = others.log_softmax(-1) if name == "jsd" or "log_target" in options else others.softmax(-1)
    labels = None if index is None else indices(shape[:-1], 5, device, index, ignored)
    given = dict(input=x.to(dtype).requires_grad_(), target=t.to(dtype), shift_labels=labels)
    return given, dict(options, reduction=reduction)


class LogitsLoss(NamedTuple):
    name: str
    make: Callable[..., Call]
    axes: Mapping[str, Iterable]  # of the cases that are compared with the formula
    index: str  # the argument that names classes

    def __str__(self) -> str:
        return self.name

    @property
    def op(self) -> Callable:
        return getattr(F, self.name) if self.name != "cross_entropy_" else overwriting


def overwriting(logits: Tensor, *args: Any, **options: Any) -> Tensor:
    """cross_entropy_ on a copy, so that the logits keep their values."""
    return F.cross_entropy_(logits.clone(), *args, **options)


overwriting.reference = F.cross_entropy.reference
OF_TARGETS = dict(
    SHARED, index=INDEX_TYPES, weight=[None, "fp32", "own"], reduction=["mean", "sum", "none"], options=EXTRAS
)  # fmt: skip
CROSS_ENTROPY = LogitsLoss("cross_entropy", of_cross_entropy, OF_TARGETS, "target")
OVERWRITING = LogitsLoss("cross_entropy_", of_cross_entropy, OF_TARGETS, "target")
LOG_PROBS = LogitsLoss(
    "log_probs", of_log_probs, dict(SHARED, index=INDEX_TYPES, ids=[None, 1, 3, 20], options=LOG_PROBS_OPTIONS), "index"
)
CHOICES: dict[str, list[dict]] = {
    "kl_div": [{}, dict(log_target=True)],
    "jsd": [{}, dict(beta=0.0), dict(beta=1.0), dict(beta=0.1)],
    "tvd": [{}],
}


def divergence(name: str) -> LogitsLoss:
    def make(*args: Any, **options: Any) -> Call:
        return of_divergence(name, *args, **options)

    reductions = ["mean", "batchmean", "sum", "none"]
    axes = dict(SHARED, index=[None, *INDEX_TYPES], reduction=reductions, options=CHOICES[name])
    return LogitsLoss(name, make, axes, "shift_labels")


DIVERGENCES = [divergence(name) for name in CHOICES]
LOSSES = [CROSS_ENTROPY, OVERWRITING, LOG_PROBS, *DIVERGENCES]


def divergence_noise(name, input, target, shift_labels=None, reduction="", ignore_index=-100, **options):
    """For test_properties.py too: the rounding error of the terms, relative to the losses: terms of opposite sign cancel."""
    x, t = input.detach().double(), target.detach().double()
    losses = operators()[name].reference(x, t, shift_labels, reduction="none", ignore_index=ignore_index, **options)
    sizes = losses.abs()
    beta = options.get("beta", 0.5)
    if name == "jsd" and beta not in (0, 1):
        log_m = torch.logaddexp(t + math.log(beta), x + math.log(1 - beta))
        # log m has the rounding error of m.
        sizes = beta * t.exp() * ((t - log_m).abs() + 0.5) + (1 - beta) * x.exp() * ((x - log_m).abs() + 0.5)
    if sizes.numel() == 0:
        return 0.0
    if reduction == "none":
        ratio = sizes.max() / losses.abs().max().clamp(min=1e-30)
    else:
        ratio = sizes.sum() / losses.sum().abs().clamp(min=1e-30)
    return float(ratio) * torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps


def noise_of(loss: LogitsLoss, given: dict[str, Any], options: dict[str, Any], device: str) -> tuple[float, float]:
    """Of results and of gradients."""
    x = next(iter(given.values()))
    if loss in DIVERGENCES:
        error = divergence_noise(loss.name, **given, **options)
        # Exponentials and logarithms of 16-bit rows have fewer digits in kernels. Their exponentials are accurate to 2 ulp,
        # those of eager to 1 ulp.
        if device == "cuda":
            return (4 * error, 0.0) if x.dtype in HALF_TYPES else (error, torch.finfo(torch.float32).eps)
        return error, 0.0
    if loss is not LOG_PROBS or not x.numel():
        return 0.0, 0.0
    # One rounding of the largest logit is an absolute error of results, and a relative one of probabilities.
    largest = float(x.detach().abs().max()) / options.get("temperature", 1.0)
    noise = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps * largest
    return noise, noise


def check(loss: LogitsLoss, given: dict[str, Tensor | None], options: dict[str, Any], device: str) -> None:
    """Results and the gradient are as accurate as those of the formula in the same dtypes."""
    names, tensors, count = [*given], [*given.values()], 2 if options.get("entropy") else 1

    def of(function: Callable) -> Callable[..., tuple[Tensor, ...]]:
        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            found = function(**dict(zip(names, tensors)), **options)
            return (found,) if isinstance(found, Tensor) else tuple(found)[:count]

        return call

    ours_of, formula = of(loss.op), of(loss.op.reference)
    with path_taken(device):
        quiet = ours_of(*(t if t is None else t.detach() for t in tensors))
    upstream = [torch.randn(r.shape, device=device) for r in quiet]
    if loss is OVERWRITING:
        # Forward already rounded this gradient; a power of two adds no second rounding.
        upstream = [2 * g.sign() for g in upstream]
    with path_taken(device):
        ours = gradients(ours_of, [like(t) for t in tensors], upstream)
    same = [t.detach() for t in ours[: len(quiet)]]
    torch.testing.assert_close(same, [*quiet], rtol=0.0, atol=0.0, equal_nan=True)
    eager = gradients(formula, [like(t) for t in tensors], upstream)
    oracle = gradients(formula, [like(t, torch.float64) for t in tensors], upstream)
    bounds = roundings(formula, tensors, upstream, oracle)
    of_results, of_gradient = noise_of(loss, given, options, device)
    for i, results in enumerate(zip(ours[:count], eager, oracle)):
        scale = float(loss is LOG_PROBS)
        assert_no_worse(f"result {i}", *results, scale=scale, noise=of_results, bounds=(bounds, i))
    x, slopes = tensors[0], (ours[-1], eager[-1], oracle[-1])
    # Of one or two classes, the gradient may be a difference of equal terms.
    scale = max(float(g.abs().max()) for g in upstream) if loss is LOG_PROBS and x.shape[-1] < 3 else 0.0
    assert_no_worse("gradient", *slopes, scale=scale, noise=of_gradient, bounds=(bounds, -1))
    if x.dtype in HALF_TYPES and loss not in DIVERGENCES:
        check_other_classes(loss, given[loss.index], of_gradient, slopes, (bounds, -1))


def check_other_classes(
    loss: LogitsLoss, index: Tensor, noise: float, slopes: tuple[Tensor, ...], bounds: tuple[Any, int]
) -> None:
    """Checks small gradients on their own.

    The target's gradient is near 1, so the general tolerance would accept zeros everywhere else. The same holds for
    rare classes among the others."""
    size = slopes[-1].abs()
    others = torch.ones_like(size, dtype=torch.bool)
    index = (index if index.dim() == size.dim() else index[..., None]).long()
    others.scatter_(-1, index.clamp(0, size.shape[-1] - 1), False)
    rare = others & (size < size.where(others, 0).mean(-1, keepdim=True))
    # A factor that is applied after rounding to 16 bits scales the rounding error.
    factor = 2 if loss is OVERWRITING else 1
    for name, which in [("other", others)] + [("rare", rare)] * (loss is not LOG_PROBS):
        apart = [g.where(which, 0) for g in slopes]
        coarse = factor * coarseness(apart[0].dtype, apart[-1])
        given = {"bounds": bounds} if loss is LOG_PROBS else {}
        assert_no_worse(f"gradient of {name} classes", *apart, noise=noise + coarse, **given)
