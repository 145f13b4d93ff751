"""log_probs against its formula in fp64, and log_softmax."""

import math

import pytest
import torch
from checks import (
    CPU_DTYPES,
    HALF_TYPES,
    assert_no_worse,
    check_results,
    gradients,
    like,
    path_taken,
    roundings,
)
from pairs import pairwise

from liger_ops import functional as F

log_probs = torch.ops.liger.log_probs

# Fewest, widths that no vector length divides, and a real vocabulary.
SIZES = [1, 2, 7, 33, 1000, 9001, 50257]
# On both sides of the variant table's limits; vocabularies whose rows are split.
SIZES_OF_KERNELS = [256, 1024, 1032, 4096, 16400, 32000, 128256, 151936]
OPTIONS = {
    "plain": {},
    "entropy": dict(entropy=True),
    "temperature": dict(entropy=True, temperature=0.7),
    "softcap": dict(entropy=True, softcap=5.0),
    "all": dict(entropy=True, softcap=5.0, temperature=1.5),
}
IDS = [None, 1, 3, 20]

LAYOUTS = {
    "contiguous": lambda x: x,
    "part of wider rows": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "without the last position": lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],
    "transposed, dense": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "strided last dimension": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "misaligned": lambda x: torch.cat([x.flatten(), x.new_zeros(1)]).roll(1)[1:].view(x.shape),
    "every other row": lambda x: torch.stack([x, x], 2).flatten(1, 2)[:, ::2],
    "expanded": lambda x: x[:1].expand_as(x),
}


