"""What the losses of logits and of distributions share. Their files have what only one of them does."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from liger_ops import functional as F
from tests.support.checks import CPU_DTYPES
from tests.support.families.logits_losses import (
    CHOICES,
    CROSS_ENTROPY,
    DIVERGENCES,
    INDEX_TYPES,
    LOG_PROBS,
    LOSSES,
    OVERWRITING,
    check,
)
from tests.support.oracles.divergences import PLAIN
from tests.support.pairs import pairs_of, pairwise

each_loss = pytest.mark.parametrize("loss", LOSSES, ids=str)
each_divergence = pytest.mark.parametrize("loss", DIVERGENCES, ids=str)
of_indices = pytest.mark.parametrize("loss", [CROSS_ENTROPY, OVERWRITING, LOG_PROBS], ids=str)
# On both sides of the variant tables' limits; vocabularies whose rows are split.
SIZES_OF_KERNELS = [
    64, 72, 256, 264, 1024, 1032, 2048, 2056, 4096, 4104, 8192, 16400, 32000, 32001, 50257, 128256, 151936, 163840, 262144,
]  # fmt: skip


def listed(found):
    return [found] if isinstance(found, Tensor) else [r for r in found if r.requires_grad]


def first_of(given):
    return next(iter(given.values()))


# ---- Values


def cases(**axes):
    for loss in LOSSES:
        own = dict(loss.axes) | axes
        if axes:  # the first and the last options, with and without extras
            own["options"] = [*own["options"]][:: max(1, len(own["options"]) - 1)]
        for values in pairs_of(*own.values()):
            yield pytest.param(loss, dict(zip(own, values)), id=f"{loss.name}-{'-'.join(map(str, values))}")


@pytest.mark.parametrize("loss, case", cases())
def test_formula(loss, case, device):
    case = dict(case)
    given, options = loss.make((2, 3, case.pop("n")), device=device, **case)
    check(loss, given, options, device)


@pytest.mark.gpu
@pytest.mark.parametrize("loss, case", cases(n=SIZES_OF_KERNELS, rows=[4, 333]))
def test_sizes_of_kernels(loss, case):
    """With more rows than multiprocessors, each row is processed by a single program."""
    case = dict(case)
    given, options = loss.make((case.pop("rows"), case.pop("n")), device="cuda", **case)
    check(loss, given, options, "cuda")


@pytest.mark.gpu
@each_loss
@pytest.mark.parametrize("rows", [70_000, 1_000_000])
def test_many_rows(rows, loss):
    """Too many rows for one program to sum their losses."""
    check(loss, *loss.make((rows, 40), device="cuda"), "cuda")


@pairwise(loss=LOSSES, index=INDEX_TYPES, ignore_index=[-100, -1, 0, 3, 2**31 - 1, 2**40])
def test_ignored_indices(loss, index, ignore_index, device):
    if ignore_index > torch.iinfo(index).max:
        ignore_index = 4
    given, options = loss.make((40, 11), device=device, index=index, ignored=0.0)
    given[loss.index][::3] = ignore_index
    check(loss, given, dict(options, ignore_index=ignore_index), device)


@each_loss
@pytest.mark.parametrize("n", [24, 2049])
def test_ignored_rows_are_not_read(n, loss, device):
    given, options = loss.make((6, n), device=device, index=torch.int64)
    given[loss.index][3:] = -100

    def results():
        found = listed(loss.op(**given, **options))
        return [*found, *torch.autograd.grad(sum(r.sum() for r in found), first_of(given))]

    expected = results()
    for t in given.values():
        if t is not None and t.is_floating_point():
            t.data[3:] = math.nan
    assert all(torch.equal(a, b) for a, b in zip(results(), expected))
    assert not expected[-1][3:].any()


@each_divergence
@pytest.mark.parametrize("index", [None, torch.int64])
def test_the_formula_of_divergences_equals_another(index, loss):
    for choice in CHOICES[loss.name]:
        given, _ = loss.make((4, 3, 9), torch.float64, index=index, options=choice)
        x, t, y = given.values()
        losses = PLAIN[loss.name](x, t, **choice)
        counted = torch.ones(4, 3, dtype=torch.bool) if y is None else y != -100
        losses = losses * counted[..., None]
        for reduction, by in {"none": 1, "sum": 1, "mean": counted.sum() * 9, "batchmean": counted.sum()}.items():
            if loss.name == "kl_div" and reduction == "batchmean" and y is None:
                by = 4
            expected = (losses if reduction == "none" else losses.sum()) / by
            found = loss.op.reference(**given, **choice, reduction=reduction)
            torch.testing.assert_close(found, expected)
            slopes = (torch.autograd.grad(v.sum(), x, retain_graph=True)[0] for v in (found, expected))
            torch.testing.assert_close(*slopes)


@each_divergence
@pytest.mark.parametrize("dtypes", [*itertools.permutations([*CPU_DTYPES, torch.float64], 2)])
def test_divergences_of_mixed_dtypes(dtypes, loss):
    for choice in CHOICES[loss.name]:
        given, options = loss.make((5, 24), index=torch.int64, options=choice)
        x, t, y = given.values()
        x, t = x.detach().to(dtypes[0]).requires_grad_(), t.to(dtypes[1])
        wide = torch.promote_types(*dtypes)
        found, expected = loss.op(x, t, y, **options), loss.op(x.to(wide), t.to(wide), y, **options)
        assert torch.equal(found, expected) and found.dtype == expected.dtype
        ours, theirs = (torch.autograd.grad(r, x)[0] for r in (found, expected))
        assert torch.equal(ours, theirs) and ours.dtype == dtypes[0]


@each_divergence
def test_nan_propagates_through_divergences(loss, device):
    for choice in CHOICES[loss.name]:
        given, _ = loss.make((4, 40), device=device, options=choice)
        given["input"].data[1, 3] = given["target"][2, 5] = math.nan
        found = loss.op(**given, **choice, reduction="none")
        assert found.isnan().nonzero().tolist() == [[1, 3], [2, 5]]


# ---- Memory


@pytest.mark.parametrize("loss", [LOG_PROBS, *DIVERGENCES], ids=str)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.library
def test_the_gradient_overwrites_unreferenced_memory(held, loss, device):
    """That of the logits, or of a divergence's target."""
    for options in loss.axes["options"]:
        given, options = loss.make((4, 64), device=device, options=options)
        overwritten = "logits" if loss is LOG_PROBS else "target"
        leaf = first_of(given)
        (expected,) = torch.autograd.grad(sum(r.sum() for r in listed(loss.op(**given, **options))), leaf)
        before = given[overwritten].detach().clone()
        temporaries = {name: t * 1 if t is not None and t.is_floating_point() else t for name, t in given.items()}
        address, kept = temporaries[overwritten].data_ptr(), temporaries[overwritten] if held else None
        found = listed(loss.op(**temporaries, **options))
        del temporaries
        seen = []
        found[0].grad_fn.next_functions[0][0].register_prehook(
            lambda grads, seen=seen: seen.append(grads[0].data_ptr())
        )
        (got,) = torch.autograd.grad(sum(r.sum() for r in found), leaf)
        assert torch.equal(got, expected) and (seen == [address]) == (not held)
        assert kept is None or torch.equal(kept, before)


