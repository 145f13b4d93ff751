"""cross_entropy, cross_entropy_with_metrics and cross_entropy_ against torch.nn.functional.cross_entropy in fp64."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from strategies import may_be_float32
from support import (
    CPU_DTYPES,
    HALF_TYPES,
    OPCHECKS,
    assert_no_worse,
    check_deterministic,
    check_export,
    check_inductor,
    check_no_double_backward,
    check_one_graph,
    check_reads_only,
    check_script,
    check_second_backward,
    coarseness,
    gradients,
    like,
    path_taken,
)
from torch import Tensor

import liger_ops

cross_entropy = torch.ops.liger.cross_entropy
with_metrics = torch.ops.liger.cross_entropy_with_metrics
cross_entropy_ = torch.ops.liger.cross_entropy_


ONES, ZEROS = torch.ones(2, 8), torch.zeros(2, dtype=torch.long)


def overwriting(logits: Tensor, *args, **options) -> Tensor:
    """cross_entropy_ as a function of logits that stay."""
    return cross_entropy_(logits.clone(), *args, **options)


def overwriting_wide_rows(logits: Tensor, *args, **options) -> Tensor:
    n = logits.shape[-1]
    return cross_entropy_(F.pad(logits, (0, -n % 64))[..., :n], *args, **options)


def reference_with_metrics(
    logits,
    target,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    lse_square_scale=0.0,
    softcap=None,
):
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(target.numel(), logits.shape[-1])
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    y = target.reshape(-1).long()
    weight = None if weight is None else weight.to(x.dtype)
    loss = F.cross_entropy(x, y, weight, None, ignore_index, None, reduction, label_smoothing)
    counted = y != ignore_index
    z_loss = torch.where(counted, lse_square_scale * torch.logsumexp(x, -1).square(), 0)
    best = x.argmax(-1) if x.numel() else torch.zeros_like(y)
    right = (counted & (best == y)).to(x.dtype)
    predicted = torch.where(counted, best, -1).view(target.shape)
    if reduction == "none":
        loss, z_loss, right = (t.view(target.shape) for t in (loss, z_loss, right))
    else:
        z_loss, right = ((t.sum() / counted.sum() if reduction == "mean" else t.sum()) for t in (z_loss, right))
    return loss + z_loss, z_loss, right, predicted


def reference(*args, **options):
    return reference_with_metrics(*args, **options)[0]


def make(shape, dtype, device, weight_dtype=None, target_dtype=torch.int64, ignored=0.25, scale=3.0):
    """logits: shape, target: shape[:-1], weight: (V,) or None. Less than 1 ignored: at least one is not."""
    logits = (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_()
    target = torch.randint(max(shape[-1], 1), shape[:-1], device=device)
    target[torch.rand(shape[:-1], device=device) < ignored] = -100
    if ignored < 1:
        target.view(-1)[:1] = 0
    weight = None if weight_dtype is None else torch.rand(shape[-1], device=device).add(0.1).to(weight_dtype)
    return logits, target.to(target_dtype), weight


def check(inputs, device, op=cross_entropy, **options):
    """Loss and gradient of `op` against the oracle, under an upstream gradient that is not 1.

    A gradient made in forward is rounded before its upstream is known: powers of two add no rounding of their own.
    """
    call, expected = partial(op, **options), partial(reference, **options)
    with path_taken(device):
        loss = call(*[t.detach() if isinstance(t, Tensor) else t for t in inputs])
    grad = [torch.randn(loss.shape, device=device)]
    if op is not cross_entropy:
        grad = [2 * grad[0].sign()]
    with path_taken(device):
        ours = gradients(call, [like(t) for t in inputs], grad)
    assert torch.equal(ours[0].detach(), loss) or loss.isnan().any()
    eager = gradients(expected, [like(t) for t in inputs], grad)
    oracle = gradients(expected, [like(t, torch.float64) for t in inputs], grad)
    for name, *results in zip(("loss", "gradient"), ours, eager, oracle):
        assert_no_worse(name, *results)
    if inputs[0].dtype in HALF_TYPES:
        check_other_classes(inputs[1], 1 if op is cross_entropy else 2, ours[1], eager[1], oracle[1])


def check_other_classes(target, upstream, *gradients):
    """Zeros would pass for the gradient of all classes but the true one, which is nearly 1, and within these for that
    of the rare ones. What fp32 computes is exact to 16 bits, so that one rounding is all that may differ; upstream:
    what multiplies a gradient that is rounded already, and with it the spacing of small numbers."""
    size = gradients[-1].abs()
    others = torch.ones_like(size, dtype=torch.bool)
    others.scatter_(-1, target.long().clamp(0, size.shape[-1] - 1)[..., None], False)
    rare = others & (size < size.where(others, 0).mean(-1, keepdim=True))
    for name, which in (("other", others), ("rare", rare)):
        apart = [g.where(which, 0) for g in gradients]
        assert_no_worse(f"gradient of {name} classes", *apart, noise=upstream * coarseness(apart[0].dtype, apart[-1]))


# Widths on each side of the variant table's boundaries, of real vocabularies, and that no vector divides.
SIZES = [1, 2, 7, 33, 256, 1000, 1024, 1032, 2049, 4096, 4104, 8192, 9001, 16400, 32000, 32001, 50257]


@pytest.mark.parametrize("op", [cross_entropy, overwriting])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_sizes(n, dtype, op, device):
    check(make((6, n), dtype, device), device, op)


@pytest.mark.parametrize("op", [cross_entropy, overwriting])
@pytest.mark.parametrize("n", [128256, 151936, 163840, 262144])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_vocabularies(n, dtype, op, device):
    check(make((3, n), dtype, device, ignored=0), device, op)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_an_odd_vocabulary_in_rows_of_whole_cache_lines(weighted, dtype, device):
    """As the linear loss has its logits: long enough to be shared out, and followed by what belongs to no row."""
    inputs = make((5, 50257), dtype, device, dtype if weighted else None)
    check(inputs, device, overwriting_wide_rows)

    wide = torch.full((5, 50304), 7.0, dtype=dtype, device=device)
    wide[:, :50257] = inputs[0].detach()
    cross_entropy_(wide[:, :50257], *inputs[1:])
    assert (wide[:, 50257:] == 7).all()


EXTRAS = {
    "plain": {},
    "smoothing": dict(label_smoothing=0.1),
    "smoothing alone": dict(label_smoothing=1.0),
    "z-loss": dict(lse_square_scale=1e-3),
    "softcap": dict(softcap=5.0),
    "all": dict(label_smoothing=0.2, lse_square_scale=1e-3, softcap=30.0),
}


@pytest.mark.parametrize("op", [cross_entropy, overwriting])
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32, "own"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_options(dtype, reduction, weight_dtype, extras, op, device):
    inputs = make((3, 5, 136), dtype, device, dtype if weight_dtype == "own" else weight_dtype)
    check(inputs, device, op, reduction=reduction, **EXTRAS[extras])


@pytest.mark.parametrize("n", [2056, 2049])
@pytest.mark.parametrize("extras", EXTRAS)
def test_options_over_many_tiles(extras, n, device):
    check(make((5, n), torch.bfloat16, device, torch.float32), device, **EXTRAS[extras])


@pytest.mark.parametrize("n", [37, 40, 1001])
@pytest.mark.parametrize("cap", [0.5, 2.0])
@pytest.mark.parametrize("op", [cross_entropy, overwriting])
def test_a_cap_far_below_the_logits(op, cap, n, device):
    """Masked classes have the lowest number there is; capped, it is as good as any other."""
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


@pytest.mark.parametrize("op", [cross_entropy, overwriting])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_target_at_all(reduction, op, device):
    """As in PyTorch: a mean over nothing is NaN, and its gradient zero."""
    logits, target, weight = make((4, 24), torch.float32, device, torch.float32, ignored=1.1)
    loss = op(logits, target, weight, reduction)
    expected = F.cross_entropy(logits, target, weight, reduction=reduction)
    assert torch.equal(loss.isnan(), expected.isnan()) and (reduction != "mean") == bool(loss.isfinite().all())
    assert not torch.autograd.grad(loss.sum(), logits)[0].any()


@pytest.mark.parametrize("op", [cross_entropy, overwriting])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,), (0, 0), (3, 1)])
def test_empty_and_one_dimensional(shape, reduction, op, device):
    logits, target, _ = make(shape, torch.float32, device, ignored=0)
    loss, expected = op(logits, target, None, reduction), reference(logits, target, None, reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    grads = (torch.autograd.grad(t.sum(), logits)[0] for t in (loss, expected))
    torch.testing.assert_close(*grads)


def test_no_class_but_ignored_rows(device):
    loss = cross_entropy(torch.empty(3, 0, device=device), torch.full((3,), -100, device=device), None, "sum")
    assert loss.item() == 0


def test_special_values_follow_pytorch(device):
    """NaN and infinities, and logits at the ends of the range."""
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


@pytest.mark.parametrize("op", [cross_entropy, overwriting])
@pytest.mark.parametrize("offset", [0.0, 64.0, -1000.0])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_confident_predictions_keep_their_digits(dtype, offset, op, device):
    """1 - p_y far below fp32's 6e-8 is exact in the loss, and in the gradient up to the one rounding of its dtype."""
    n, gaps = 1000, [4.0, 8.0, 16.0, 32.0]
    logits = torch.full((4, n), offset, device=device)
    target = torch.tensor([0, 17, 500, 999], device=device)
    logits[torch.arange(4), target] += torch.tensor(gaps, device=device)
    logits = logits.to(dtype).requires_grad_()
    gap = (logits.detach().double()[torch.arange(4), target] - offset).tolist()
    miss = torch.tensor([(n - 1) * math.exp(-g) for g in gap], dtype=torch.float64)
    loss = op(logits, target, None, "none")
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert torch.allclose(loss.detach().cpu().double(), torch.log1p(miss), rtol=1e-5, atol=0)
    got, expected = grad[torch.arange(4), target].cpu().double(), -miss / (1 + miss)
    # Relative; fp16 has no small numbers, so there only what its spacing admits.
    assert torch.allclose(got, expected, rtol=1e-5 + torch.finfo(dtype).eps, atol=3e-8 if dtype == torch.float16 else 0)


