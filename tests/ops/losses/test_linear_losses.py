"""What the losses of a linear layer share: the formula in fp64, chunks under a memory budget, low-rank addends of logits
(adapters of a head), frozen parts of a head, and memory. Their files have what only one of them does."""

import pytest
import torch

from liger_ops import functional as F
from liger_ops import nn
from tests.support.checks import (
    CPU_DTYPES,
    assert_no_worse,
    check_deterministic,
    check_no_double_backward,
    check_no_synchronization,
    check_replays,
    check_second_backward,
    equal,
    gradients,
    like,
    overall_error,
)
from tests.support.families.linear_losses import (
    CROSS_ENTROPY,
    DIVERGENCE,
    LOG_PROBS,
    LOSSES,
    check,
    least_budget,
    small_budget,
)
from tests.support.host.allocations import peak_memory
from tests.support.host.solo_group import solo_group
from tests.support.pairs import pairs_of, pairwise

NAMES = [loss.name for loss in LOSSES]
reduced_losses = pytest.mark.parametrize("loss", [CROSS_ENTROPY, DIVERGENCE], ids=str)


def first(op, others):
    """A function of named tensors that returns the first result."""

    def call(**given):
        found = op(**given, **others)
        return found if isinstance(found, torch.Tensor) else found[0]

    return call


def learned(given):
    return [t for t in given.values() if t.requires_grad]


# ---- Values


def cases():
    for loss in LOSSES:
        for values in pairs_of(*loss.axes.values()):
            yield pytest.param(loss, dict(zip(loss.axes, values)), id=f"{loss.name}-{'-'.join(map(str, values))}")


@pytest.mark.parametrize("loss, case", cases())
def test_formula(loss, case, device):
    case = dict(case)
    in_chunks = case.pop("in_chunks")
    given, others = loss.make(device=device, **case)
    if in_chunks:
        others["memory_budget"] = small_budget(loss.op, **given, **others)
    check(loss.op, given, device, **others)


@pytest.mark.gpu
@pairwise(
    loss=LOSSES, dtype=CPU_DTYPES, classes=[32000, 50257, 128256, 151936, 262144, 600_001], frozen=["", "weight"],
    in_chunks=[False, True], reduction=["mean", "none"],
)  # fmt: skip
def test_vocabularies(loss, dtype, classes, frozen, in_chunks, reduction):
    options = {LOG_PROBS.name: dict(ids=4, options="entropy"), DIVERGENCE.name: dict(beta=0.3)}.get(loss.name, {})
    options |= {} if loss is LOG_PROBS else dict(reduction=reduction)
    given, others = loss.make(((300,), 256, classes), dtype, "cuda", frozen=frozen, **options)
    budget = least_budget(loss.op, **given, **others) + 75 * 12 * classes
    check(loss.op, given, "cuda", **others, memory_budget=budget if in_chunks else None)


@reduced_losses
def test_small_gradients_survive_fp16(loss, device):
    """A small probability divided by the number of tokens underflows in fp16."""
    given, others = loss.make(((1024,), 16, 4000), torch.float16, device, reduction="mean")
    call = lambda op: lambda *t: first(op, others)(**dict(zip(given, t)))  # noqa: E731
    grad = [torch.tensor(1024.0, device=device)]
    ours = gradients(call(loss.op), [*given.values()], grad)
    oracle = gradients(call(loss.op.reference), [like(t, torch.float64) for t in given.values()], grad)
    for mine, truth in zip(ours[1:], oracle[1:]):
        assert overall_error(mine, truth) < torch.finfo(torch.float16).eps


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every other column": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "expanded": lambda t: t[:1].expand_as(t),
}


# Equal classes would leave nothing but rounding errors of the gradients.
@pairwise(loss=LOSSES, of_input=LAYOUTS, of_weight=[*LAYOUTS][:2])
def test_layouts_in_chunks(loss, of_input, of_weight, device):
    """test_every_operator.py has more layouts, without chunks."""
    given, others = loss.make(((4, 9), 16, 100), torch.bfloat16, device)
    for name, t in given.items():
        layout = LAYOUTS[of_weight if "weight" in name else of_input]
        given[name] = layout(t.detach()).requires_grad_(t.requires_grad)
    check(loss.op, given, device, **others, memory_budget=small_budget(loss.op, **given, **others))


