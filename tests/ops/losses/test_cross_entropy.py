"""cross_entropy, cross_entropy_with_metrics and cross_entropy_ against torch.nn.functional.cross_entropy in fp64."""

import math

import pytest
import torch
import torch.nn.functional as F
from checks import CPU_DTYPES, assert_no_worse, path_taken
from cross_entropies import (
    EXTRAS,
    ONES,
    ZEROS,
    check,
    cross_entropy,
    cross_entropy_,
    make,
    overwriting,
    overwriting_wide_rows,
    reference,
    reference_with_metrics,
    with_metrics,
)
from pairs import pairwise

import liger_ops

# Fewest, widths that no vector length divides, and a real vocabulary.
SIZES = [1, 2, 7, 33, 1000, 9001, 50257]
# On both sides of the variant table's boundaries; vocabularies whose rows are split.
SIZES_OF_KERNELS = [256, 1024, 1032, 2049, 4096, 4104, 8192, 16400, 32000, 32001, 128256, 151936, 163840, 262144]
OPS = [cross_entropy, overwriting]


@pairwise(n=SIZES, dtype=CPU_DTYPES, op=OPS)
def test_sizes(n, dtype, op, device):
    check(make((6, n), dtype, device), device, op)


@pytest.mark.gpu
@pairwise(n=SIZES_OF_KERNELS, dtype=CPU_DTYPES, op=OPS)
def test_sizes_of_kernels(n, dtype, op):
    check(make((4, n), dtype, "cuda", ignored=0.1), "cuda", op)


@pairwise(weighted=[False, True], dtype=[torch.float32, torch.bfloat16])
def test_an_odd_vocabulary_in_padded_rows(weighted, dtype, device):
    """Logits as the linear loss stores them: several programs share a row, and padding follows each row."""
    inputs = make((5, 50257), dtype, device, dtype if weighted else None)
    check(inputs, device, overwriting_wide_rows)

    wide = torch.full((5, 50304), 7.0, dtype=dtype, device=device)
    wide[:, :50257] = inputs[0].detach()
    cross_entropy_(wide[:, :50257], *inputs[1:])
    assert (wide[:, 50257:] == 7).all()


@pairwise(
    dtype=CPU_DTYPES,
    reduction=["mean", "sum", "none"],
    weight_dtype=[None, torch.float32, "own"],
    extras=EXTRAS,
    op=OPS,
)
def test_options(dtype, reduction, weight_dtype, extras, op, device):
    inputs = make((3, 5, 136), dtype, device, dtype if weight_dtype == "own" else weight_dtype)
    check(inputs, device, op, reduction=reduction, **EXTRAS[extras])


@pairwise(extras=EXTRAS, n=[2056, 2049])
def test_options_over_many_tiles(extras, n, device):
    check(make((5, n), torch.bfloat16, device, torch.float32), device, **EXTRAS[extras])