@pytest.mark.gpu
@each_loss
def test_no_memory_beyond_the_gradient(loss):
    given, options = loss.make((512, 32000), torch.bfloat16, "cuda")
    leaf = first_of(given)
    op = F.cross_entropy_ if loss is OVERWRITING else loss.op
    call = [{name: t * 1 if t is not None and t.is_floating_point() else t for name, t in given.items()}]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = listed(op(**call.pop(), **options))
    seen = []
    producer = found[0].grad_fn.next_functions[0][0]
    producer.register_prehook(lambda _: seen.append(torch.cuda.max_memory_allocated() - before))
    torch.autograd.grad(sum(r.sum() for r in found), leaf)
    assert seen[0] < 2**18


@pytest.mark.gpu
@each_loss
def test_more_than_2_to_the_31_elements(loss):
    """Rows that count are the last."""
    n = 128256
    rows = 2**31 // n + 5
    x = torch.rand(rows, n, device="cuda", dtype=torch.bfloat16).neg_()
    given, options = loss.make((rows, 2), torch.bfloat16, "cuda", index=torch.int64, ignored=2.0)
    given[loss.index].fill_(-100)[-7:] = torch.arange(n - 7, n, device="cuda")
    given |= {first: x for first in [next(iter(given))]} | ({"target": x.roll(1, -1)} if loss in DIVERGENCES else {})
    options |= {} if loss is LOG_PROBS else dict(reduction="sum")
    tail = {name: t if t is None else t[-7:].clone() for name, t in given.items()}
    results = []
    for tensors in (tail, given):
        leaf = first_of(tensors).requires_grad_()
        found = listed(loss.op(**tensors, **options))
        (slope,) = torch.autograd.grad(sum(r.sum() for r in found), leaf)
        results.append(([r[-7:] if r.dim() else r for r in found], slope[-7:]))
    torch.testing.assert_close(*results)


@pytest.mark.gpu
@of_indices
@pairwise(n=[40, 41], index=INDEX_TYPES, weighted=[False, True])
def test_an_index_out_of_range_makes_its_row_nan(n, index, weighted, loss):
    """Other rows are unaffected, although the class after a row's last one is the next row's first."""
    options = dict(ids=2 if weighted else None) if loss is LOG_PROBS else dict(weight="fp32" if weighted else None)
    given, options = loss.make((6, n), device="cuda", index=index, ignored=0.0, **options)
    far = [2**31 - 1, -(2**31)] if index == torch.int32 else [2**62, 2**32 + 5]
    rows = given[loss.index].view(6, -1)
    rows[:4, 0] = torch.tensor([*far, -1, n], device="cuda")
    options |= {} if loss is LOG_PROBS else dict(reduction="none")
    found = listed(loss.op(**given, **options))[0]
    (slope,) = torch.autograd.grad(found.sum(), given["logits"])
    found = found.view(6, -1)
    assert found[:4, 0].isnan().all() and slope[:4].isnan().all()
    assert found[:, 1:].isfinite().all() and found[4:].isfinite().all() and slope[4:].isfinite().all()


# ---- Errors of divergences


X, Y = torch.ones(2, 8), torch.zeros(2, dtype=torch.long)
ERRORS = {
    r"shift_labels must have shape \[2\], that of input without its last dimension": (X, X, Y[:1]),
    "reduction must be 'mean', 'batchmean', 'sum' or 'none'": (X, X, Y, "avg"),
}


@pytest.mark.library
@pytest.mark.parametrize("message", ERRORS)
@each_divergence
def test_errors_of_divergences(loss, message):
    named = dict(zip(("input", "target", "shift_labels", "reduction"), ERRORS[message]))
    with pytest.raises(RuntimeError, match=rf"^{loss.name}: {message}.*\(got "):
        loss.op(**named)