def make(shape, dtype, device, ids=None, index_dtype=torch.int64, ignored=0.3):
    """Logits, and ids of which at least one counts. The first two of several ids are equal."""
    logits = (3 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
    index = torch.randint(shape[-1], shape[:-1] if ids is None else (*shape[:-1], ids), device=device)
    if ids is not None and ids > 1:
        index[..., 1] = index[..., 0]
    index[torch.rand(index.shape, device=device) < ignored] = -100
    index.view(-1)[:1] = 0
    return logits, index.to(index_dtype)


def check(logits, index, device, **options):
    call = lambda x: tuple(log_probs(x, index, **options))[: 1 + options.get("entropy", False)]  # noqa: E731
    formula = lambda x: tuple(F.log_probs.reference(x, index, **options))[: 1 + options.get("entropy", False)]  # noqa: E731
    with path_taken(device):
        quiet = call(logits.detach())
    grads = [torch.randn(out.shape, device=device) for out in quiet]
    with path_taken(device):
        ours = gradients(call, [like(logits)], grads)
    assert all(torch.equal(a, b.detach()) for a, b in zip(quiet, ours))
    eager = gradients(formula, [like(logits)], grads)
    oracle = gradients(formula, [like(logits, torch.float64)], grads)
    largest = max(float(g.abs().max()) for g in grads if g.numel()) if index.numel() else 0.0
    # One rounding of the largest logit is an absolute error of results, and a relative one of probabilities.
    wide = torch.promote_types(logits.dtype, torch.float32)
    exponent = float(logits.detach().abs().max()) / options.get("temperature", 1.0) if logits.numel() else 0.0
    noise = torch.finfo(wide).eps * exponent
    bounds = roundings(formula, [logits], grads, oracle)
    for i, results in enumerate(zip(ours[:-1], eager, oracle)):
        assert_no_worse(("log-probabilities", "entropy")[i], *results, scale=1.0, noise=noise, bounds=(bounds, i))
    scale = largest if logits.shape[-1] < 3 else 0.0
    assert_no_worse("gradient", ours[-1], eager[-1], oracle[-1], scale=scale, noise=noise, bounds=(bounds, -1))
    if logits.dtype in HALF_TYPES and index.numel():
        others = torch.ones_like(logits, dtype=torch.bool)
        ids = (index if index.dim() == logits.dim() else index[..., None]).long()
        others.scatter_(-1, ids.clamp(min=0), False)
        apart = [g.where(others, 0) for g in (ours[-1], eager[-1], oracle[-1])]
        noise += torch.finfo(torch.float16).tiny * 2**-10 / max(float(apart[2].abs().max()), 1e-30)
        assert_no_worse("gradient of other logits", *apart, noise=noise, bounds=(bounds, -1))


@pairwise(n=SIZES, dtype=CPU_DTYPES, options=["plain", "entropy"])
def test_sizes(n, dtype, options, device):
    check(*make((6, n), dtype, device), device, **OPTIONS[options])


@pytest.mark.gpu
@pairwise(n=SIZES_OF_KERNELS, dtype=CPU_DTYPES, ids=[None, 5], options=["plain", "entropy"])
def test_sizes_of_kernels(n, dtype, ids, options):
    check(*make((4, n), dtype, "cuda", ids), "cuda", **OPTIONS[options])


@pairwise(dtype=CPU_DTYPES, index_dtype=[torch.int64, torch.int32], ids=IDS, options=OPTIONS, n=[136, 2049])
def test_options(dtype, index_dtype, ids, options, n, device):
    check(*make((3, 5, n), dtype, device, ids, index_dtype), device, **OPTIONS[options])


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("ids", [None, 4])
def test_upstream_gradients(ids, wanted, device):
    """Only one of the results, expanded gradients, and transposed ones."""
    logits, index = make((3, 5, 72), torch.float32, device, ids)
    shapes = index.shape, index.shape[:2]
    for spread in (lambda g: g, lambda g: g[:1].expand_as(g), lambda g: g.transpose(0, 1).contiguous().transpose(0, 1)):
        grads = [spread(torch.randn(shape, device=device)) for shape in shapes]
        found = []
        for function in (log_probs, F.log_probs.reference):
            pairs = [(o, g) for o, g, w in zip(function(logits, index, entropy=True), grads, wanted) if w]
            found.append(torch.autograd.grad([o for o, _ in pairs], logits, [g for _, g in pairs])[0])
        torch.testing.assert_close(*found)


def test_log_softmax(device):
    logits, index = make((4, 9), torch.float32, device, 3, ignored=0)
    found = log_probs(logits, index, temperature=2.0, entropy=True)
    logs = (logits / 2).log_softmax(-1)
    torch.testing.assert_close(found[0], logs.gather(-1, index))
    torch.testing.assert_close(found[1], torch.distributions.Categorical(logits=logits / 2).entropy())


@pairwise(index_dtype=[torch.int64, torch.int32], ignore_index=[-100, -1, 0, 3, 2**31 - 1, 2**40])
def test_ignored_ids(index_dtype, ignore_index, device):
    if ignore_index > torch.iinfo(index_dtype).max:
        ignore_index = 5
    logits, index = make((40, 11), torch.float32, device, 2, ignored=0)
    index[::3] = ignore_index
    index[1::3, 1] = ignore_index
    check(logits, index.to(index_dtype), device, ignore_index=ignore_index, entropy=True)


def test_ignored_rows_are_not_read(device):
    logits, index = make((6, 2049), torch.float32, device)
    index[:3] = -100
    with torch.no_grad():
        logits[:3] = math.nan
    found = log_probs(logits, index, entropy=True)
    (slope,) = torch.autograd.grad(sum(r.sum() for r in found), logits)
    assert not found[0][:3].any() and not found[1][:3].any() and not slope[:3].any() and slope.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,), (3, 1)])
@pytest.mark.parametrize("ids", [None, 0, 2])
def test_empty_and_one_dimensional(ids, shape, device):
    logits, index = make(shape, torch.float32, device, ids, ignored=0)
    ones = [torch.ones_like(t) for t in log_probs(logits, index, entropy=True)]
    ours = gradients(lambda x: tuple(log_probs(x, index, entropy=True)), [logits], ones)
    check_results(ours, lambda x: tuple(F.log_probs.reference(x, index, entropy=True)), [logits], ones)


