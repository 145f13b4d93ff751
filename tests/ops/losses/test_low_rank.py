"""Low-rank addends of logits, adapters of a head, in the linear losses: against their formulas in fp64."""

from functools import partial

import pytest
import torch
from checks import CPU_DTYPES, HALF_TYPES, assert_no_worse, check_results, equal, gradients, like, path_taken, roundings
from linear_losses import rms_error
from pairs import pairwise
from torch import Tensor
from torch.nn import functional

from liger_ops import functional as F
from liger_ops.losses import distillation_loss, dpo_loss, grpo_loss, kto_loss, topk_distillation_loss
from liger_ops.nn import FusedLinearCrossEntropyLoss

# As x, and fp32 as peft's adapters are by default.
ADAPTERS = ["same", torch.float32]
FROZEN = [("weight", "bias"), (), ("weight", "input"), ("low_rank_input",), ("low_rank_weight",)]


def head(tokens, classes, dtype, adapter, device, hidden=16, rank=5, frozen=(), prefix=""):
    """The tensors of one model, by name."""
    adapter = dtype if adapter == "same" else adapter
    sizes = {
        "input": (*tokens, hidden), "weight": (classes, hidden), "bias": (classes,), "low_rank_input": (*tokens, rank),
        "low_rank_weight": (classes, rank),
    }  # fmt: skip
    found = {}
    for name, size in sizes.items():
        scale = 2 * max(size[-1], 1) ** -0.5 if "weight" in name else 1.0
        t = (torch.randn(size, device=device) * scale).to(adapter if "low_rank" in name else dtype)
        found[prefix + name] = t.requires_grad_(name not in frozen)
    return found


def targets(tokens, classes, device):
    target = torch.randint(classes, tokens, device=device)
    return target.masked_fill(torch.rand(tokens, device=device) < 0.2, -100)


def check(op, given, device, count=1, **options):
    """The first `count` results and all gradients are as accurate as those of the formula in the same dtypes."""
    names = [*given]

    def of(function, **others):
        def call(*tensors):
            found = function(**dict(zip(names, tensors)), **others)
            return (found,) if isinstance(found, Tensor) else tuple(found)[:count]

        return call

    doubled = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in options.items()}
    ours_of, formula = of(op, **options), of(op.reference, **options)
    exact_of, tensors = of(op.reference, **doubled), [*given.values()]
    with path_taken(device):
        quiet = ours_of(*(t.detach() for t in tensors))
    g = torch.Generator().manual_seed(3)
    upstream = [torch.randn(r.shape, generator=g).to(device) if r.dim() else torch.tensor(-2.0) for r in quiet]
    with path_taken(device):
        ours = gradients(ours_of, [like(t) for t in tensors], upstream)
    eager = gradients(formula, [like(t) for t in tensors], upstream)
    oracle = gradients(exact_of, [like(t, torch.float64) for t in tensors], upstream)
    # Ours and eager code round logits to the dtype of the input.
    dtype = tensors[0].dtype
    bounds = roundings(exact_of, tensors, upstream, oracle, precision=dtype)
    wanted = [name for name, t in given.items() if t.requires_grad]
    results = [f"result {i}" for i in range(count)]
    for i, (name, *parts) in enumerate(zip(results + wanted, ours, eager, oracle, strict=True)):
        assert parts[0].dtype == parts[1].dtype and parts[0].shape == parts[1].shape
        noise = 3 * rms_error(*(t.detach() for t in parts[1:]))
        if op is F.fused_linear_divergence and name not in results and dtype in HALF_TYPES:
            # Ours rounds the gradients of logits to the dtype; the formula's products read them in fp32.
            noise += torch.finfo(dtype).eps
        assert_no_worse(name, *parts, scale=1.0 if name in results else 0.0, noise=noise, bounds=(bounds, i))
    return ours


# ---- Values


OPTIONS = {
    "plain": {},
    "smoothing": dict(label_smoothing=0.1),
    "z-loss": dict(lse_square_scale=1e-3),
    "softcap": dict(softcap=5.0, logits_scale=0.7),
}