@reduced_losses
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_the_upstream_gradient_scales_the_gradients(loss, dtype, device):
    given, others = loss.make(((50,), 16, 40), dtype, device, reduction="mean")
    ones, halves = (
        torch.autograd.grad(first(loss.op, others)(**given), learned(given), torch.tensor(factor, device=device))
        for factor in (1.0, -0.5)
    )
    # A power of two rounds nothing but subnormal numbers.
    spacing = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    for half, one in zip(halves, ones):
        torch.testing.assert_close(half, one * -0.5, rtol=0, atol=spacing)


@pytest.mark.parametrize("wanted", ["input", "weight", "bias"])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_some_of_the_gradients(loss, wanted, device):
    """A backward that computes fewer gradients than forward expected may divide the tokens into other chunks."""
    dtype, options = torch.bfloat16, {} if loss is LOG_PROBS else dict(reduction="none")
    given, others = loss.make(((90,), 16, 100), dtype, device, bias=True, **options)
    (name,) = [f"{prefix}{wanted}" for prefix in ("", "s_") if f"{prefix}{wanted}" in given]
    budget = small_budget(loss.op, **given, **others)

    def gradient(op, dtype, **more):
        tensors = {k: like(t, dtype) for k, t in given.items()}
        return torch.autograd.grad(first(op, others | more)(**tensors).sum(), tensors[name])[0]

    ours = gradient(loss.op, dtype, memory_budget=budget)
    eager, exact = (gradient(loss.op.reference, of) for of in (dtype, torch.float64))
    assert_no_worse(name, ours, eager, exact)


@reduced_losses
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_counts(loss, reduction, device):
    """A mean over nothing is NaN, and its gradients are zero."""
    given, others = loss.make(((6,), 16, 40), torch.bfloat16, device, reduction=reduction, bias=True)
    if loss is DIVERGENCE:
        others["mask"] = torch.zeros(6, dtype=torch.bool, device=device)
    else:
        others["target"] = torch.full_like(others["target"], -100)
    found = first(loss.op, others)(**given)
    assert found.isnan() if reduction == "mean" else not found.any()
    assert not any(g.any() for g in torch.autograd.grad(found.sum(), learned(given)))


@pytest.mark.parametrize("loss", [CROSS_ENTROPY, LOG_PROBS], ids=str)
def test_an_addend_without_ranks_changes_nothing(loss, device):
    given, others = loss.make(((7,), 16, 30), torch.bfloat16, device, adapter=torch.float32, rank=0)
    found = first(loss.op, others)(**given)
    assert not any(g.numel() for g in torch.autograd.grad(found.sum(), learned(given))[-2:])
    without = {name: t for name, t in given.items() if "low_rank" not in name}
    assert equal([found], [first(loss.op, others)(**without)])


# ---- Autograd


@pairwise(loss=LOSSES, frozen=["", "weight", "input"], dtype=[torch.float32, torch.float16], reduction=["mean", "none"])
def test_second_and_double_backward(loss, frozen, dtype, reduction, device):
    """Forward computes the gradients of a mean and of a frozen head, which backward scales."""
    options = {} if loss is LOG_PROBS else dict(reduction=reduction)
    given, others = loss.make(((20,), 8, 30), dtype, device, frozen=frozen, **options)
    call = lambda *t: first(loss.op, others)(**dict(zip(given, t)))  # noqa: E731
    grad = [torch.randn_like(call(*given.values()))]
    check_second_backward(call, [*given.values()], grad)
    check_no_double_backward(loss.name, call, [*given.values()], grad)


@pairwise(loss=LOSSES, frozen=["", "weight"], reduction=["mean", "none"])
def test_runs_in_chunks_are_bitwise_equal(loss, frozen, reduction, device):
    options = dict(ids=5) if loss is LOG_PROBS else dict(reduction=reduction)
    given, others = loss.make(((500,), 64, 1000), torch.bfloat16, device, frozen=frozen, **options)
    others["memory_budget"] = 16 * small_budget(loss.op, **given, **others)
    call = lambda *t: first(loss.op, others)(**dict(zip(given, t)))  # noqa: E731
    grad = torch.randn_like(call(*given.values()))
    check_deterministic(call, [*given.values()], [grad])