# ---- Metrics


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("n", [136, 1001, 9000])
def test_metrics(n, reduction, with_weight, extras, device):
    logits, target, weight = make((2, 6, n), torch.float32, device, torch.float32 if with_weight else None)
    with torch.no_grad():
        # Half of the predictions right.
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
def test_predicted_tokens_are_the_first_of_equals(n, dtype, device):
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


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("target_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LOGITS_LAYOUTS)
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


def test_a_dense_layout_is_kept(device):
    logits = torch.randn(6, 4, 64, device=device).transpose(0, 1).requires_grad_()
    (grad,) = torch.autograd.grad(cross_entropy(logits, torch.zeros(4, 6, dtype=torch.long, device=device)), logits)
    assert grad.stride() == logits.stride()


@pytest.mark.parametrize("layout", [k for k in LOGITS_LAYOUTS if k != "expanded"])
def test_overwriting_leaves_the_rest_of_a_buffer(layout, device):
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


# ---- Memory: what is written, and what is not


def test_inputs_are_not_written(device):
    check_reads_only(
        cross_entropy, make((4, 256), torch.float32, device, torch.float32), [torch.ones((), device=device)]
    )


class Keep:
    """Ways in which somebody else can see the logits; each returns what must not change."""

    def nothing(logits):
        return None

    def a_name(logits):
        return logits

    def a_view(logits):
        return logits[1:]

    def a_detached_view(logits):
        return logits.detach()

    def their_storage(logits):
        return logits.untyped_storage()

    def another_graph(logits):
        return logits.square().sum()


WAYS = [k for k in vars(Keep) if not k.startswith("_")]


@pytest.mark.parametrize("op", [cross_entropy, with_metrics])
@pytest.mark.parametrize("way", WAYS)
def test_only_logits_that_nobody_sees_are_written(way, op, device):
    leaf, target, _ = make((4, 64), torch.float32, device)
    logits = leaf * 1
    address, kept = logits.data_ptr(), getattr(Keep, way)(logits)
    out = op(logits, target)
    loss = out[0] if isinstance(out, tuple) else out
    del logits, out
    # The product's backward hands a gradient on in a new buffer, so its own argument is caught by a hook.
    seen = []
    loss.grad_fn.next_functions[0][0].register_prehook(lambda grads: seen.append(grads[0].data_ptr()))
    loss.backward(retain_graph=kept is not None and way == "another_graph")
    assert (seen == [address]) == (kept is None)
    if isinstance(kept, torch.UntypedStorage):
        kept = torch.empty(0, device=device).set_(kept).view(4, 64)
    if way == "another_graph":
        expected = 2 * leaf.detach()
        assert torch.equal(torch.autograd.grad(kept, leaf)[0], expected)
    elif kept is not None:
        assert torch.equal(kept.detach(), leaf.detach()[-len(kept) :])


def test_retained_graph_keeps_the_logits(device):
    inputs = make((4, 64), torch.float32, device)
    check_second_backward(lambda x, *rest: cross_entropy(x * 1, *rest), inputs, [torch.ones((), device=device)])


@pytest.mark.parametrize("held", [True, False])
def test_saved_tensor_hooks(held, device):
    leaf, target, _ = make((4, 64), torch.float32, device, ignored=0)
    packed = []

    def pack(t):
        packed.append(t)
        return len(packed) - 1 if held else t

    unpack = (lambda i: packed[i]) if held else (lambda t: t)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = cross_entropy(leaf * 1, target)
    values = [t.clone() for t in packed]
    grad = torch.autograd.grad(loss, leaf)[0]
    torch.testing.assert_close(grad, torch.autograd.grad(F.cross_entropy(leaf, target), leaf)[0])
    assert all(torch.equal(a, b) for a, b in zip(packed, values))


def test_checkpoint(device):
    leaf, target, _ = make((4, 64), torch.float32, device)
    head = torch.nn.Linear(64, 40, device=device)
    losses = lambda x: cross_entropy(head(x), target % 40)  # noqa: E731
    plain = torch.autograd.grad(losses(leaf), leaf)[0]
    again = torch.utils.checkpoint.checkpoint(losses, leaf, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, leaf)[0], plain)


