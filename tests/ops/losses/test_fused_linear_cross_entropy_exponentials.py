"""The logits-free path of fused_linear_cross_entropy: bf16, large GEMMs, compute capability 9.0."""

import json
import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checks import gradients, has_hopper_kernels, interpret, output_of, path_taken
from linear_losses import INPUT, WEIGHT, budget_for, check, check_replays, flce, make, plan, reference

import liger_ops


def exponential_launches():
    return sum(json.loads(torch.ops.liger._status())["kernels"]["fused_linear_cross_entropy_exp_logits"]["launches"])


def check_exponentials(inputs, chunks=1, **options):
    """check(), and the number of launches: two per chunk, of which the second usually has nothing to recompute."""
    budget = budget_for(chunks, inputs) if chunks else None
    x, weight = inputs[:2]
    check(inputs, "cuda", memory_budget=budget, **options)
    planned = plan(x.numel() // x.shape[-1], x.shape[-1], len(weight), x.dtype, INPUT | WEIGHT, budget)[1]
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
    check_exponentials(make(tokens, hidden, classes, torch.bfloat16, "cuda"), chunks)


@pytest.mark.gpu
def test_a_budget_without_room_for_row_sums_is_kept():
    inputs = make(2048, 512, 65536, torch.bfloat16, "cuda")
    with path_taken("cuda"):
        flce(*inputs, memory_budget=budget_for(1, inputs))
    assert exponential_launches() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        "sum", "tokens", "classes", "z-loss", "classes, tokens and z-loss", "scale", "int32", "all ignored",
        "leading dimensions", "part of wider rows", "confident",
    ],
)  # fmt: skip
def test_exponentials_with_options(case):
    x, weight, target, _ = make((4, 500), 512, 49152, torch.bfloat16, "cuda")
    options = {}
    if case == "sum":
        options["reduction"] = "sum"
    if "tokens" in case:
        options["token_weight"] = torch.rand(target.shape, device="cuda")
    if "classes" in case:
        options["ce_weight"] = torch.rand(len(weight), device="cuda")
    if "z-loss" in case:
        options["lse_square_scale"] = 1e-3
    if case == "scale":
        options["logits_scale"] = 0.3
    if case == "int32":
        target = target.int()
    if case == "all ignored":
        target, options["reduction"] = torch.full_like(target, -100), "sum"
    if case == "part of wider rows":
        weight = torch.cat([weight.detach()] * 2, 1)[:, :512].requires_grad_()
    if case == "confident":
        with torch.no_grad():
            x[:2] = 40 * F.normalize(weight[target[:2].clamp(min=0)].float(), dim=-1).bfloat16()
    for chunks in (1, 3):
        check_exponentials((x, weight, target, None), chunks, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [30, 1000])
def test_exponentials_that_overflow(scale):
    """Losses of some hundred, where exp(x_j - x_y) overflows: in ten rows, then in all."""
    x, weight, target, _ = make(1500, 512, 49152, torch.bfloat16, "cuda", ignored=0.1)
    for rows in (slice(300, 310), slice(None)):
        with torch.no_grad():
            x[rows] *= scale
        check_exponentials((x, weight, target, None), 2)
        assert reference(x, weight, target, reduction="none")[rows].max() > 88
        with torch.no_grad():
            x[rows] /= scale