@pairwise(
    dtype=CPU_DTYPES, adapter=ADAPTERS, reduction=["mean", "sum", "none"], frozen=FROZEN, options=OPTIONS,
    weighted=[False, True], budget=[None, 60_000],
)  # fmt: skip
def test_cross_entropy(dtype, adapter, reduction, frozen, options, weighted, budget, device):
    given = head((3, 30), 200, dtype, adapter, device, frozen=frozen)
    others = dict(OPTIONS[options], reduction=reduction, memory_budget=budget)
    if weighted:
        others |= dict(ce_weight=torch.rand(200, device=device) + 0.1, token_weight=torch.rand(3, 30, device=device))
    check(F.fused_linear_cross_entropy, given, device, target=targets((3, 30), 200, device), **others)


@pairwise(form=["metrics", "log_probs"], dtype=CPU_DTYPES, adapter=ADAPTERS, reduction=["mean", "none"])
def test_forms_of_cross_entropy(form, dtype, adapter, reduction, device):
    given = head((40,), 100, dtype, adapter, device, frozen=("weight",))
    options = dict(target=targets((40,), 100, device), reduction=reduction, softcap=5.0)
    plain = F.fused_linear_cross_entropy(**given, **options)
    found = getattr(F, f"fused_linear_cross_entropy_with_{form}")(**given, **options)
    torch.testing.assert_close(found[0], plain)
    logits = logits_of(**{name: t.detach() for name, t in given.items()}).to(dtype).float()
    logits = 5 * torch.tanh(logits / 5)
    counted = options["target"] != -100
    if form == "metrics":
        # Equal after rounding, another class may be first.
        best = logits.gather(-1, found.predicted_tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        noise = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(best[counted], logits.amax(-1)[counted], rtol=noise, atol=noise)
    else:
        expected = functional.cross_entropy(logits, options["target"], reduction="none")
        torch.testing.assert_close(-found.log_probs, expected, rtol=0, atol=16 * torch.finfo(dtype).eps)


def logits_of(input, weight, bias, low_rank_input, low_rank_weight):
    wide = torch.promote_types(input.dtype, torch.float32)
    part = functional.linear(low_rank_input.to(wide), low_rank_weight.to(wide))
    return functional.linear(input.to(wide), weight.to(wide), bias.to(wide)) + part


@pairwise(
    dtype=CPU_DTYPES, adapter=ADAPTERS, frozen=FROZEN, ids=[None, 3], entropy=["", "entropy", "announced"],
    budget=[None, 20_000], softcap=[None, 3.0],
)  # fmt: skip
def test_log_probs(dtype, adapter, frozen, ids, entropy, budget, softcap, device):
    given = head((2, 30), 100, dtype, adapter, device, frozen=frozen)
    target = targets((2, 30) if ids is None else (2, 30, ids), 100, device)
    options = dict(entropy=bool(entropy), entropy_grad=entropy == "announced", softcap=softcap, temperature=0.8)
    check(F.fused_linear_log_probs, given, device, 2 if entropy else 1, target=target, memory_budget=budget, **options)


def test_half_precision_heads_of_float32_input(device):
    given = head((50,), 100, torch.float32, "same", device)
    given |= {name: given[name].detach().bfloat16().requires_grad_() for name in ("weight", "bias")}
    check(F.fused_linear_log_probs, given, device, 2, target=targets((50,), 100, device), entropy=True)


@pairwise(
    dtype=CPU_DTYPES, adapter=ADAPTERS, reduction=["mean", "none"], frozen=FROZEN, beta=[0.0, 0.3, 1.0],
    of=["s_", "t_", "both"], budget=[None, 150_000],
)  # fmt: skip
def test_divergence(dtype, adapter, reduction, frozen, beta, of, budget, device):
    everything = [name.removeprefix("s_") for name in head((1,), 2, dtype, "same", device)]
    student = head((3, 20), 120, dtype, adapter, device, frozen=frozen, prefix="s_")
    teacher = head((3, 20), 120, dtype, adapter, device, hidden=24, rank=3, frozen=everything, prefix="t_")
    given = student | teacher
    if of != "both":
        given = {name: t for name, t in given.items() if name.startswith(of) or "low_rank" not in name}
    options = dict(beta=beta, reduction=reduction, s_softcap=5.0, memory_budget=budget)
    check(F.fused_linear_divergence, given, device, 2, mask=torch.rand(3, 20, device=device) > 0.2, **options)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_divergence_from_a_teacher_of_other_classes(reduction, device):
    everything = ("input", "weight", "bias", "low_rank_input", "low_rank_weight")
    given = head((40,), 60, torch.float32, "same", device, prefix="s_")
    given |= head((40,), 90, torch.float32, "same", device, frozen=everything, prefix="t_")
    of = torch.randperm(90, device=device)[:60]
    check(F.fused_linear_divergence, given, device, 2, vocab_map=of, reduction=reduction)


OPERATORS = {
    "fused_linear_cross_entropy": F.fused_linear_cross_entropy,
    "fused_linear_log_probs": lambda *given, **named: F.fused_linear_log_probs(*given, **named)[0],
}


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("tokens, rank", [((0,), 4), ((2, 0, 3), 4), ((7,), 0)])
def test_no_tokens_and_no_ranks(op, tokens, rank, device):
    given = head(tokens, 30, torch.bfloat16, torch.float32, device, rank=rank)
    target = targets(tokens, 30, device)
    found = OPERATORS[op](target=target, **given)
    grads = torch.autograd.grad(found.sum(), [*given.values()])
    assert [g.shape for g in grads] == [t.shape for t in given.values()]
    assert not grads[-1].any()
    if rank == 0:
        without = {name: t for name, t in given.items() if "low_rank" not in name}
        assert equal([found], [OPERATORS[op](target=target, **without)])


@pytest.mark.parametrize("op", OPERATORS)
def test_layouts(op, device):
    given = head((4, 6), 40, torch.float32, "same", device)
    target, call = targets((4, 6), 40, device), OPERATORS[op]
    expected = call(target=target, **given)
    t, b = given["low_rank_input"].detach(), given["low_rank_weight"].detach()
    for changed in (
        dict(low_rank_input=t.transpose(0, 1).contiguous().transpose(0, 1), low_rank_weight=b.t().contiguous().t()),
        dict(low_rank_input=torch.cat([t, t], -1)[..., : t.shape[-1]], low_rank_weight=torch.cat([b, b], -1)[:, :5]),
    ):
        torch.testing.assert_close(call(target=target, **given | changed), expected)


@pytest.mark.parametrize("op", OPERATORS)
def test_only_the_gradient_that_is_needed(op, device):
    full = head((50,), 100, torch.float32, "same", device)
    target = targets((50,), 100, device)
    every = torch.autograd.grad(OPERATORS[op](target=target, **full).sum(), [*full.values()])
    for (name, t), expected in zip(full.items(), every):
        alone = {k: v.detach() for k, v in full.items()} | {name: t}
        (found,) = torch.autograd.grad(OPERATORS[op](target=target, **alone).sum(), t)
        torch.testing.assert_close(found, expected)


def test_the_module():
    given = head((20,), 50, torch.float32, "same", "cpu")
    target = targets((20,), 50, "cpu")
    loss = FusedLinearCrossEntropyLoss(softcap=5.0)
    names = ("input", "weight", "bias", "low_rank_input", "low_rank_weight")
    x, weight, *others = (given[name] for name in names)
    bias, t, b = others
    expected = F.fused_linear_cross_entropy(target=target, softcap=5.0, **given)
    assert torch.equal(loss(x, weight, target, bias, None, t, b), expected)
    assert torch.equal(torch.jit.script(loss)(x, weight, target, bias, None, t, b), expected)


# ---- Post-training losses


def merged(given):
    """The same head without an addend: input and weight with more columns."""
    columns = {"input": "low_rank_input", "weight": "low_rank_weight"}
    return {name: torch.cat([given[name], given[other]], -1) for name, other in columns.items()}


def post_training_calls():
    target = torch.randint(30, (4, 6))
    reference = dict(ref_hidden=torch.randn(4, 6, 8), ref_weight=torch.randn(30, 8))
    teacher = dict(teacher_hidden=torch.randn(4, 6, 8), teacher_weight=torch.randn(30, 8))
    top = dict(
        teacher_ids=torch.rand(4, 6, 30).topk(3).indices,
        teacher_log_probs=torch.randn(4, 6, 30).log_softmax(-1)[..., :3],
    )
    return {
        "dpo": partial(dpo_loss, target=target, **reference),
        "kto": partial(kto_loss, target=target, desirable=torch.tensor([True, False, True, False]), **reference),
        "grpo": partial(
            grpo_loss, target=target, mask=torch.ones(4, 6), advantages=torch.randn(4), beta=0.1, entropy_weight=0.1,
            **reference,
        ),
        "distillation": partial(distillation_loss, target=target, hard_weight=0.5, beta=0.3, **teacher),
        "topk": partial(topk_distillation_loss, target=target, hard_weight=0.5, temperature=2.0, **top),
    }  # fmt: skip


@pytest.mark.parametrize("loss", post_training_calls())
def test_post_training_losses(loss):
    """The reference model has no adapter."""
    torch.manual_seed(0)
    call = post_training_calls()[loss]
    given = head((4, 6), 30, torch.float32, "same", "cpu")
    given = {name: t for name, t in given.items() if name != "bias"}
    renamed = {("hidden" if name == "input" else name): t for name, t in given.items()}
    one = torch.ones(())

    def of_merged(*tensors):
        whole = merged(dict(zip(given, tensors)))
        return call(hidden=whole["input"], weight=whole["weight"])[0]

    found = call(**renamed)[0]
    grads = torch.autograd.grad(found, [*given.values()])
    check_results([found.detach(), *grads], of_merged, [*given.values()], [one])


# ---- Errors


def wrong_calls():
    t, b = torch.zeros(5, 3), torch.zeros(7, 3)
    half = torch.zeros(5, 3, dtype=torch.float16)
    return [
        (dict(low_rank_input=t), "low_rank_weight must be given if and only if low_rank_input is"),
        (dict(low_rank_weight=b), "low_rank_weight must be given if and only if low_rank_input is"),
        (dict(low_rank_input=half, low_rank_weight=b), "low_rank_input must be float32 or have the dtype of input"),
        (
            dict(low_rank_input=t[:4], low_rank_weight=b),
            r"low_rank_input must have the shape of input, \[5, 4\], except",
        ),
        (
            dict(low_rank_input=t[0], low_rank_weight=b),
            r"low_rank_input must have the shape of input, \[5, 4\], except",
        ),
        (
            dict(low_rank_input=t, low_rank_weight=b[:, :2]),
            r"low_rank_weight must have shape \[7, 3\], the classes and",
        ),
        (dict(low_rank_input=t, low_rank_weight=b[:6]), r"low_rank_weight must have shape \[7, 3\], the classes and"),
        (
            dict(low_rank_input=t, low_rank_weight=b.to("meta")),
            "low_rank_weight must be on cpu like input",
        ),
    ]


@pytest.mark.parametrize("changed, message", wrong_calls())
@pytest.mark.parametrize("op", OPERATORS)
def test_errors(op, changed, message):
    x, weight, target = torch.zeros(5, 4), torch.zeros(7, 4), torch.zeros(5, dtype=torch.long)
    with pytest.raises(RuntimeError, match=f"^{op}: {message}.*[(]got "):
        OPERATORS[op](x, weight, target, **changed)


@pytest.mark.parametrize("prefix", ["s_", "t_"])
def test_errors_of_the_divergence(prefix):
    x, weight = torch.zeros(5, 4), torch.zeros(7, 4)
    message = (
        f"^fused_linear_divergence: {prefix}low_rank_weight must be given if and only if {prefix}low_rank_input is"
    )
    with pytest.raises(RuntimeError, match=message):
        F.fused_linear_divergence(x, weight, x, weight, **{f"{prefix}low_rank_input": torch.zeros(5, 3)})