def test_no_classes(device):
    found = log_probs(torch.empty(3, 0, device=device), torch.full((3,), -100, device=device), entropy=True)
    assert found[0].tolist() == found[1].tolist() == [0, 0, 0]


def test_an_unrequested_entropy_is_empty(device):
    logits, index = make((3, 5, 8), torch.float32, device, 2)
    found = log_probs(logits, index)
    assert found[1].shape == (3, 5, 0) and not found[1].requires_grad and found[0].shape == (3, 5, 2)


def test_special_values_follow_pytorch(device):
    inf, lowest = math.inf, torch.finfo(torch.float32).min
    logits = torch.randn(7, 100, device=device)
    logits[0, 10:], logits[1], logits[2, 5], logits[3, 5], logits[4] = -inf, -inf, math.nan, inf, lowest
    logits[5, 7] = -inf
    logits.requires_grad_()
    index = torch.tensor([3, 4, 6, 5, 9, 7, -100], device=device)
    found = log_probs(logits, index)[0]
    expected = logits.log_softmax(-1).gather(-1, index.clamp(min=0)[:, None])[:, 0].masked_fill(index < 0, 0)
    torch.testing.assert_close(found, expected, equal_nan=True)
    grads = (torch.autograd.grad(r.sum(), logits)[0] for r in (found, expected))
    torch.testing.assert_close(*(g[[0, 1, 2, 3, 4, 5]] for g in grads), equal_nan=True)
    masked = log_probs(logits[:1], index[:1], entropy=True)[1]
    torch.testing.assert_close(masked, torch.distributions.Categorical(logits=logits[:1, :10]).entropy())
    assert torch.autograd.grad(masked.sum(), logits)[0].isfinite().all()


# ---- Layouts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ids", [None, 2])
def test_layouts(ids, layout, device):
    logits, index = make((3, 5, 64), torch.bfloat16, device, ids)
    check(LAYOUTS[layout](logits.detach()).requires_grad_(), index, device, entropy=True)
    if ids is not None:
        check(logits, LAYOUTS[layout](index), device, entropy=True)


# ---- Memory


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.library
def test_the_gradient_overwrites_unreferenced_logits(held, device):
    leaf, index = make((4, 64), torch.float32, device, 3)
    (expected,) = torch.autograd.grad(log_probs(leaf, index)[0].sum(), leaf)
    logits = leaf * 1
    address, kept = logits.data_ptr(), logits if held else None
    found = log_probs(logits, index)[0]
    del logits
    seen = []
    found.grad_fn.next_functions[0][0].register_prehook(lambda grads: seen.append(grads[0].data_ptr()))
    (got,) = torch.autograd.grad(found.sum(), leaf)
    assert torch.equal(got, expected) and (seen == [address]) == (not held)
    assert kept is None or torch.equal(kept, leaf)


@pytest.mark.library
def test_no_probabilities_are_saved():
    logits, index = make((4, 64), torch.float32, "cpu", 2)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        log_probs(logits, index, entropy=True)
    assert [s.data_ptr() for s in saved if s.numel() > 12] == [logits.data_ptr()]


def test_results_may_be_changed_in_place(device):
    logits, index = make((4, 64), torch.float32, device)
    found = log_probs(logits * 1, index)[0]
    found.mul_(2).sum().backward()
    expected = torch.autograd.grad(2 * log_probs(logits, index)[0].sum(), logits)[0]
    torch.testing.assert_close(logits.grad, expected)


# ---- Autograd and transforms


def both(x, i):
    return tuple(log_probs(x, i, entropy=True))