@pytest.mark.gpu
@pytest.mark.hopper
def test_exponentials_of_nan_and_ignored_rows():
    """NaN in a row or a target out of range gives a NaN loss. An ignored row with NaN has a zero gradient."""
    x, weight, target, _ = make(1200, 512, 65536, torch.bfloat16, "cuda", ignored=0)
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
    x, weight, target, _ = make(2048, 512, 65536, torch.bfloat16, "cuda")
    x.requires_grad_(wanted == "input"), weight.requires_grad_(wanted == "weight")
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
    x, weight, target, _ = inputs = make(1500, hidden, 65600, torch.bfloat16, "cuda")
    x.requires_grad_(False), weight.requires_grad_(False)
    budget = budget_for(chunks, inputs, 0) if chunks else None
    _, planned, workspace, _ = plan(len(x), hidden, len(weight), x.dtype, 0, budget)
    options = dict(
        reduction=reduction, logits_scale=0.7, token_weight=torch.rand(len(x), device="cuda"), lse_square_scale=1e-3
    )
    liger_ops.reset_launch_counts()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = flce(x, weight, target, memory_budget=budget, **options)
    assert exponential_launches() == 2 * planned
    assert torch.cuda.max_memory_allocated() - before <= 1.05 * workspace
    expected = reference(x.double(), weight.double(), target, **options)
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
    inputs = make(2048, 512, 49152, torch.bfloat16, "cuda")[:3]
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
    inputs = make(2048, 512, 49152, torch.bfloat16, "cuda")[:3]
    call = partial(flce, memory_budget=budget_for(chunks, inputs))

    def step():
        return [t.detach() for t in gradients(call, inputs, [torch.full((), 3.0, device="cuda")])]

    expected = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert all(a.data_ptr() != b.data_ptr() for a, b in zip(step(), expected))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_replays(step, expected)


# ---- The kernels in the interpreter


