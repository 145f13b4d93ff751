"""The logits-free path of fused_linear_cross_entropy: bf16, large GEMMs, compute capability 9.0."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional as nnf

import liger_ops
from liger_ops.functional import fused_linear_cross_entropy as flce
from tests.support.checks import (
    check_no_synchronization,
    check_replays,
    gradients,
    has_hopper_kernels,
    output_of,
    path_taken,
)
from tests.support.families.linear_losses import BITS, budget_for, check, of_cross_entropy, plan_of

BOTH = BITS["input"] | BITS["weight"]


def make(tokens, hidden, classes, **options):
    """Named tensors, also the target."""
    given, others = of_cross_entropy(
        (tokens if isinstance(tokens, tuple) else (tokens,), hidden, classes), torch.bfloat16, "cuda", **options
    )
    with torch.no_grad():
        given["weight"] /= 2  # logits near 1
    return given, others


def exponential_launches():
    return sum(json.loads(torch.ops.liger._status())["kernels"]["fused_linear_cross_entropy_exp_logits"]["launches"])


def check_exponentials(given, others, chunks=1):
    """check(), and the number of launches: two per chunk, of which the second usually has nothing to recompute."""
    budget = budget_for(chunks, given) if chunks else None
    check(flce, given, "cuda", memory_budget=budget, **others)
    planned = plan_of(given, BOTH, budget)[1]
    assert planned == (chunks or 1) and exponential_launches() == 2 * planned * has_hopper_kernels()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens, hidden, classes, chunks",
    [
        (2048, 512, 32768, 1),
        (2048, 512, 32768, 2),
        # Partial tiles in rows, classes and hidden.
        (2500, 520, 33001, 1),
        (2500, 520, 33001, 2),
        (765, 1024, 65600, 1),
        # More row sums than fit into the input's gradient. No budget.
        (8192, 64, 70001, None),
    ],
)
def test_exponentials(tokens, hidden, classes, chunks):
    check_exponentials(*make(tokens, hidden, classes), chunks)


@pytest.mark.gpu
def test_a_budget_without_room_for_row_sums_is_kept():
    given, others = make(2048, 512, 65536)
    with path_taken("cuda"):
        flce(**given, **others, memory_budget=budget_for(1, given))
    assert exponential_launches() == 0


OPTIONS = {
    "sum": dict(reduction="sum"),
    "tokens": dict(weighted="tokens"),
    "classes": dict(weighted="classes"),
    "z-loss": dict(options="z-loss"),
    "classes, tokens and z-loss": dict(weighted="classes and tokens", options="z-loss"),
    "scale": dict(options="scale"),
    "int32": {},
    "all ignored": dict(reduction="sum"),
    "part of wider rows": {},
    "confident": {},
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", OPTIONS)
def test_exponentials_with_options(case):
    given, others = make((4, 500), 512, 49152, **OPTIONS[case])
    x, weight, target = given["input"], given["weight"], others["target"]
    if case == "int32":
        others["target"] = target.int()
    if case == "all ignored":
        others["target"] = torch.full_like(target, -100)
    if case == "part of wider rows":
        given["weight"] = torch.cat([weight.detach()] * 2, 1)[:, :512].requires_grad_()
    if case == "confident":
        with torch.no_grad():
            x[:2] = 40 * nnf.normalize(weight[target[:2].clamp(min=0)].float(), dim=-1).bfloat16()
    for chunks in (1, 3):
        check_exponentials(given, others, chunks)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [30, 1000])
def test_exponentials_that_overflow(scale):
    """Losses of some hundred, where exp(x_j - x_y) overflows: in ten rows, then in all."""
    given, others = make(1500, 512, 49152, ignored=0.1)
    x = given["input"]
    for rows in (slice(300, 310), slice(None)):
        with torch.no_grad():
            x[rows] *= scale
        check_exponentials(given, others, 2)
        assert flce.reference(**given, **others | dict(reduction="none"))[rows].max() > 88
        with torch.no_grad():
            x[rows] /= scale


@pytest.mark.gpu
@pytest.mark.hopper
def test_exponentials_of_nan_and_ignored_rows():
    """NaN in a row or a target out of range gives a NaN loss. An ignored row with NaN has a zero gradient."""
    given, others = make(1200, 512, 65536, ignored=0)
    x, weight, target = given["input"], given["weight"], others["target"]
    target[7], target[9] = 65536, -100
    with torch.no_grad():
        x[9] = math.nan
    loss = flce(x, weight, target)
    (dx,) = torch.autograd.grad(loss, x)
    assert loss.isnan() and not dx[9].any() and not dx[7].any() and dx[8].any() and not dx[8].isnan().any()
    with torch.no_grad():
        x[100] = math.nan
    target[7] = 0
    assert flce(x, weight, target).isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", ["input", "weight", "nothing"])
def test_exponentials_need_an_input_gradient_or_no_gradient(wanted):
    given, others = make(2048, 512, 65536, frozen=" ".join({"input", "weight"} - {wanted}))
    x, weight, target = given["input"], given["weight"], others["target"]
    liger_ops.reset_launch_counts()
    loss = flce(x, weight, target)
    assert exponential_launches() == 2 * (wanted != "weight" and has_hopper_kernels())
    if wanted != "nothing":
        whole = [t.detach().requires_grad_() for t in (x, weight)]
        expected = torch.autograd.grad(flce(*whole, target), whole)[wanted == "weight"]
        loss.backward()
        error = torch.linalg.vector_norm((weight.grad if wanted == "weight" else x.grad) - expected)
        # One of the two paths may round logits.
        assert error <= torch.finfo(torch.bfloat16).eps * torch.linalg.vector_norm(expected)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("hidden, chunks", [(512, 1), (520, 3), (2048, None)])
def test_exponentials_without_gradients(hidden, chunks, reduction):
    """Peak memory stays within the plan."""
    given, others = make(
        1500, hidden, 65600, reduction=reduction, weighted="tokens", options="z-loss", frozen="input weight"
    )
    x, weight = given["input"], given["weight"]
    others["logits_scale"] = 0.7
    budget = budget_for(chunks, given) if chunks else None
    _, planned, workspace, _ = plan_of(given, 0, budget)
    liger_ops.reset_launch_counts()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = flce(**given, memory_budget=budget, **others)
    assert exponential_launches() == 2 * planned
    assert torch.cuda.max_memory_allocated() - before <= 1.05 * workspace
    expected = flce.reference(x.double(), weight.double(), **others)
    bound = torch.finfo(torch.float32).eps * float((x.abs().double() @ weight.abs().double().T).max())
    assert (loss - expected).abs().max() <= bound * (len(x) if reduction == "sum" else 1)


LARGE_LOSS = """
import json, torch, liger_ops
x, weight, target = torch.load({path!r})
x.requires_grad_(), weight.requires_grad_()
loss = torch.ops.liger.fused_linear_cross_entropy(x, weight, target)
loss.backward()
launches = json.loads(torch.ops.liger._status())["kernels"]["fused_linear_cross_entropy_exp_logits"]["launches"]
torch.save([loss.detach(), x.grad, weight.grad], {path!r} + ".out")
print(sum(launches))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["switched off", "not in the pack"])
def test_without_exponentials(case, tmp_path):
    """The path over logits gives the same loss, if requested and if the kernel is missing."""
    given, others = make(2048, 512, 49152)
    inputs = [*given.values(), others["target"]]
    path = str(tmp_path / "inputs.pt")
    torch.save([t.detach() for t in inputs], path)
    env = {"LIGER_OPS_EXPONENTIALS": "0"}
    if case == "not in the pack":
        env = {"LIGER_OPS_PACK_DIR": str(tmp_path / "packs"), "LIGER_OPS_JIT": "0"}
        (tmp_path / "packs").mkdir()
        shutil.copy(Path(liger_ops.__file__).parent / "packs" / "ptx.pack", tmp_path / "packs")
    assert int(output_of(LARGE_LOSS.format(path=path), **env)) == 0
    expected = gradients(flce, inputs, [torch.ones((), device="cuda")])
    for there, here in zip(torch.load(path + ".out"), expected):
        # That path rounds logits.
        assert torch.linalg.vector_norm(there - here) <= torch.finfo(torch.bfloat16).eps * torch.linalg.vector_norm(
            here
        )


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [1, 2])
def test_exponentials_are_deterministic_and_captured(chunks):
    given, others = make(2048, 512, 49152)
    call = lambda *t: flce(**dict(zip(given, t)), **others, memory_budget=budget_for(chunks, given))  # noqa: E731

    def step():
        return [t.detach() for t in gradients(call, [*given.values()], [torch.full((), 3.0, device="cuda")])]

    check_replays(step, check_no_synchronization(step))