def test_double_backward_is_refused(device):
    inputs, grads = make((4, 64), torch.float32, device), [torch.ones((), device=device)]
    check_no_double_backward("cross_entropy", cross_entropy, inputs, grads)
    check_no_double_backward("cross_entropy_", overwriting, inputs, grads)


def test_forward_mode_is_refused(device):
    with torch.autograd.forward_ad.dual_level():
        logits = torch.autograd.forward_ad.make_dual(torch.randn(4, 8, device=device), torch.ones(4, 8, device=device))
        with pytest.raises(RuntimeError, match="cross_entropy: forward-mode"):
            cross_entropy(logits, torch.zeros(4, dtype=torch.long, device=device))


def test_runs_are_bitwise_equal(device):
    inputs = make((1000, 2000), torch.bfloat16, device, torch.float32)
    for op in (cross_entropy, overwriting):
        check_deterministic(partial(op, label_smoothing=0.1), inputs, [torch.ones((), device=device)])


# ---- The overwriting form


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_become_their_gradient(reduction, device):
    leaf, target, weight = make((5, 48), torch.float32, device, torch.float32)
    expected_loss = cross_entropy(leaf, target, weight, reduction)
    (expected,) = torch.autograd.grad(expected_loss.sum(), leaf)
    logits = leaf * 1
    loss = cross_entropy_(logits, target, weight, reduction)
    assert logits._version == 1
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(logits.detach(), expected)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    torch.testing.assert_close(grad, expected)