@pairwise(op=OPS, cap=[0.5, 2.0], n=[37, 40, 1001])
def test_a_cap_far_below_the_logits(op, cap, n, device):
    """Logits masked with the lowest finite value become ordinary logits under a cap."""
    logits, target, _ = make((5, n), torch.float32, device, ignored=0)
    with torch.no_grad():
        logits[1, : n // 2] = torch.finfo(torch.float32).min
        logits[2, 1:] = torch.finfo(torch.float32).min
    check((logits, target), device, op, softcap=cap)


@pytest.mark.parametrize("target_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 3, 2**31 - 1, 2**40])
def test_targets(ignore_index, target_dtype, device):
    if ignore_index > torch.iinfo(target_dtype).max:
        ignore_index = 5
    logits, target, weight = make((40, 11), torch.float32, device, torch.float32, ignored=0)
    target[::3] = ignore_index
    check((logits, target.to(target_dtype), weight), device, ignore_index=ignore_index)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_targets_ignored(reduction, op, device):
    """As in PyTorch, the mean over no targets is NaN and its gradient is zero."""
    logits, target, weight = make((4, 24), torch.float32, device, torch.float32, ignored=1.1)
    loss = op(logits, target, weight, reduction)
    expected = F.cross_entropy(logits, target, weight, reduction=reduction)
    assert torch.equal(loss.isnan(), expected.isnan()) and (reduction != "mean") == bool(loss.isfinite().all())
    assert not torch.autograd.grad(loss.sum(), logits)[0].any()


@pairwise(shape=[(0, 8), (2, 0, 8), (8,), (0, 0), (3, 1)], reduction=["mean", "sum", "none"], op=OPS)
def test_empty_and_one_dimensional(shape, reduction, op, device):
    logits, target, _ = make(shape, torch.float32, device, ignored=0)
    loss, expected = op(logits, target, None, reduction), reference(logits, target, None, reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    grads = (torch.autograd.grad(t.sum(), logits)[0] for t in (loss, expected))
    torch.testing.assert_close(*grads)


def test_no_classes_and_all_rows_ignored(device):
    loss = cross_entropy(torch.empty(3, 0, device=device), torch.full((3,), -100, device=device), None, "sum")
    assert loss.item() == 0


def test_special_values_follow_pytorch(device):
    """NaN, infinities and the extreme finite logits."""
    inf, lowest = math.inf, torch.finfo(torch.float32).min
    logits = torch.randn(8, 100, device=device)
    logits[0, 10:], logits[1], logits[2, 5], logits[3, 5] = -inf, -inf, math.nan, inf
    logits[4], logits[5], logits[6, 7] = lowest, -lowest / 4, -inf
    target = torch.tensor([3, 4, 6, 5, 9, 9, 7, -100], device=device)
    for label_smoothing in (0.0, 0.1):
        options = dict(reduction="none", label_smoothing=label_smoothing)
        results = []
        for op in (cross_entropy, overwriting, F.cross_entropy):
            x = logits.clone().requires_grad_()
            loss = op(x, target, **options)
            results.append((loss.detach(), *torch.autograd.grad(loss.sum(), x)))
        for ours in results[:2]:
            torch.testing.assert_close(ours, results[2], equal_nan=True)


@pairwise(dtype=CPU_DTYPES, offset=[0.0, 64.0, -1000.0], op=OPS)
@pytest.mark.library
def test_confident_predictions_are_accurate(dtype, offset, op, device):
    """1 - p_y is accurate in the loss even far below fp32's epsilon; the gradient adds one rounding to its dtype."""
    n, gaps = 1000, [4.0, 8.0, 16.0, 32.0]
    logits = torch.full((4, n), offset, device=device)
    target = torch.tensor([0, 17, 500, 999], device=device)
    logits[torch.arange(4), target] += torch.tensor(gaps, device=device)
    logits = logits.to(dtype).requires_grad_()
    gap = (logits.detach().double()[torch.arange(4), target] - offset).tolist()
    miss = torch.tensor([(n - 1) * math.exp(-g) for g in gap], dtype=torch.float64)
    loss = op(logits, target, None, "none")
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    # The relative error of an exponential is the error of its argument; a sum's grows with the root of its terms.
    rtol = (max(gaps) + n**0.5) * torch.finfo(torch.float32).eps
    assert torch.allclose(loss.detach().cpu().double(), torch.log1p(miss), rtol=rtol, atol=0)
    got, expected = grad[torch.arange(4), target].cpu().double(), -miss / (1 + miss)
    # Rounding may also be half the spacing of subnormal numbers.
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    assert torch.allclose(got, expected, rtol=rtol + eps, atol=tiny * eps / 2)


# ---- Metrics


@pairwise(n=[136, 1001, 9000], reduction=["mean", "sum", "none"], with_weight=[True, False], extras=EXTRAS)
@pytest.mark.library
def test_metrics(n, reduction, with_weight, extras, device):
    logits, target, weight = make((2, 6, n), torch.float32, device, torch.float32 if with_weight else None)
    with torch.no_grad():
        # Makes half of the predictions correct.
        logits[0].scatter_(-1, target[0].clamp(min=0)[:, None], 20.0)
    arguments, options = (logits, target, weight, reduction), EXTRAS[extras]
    with path_taken(device):
        ours = with_metrics(*arguments, **options)
    oracle = reference_with_metrics(logits.double(), *arguments[1:], **options)
    eager = reference_with_metrics(*arguments, **options)
    for name, *results in zip(("loss", "z_loss", "token_accuracy"), ours, eager, oracle):
        assert_no_worse(name, *results)
    assert torch.equal(ours[3], oracle[3]) and ours[3].dtype == torch.int64
    loss = cross_entropy(*arguments, **options)
    assert torch.equal(loss, ours[0])
    grads = [torch.autograd.grad(t.sum(), logits)[0] for t in (loss, ours[0])]
    assert torch.equal(*grads)
    assert not any(t.requires_grad for t in ours[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [100, 104, 2561, 9000, 70001])
def test_ties_predict_the_first_token(n, dtype, device):
    logits = torch.zeros(7, n, device=device, dtype=dtype)
    logits[1, [40, 60]] = logits[2, [40, 60]] = logits[3, [60, n - 1]] = logits[4, n - 1] = 1.0
    logits[5] = -math.inf
    logits[6] = math.nan
    target = torch.tensor([5, 60, 40, n - 1, n - 1, 3, 3], device=device)
    with path_taken(device):
        *_, accuracy, predicted = with_metrics(logits, target, None, "none")
    assert predicted[:6].tolist() == logits[:6].argmax(-1).tolist()
    assert accuracy.tolist() == [0, 0, 1, 0, 1, 0, 0]


def test_metrics_under_no_grad(device):
    logits, target, weight = make((4, 40), torch.bfloat16, device, torch.float32)
    with torch.no_grad():
        quiet = with_metrics(logits, target, weight)
    assert all(torch.equal(a, b) for a, b in zip(quiet, with_metrics(logits, target, weight)))


@pairwise(op=OPS, reduction=["mean", "sum", "none"], extras=EXTRAS)
def test_gradcheck(op, reduction, extras):
    logits, target, weight = make((4, 5), torch.float64, "cpu", torch.float64, scale=1.0)
    assert torch.autograd.gradcheck(lambda x: op(x, target, weight, reduction, **EXTRAS[extras]), [logits])


# ---- Layouts


LAYOUTS = {
    "contiguous": lambda t: t.clone(),
    "shifted": lambda t: torch.cat([t, t[:, :1]], 1)[:, :-1],
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "misaligned": lambda t: torch.cat([t.flatten(), t.new_zeros(1)]).roll(1)[1:].view(t.shape),
    "every other row": lambda t: torch.stack([t, t], 2).flatten(1, 2)[:, ::2],
    "expanded": lambda t: t[:1].expand_as(t),
}


LOGITS_LAYOUTS = {
    **LAYOUTS,
    "part of wider rows": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "strided classes": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
}


@pairwise(layout=LOGITS_LAYOUTS, target_layout=LAYOUTS, reduction=["mean", "none"])
def test_layouts(layout, target_layout, reduction, device):
    logits, target, weight = make((3, 4, 5, 64), torch.bfloat16, device, torch.float32)
    logits = LOGITS_LAYOUTS[layout](logits.detach()).requires_grad_()
    check((logits, LAYOUTS[target_layout](target), weight), device, reduction=reduction)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_upstream_layouts(layout, device):
    logits, target, _ = make((3, 4, 40), torch.float32, device)
    grad = LAYOUTS[layout](torch.randn(3, 4, device=device))
    for op in (cross_entropy, overwriting):
        (ours,) = torch.autograd.grad(op(logits, target, None, "none"), logits, grad)
        (expected,) = torch.autograd.grad(reference(logits, target, None, "none"), logits, grad)
        torch.testing.assert_close(ours, expected)


@pytest.mark.library
def test_dense_strides_are_preserved(device):
    logits = torch.randn(6, 4, 64, device=device).transpose(0, 1).requires_grad_()
    (grad,) = torch.autograd.grad(cross_entropy(logits, torch.zeros(4, 6, dtype=torch.long, device=device)), logits)
    assert grad.stride() == logits.stride()


@pytest.mark.parametrize("layout", [k for k in LOGITS_LAYOUTS if k != "expanded"])
def test_overwriting_does_not_touch_the_rest_of_a_buffer(layout, device):
    values, target, _ = make((3, 4, 64), torch.float32, device)
    (expected,) = torch.autograd.grad(cross_entropy(values, target), values)
    logits = LOGITS_LAYOUTS[layout](values.detach())
    whole = logits if logits._base is None else logits._base
    before = whole.clone()
    cross_entropy_(logits, target)
    torch.testing.assert_close(logits, expected)
    with torch.no_grad():
        logits.copy_(values)
    assert torch.equal(whole, before)


# ---- GPU only


@pytest.mark.gpu
@pairwise(n=[40, 41], target_dtype=[torch.int64, torch.int32], weighted=[False, True])
def test_a_target_out_of_range_makes_its_row_nan(n, target_dtype, weighted):
    """Other rows are unaffected, although the class after a row's last one is the next row's first."""
    logits, target, weight = make((6, n), torch.float32, "cuda", torch.float32 if weighted else None, ignored=0)
    far = [2**31 - 1, -(2**31)] if target_dtype == torch.int32 else [2**62, 2**32 + 5]
    target[:4] = torch.tensor([*far, -1, n], device="cuda")
    for op in (cross_entropy, overwriting):
        loss = op(logits, target.to(target_dtype), weight, "none")
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        assert loss[:4].isnan().all() and grad[:4].isnan().all()
        assert loss[4:].isfinite().all() and grad[4:].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [70_000, 1_000_000])
@pytest.mark.parametrize("op", OPS)
def test_many_rows(rows, op):
    """Too many rows for one program to sum their losses."""
    check(make((rows, 40), torch.float32, "cuda", torch.float32), "cuda", op, lse_square_scale=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [32000, 50257, 128256])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_one_program_per_row(n, dtype):
    """With more rows than multiprocessors, each row is processed by a single program."""
    rows = torch.cuda.get_device_properties("cuda").multi_processor_count + 1
    check(make((rows, n), dtype, "cuda"), "cuda")


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    n = 128256
    rows = 2**31 // n + 5
    logits = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(n, (rows,), device="cuda")
    tail = logits[-7:].clone().requires_grad_()
    loss = cross_entropy(logits, target, None, "none")[-7:]
    expected = F.cross_entropy(tail.float(), target[-7:], reduction="none")
    torch.testing.assert_close(loss, expected)
    cross_entropy_(logits, target, None, "sum")
    torch.testing.assert_close(logits[-7:], torch.autograd.grad(expected.sum(), tail)[0])


@pytest.mark.gpu
def test_autocast_follows_pytorch():
    logits, target, weight = make((40, 64), torch.bfloat16, "cuda", torch.float32, ignored=0)
    with torch.autocast("cuda", torch.bfloat16):
        ours, theirs = cross_entropy(logits, target, weight), F.cross_entropy(logits, target, weight)
    assert ours.dtype == theirs.dtype == torch.float32
    # Releases of torch round intermediate results differently, so compare with the loss in float32.
    exact = F.cross_entropy(logits.float(), target, weight)
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(*(torch.autograd.grad(t, logits)[0] for t in (ours, exact)))


# ---- Bad input


ERRORS = {
    "integer logits": ((ONES.long(), ZEROS), {}, "logits must be float32, float16, bfloat16 or float64"),
    "scalar logits": ((torch.tensor(1.0), ZEROS), {}, "logits must have at least one dimension"),
    "sparse logits": ((ONES.to_sparse(), ZEROS), {}, "logits must be a dense, unquantized tensor"),
    "float target": ((ONES, ONES), {}, "target must be int64 or int32"),
    "target of another shape": ((ONES, torch.zeros(3, dtype=torch.long)), {}, r"target must have shape \[2\]"),
    "target elsewhere": ((ONES, ZEROS.to("meta")), {}, "target must be on cpu like logits"),
    "target too large": ((ONES, ZEROS + 8), {}, r"target must lie in \[0, 8\) or be ignore_index, -100 "),
    "negative target": ((ONES, ZEROS - 1), {}, r"target must lie in \[0, 8\) or be ignore_index, -100 "),
    "weight of another length": ((ONES, ZEROS, torch.ones(7)), {}, r"weight must have shape \[8\]"),
    "weight of two dimensions": ((ONES, ZEROS, torch.ones(1, 8)), {}, r"weight must have shape \[8\]"),
    "narrow weight": ((ONES, ZEROS, torch.ones(8).half()), {}, "weight must be float32 or have the dtype of logits"),
    "weight elsewhere": ((ONES, ZEROS, torch.ones(8, device="meta")), {}, "weight must be on cpu like logits"),
    "sparse weight": ((ONES, ZEROS, torch.ones(8).to_sparse()), {}, "weight must be a dense, unquantized tensor"),
    "learned weight": ((ONES, ZEROS, torch.ones(8, requires_grad=True)), {}, "weight must not require a gradient"),
    "unknown reduction": ((ONES, ZEROS), dict(reduction="avg"), "reduction must be 'mean', 'sum' or 'none'"),
    "too much smoothing": ((ONES, ZEROS), dict(label_smoothing=1.5), "label_smoothing must be between 0 and 1"),
    "negative smoothing": ((ONES, ZEROS), dict(label_smoothing=-0.1), "label_smoothing must be between 0 and 1"),
    "infinite z-loss": ((ONES, ZEROS), dict(lse_square_scale=math.inf), "lse_square_scale must be finite"),
    "zero softcap": ((ONES, ZEROS), dict(softcap=0.0), "softcap must be positive and finite"),
}


@pytest.mark.parametrize("op", [cross_entropy, with_metrics, cross_entropy_])
@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.library
def test_errors(case, op):
    arguments, options, message = ERRORS[case]
    name = op._qualified_op_name.removeprefix("liger::")
    with pytest.raises(RuntimeError, match=rf"^{name}: {message}.*\(got "):
        op(*arguments, **options)


@pytest.mark.library
def test_overlapping_logits_cannot_be_overwritten():
    with pytest.raises(RuntimeError, match="cross_entropy_: logits must not overlap themselves"):
        cross_entropy_(torch.ones(1, 8).expand(2, 8), ZEROS)


@pytest.mark.library
def test_launch_counts_name_the_cpu_path():
    liger_ops.reset_launch_counts()
    cross_entropy(ONES, ZEROS)
    assert liger_ops.launch_counts()["cpu"] == 1