def test_checkpoint(device):
    leaf, index = make((4, 64), torch.float32, device, 2)
    results = lambda x: sum(r.sum() for r in both(x * 2, index))  # noqa: E731
    plain = torch.autograd.grad(results(leaf), leaf)[0]
    again = torch.utils.checkpoint.checkpoint(results, leaf, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, leaf)[0], plain)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("ids", [None, 3])
def test_gradcheck(ids, options):
    logits, index = make((4, 5), torch.float64, "cpu", ids)
    wanted = 1 + OPTIONS[options].get("entropy", False)
    assert torch.autograd.gradcheck(lambda x: tuple(log_probs(x, index, **OPTIONS[options]))[:wanted], [logits])


# ---- Bad input

X, IDS_OF_X = torch.ones(2, 8), torch.zeros(2, dtype=torch.long)
ERRORS = {
    "logits must be float32, float16, bfloat16 or float64": (X.long(), IDS_OF_X),
    "logits must have at least one dimension": (torch.tensor(1.0), IDS_OF_X),
    "logits must be a dense, unquantized tensor": (X.to_sparse(), IDS_OF_X),
    "index must be int64 or int32": (X, IDS_OF_X.float()),
    r"index must have shape \[2\], or that with one dimension more": (X, IDS_OF_X[:1]),
    "index must be on cpu like logits": (X, IDS_OF_X.to("meta")),
    r"index must lie in \[0, 8\) or be ignore_index, -100": (X, IDS_OF_X + 8),
    "temperature must be positive and finite": (X, IDS_OF_X, 0.0),
    "softcap must be positive and finite": (X, IDS_OF_X, 1.0, -100, 0.0),
}


@pytest.mark.parametrize("message", ERRORS)
@pytest.mark.library
def test_errors(message):
    with pytest.raises(RuntimeError, match=rf"^log_probs: {message}.*\(got "):
        log_probs(*ERRORS[message])


# ---- GPU only


@pytest.mark.gpu
@pytest.mark.parametrize("n", [40, 41])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_an_id_out_of_range_makes_its_row_nan(index_dtype, n):
    logits, index = make((6, n), torch.float32, "cuda", 2, ignored=0)
    far = [2**31 - 1, -(2**31)] if index_dtype == torch.int32 else [2**62, 2**32 + 5]
    index[:4, 0] = torch.tensor([*far, -1, n], device="cuda")
    found = log_probs(logits, index.to(index_dtype))[0]
    (slope,) = torch.autograd.grad(found.sum(), logits)
    assert found[:4, 0].isnan().all() and slope[:4].isnan().all()
    assert found[:, 1].isfinite().all() and found[4:].isfinite().all() and slope[4:].isfinite().all()


@pytest.mark.gpu
@pairwise(dtype=CPU_DTYPES, n=[50257, 128256], rows=[1, 40, 2000])
def test_few_and_many_rows(dtype, n, rows):
    check(*make((rows, n), dtype, "cuda", 3), "cuda", entropy=True)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    n = 128256
    rows = 2**31 // n + 5
    logits = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16).requires_grad_()
    index = torch.randint(n, (rows,), device="cuda")
    tail = logits.detach()[-7:].clone().requires_grad_()
    found, expected = (both(x, i) for x, i in ((logits, index), (tail, index[-7:])))
    torch.testing.assert_close([r[-7:] for r in found], [*expected])
    slopes = (torch.autograd.grad(r[0][-7:].sum(), x)[0][-7:] for r, x in ((found, logits), (expected, tail)))
    torch.testing.assert_close(*slopes)


@pytest.mark.gpu
def test_no_memory_beyond_the_logits():
    leaf, index = make((512, 32000), torch.bfloat16, "cuda")
    logits = [leaf * 1]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = log_probs(logits.pop(), index)[0]
    seen = []
    producer = found.grad_fn.next_functions[0][0]
    producer.register_prehook(lambda _: seen.append(torch.cuda.max_memory_allocated() - before))
    found.sum().backward()
    assert seen[0] < 2**18