@pytest.mark.parametrize(
    "loss, name",
    [(CROSS_ENTROPY, "ce_weight"), (CROSS_ENTROPY, "token_weight")]
    + [(DIVERGENCE, name) for name in ("t_input", "t_weight", "t_bias", "token_weight")],
    ids=lambda value: getattr(value, "name", value),
)
def test_forward_mode_of_what_is_not_learned_is_refused(loss, name):
    weighted = "classes and tokens" if loss is CROSS_ENTROPY else "mask and weights"
    given, others = loss.make(((5,), 8, 10), torch.float32, "cpu", bias=True, weighted=weighted)
    arguments = {k: t.detach() for k, t in given.items()} | others
    with torch.autograd.forward_ad.dual_level():
        arguments[name] = torch.autograd.forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
        with pytest.raises(RuntimeError, match="forward-mode automatic differentiation is not supported"):
            loss.op(**arguments)


@pytest.mark.gpu
@pairwise(loss=LOSSES, frozen=["", "weight", "weight bias", "input"], reduction=["mean", "none"], tokens=[64, 300])
def test_no_synchronization_and_cuda_graph_capture(loss, frozen, reduction, tokens):
    options = dict(ids=3, options="entropy") if loss is LOG_PROBS else dict(reduction=reduction)
    given, others = loss.make(((tokens,), 64, 9000), torch.bfloat16, "cuda", frozen=frozen, **options)

    def step():
        return torch.autograd.grad(first(loss.op, others)(**given).sum(), learned(given))

    check_replays(step, check_no_synchronization(step))


# ---- Memory


MEMORY = {
    "cross entropy": (CROSS_ENTROPY, {}),
    "cross entropy, split classes": (CROSS_ENTROPY, {}),
    "log-probabilities": (LOG_PROBS, dict(options="entropy")),
    "log-probabilities of 3 ids": (LOG_PROBS, dict(options="entropy", ids=3)),
    "divergence, mean": (DIVERGENCE, dict(beta=0.5, reduction="mean")),
    "divergence": (DIVERGENCE, dict(beta=0.5)),
    "divergence, mean, other classes": (DIVERGENCE, dict(beta="of 8192 classes", reduction="mean")),
    "divergence, other classes": (DIVERGENCE, dict(beta="of 8192 classes")),
}


@pairwise(case=MEMORY, dtype=[torch.float32, torch.bfloat16], frozen=["", "weight", "input weight"])
@pytest.mark.library
def test_peak_memory_stays_below_the_budget(case, dtype, frozen):
    """The logits would take 16 times as much, or 8 times in bf16. With split classes, two buffers of logits would take twice
    as much."""
    loss, options = MEMORY[case]
    tokens, hidden, classes, budget = 512, 16, 8192, 1 << 20
    given, others = loss.make(((tokens,), hidden, classes), dtype, "cpu", frozen=frozen, **options)
    wanted = learned(given)
    if loss is LOG_PROBS:
        others |= dict(mean_logits=True, log_sum_sq_probs=True, is_top1=True)
    if "split" in case:
        others |= dict(group=solo_group(), classes=classes)

    def step():
        found = loss.op(**given, **others, memory_budget=budget)
        results = [found] if isinstance(found, torch.Tensor) else [r for r in found if r.requires_grad]
        # With a frozen head, only the gradient of an entropy that was announced fits into the budget.
        return (
            torch.autograd.grad(sum(r.sum() for r in results[: 1 if "weight" in frozen else 2]), wanted)
            if wanted
            else found
        )

    # Beside logits and gradients: results per token, and fp32 copies of bf16 rows, heads and blocks.
    per_token = 8 * (12 + 6 * (options.get("ids") or 1))
    widened = 0
    if dtype == torch.bfloat16:
        widened = (tokens + classes) * (hidden + 8) * 4 + (budget if loss is LOG_PROBS and not frozen else 0)
    assert tokens * classes * dtype.itemsize >= 8 * budget
    assert peak_memory(step) <= sum(t.nbytes for t in wanted) + budget + widened + per_token * tokens


