"""What the tests of the linear losses share: tensors of heads, budgets, and the comparison with the formulas in fp64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from liger_ops import functional as F
from liger_ops._accuracy import compute_dtype
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

plan = torch.ops.liger._fused_linear_cross_entropy_plan
# The plan takes these bits: which gradients a call computes.
BITS = {"input": 1, "weight": 2, "bias": 4}


# ---- For test_properties.py


def precision(input=None, low_rank_input=None, s_input=None, s_low_rank_input=None, **_):
    """For test_properties.py: with a low-rank addend, ours rounds the addend and the logits to the dtype, and the formula the
    product and the logits. Their gradients are rounded too, whatever the dtype of the addend."""
    x, addend = (input, low_rank_input) if s_input is None else (s_input, s_low_rank_input)
    return None if addend is None else x.dtype


def noise(op, **arguments):
    """For test_properties.py: a loss near zero has the absolute error of the logits of which it is a difference."""
    given = {
        k: v.detach().double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }
    x, weight = given["input"], given["weight"]
    logits = (x @ weight.t()).abs() * abs(given.get("logits_scale", 1.0))
    largest = float(logits.max().clamp(max=given.get("softcap") or math.inf)) if logits.numel() else 0.0
    size = max(1.0, largest / given.get("temperature", 1.0))
    error = 4 * size * torch.finfo(compute_dtype([arguments["input"], arguments["weight"]])).eps
    exact = operators()[op].reference(**given)
    exact = (exact,) if isinstance(exact, torch.Tensor) else exact
    return tuple(error / max(float(t.double().abs().nan_to_num().max()), 1e-30) if t.numel() else 0.0 for t in exact)


# ---- Calls


def head(
    tokens: tuple[int, ...], hidden: int, classes: int, dtype: torch.dtype, device: str, bias: bool = False,
    adapter: str | torch.dtype | None = None, frozen: str = "", prefix: str = "", rank: int = 5,
) -> dict[str, Tensor]:  # fmt: skip
    """The tensors of one model by name. adapter: the dtype of a low-rank addend of the logits, "same" or None. frozen:
    names, without the prefix."""
    sizes: dict[str, tuple[int, ...]] = {"input": (*tokens, hidden), "weight": (classes, hidden)}
    if bias:
        sizes["bias"] = (classes,)
    if adapter is not None:
        sizes |= {"low_rank_input": (*tokens, rank), "low_rank_weight": (classes, rank)}
    found = {}
    for name, size in sizes.items():
        scale = 2 * max(size[-1], 1) ** -0.5 if "weight" in name else 1.0
        own = adapter if "low_rank" in name and isinstance(adapter, torch.dtype) else dtype
        t = (torch.randn(size, device=device) * scale).to(own)
        found[prefix + name] = t.requires_grad_(name not in frozen.split())
    return found


def targets(
    tokens: tuple[int, ...], classes: int, device: str, ids: int | None = None, ignored: float = 0.25
) -> Tensor:
    """Skewed like tokens of natural language: a few classes take most. Of several ids, the first two are equal, and a
    quarter of the positions is ignored as a whole. The first counts."""
    shape = tokens if ids is None else (*tokens, ids)
    target = (torch.rand(shape, device=device) ** 3 * classes).long()
    if ids is not None and ids > 1:
        target[..., 1] = target[..., 0]
    drop = torch.rand(shape, device=device) < ignored
    drop.view(-1, ids or 1)[3::4] |= ids is not None
    drop.view(-1)[:1] = False
    return target.masked_fill(drop, -100)


Call = tuple[dict[str, Tensor], dict[str, Any]]  # tensors that may be learned, and other arguments
SMOOTHING, Z_LOSS = dict(label_smoothing=0.1), dict(lse_square_scale=1e-3)
CE_OPTIONS: dict[str, dict] = {
    "plain": {},
    "smoothing": SMOOTHING,
    "z-loss": Z_LOSS,
    "softcap": dict(softcap=5.0),
    "scale": dict(logits_scale=0.7),
    "all": SMOOTHING | Z_LOSS | dict(softcap=5.0, logits_scale=1.5),
}


def of_cross_entropy(
    sizes: tuple, dtype: torch.dtype, device: str, reduction: str = "mean", options: str = "plain", weighted: str = "",
    ignored: float = 0.25, **case: Any,
) -> Call:  # fmt: skip
    tokens, _, classes = sizes
    others = dict(CE_OPTIONS[options], reduction=reduction, target=targets(tokens, classes, device, None, ignored))
    if "classes" in weighted:
        others["ce_weight"] = torch.rand(classes, device=device) + 0.1
    if "tokens" in weighted:
        others["token_weight"] = torch.rand(tokens, device=device)
    return head(*sizes, dtype, device, **case), others


LOG_PROBS_OPTIONS: dict[str, dict] = {
    "plain": {},
    "entropy": dict(entropy=True),
    "entropy, announced": dict(entropy=True, entropy_grad=True),
    "softcap": dict(entropy=True, softcap=3.0, logits_scale=0.7),
    "all": dict(entropy=True, entropy_grad=True, softcap=3.0, logits_scale=1.5, temperature=0.7),
}


def of_log_probs(
    sizes: tuple, dtype: torch.dtype | str, device: str, options: str = "plain", ids: int | None = None,
    ignored: float = 0.25, **case: Any,
) -> Call:  # fmt: skip
    """dtype: "mixed" is fp32 hidden states with a head in bf16."""
    tokens, _, classes = sizes
    given = head(*sizes, torch.float32 if dtype == "mixed" else dtype, device, **case)
    if dtype == "mixed":
        given |= {k: like(t, torch.bfloat16) for k, t in given.items() if k in ("weight", "bias")}
    return given, dict(LOG_PROBS_OPTIONS[options], target=targets(tokens, classes, device, ids, ignored))


DIVERGENCE_OPTIONS: dict[str, dict] = {
    "plain": {},
    "temperature": dict(temperature=2.0),
    "scale": dict(s_logits_scale=0.7, t_logits_scale=1.5),
    "softcap": dict(s_softcap=3.0, t_softcap=5.0),
    "one softcap": dict(t_softcap=4.0),
    "all": dict(temperature=0.6, s_logits_scale=0.7, t_logits_scale=1.5, s_softcap=3.0, t_softcap=5.0),
}
EVERYTHING = "input weight bias low_rank_input low_rank_weight"


def of_divergence(
    sizes: tuple, dtype: torch.dtype, device: str, beta: float | str = 0.0, reduction: str = "none",
    options: str = "plain", weighted: str = "", frozen: str = "", adapter: str | torch.dtype | None = None,
    of: str = "both", t_dtype: torch.dtype | str = "same", bias: bool = False,
) -> Call:  # fmt: skip
    """beta: "of 300 classes" is a beta of 0 with a teacher of so many classes, and the student's among them: in any order,
    some twice. of: the models that have an adapter."""
    tokens, hidden, classes = sizes
    of_teacher = int(beta.split()[1]) if isinstance(beta, str) else classes
    given = head(*sizes, dtype, device, bias, adapter if of != "t_" else None, frozen, "s_")
    given |= head(
        tokens, hidden + 8, of_teacher, dtype if t_dtype == "same" else t_dtype, device, bias,
        adapter if of != "s_" else None, EVERYTHING, "t_", 3,
    )  # fmt: skip
    others = dict(DIVERGENCE_OPTIONS[options], reduction=reduction)
    if isinstance(beta, str):
        others["vocab_map"] = torch.randint(of_teacher, (classes,), device=device)
    else:
        others["beta"] = beta
    if "mask" in weighted:
        others["mask"] = (torch.rand(tokens, device=device) < 0.6).index_fill(0, torch.tensor(0, device=device), True)
    if "weights" in weighted:
        others["token_weight"] = torch.rand(tokens, device=device)
    return given, others


# (tokens, hidden, classes): some, fewest, many, an odd number of each, no columns, and more classes than one block has.
SIZES = [((3, 20), 32, 200), ((), 8, 2), ((70,), 32, 300), ((33,), 7, 61), ((9,), 0, 7), ((9,), 16, 5003)]
FROZEN = [
    "", "weight bias", "input", "weight", "bias", "input weight", "input weight bias", "low_rank_input", "low_rank_weight",
    EVERYTHING,
]  # fmt: skip
SHARED: dict[str, Iterable] = dict(
    frozen=FROZEN, sizes=SIZES, adapter=[None, "same", torch.float32], in_chunks=[True, False, True], bias=[True, False]
)


class LinearLoss(NamedTuple):
    name: str
    make: Callable[..., Call]
    axes: Mapping[str, Iterable]  # of the cases that are compared with the formula

    def __str__(self) -> str:
        return self.name

    @property
    def op(self) -> Callable:
        return getattr(F, self.name)


CROSS_ENTROPY = LinearLoss(
    "fused_linear_cross_entropy", of_cross_entropy,
    dict(
        SHARED, dtype=CPU_DTYPES, reduction=["mean", "sum", "none"], options=CE_OPTIONS,
        weighted=["", "classes", "tokens", "classes and tokens"],
    ),
)  # fmt: skip
LOG_PROBS = LinearLoss(
    "fused_linear_log_probs", of_log_probs,
    dict(SHARED, dtype=[*CPU_DTYPES, "mixed"], ids=[None, 1, 5], options=LOG_PROBS_OPTIONS),
)  # fmt: skip
DIVERGENCE = LinearLoss(
    "fused_linear_divergence", of_divergence,
    dict(
        SHARED, dtype=CPU_DTYPES, t_dtype=["same", *CPU_DTYPES], beta=[0.0, 1.0, 0.3, "of 40 classes", "of 300 classes"],
        reduction=["mean", "sum", "none"], options=DIVERGENCE_OPTIONS, weighted=["", "mask", "mask and weights"],
        of=["both", "s_", "t_"],
    ),
)  # fmt: skip
LOSSES = [CROSS_ENTROPY, LOG_PROBS, DIVERGENCE]


# ---- Budgets


def least_budget(op: Callable, **arguments: Any) -> int:
    budget = 1
    while True:
        try:
            op(**arguments, memory_budget=budget)
            return budget
        except RuntimeError as error:
            budget = int(re.search(r"memory_budget must be at least (\d+) bytes", str(error))[1])


def small_budget(op: Callable, **arguments: Any) -> int:
    """For chunks of 2 to 16 tokens."""
    classes = len(arguments.get("s_weight", arguments.get("weight")))
    return least_budget(op, **arguments) + 32 * -(-classes // 64) * 64


def plan_of(
    given: dict[str, Tensor], wanted: int | None = None, budget: int | None = None
) -> tuple[int, int, int, int]:
    """(tokens per chunk, chunks, bytes of the workspace, bytes of the gradients) of the linear cross entropy."""
    if wanted is None:
        wanted = sum(bit for name, bit in BITS.items() if name in given and given[name].requires_grad)
    x, classes = given["input"], len(given["weight"])
    return plan(math.prod(x.shape[:-1]), x.shape[-1], classes, x.dtype, wanted, budget)


def budget_for(chunks: int, given: dict[str, Tensor], wanted: int | None = None) -> int:
    """The smallest memory budget for which the plan of the linear cross entropy has at most this many chunks."""
    low, high = 1, 1 << 32
    while low < high:
        middle = (low + high) // 2
        try:
            few = plan_of(given, wanted, middle)[1] <= chunks
        except RuntimeError:
            few = False
        low, high = (low, middle) if few else (middle + 1, high)
    return low


# ---- Comparison with the formulas


def check(op: Callable, given: dict[str, Tensor], device: str, **options: Any) -> list[Tensor]:
    """Results that may have a gradient, the entropy of a divergence, and all gradients are as accurate as those of the
    formula in the same dtypes. Returns them."""
    names, tensors = [*given], [*given.values()]
    is_divergence = "s_input" in given
    count = 2 if is_divergence or options.get("entropy") else 1

    def of(function: Callable, **others: Any) -> Callable[..., tuple[Tensor, ...]]:
        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            found = function(**dict(zip(names, tensors)), **others)
            return (found,) if isinstance(found, Tensor) else tuple(found)[:count]

        return call

    doubled = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in options.items()}
    ours_of, formula, exact_of = of(op, **options), of(op.reference, **options), of(op.reference, **doubled)
    with path_taken(device):
        quiet = ours_of(*(t.detach() for t in tensors))
    g = torch.Generator().manual_seed(3)
    # Forward already rounded the gradient of a mean. A power of two adds no second rounding.
    upstream = [(torch.randn(r.shape, generator=g) if r.dim() else torch.tensor(-2.0)).to(device) for r in quiet]
    with path_taken(device):
        ours = gradients(ours_of, [like(t) for t in tensors], upstream)
    eager = gradients(formula, [like(t) for t in tensors], upstream)
    oracle = gradients(exact_of, [like(t, torch.float64) for t in tensors], upstream)
    dtype, has_addend = tensors[0].dtype, any("low_rank" in name for name in given)
    # Ours and eager code round logits to the dtype of the input. A divergence keeps its logits in fp32.
    rounds_logits = has_addend or not is_divergence
    bounds = roundings(exact_of, tensors, upstream, oracle, dtype if rounds_logits else None)
    error = logit_error(**given, **options) if is_divergence else 0.0
    wanted = [name for name, t in given.items() if t.requires_grad]
    assert ours[0].requires_grad == bool(wanted) and not (is_divergence and ours[1].requires_grad)
    for i, results in enumerate(zip(ours, eager, oracle, strict=True)):
        mine, theirs, truth = (t.detach() for t in results)
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        # The largest of many errors varies by chance, in proportion to their RMS.
        noise = 3 * rms_error(theirs, truth) if rounds_logits else 0.0
        if i < count:
            if is_divergence:
                # The mean of the positions' errors is no larger than one; their sum grows with the root of their number.
                terms = ours[1].numel() ** 0.5 if options.get("reduction") == "sum" and not i else 1
                noise += relative(error * terms, truth)
            scale, name = float(has_addend or op is LOG_PROBS.op), f"result {i}"
            # Chunks without gradients have other sizes.
            assert_no_worse(f"{name} alone", quiet[i], theirs, truth, scale=scale, noise=noise, bounds=(bounds, i))
        else:
            scale, name = 0.0, wanted[i - count]
            noise += of_gradients(mine, given, error, is_divergence, device)
        assert_no_worse(name, mine, theirs, truth, scale=scale, noise=noise, bounds=(bounds, i))
        if op is CROSS_ENTROPY.op and name in ("weight", "bias") and dtype in HALF_TYPES and given["input"].numel():
            chunks = plan_of(given, budget=options.get("memory_budget"))[1]
            check_untargeted(name, options["target"], mine, theirs, truth, chunks)
    return ours


def of_gradients(ours: Tensor, given: dict[str, Tensor], error: float, is_divergence: bool, device: str) -> float:
    """The noise of a gradient. error: of a divergence's logits."""
    of = torch.finfo(ours.dtype)
    if not is_divergence:
        # Exponentials are accurate to 2 ulp in our kernels, to 1 ulp in eager.
        return of.eps if device == "cuda" and ours.dtype == torch.float32 else 0.0
    # A gradient sums differences of two probabilities, which have the relative error of their logits. Ours rounds the
    # gradients of logits to the dtype; the formula's GEMMs read them in fp32. Those of many classes are about 1 / classes,
    # and may be subnormal numbers.
    half = given["s_input"].dtype in HALF_TYPES
    of = torch.finfo(given["s_input"].dtype)
    return 2 * error + (of.eps / 2 * max(1.0, len(given["s_weight"]) * of.smallest_normal) if half else 0.0)


