"""The kernels around the GEMM that writes exponentials, in Triton's interpreter on CPU tensors. No operator launches them there,
because the GEMM needs a GPU."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import liger_ops.kernels as tables
from liger_ops.kernels.losses import _flags
from liger_ops.kernels.losses import exponentials as kernels
from tests.support.pairs import pairs_of

UNKNOWN, TILE = (
    kernels.UNKNOWN.value,
    tables.find("fused_linear_cross_entropy_exp_logits").configs[0].constexprs["TILE_N"],
)
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
        blocks = torch.arange(rows) // 256
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


def results_of(rows, n, columns, words, takes, arrives, extras, large):
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
        variant = tables.find("fused_linear_cross_entropy_" + name).pick({"X": "bf16"}, columns, columns % 8 == 0)
        variant.kernel.function[(rows,)](*args, **variant.constexprs)

    launch(
        "true_logits",
        base,
        classes,
        highest,
        raised,
        x,
        weight,
        packed,
        n,
        columns,
        columns,
        columns,
        words,
        -100,
        0,
        n,
        scale,
    )
    exponentials(e, sums, x, weight, base, classes, highest, raised, scale)
    # A loss without gradients: sums have their own memory.
    alone, nothing = torch.full((rows,), float("nan")), torch.empty(1)

    def weigh(lost, z_loss, weighed, e, sums, flags):
        launch(
            "weigh", lost, z_loss, factor, taken, weighed, e, x, sums, nothing, base, classes, highest, packed, class_weight,
            grad, totals, rows, columns, tiles, sums.stride(0), 0, e.stride(0), columns, words, 1, z_scale, flags,
        )  # fmt: skip

    weigh(alone, nothing, nothing, e.clone(), sums.clone(), HAS_WEIGHT * extras | ADD_Z_LOSS)
    flags = MEAN | HAS_GRAD * arrives | TAKES * takes | WEIGHS | HAS_WEIGHT * extras | SAVE_Z_LOSS
    weigh(lost, z_loss, weighed, e, sums, flags)
    dweight = scale * e[:, :n].T @ weighed
    dx = scale * e[:, :n] @ weight
    if takes:
        known = (classes >= 0).nonzero().flatten()
        dweight.index_add_(0, classes[known].long(), scale * taken[known, None] * x[known])
    launch("rescale", dx, factor, taken, classes, weight, columns, columns, scale, flags)

    # The same with the classes split over two ranks.
    ranks, facts = [], []
    for first, end in ((0, n - n // 3), (n - n // 3, n)):
        r = SimpleNamespace(first=first, w=weight[first:end].contiguous(), n=end - first)
        r.base, r.factor, r.taken, r.loss, r.z_loss = torch.full((5, rows), float("nan"))
        r.classes, r.highest, r.raised = classes.clone(), highest.clone(), raised.clone()
        launch(
            "true_logits",
            r.base,
            r.classes,
            r.highest,
            r.raised,
            x,
            r.w,
            packed,
            r.n,
            columns,
            columns,
            columns,
            words,
            -100,
            first,
            n,
            scale,
        )
        ranks.append(r)
    base_of_all = torch.stack([r.base for r in ranks]).amax(0)
    for r in ranks:
        r.base.copy_(base_of_all)
        r.e, r.sums = torch.full((rows, r.n + 3), float("nan")), torch.full((rows, -(-r.n // TILE)), float("nan"))
        exponentials(r.e, r.sums, x, r.w, r.base, r.classes, r.highest, r.raised, scale)
        facts.append(torch.full((2, rows), float("nan")))
        add_sums = tables.find("fused_linear_cross_entropy_add_sums").variant(0)
        add_sums.kernel.function[(rows,)](
            facts[-1], r.sums, r.base, r.highest, rows, *[r.sums.shape[1]] * 2, **add_sums.constexprs
        )
    facts, flags, split_dx, split_dweight = torch.stack(facts), flags | TAKES, 0, []
    for r in ranks:
        r.weighed = torch.full((rows, columns), float("nan"))
        launch(
            "weigh",
            r.loss,
            r.z_loss,
            r.factor,
            r.taken,
            r.weighed,
            r.e,
            x,
            r.sums,
            facts,
            r.base,
            r.classes,
            r.highest,
            packed,
            class_weight,
            grad,
            totals,
            rows,
            columns,
            *[r.sums.shape[1]] * 2,
            2,
            r.e.stride(0),
            columns,
            words,
            1,
            z_scale,
            flags,
        )
        dweight_here, part = scale * r.e[:, : r.n].T @ r.weighed, scale * r.e[:, : r.n] @ r.w
        known = (r.classes >= 0).nonzero().flatten()
        dweight_here.index_add_(0, r.classes[known].long(), scale * r.taken[known, None] * x[known])
        launch("rescale", part, r.factor, r.taken, r.classes, r.w, columns, columns, scale, flags)
        split_dx = split_dx + part
        split_dweight.append(dweight_here)
        assert torch.equal(r.loss.nan_to_num(), ranks[0].loss.nan_to_num())
    return dict(
        split_loss=r.loss,
        split_z_loss=r.z_loss,
        split_dx=split_dx,
        split_dweight=torch.cat(split_dweight),
        loss=lost,
        z_loss=z_loss,
        alone=alone,
        dx=dx,
        dweight=dweight,
        x=x,
        weight=weight,
        target=target,
        grad=grad,
        classes=classes,
        class_weight=class_weight,
        rescued=highest != UNKNOWN,
    )


# (rows, classes, columns, words of a target, whether the target's gradient is apart, whether an upstream gradient arrives,
# class weights and z-loss, large logits). The last cases have more than one block of rows, which takes seconds.
FORMS = [(1, False, True), (2, True, False), (2, False, False), (1, True, True)]
QUICK = [(33, 500, 24, *form, *options) for form, *options in pairs_of(FORMS, [False, True], [False, True])]
QUICK += [(260, 192, 1031, 2, True, False, True, True)]
THOROUGH = [(33, 500, 24, *form, *options) for form, *options in product(FORMS, [False, True], [False, True])]
THOROUGH += [(260, 192, 1031, 1, False, True, False, True)]


def cases():
    for case in dict.fromkeys([*QUICK, *THOROUGH]):
        yield pytest.param(case, marks=[] if case in QUICK else [pytest.mark.thorough], id="-".join(map(str, case)))


@pytest.mark.parametrize("device", ["interpreted"])
@pytest.mark.parametrize("case", cases())
def test_results(case, device):
    """Losses and gradients, from exponentials and their sums."""
    *_, arrives, extras, large = case
    got = results_of(*case)
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