def usual_budget(loss, options, frozen):
    """In MiB, without the gradients."""
    if loss is LOG_PROBS:
        return 640 if frozen == "weight" else 320
    if options["reduction"] == "mean":
        return 1280
    return 640 if frozen == "weight" else 320


@pytest.mark.gpu
@pytest.mark.parametrize("loss, tokens, hidden, options", [
    (LOG_PROBS, 8192, 4096, dict(options="entropy")), (LOG_PROBS, 16384, 2048, dict(options="entropy")),
    (DIVERGENCE, 4096, 1024, dict(beta=0.5, reduction="mean")), (DIVERGENCE, 4096, 1024, dict(beta=0.5, reduction="none")),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("frozen", ["", "weight", "input", "input weight"])
@pytest.mark.parametrize("mib", [None, 320, 64])
def test_peak_memory_on_a_gpu(loss, tokens, hidden, options, frozen, mib):
    given, others = loss.make(((tokens,), hidden, 128256), torch.bfloat16, "cuda", frozen=frozen, **options)
    wanted, budget = learned(given), None if mib is None else mib << 20

    def step():
        found = first(loss.op, others | dict(memory_budget=budget))(**given)
        return torch.autograd.grad(found.sum(), wanted) if wanted else found

    step()  # allocates the workspace of cuBLAS
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = step()
    peak = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in wanted)
    assert kept is not None and peak <= 1.05 * 2**20 * (mib or usual_budget(loss, options, frozen)), peak / 2**20


def exact_of(loss, given, others, parts=16):
    """The mean of the losses and its gradients by the formula in fp64, with the logits of a part of the tokens at a time."""
    leaves, tokens = {name: like(t, torch.float64) for name, t in given.items()}, len(next(iter(given.values())))
    counted, total = (others["target"] != -100).sum() if "target" in others else tokens, 0.0
    for i in range(parts):
        arguments = {
            name: t[i::parts] if isinstance(t, torch.Tensor) and len(t) == tokens else t
            for name, t in (leaves | others | dict(reduction="sum")).items()
        }
        mean = first(loss.op.reference, arguments)() / counted
        mean.backward()
        total += mean.detach()
    return [total, *(t.grad for t in learned(leaves))]


@pytest.mark.gpu
@reduced_losses
def test_more_than_2_to_the_31_logits(loss):
    """At once they are as accurate as in chunks, which other tests compare with the formula."""
    given, others = loss.make(((16400,), 64, 131200), torch.bfloat16, "cuda", reduction="mean")
    grad = [torch.ones((), device="cuda")]
    large, small = (
        gradients(
            lambda *t, budget=budget: first(loss.op, others | dict(memory_budget=budget))(**dict(zip(given, t))),
            [*given.values()], grad,
        )
        for budget in (24 << 30, 1 << 30)
    )  # fmt: skip
    for i, results in enumerate(zip(large, small, exact_of(loss, given, others), strict=True)):
        assert_no_worse(f"result {i}", *results)


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", ["", "weight"])
@pytest.mark.parametrize("loss, options", [
    (CROSS_ENTROPY, dict(reduction="none")), (LOG_PROBS, {}), (LOG_PROBS, dict(ids=1)), (LOG_PROBS, dict(ids=3)),
], ids=str)  # fmt: skip
def test_a_target_out_of_range_makes_its_row_nan(loss, options, frozen):
    given, others = loss.make(((10,), 16, 40), torch.bfloat16, "cuda", ignored=0.0, frozen=frozen, **options)
    rows = others["target"].view(10, -1)
    rows[2, 0], rows[3, 0] = 40, -1
    found = first(loss.op, others)(**given)
    (slope,) = torch.autograd.grad(found.sum(), given["input"])
    assert found.view(10, -1)[:, 0].isnan().nonzero().flatten().tolist() == [2, 3]
    assert loss is CROSS_ENTROPY or slope[2:4].isnan().all()
    assert slope[4].isfinite().all()


# ---- Errors


X, W, Y = torch.randn(2, 3, 8), torch.randn(10, 8), torch.zeros(2, 3, dtype=torch.long)
OF_TARGETS = [
    F.fused_linear_log_probs,
    *(getattr(F, f"{NAMES[0]}{form}") for form in ("", "_with_metrics", "_with_log_probs")),
]
CALLS = {op.__name__: (op, "", dict(input=X, weight=W, target=Y)) for op in OF_TARGETS}
for prefix in ("s_", "t_"):
    models = dict(s_input=X, s_weight=W, t_input=torch.randn(2, 3, 8), t_weight=torch.randn(10, 8))
    CALLS[f"{NAMES[2]}, {prefix}"] = F.fused_linear_divergence, prefix, models
T, B = torch.zeros(2, 3, 4), torch.zeros(10, 4)
# Arguments without the prefix of a model.
ERRORS = {
    "another dtype": (dict(weight=W.double()), "{}weight must have the dtype of {}input, Float"),
    "another width": (dict(weight=W[:, 1:]), r"{}weight must have shape \[classes, 8\]"),
    "a bias of another length": (dict(bias=torch.ones(9)), r"{}bias must have shape \[10\]"),
    "a negative softcap": (dict(softcap=-1.0), "{}softcap must be positive and finite"),
    "half an addend": (dict(low_rank_input=T), "{}low_rank_weight must be given if and only if {}low_rank_input is"),
    "the other half": (dict(low_rank_weight=B), "{}low_rank_weight must be given if and only if {}low_rank_input is"),
    "an addend of fewer rows": (
        dict(low_rank_input=T[:1], low_rank_weight=B), r"{}low_rank_input must have the shape of {}input, \[2, 3, 8\]",
    ),
    "an addend of other ranks": (
        dict(low_rank_input=T, low_rank_weight=B[:, :2]), r"{}low_rank_weight must have shape \[10, 4\], the classes and",
    ),
}  # fmt: skip
OF_BUDGETS = {0: "be a positive number of bytes", 1: r"be at least \d+ bytes"}


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.parametrize("of", CALLS)
@pytest.mark.library
def test_errors(of, case):
    op, prefix, call = CALLS[of]
    changes, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=rf"^{op.__name__}: {message.replace('{}', prefix)}.*\(got "):
        op(**call | {prefix + name: value for name, value in changes.items()})