EXPONENTIALS = """
import types, sys, torch, numpy
package = types.ModuleType("liger_ops"); package.__path__ = ["liger_ops"]; sys.modules["liger_ops"] = package
from liger_ops.kernels import find
from liger_ops.kernels.losses import _flags, exponentials as kernels
UNKNOWN, TILE = kernels.UNKNOWN.value, find("fused_linear_cross_entropy_exp_logits").configs[0].constexprs["TILE_N"]
MEAN, HAS_GRAD, HAS_WEIGHT, SAVE_Z_LOSS, ADD_Z_LOSS = (
    getattr(_flags, name).value for name in ("MEAN", "HAS_GRAD", "HAS_WEIGHT", "SAVE_Z_LOSS", "ADD_Z_LOSS")
)
TAKES, WEIGHS = kernels.TAKES.value, kernels.WEIGHS.value

def in_order(numbers):
    bits = numbers.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)

def exponentials(e, sums, x, weight, base, classes, highest, raised, scale):
    # Emulates the GEMM that is written in PTX, launched twice.
    rows, n = len(x), len(weight)
    for again in (False, True):
        flagged = highest != UNKNOWN
        lowered = base.clone()
        if again:
            lowered[flagged] = in_order(highest[flagged]).view(torch.float32)
        logits = scale * (x @ weight.T)
        known = (classes >= 0).nonzero().flatten()
        logits[known, classes[known].long()] = -torch.inf
        blocks = (torch.arange(rows) // 256)
        made = (raised[1 + blocks] != 0) if again else torch.ones(rows, dtype=torch.bool)
        if again and not raised[0]:
            break
        e[made, :n] = torch.exp(logits - lowered[:, None])[made]
        for tile in range(sums.shape[1]):
            part = slice(tile * TILE, min(n, (tile + 1) * TILE))
            sums[made, tile] = e[made, part].sum(1)
            over = sums[:, tile] > 2.0**64
            top = torch.where(over, in_order(logits[:, part].amax(1)), UNKNOWN)
            highest.copy_(torch.maximum(highest, top.int()))
            raised[1 + blocks[over]] = 1
            raised[0] |= int(over.any())

def run(path, rows, n, columns, words, takes, arrives, extras, large):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, columns), torch.randn(n, columns) * columns**-0.5
    target = torch.randint(n, (rows,))
    target[::5], target[1] = -100, n + 7
    if large:
        x[rows // 2 :] *= 300
        x[rows // 2 + 1] = 300 * weight[target[rows // 2 + 1]]
    packed = target.to(torch.int64 if words == 2 else torch.int32).view(torch.int32)
    grad, totals, scale = torch.rand(rows) + 0.5, torch.tensor([7.0, 5.0]), 0.75
    class_weight, z_scale = torch.rand(n), 1e-3 * extras
    lost, z_loss, taken = torch.full((3, rows), float("nan"))
    base, factor = torch.full((2, rows), float("nan"))
    classes, highest = torch.full((2, rows), 5, dtype=torch.int32)
    raised = torch.full((1 + -(-rows // 256),), 9, dtype=torch.int32)
    e, tiles = torch.full((rows, n + 3), float("nan")), -(-n // TILE)
    weighed = torch.full((rows, columns), float("nan"))
    # Row sums share memory with the output: each program reads its row's sums before it writes.
    sums = weighed[:, :tiles]

    def launch(name, *args):
        variant = find("fused_linear_cross_entropy_" + name).pick({"X": "bf16"}, columns, columns % 8 == 0)
        variant.kernel.function[(rows,)](*args, **variant.constexprs)

    launch("true_logits", base, classes, highest, raised, x, weight, packed, n, columns, columns, columns, words, -100,
           0, n, scale)
    exponentials(e, sums, x, weight, base, classes, highest, raised, scale)
    # A loss without gradients: sums have their own memory.
    alone, nothing = torch.full((rows,), float("nan")), torch.empty(1)
    launch("weigh", alone, nothing, factor, taken, nothing, e.clone(), x, sums.clone(), nothing, base, classes, highest,
           packed, class_weight, grad, totals, rows, columns, tiles, tiles, 0, e.stride(0), columns, words, 1, z_scale,
           HAS_WEIGHT * extras | ADD_Z_LOSS)
    flags = MEAN | HAS_GRAD * arrives | TAKES * takes | WEIGHS | HAS_WEIGHT * extras | SAVE_Z_LOSS
    launch("weigh", lost, z_loss, factor, taken, weighed, e, x, sums, nothing, base, classes, highest, packed,
           class_weight, grad, totals, rows, columns, tiles, sums.stride(0), 0, e.stride(0), columns, words, 1, z_scale, flags)
    dweight = scale * e[:, :n].T @ weighed
    dx = scale * e[:, :n] @ weight
    if takes:
        known = (classes >= 0).nonzero().flatten()
        dweight.index_add_(0, classes[known].long(), scale * taken[known, None] * x[known])
    launch("rescale", dx, factor, taken, classes, weight, columns, columns, scale, flags)

    # The same with the classes split over two ranks.
    ranks, facts = [], []
    for first, end in ((0, n - n // 3), (n - n // 3, n)):
        r = types.SimpleNamespace(first=first, w=weight[first:end].contiguous(), n=end - first)
        r.base, r.factor, r.taken, r.loss, r.z_loss = torch.full((5, rows), float("nan"))
        r.classes, r.highest, r.raised = classes.clone(), highest.clone(), raised.clone()
        launch("true_logits", r.base, r.classes, r.highest, r.raised, x, r.w, packed, r.n, columns, columns, columns, words,
               -100, first, n, scale)
        ranks.append(r)
    base_of_all = torch.stack([r.base for r in ranks]).amax(0)
    for r in ranks:
        r.base.copy_(base_of_all)
        r.e, r.sums = torch.full((rows, r.n + 3), float("nan")), torch.full((rows, -(-r.n // TILE)), float("nan"))
        exponentials(r.e, r.sums, x, r.w, r.base, r.classes, r.highest, r.raised, scale)
        facts.append(torch.full((2, rows), float("nan")))
        add_sums = find("fused_linear_cross_entropy_add_sums").variant(0)
        add_sums.kernel.function[(rows,)](facts[-1], r.sums, r.base, r.highest, rows, *[r.sums.shape[1]] * 2,
                                          **add_sums.constexprs)
    facts, flags, split_dx, split_dweight = torch.stack(facts), flags | TAKES, 0, []
    for r in ranks:
        r.weighed = torch.full((rows, columns), float("nan"))
        launch("weigh", r.loss, r.z_loss, r.factor, r.taken, r.weighed, r.e, x, r.sums, facts, r.base, r.classes, r.highest,
               packed, class_weight, grad, totals, rows, columns, *[r.sums.shape[1]] * 2, 2, r.e.stride(0), columns, words,
               1, z_scale, flags)
        dweight_here, part = scale * r.e[:, : r.n].T @ r.weighed, scale * r.e[:, : r.n] @ r.w
        known = (r.classes >= 0).nonzero().flatten()
        dweight_here.index_add_(0, r.classes[known].long(), scale * r.taken[known, None] * x[known])
        launch("rescale", part, r.factor, r.taken, r.classes, r.w, columns, columns, scale, flags)
        split_dx = split_dx + part
        split_dweight.append(dweight_here)
        assert torch.equal(r.loss.nan_to_num(), ranks[0].loss.nan_to_num())
    numpy.savez(path, split_loss=r.loss, split_z_loss=r.z_loss, split_dx=split_dx, split_dweight=torch.cat(split_dweight), loss=lost, z_loss=z_loss, alone=alone, dx=dx, dweight=dweight, x=x, weight=weight, target=target, grad=grad,
                classes=classes, class_weight=class_weight, rescued=highest != UNKNOWN)
"""