def test_inference_mode_notes_that_logits_are_overwritten(device):
    leaf, target, _ = make((5, 48), torch.float32, device)
    logits = leaf * 1
    square = (logits * logits).sum()
    with torch.inference_mode():
        cross_entropy_(logits, target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(square, leaf)


def test_overwritten_logits_have_no_gradient(device):
    leaf, target, _ = make((5, 48), torch.float32, device)
    logits = leaf * 1
    loss = cross_entropy_(logits, target)
    with pytest.raises(RuntimeError, match="cross_entropy_: the logits hold their gradient now"):
        (loss + logits.sum()).backward()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        cross_entropy_(leaf, target)


def test_changed_gradient_is_noticed(device):
    leaf, target, _ = make((5, 48), torch.float32, device)
    logits = leaf * 1
    loss = cross_entropy_(logits, target)
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_the_producer_saved_is_noticed(device):
    leaf, target, _ = make((5, 48), torch.float32, device)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy_(leaf.exp(), target).backward()


def test_overwriting_a_view(device):
    leaf, target, _ = make((4, 48), torch.float32, device, ignored=0)
    logits = (leaf * 1).view(2, 2, 48)
    loss = cross_entropy_(logits.view(-1, 48), target)
    (grad,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(grad, torch.autograd.grad(F.cross_entropy(leaf, target), leaf)[0])
    assert torch.equal(logits.detach().view(-1, 48), grad)


def test_overwriting_twice_backward(device):
    leaf, target, _ = make((4, 48), torch.float32, device)
    loss = cross_entropy_(leaf * 1, target) * 3
    first = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    second = torch.autograd.grad(loss, leaf)[0]
    assert torch.equal(first, second)


def test_overwriting_without_grad(device):
    leaf, target, _ = make((4, 48), torch.float32, device)
    with torch.no_grad():
        logits = leaf.clone()
        cross_entropy_(logits, target)
    torch.testing.assert_close(logits, torch.autograd.grad(F.cross_entropy(leaf, target), leaf)[0])


# ---- PyTorch's own checks


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("op", [cross_entropy, overwriting])
def test_gradcheck(op, reduction, extras):
    logits, target, weight = make((4, 5), torch.float64, "cpu", torch.float64, scale=1.0)
    assert torch.autograd.gradcheck(lambda x: op(x, target, weight, reduction, **EXTRAS[extras]), [logits])


@pytest.mark.parametrize("op", [cross_entropy, with_metrics, cross_entropy_])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_opcheck(requires_grad, reduction, op, device):
    logits, target, weight = make((4, 16), torch.float32, device, torch.float32)
    logits = logits.detach().requires_grad_(requires_grad)
    if op is cross_entropy_:
        # A leaf that requires a gradient cannot be written; that of a clone is checked by test_compile.
        logits = logits.detach()
    options = dict(label_smoothing=0.1)
    torch.library.opcheck(op.default, (logits, target, weight, reduction), options, test_utils=OPCHECKS)


FORMS = {
    "cross_entropy": lambda x, t, w: cross_entropy(x * 2, t, w, lse_square_scale=1e-3),
    "with_metrics": lambda x, t, w: with_metrics(x * 2, t, w)[0],
    "per token": lambda x, t, w: cross_entropy(x * 2, t, w, "none").square().sum(),
    "cross_entropy_": lambda x, t, w: cross_entropy_(x * 2, t, w) * 3,
}


@pytest.mark.parametrize("form", FORMS)
def test_compile_makes_one_graph_for_all_sizes(form, device):
    calls = [make(shape, torch.float32, device, torch.float32) for shape in [(4, 64), (6, 128), (10, 256)]]
    check_one_graph(FORMS[form], [(inputs, [torch.ones((), device=device)]) for inputs in calls])


@pytest.mark.parametrize("form", FORMS)
def test_inductor(form, device):
    inputs = make((4, 64), torch.float32, device, torch.float32)
    before = inputs[0].detach().clone()
    check_inductor(FORMS[form], inputs, [torch.ones((), device=device)])
    assert torch.equal(inputs[0], before)


class Module(torch.nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return torch.ops.liger.cross_entropy(logits, target, None, "mean", -100, 0.1)


@pytest.mark.parametrize("strict", [True, False])
def test_export_keeps_the_op_and_the_batch_dynamic(strict, device):
    inputs, others = ([t.detach() for t in make((rows, 32), torch.float32, device)[:2]] for rows in (4, 9))
    check_export(cross_entropy, Module(), inputs, others, strict)


def test_script(device, tmp_path):
    calls = [make(shape, torch.float32, device)[:2] for shape in [(4, 32), (2, 3, 40)]]
    check_script(Module(), calls, tmp_path / "module.pt")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_meta(reduction):
    logits = torch.empty(5, 3, 64, device="meta", dtype=torch.bfloat16)
    target = torch.empty(5, 3, device="meta", dtype=torch.long)
    rows = torch.Size([5, 3]) if reduction == "none" else torch.Size([])
    loss, z_loss, accuracy, predicted = with_metrics(logits, target, None, reduction)
    assert {t.shape for t in (loss, z_loss, accuracy)} == {rows} and predicted.shape == (5, 3)
    assert (loss.dtype, predicted.dtype, loss.device.type) == (torch.float32, torch.int64, "meta")
    assert cross_entropy_(logits, target, None, reduction).shape == rows


# ---- GPU alone


@pytest.mark.gpu
def test_autocast_follows_pytorch():
    logits, target, weight = make((40, 64), torch.bfloat16, "cuda", torch.float32, ignored=0)
    with torch.autocast("cuda", torch.bfloat16):
        ours, theirs = cross_entropy(logits, target, weight), F.cross_entropy(logits, target, weight)
    assert ours.dtype == theirs.dtype == torch.float32
    # Releases differ in what they round on the way there; the loss of the logits in float32 is what both mean.
    exact = F.cross_entropy(logits.float(), target, weight)
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(*(torch.autograd.grad(t, logits)[0] for t in (ours, exact)))


@pytest.mark.gpu
@pytest.mark.parametrize("target_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("n", [40, 41])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_target_out_of_range_makes_its_row_nan(n, target_dtype, weighted):
    """And no other: the class beyond a row's last may be the next row's first."""
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
@pytest.mark.parametrize("op", [cross_entropy, overwriting])
def test_many_rows(rows, op):
    """So many that one program no longer adds up their losses."""
    check(make((rows, 40), torch.float32, "cuda", torch.float32), "cuda", op, lse_square_scale=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [32000, 50257, 128256])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_rows_that_are_not_shared_out(n, dtype):
    """One more than the device has multiprocessors: each is a program's own."""
    rows = torch.cuda.get_device_properties("cuda").multi_processor_count + 1
    check(make((rows, n), dtype, "cuda"), "cuda")


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
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
@pytest.mark.parametrize("op", [cross_entropy, with_metrics, overwriting])
def test_nothing_waits_for_the_device_and_a_graph_captures_it(op):
    logits, target, weight = make((64, 1000), torch.bfloat16, "cuda", torch.float32)

    def step():
        out = op(logits, target, weight, label_smoothing=0.1)
        return torch.autograd.grad(out[0] if isinstance(out, tuple) else out, logits)[0]

    expected = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [cross_entropy, cross_entropy_])
def test_no_memory_beyond_the_logits(op):
    leaf, target, _ = make((512, 32000), torch.bfloat16, "cuda")
    logits = [leaf * 1]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = op(logits.pop(), target)
    seen = []
    producer = loss.grad_fn.next_functions[0][0]
    producer.register_prehook(lambda _: seen.append(torch.cuda.max_memory_allocated() - before))
    loss.backward()
    assert seen[0] < 2**18


@pytest.mark.gpu
def test_double_on_cuda_is_refused():
    with pytest.raises(RuntimeError, match="logits must be float32, float16 or bfloat16"):
        cross_entropy(ONES.double().cuda(), ZEROS.cuda())


# ---- Bad input

ERRORS = {
    "integer logits": ((ONES.long(), ZEROS), {}, "logits must be float32, float16, bfloat16 or float64"),
    "scalar logits": ((torch.tensor(1.0), ZEROS), {}, "logits must have at least one dimension"),
    "sparse logits": ((ONES.to_sparse(), ZEROS), {}, "logits must be a dense, unquantized tensor"),
    "float target": ((ONES, ONES), {}, "target must be int64 or int32 class indices"),
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
def test_errors(case, op):
    arguments, options, message = ERRORS[case]
    name = op._qualified_op_name.removeprefix("liger::")
    with pytest.raises(RuntimeError, match=rf"^{name}: {message}.*\(got "):
        op(*arguments, **options)


def test_overlapping_logits_cannot_be_overwritten():
    with pytest.raises(RuntimeError, match="cross_entropy_: logits must not overlap themselves"):
        cross_entropy_(torch.ones(1, 8).expand(2, 8), ZEROS)


# ---- The kernels themselves, on CPU tensors

INTERPRETED = """
import sys, types, torch, numpy
package = types.ModuleType("liger_ops"); package.__path__ = ["liger_ops"]; sys.modules["liger_ops"] = package
sys.path.insert(0, "tests")
from liger_ops.kernels import find
from liger_ops.kernels.cross_entropy import MOST_SKEW
SKEW = MOST_SKEW.value
BOTH = find("cross_entropy_fwd_bwd")
HAS_WEIGHT, SMOOTH, CAP, STATS, Z, METRICS, ADD_Z, MEAN, FROM, TO, TOTALS, GRAD, COUNT, KNOWN = (2**i for i in range(14))
nan = float("nan")

def run(path, n, mean, extras, x="fp32"):
    rows, aligned, words = 3, n % 8 == 0, 2 if mean else 1
    torch.manual_seed(0)
    dtype = dict(fp32=torch.float32, fp16=torch.float16)[x]
    logits, w = (torch.randn(rows, n) * 3).to(dtype), torch.rand(n) + 0.1
    target = torch.randint(n, (rows,))
    target[::4] = -100
    packed = target.to(torch.int64 if words == 2 else torch.int32).view(torch.int32)
    grad = torch.randn(1 if mean else rows)
    options = (0.1, 1e-3, 20.0) if extras else (0.0, 1e-3, 1.0)
    flags = (HAS_WEIGHT | SMOOTH | CAP if extras else 0) | (MEAN if mean else ADD_Z) | Z | METRICS

    counted = 2 if x == "fp32" else 1  # as both's configs do

    def of_one_part(v):
        like = v.choices == {"X": x, "EXTRAS": extras} and v.config.aligned == aligned
        return like and v.config.constexprs["SHARE"] >= (n + SKEW) * counted

    def launch(name, grid, *args, shared_out=False, **choices):
        kernel, choices = find(name), choices or {"X": x, "EXTRAS": extras}
        width = n * counted if name == BOTH.name else n
        variant = kernel.pick(choices, width, aligned)
        if 0 < variant.config.constexprs.get("SHARE", 0) < width:
            variant = kernel.pick(choices, 2**40, False)
        if shared_out:
            variant = next(filter(of_one_part, kernel.variants()))
        grid = grid(variant.config.constexprs) if callable(grid) else grid
        # Blocks of few rows, so that few rows make several.
        small = {"BLOCK": 2} if name == "cross_entropy_sum" else {}
        kernel.function[(grid,)](*args, **variant.constexprs | small)

    def spans(c):
        return rows * -(-(n + SKEW * c.get("SKEWED", 0)) // (c["BLOCK_N"] * c["BLOCKS"]))

    def results(gradient):
        totals, outs = torch.full((2,), nan), [torch.full((), nan) for _ in range(3)]
        loss, z, accuracy, predicted = *(torch.full((rows,), nan) for _ in range(3)), torch.full((rows,), -7)
        partial = torch.full((2, 5), nan)
        def add(flags, known=0):
            head = (*outs, totals, partial, loss, z, accuracy, packed, w)
            launch("cross_entropy_sum", 2, *head, rows, n, -100, flags | known | TO, WORDS=words)
            launch("cross_entropy_sum", 1, *head, 2, n, -100, flags | FROM | (known or TOTALS), WORDS=words)
        gradient(loss, z, accuracy, predicted, totals, add)
        if mean:
            loss, z, accuracy = outs
        return dict(loss=loss, z=z, accuracy=accuracy, predicted=predicted)

    both, shared, scaled = (logits.clone() for _ in range(3))
    # Odd rows of a gradient may begin at another place between two boundaries than those of their logits.
    offset = 0 if aligned or extras else 1
    dx = torch.full((rows * n + offset,), nan, dtype=dtype)[offset:].view(rows, n)
    def two(loss, z, accuracy, predicted, totals, add):
        stats = torch.full((3, rows), nan)
        shape = (rows, n, rows, 0, n)
        # With a loss for each row, as one of several programs of a row would.
        launch("cross_entropy_fwd", rows, loss, z, accuracy, predicted, stats, logits, packed, w, w.sum(),
               torch.full((rows, 4), nan), torch.zeros(rows, dtype=torch.int32), rows, n, -(-(n + SKEW) // 8) * 8, *shape[2:],
               words, -100, *options, flags | STATS, X=x, EXTRAS=extras, SHARED=int(not mean and not extras))
        add(flags)
        launch("cross_entropy_bwd", spans, dx, logits, packed, stats, grad, totals, w, w.sum(), *shape, 0, n, words,
               0 if mean else 1, -100, *options, flags)
    def one(loss, z, accuracy, predicted, totals, add, x=both, shared_out=False):
        add(flags & ~(Z | METRICS) | COUNT)
        launch("cross_entropy_fwd_bwd", rows, loss, z, accuracy, predicted, x, x, packed, grad, totals, w, w.sum(),
               torch.full((rows, 4), nan), torch.zeros(rows, dtype=torch.int32), rows, n, rows, 0, n, 0, n, words,
               0 if mean else 1, -100, *options, flags | GRAD, shared_out=shared_out)
        add(flags, KNOWN)
    first, second = results(two), results(one)
    # Programs take turns here, so that none can wait for another: rows of one part.
    some = any(map(of_one_part, BOTH.variants()))
    third = results(lambda *a: one(*a, x=shared, shared_out=True)) if some else second
    launch("cross_entropy_scale", spans, scaled, grad, n, rows, 0, n, 0 if mean else 1, X=x)
    logits, dx, both, scaled, shared = (t.float() for t in (logits, dx, both, scaled, shared))
    numpy.savez(path, logits=logits, target=target, weight=w, grad=grad, dx=dx, both=both, scaled=scaled,
                shared=shared if some else both, **{"first_" + k: v for k, v in first.items()},
                **{"second_" + k: v for k, v in second.items()}, **{"third_" + k: v for k, v in third.items()})
"""
INTERPRETED_CASES = [
    *itertools.product([40], [True, False], [0, 1]),
    (60, True, 1),
    (60, False, 0),
    *((n, mean, int(mean == (n < 5000))) for n in (2560, 9000, 2001, 5003) for mean in (True, False)),
    # 16-bit logits are kept two in a word. (The interpreter has no constants of bf16.)
    (2560, True, 0, "fp16"),
    (5003, False, 0, "fp16"),
    # More than a program keeps.
    (16392, True, 0, "fp16"),
]


@pytest.mark.parametrize("case", INTERPRETED_CASES, ids=lambda case: "-".join(map(str, case)))
def test_kernels_interpreted(case, interpreted):
    n, mean, extras, *x = case
    got = interpreted[case]
    # What rounding a gradient costs; exponentials keep fewer digits where logits have few.
    digits = 2**-10 if x else 0
    options = dict(label_smoothing=0.1, softcap=20.0) if extras else {}
    logits = got["logits"].double().requires_grad_()
    weight = got["weight"].double() if extras else None
    reduction = "mean" if mean else "none"
    expected = reference_with_metrics(logits, got["target"], weight, reduction, lse_square_scale=1e-3, **options)
    upstream = got["grad"].double()
    (grad,) = torch.autograd.grad(expected[0], logits, upstream.view(expected[0].shape))
    for form in ("first", "second", "third"):
        for name, value in zip(("loss", "z", "accuracy", "predicted"), expected):
            torch.testing.assert_close(got[f"{form}_{name}"].to(value.dtype), value.detach(), rtol=2e-6, atol=2e-6)
    for name in ("dx", "both", "shared"):
        torch.testing.assert_close(got[name].double(), grad, rtol=max(2e-5, digits), atol=2e-7)
    scaled = got["logits"] * got["grad"].reshape(-1, 1)
    torch.testing.assert_close(got["scaled"], scaled, rtol=max(1.3e-6, digits), atol=1e-5)


def test_launch_counts_name_the_cpu_path():
    liger_ops.reset_launch_counts()
    cross_entropy(ONES, ZEROS)
    assert liger_ops.launch_counts()["cpu"] == 1


def vary(draw, arguments):
    may_be_float32(draw, arguments, "weight")