def rms_error(result, truth) -> float:
    """Root mean square error, relative to the largest magnitude of `truth` as in distance()."""
    if truth.numel() == 0:
        return 0.0
    return float((result.double() - truth).square().mean().sqrt() / truth.abs().max().clamp(min=1e-30))


def relative(error: float, truth: Tensor) -> float:
    largest = float(truth.abs().nan_to_num().max()) if truth.numel() else 0.0
    return error / largest if largest else 0.0


def check_untargeted(name: str, target: Tensor, ours: Tensor, eager: Tensor, oracle: Tensor, chunks: int) -> None:
    """Checks the rows of classes that are no target on their own: next to the much larger gradients of target classes,
    the general tolerance would accept zeros. These rows are rounded once per chunk."""
    target = target.flatten().long()
    known = target[(target >= 0) & (target < len(oracle))]
    untargeted = torch.ones(len(oracle), dtype=torch.bool, device=oracle.device).index_fill(0, known, False)
    results = [t[untargeted] for t in (ours, eager, oracle)]
    noise = 3 * rms_error(*results[1:]) + chunks * torch.finfo(ours.dtype).eps / 2
    assert_no_worse(f"{name} of untargeted classes", *results, noise=noise + coarseness(ours.dtype, results[2]))


def logit_error(
    s_input, s_weight, t_input, t_weight, s_bias=None, t_bias=None, temperature=1.0, s_logits_scale=1.0,
    t_logits_scale=1.0, **others,
):  # fmt: skip
    """One rounding of the terms of the largest logit over the temperature, in the dtype in which ours and the formula compute
    logits: fp32, or fp64 if a model is fp64. The error of a log-probability, some terms of which are rounded."""
    models = ("s_", s_input, s_weight, s_bias, s_logits_scale), ("t_", t_input, t_weight, t_bias, t_logits_scale)
    wide = torch.float64 if torch.float64 in (s_input.dtype, t_input.dtype) else torch.float32
    largest = 0.0
    for prefix, x, weight, bias, scale in models:
        terms = nnf.linear(*(t if t is None else t.detach().double().abs() for t in (x, weight, bias)))
        if others.get(f"{prefix}low_rank_input") is not None:
            addend = (others[f"{prefix}low_rank_{name}"].detach().double().abs() for name in ("input", "weight"))
            terms = terms + nnf.linear(*addend)
        largest = max(largest, abs(scale) * float(terms.max()) if terms.numel() else 0.0)
    return torch.finfo(wide).eps * largest / temperature