EXPONENTIALS_CASES = [
    (33, 500, 24, words, takes, arrives, extras, large)
    for words, takes, arrives in ((1, False, True), (2, True, False), (2, False, False), (1, True, True))
    for extras in (False, True)
    for large in (False, True)
]
# More than one block of rows. The interpreter needs seconds for each.
EXPONENTIALS_CASES += [
    (260, 192, 1031, *case) for case in ((2, True, False, True, True), (1, False, True, False, True))
]


@pytest.fixture(scope="module")
def exponentials_interpreted(tmp_path_factory):
    return interpret(EXPONENTIALS, EXPONENTIALS_CASES, tmp_path_factory.mktemp("exponentials"))


@pytest.mark.parametrize("case", EXPONENTIALS_CASES, ids=lambda case: "-".join(map(str, case)))
def test_exponentials_interpreted(case, exponentials_interpreted):
    """Runs the kernels around the GEMM: they compute losses and gradients from exponentials and their sums."""
    *_, arrives, extras, large = case
    got = exponentials_interpreted[case]
    x, weight = (got[name].double().requires_grad_() for name in ("x", "weight"))
    target, bad = got["target"].clone(), got["target"] >= len(weight)
    assert (got["classes"][bad] == -2).all() and (got["classes"][target == -100] == -1).all()
    assert got["rescued"].any() == large and not got["rescued"].all()
    target[bad] = -100
    arriving = got["grad"].double() if arrives else torch.ones(len(x), dtype=torch.float64)
    logits, of_class = 0.75 * x @ weight.T, got["class_weight"].double() if extras else None
    loss = F.cross_entropy(logits, target, of_class, reduction="none")
    z_loss = torch.where(target == -100, 0, 1e-3 * extras * logits.logsumexp(1) ** 2)
    (loss * arriving / 7 + z_loss * arriving / 5).sum().backward()
    # The absolute error of logits is the absolute error of losses and the relative error of exponentials. Logits are
    # fp32 sums, whose rounding error grows with the magnitude of the terms.
    with torch.no_grad():
        allowed = torch.finfo(torch.float32).eps * float((x.abs() @ weight.abs().T).max())
        steepest = 1 + 2e-3 * float(logits.logsumexp(1).abs().max())
    losses = {"loss": loss, "z_loss": z_loss, "alone": loss + z_loss, "split_loss": loss, "split_z_loss": z_loss}
    for name, truth in losses.items():
        assert got[name][bad].isnan().all()
        assert (got[name].double() - truth.detach())[~bad].abs().max() <= allowed * steepest, name
    gradients_of = {"dx": x, "dweight": weight, "split_dx": x, "split_dweight": weight}
    for mine, truth in ((got[name], leaf.grad) for name, leaf in gradients_of.items()):
        assert torch.linalg.vector_norm(mine.double() - truth) <= allowed * torch.linalg.vector_norm(truth)