@pytest.mark.parametrize("budget", OF_BUDGETS)
@pytest.mark.parametrize("of", CALLS)
@pytest.mark.library
def test_errors_of_budgets(of, budget):
    op, _, call = CALLS[of]
    with pytest.raises(RuntimeError, match=rf"^{op.__name__}: memory_budget must {OF_BUDGETS[budget]}.*\(got {budget}"):
        op(**call, memory_budget=budget)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
@pytest.mark.parametrize("ids", [(), (3,)])
@pytest.mark.parametrize("of", CALLS)
def test_swapped_hidden_states_and_weight_are_called_that(of, ids, shape):
    op, prefix, call = CALLS[of]
    call = {name: t.reshape(*shape, *t.shape[2:]) if t.dim() > 2 or t is Y else t for name, t in call.items()}
    if ids and op is F.fused_linear_log_probs:
        call["target"] = call["target"].unsqueeze(-1).expand(*shape, *ids)
    x, weight = f"{prefix}input", f"{prefix}weight"
    message = rf"^{op.__name__}: .* must have shape .*; {x} and {weight} may be swapped"
    for function in (op, op.reference):
        function(**call)
        with pytest.raises(RuntimeError, match=message):
            function(**call | {x: call[weight], weight: call[x]})


def test_the_module_says_that_they_are_swapped():
    with pytest.raises(RuntimeError, match="input and weight may be swapped"):
        nn.FusedLinearCrossEntropyLoss()(W, X, Y)


def test_no_hint_about_other_mistakes():
    for wrong in ((X, W, Y[1:]), (X, W[:, 1:], Y), (X, W, Y[:, None])):
        with pytest.raises(RuntimeError) as raised:
            F.fused_linear_cross_entropy(*wrong)
        assert "swapped" not in str(raised.value)
