"""Helpers that the fused_linear_cross_entropy tests share: the operators, their fp64 oracle and the checks."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from checks import HALF_TYPES, assert_no_worse, coarseness, gradients, like, path_taken, roundings

from liger_ops._accuracy import compute_dtype
from liger_ops.reference import operators

flce = torch.ops.liger.fused_linear_cross_entropy


with_metrics = torch.ops.liger.fused_linear_cross_entropy_with_metrics


with_log_probs = torch.ops.liger.fused_linear_cross_entropy_with_log_probs


plan = torch.ops.liger._fused_linear_cross_entropy_plan


# The private ops take these bits: which gradients a call computes.
INPUT, WEIGHT, BIAS = 1, 2, 4


def logits_of(x, weight, bias=None, logits_scale=1.0):
    logits = F.linear(x, weight, bias)
    return logits if logits_scale == 1 else logits * logits_scale


def reference(
    x, weight, target, bias=None, ce_weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0,
    lse_square_scale=0.0, softcap=None, logits_scale=1.0, token_weight=None, memory_budget=None,
):  # fmt: skip
    logits = logits_of(x, weight, bias, logits_scale)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, weight.shape[0])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    y = target.reshape(-1).long()
    counted = y != ignore_index
    ce_weight = None if ce_weight is None else ce_weight.to(logits.dtype)
    loss = F.cross_entropy(logits, y, ce_weight, None, ignore_index, None, "none", label_smoothing)
    z_loss = torch.where(counted, lse_square_scale * torch.logsumexp(logits, -1).square(), 0)
    if token_weight is not None:
        loss, z_loss = (t * token_weight.reshape(-1).to(t.dtype) for t in (loss, z_loss))
    if reduction == "none":
        return (loss + z_loss).view(target.shape)
    if reduction == "sum":
        return (loss + z_loss).sum()
    of = torch.ones_like(loss) if ce_weight is None else ce_weight[y.clamp(min=0)]
    return loss.sum() / torch.where(counted, of, 0).sum() + z_loss.sum() / counted.sum()


def make(tokens, hidden, classes, dtype, device, bias=False, ignored=0.25):
    """Targets are skewed like tokens of natural language: a few classes take most."""
    tokens = (tokens,) if isinstance(tokens, int) else tokens
    x = torch.randn(*tokens, hidden, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(classes, hidden, device=device) * hidden**-0.5).to(dtype).requires_grad_()
    target = (torch.rand(tokens, device=device) ** 3 * classes).long()
    target[torch.rand(tokens, device=device) < ignored] = -100
    b = torch.randn(classes, device=device).to(dtype).requires_grad_() if bias else None
    return x, weight, target, b


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


def budget_for(chunks, inputs, wanted=INPUT | WEIGHT):
    """The smallest memory budget for which the plan has at most this many chunks."""
    x, weight = inputs[0], inputs[1]
    sizes = (x.numel() // max(x.shape[-1], 1), x.shape[-1], weight.shape[0], x.dtype, wanted)
    low, high = 1, 1 << 32
    while low < high:
        middle = (low + high) // 2
        try:
            few = plan(*sizes, middle)[1] <= chunks
        except RuntimeError:
            few = False
        low, high = (low, middle) if few else (middle + 1, high)
    return low


def check(inputs, device, grad=None, **options):
    ours_of, expected = partial(flce, **options), partial(reference, **options)
    loss = expected(*[t if t is None else t.detach() for t in inputs])
    # Forward already rounded the gradient; a power of two adds no second rounding.
    upstream = torch.randn(loss.shape, device=device) if loss.dim() else torch.tensor(-2.0, device=device)
    with path_taken(device):
        ours = gradients(ours_of, [like(t) for t in inputs], [upstream])
    eager = gradients(expected, [like(t) for t in inputs], [upstream])
    doubled = dict(options)
    for name in ("token_weight", "ce_weight"):
        if doubled.get(name) is not None:
            doubled[name] = doubled[name].double()
    exact = [like(t, torch.float64) for t in inputs]
    formula = partial(reference, **doubled)
    oracle = gradients(formula, exact, [upstream])
    # Ours and eager code round logits to the dtype.
    bounds = roundings(formula, inputs, [upstream], oracle, precision=inputs[0].dtype)
    assert_no_worse("loss", ours[0], eager[0], oracle[0], bounds=(bounds, 0))
    named = zip(("input", "weight", "target", "bias"), inputs)
    wanted = [name for name, t in named if t is not None and t.requires_grad]
    for i, (name, mine, theirs, truth) in enumerate(zip(wanted, ours[1:], eager[1:], oracle[1:], strict=True)):
        # The largest of many errors varies by chance, in proportion to their RMS.
        noise = 3 * rms_error(theirs, truth)
        if device == "cuda" and mine.dtype == torch.float32:
            # Exponentials are accurate to 2 ulp in our kernels, to 1 ulp in eager.
            noise += torch.finfo(torch.float32).eps
        assert_no_worse(name, mine, theirs, truth, noise=noise, bounds=(bounds, i + 1))
        if name != "input" and mine.dtype in HALF_TYPES:
            check_untargeted(name, inputs, mine, theirs, truth, chunks_of(inputs, wanted, options.get("memory_budget")))
    return ours


def rms_error(result, truth) -> float:
    """Root mean square error, relative to the largest magnitude of `truth` as in distance()."""
    if truth.numel() == 0:
        return 0.0
    return float((result.double() - truth).square().mean().sqrt() / truth.abs().max().clamp(min=1e-30))


def chunks_of(inputs, wanted, budget) -> int:
    x, weight, target = inputs[:3]
    bits = sum({"input": INPUT, "weight": WEIGHT, "bias": BIAS}[name] for name in wanted)
    return plan(target.numel(), x.shape[-1], len(weight), x.dtype, bits, budget)[1]


def check_untargeted(name, inputs, ours, eager, oracle, chunks):
    """Checks the rows of classes that are no target on their own: next to the much larger gradients of target classes,
    the general tolerance would accept zeros. These rows are rounded once per chunk."""
    target = inputs[2].flatten().long()
    known = target[(target >= 0) & (target < len(inputs[1]))]
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
        terms = F.linear(*(t if t is None else t.detach().double().abs() for t in (x, weight, bias)))
        if others.get(f"{prefix}low_rank_input") is not None:
            addend = (others[f"{prefix}low_rank_{name}"].detach().double().abs() for name in ("input", "weight"))
            terms = terms + F.linear(*addend)
        largest = max(largest, abs(scale) * float(terms.max()) if terms.numel() else 0.0)
    return torch.finfo(wide).eps * largest / temperature
