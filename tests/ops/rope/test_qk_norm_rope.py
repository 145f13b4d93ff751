"""qk_norm_rope against the formulas of its two steps in fp64."""

import pytest
import torch
from checks import (
    CPU_DTYPES,
    HALF_TYPES,
    ROWS_AND_PARAMETERS,
    assert_no_worse,
    check_op,
    check_results,
    path_taken,
    sizes_around_tiles,
)
from hypothesis import strategies as st
from pairs import pairwise, sizes_by_device
from rotations import ANGLE_LAYOUTS, LAYOUTS, Probe, angles, heads, reference_qk_norm_rope

qk_norm_rope = torch.ops.liger.qk_norm_rope


def make(
    batch, q_heads, k_heads, sequence, size, dtype, device, rotated=None, weight_dtype=None, angle_dtype=torch.float32,
    angle_batch=1, needs_grad=(True, True, True, True),
):  # fmt: skip
    torch.manual_seed(0)  # compared rounding errors must not depend on which tests ran before
    q, k = (heads(batch, h, sequence, size, dtype, device, n) for h, n in zip((q_heads, k_heads), needs_grad[:2]))
    weights = [torch.randn(size, dtype=weight_dtype or dtype, device=device).requires_grad_(n) for n in needs_grad[2:]]
    table = angles(angle_batch, sequence, size if rotated is None else rotated, dtype=angle_dtype, device=device)
    grads = [heads(batch, h, sequence, size, dtype, device, False) for h in (q_heads, k_heads)]
    return [q, k, *weights, *table], grads


def check(inputs, grads, device, **options):
    cos, sin = inputs[4:]
    check_op(
        lambda *t: qk_norm_rope(*t, cos, sin, **options),
        lambda *t: reference_qk_norm_rope(*t, cos, sin, **options),
        inputs[:4],
        grads,
        device,
    )


# Head sizes of models, sizes between powers of two, both sides of every tile boundary, and fewer pairs than a vector
# has elements.
SIZES = sorted(
    {2, 6, 20, 80, 96, 112, 192, 320, 1000}
    | {n + n % 2 for n in sizes_around_tiles("qk_norm_rope_fwd", "qk_norm_rope_bwd") if n > 1}
)


@sizes_by_device(cpu=[2, 6, 96, 320], cuda=SIZES, interleaved=[False, True], dtype=CPU_DTYPES)
def test_head_sizes(n, interleaved, dtype, device):
    check(*make(2, 5, 2, 3, n, dtype, device), device, interleaved=interleaved)


# n: head size and rotated columns.
@sizes_by_device(
    cpu=[(128, 32), (100, 20), (64, 2), (37, 20), (64, 0)],
    cuda=[(128, 64), (128, 32), (256, 64), (80, 32), (96, 24), (100, 20), (64, 2), (33, 32), (37, 20), (64, 0)],
    interleaved=[False, True],
    dtype=CPU_DTYPES,
)
def test_partial_rotation(n, interleaved, dtype, device):
    check(*make(2, 3, 1, 4, n[0], dtype, device, n[1]), device, interleaved=interleaved)


# Multi-head, grouped-query and multi-query attention, counts that do not fill a tile, and more heads in k than in q.
@pytest.mark.parametrize(
    "q_heads, k_heads, batch, sequence",
    [(32, 8, 2, 17), (8, 8, 3, 1), (96, 8, 1, 1), (71, 1, 1, 1), (7, 3, 2, 17), (1, 1, 3, 1), (2, 9, 2, 17)],
)
def test_head_counts(q_heads, k_heads, batch, sequence, device):
    check(*make(batch, q_heads, k_heads, sequence, 64, torch.bfloat16, device), device)


@pairwise(dtypes=ROWS_AND_PARAMETERS, casting_mode=["llama", "gemma", "none"], offset=[0.0, 1.0], eps=[1e-6, 1e-2])
def test_options_of_the_norm(dtypes, offset, casting_mode, eps, device):
    dtype, weight_dtype = dtypes
    inputs, grads = make(2, 4, 2, 5, 96, dtype, device, weight_dtype=weight_dtype)
    check(inputs, grads, device, eps=eps, offset=offset, casting_mode=casting_mode)


@pairwise(dtypes=ROWS_AND_PARAMETERS, own_dtype=[False, True], angle_batch=[1, 3])
def test_angles(dtypes, own_dtype, angle_batch, device):
    dtype, weight_dtype = dtypes
    angle_dtype = dtype if own_dtype else torch.float32
    inputs, grads = make(3, 4, 2, 5, 64, dtype, device, None, weight_dtype, angle_dtype, angle_batch)
    check(inputs, grads, device)
    if angle_batch == 1:
        flat = [*inputs[:4], *(t[0] for t in inputs[4:])]
        assert all(torch.equal(a, b) for a, b in zip(qk_norm_rope(*inputs), qk_norm_rope(*flat)))


@pytest.mark.parametrize("with_weights", [(True, False), (False, True), (False, False)])
def test_without_weights(with_weights, device):
    inputs, grads = make(2, 4, 2, 5, 64, torch.bfloat16, device)
    inputs[2:4] = [w if present else None for w, present in zip(inputs[2:4], with_weights)]
    check(inputs, grads, device, offset=0.5)


@pytest.mark.parametrize("layout", ANGLE_LAYOUTS)
def test_layouts_of_angles(layout, device):
    inputs, grads = make(2, 4, 2, 5, 64, torch.float32, device, angle_batch=2)
    inputs[4:] = map(ANGLE_LAYOUTS[layout], inputs[4:])
    check(inputs, grads, device)


@pairwise(
    q_layout=LAYOUTS,
    k_layout=["positions first", "heads first", "slice of a fused projection", "strided columns"],
    grad_layout=["positions first", "heads first", "strided columns", "expanded heads"],
)
def test_layouts(q_layout, k_layout, grad_layout, device):
    inputs, grads = make(2, 4, 2, 5, 32, torch.bfloat16, device)
    inputs[:2] = (LAYOUTS[i](t.detach()).requires_grad_() for i, t in zip((q_layout, k_layout), inputs))
    check(inputs, [LAYOUTS[grad_layout](g) for g in grads], device)


def test_layouts_of_weights(device):
    inputs, grads = make(2, 4, 2, 5, 32, torch.bfloat16, device)
    inputs[2:4] = (torch.stack([w, w], 1).detach()[:, 0].requires_grad_() for w in inputs[2:4])
    check(inputs, grads, device)


@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", ["positions first", "heads first"])
def test_results_and_gradients_preserve_the_layout(layout, grad_layout, device):
    inputs, grads = make(2, 4, 2, 5, 32, torch.float32, device)
    inputs[:2] = (LAYOUTS[layout](t.detach()).requires_grad_() for t in inputs[:2])
    outs = qk_norm_rope(*inputs)
    assert all(o.stride() == t.stride() for o, t in zip(outs, inputs))
    got = torch.autograd.grad(outs, inputs[:2], [LAYOUTS[grad_layout](g) for g in grads])
    assert all(g.stride() == t.stride() for g, t in zip(got, inputs))


@pairwise(
    sections_and_size=[((16, 24, 24), 128), ((8, 12, 12), 64), ((3, 0, 5), 16), ((8, 8, 16), 80)],
    interleaved=[False, True],
    angle_batch=[None, 1, 2],
)
def test_multimodal_sections(sections_and_size, interleaved, angle_batch, device):
    sections, size = sections_and_size
    inputs, grads = make(2, 4, 2, 5, size, torch.bfloat16, device)
    rotated = 2 * sum(sections)
    shape = (3, 5, rotated) if angle_batch is None else (3, angle_batch, 5, rotated)
    inputs[4:] = angles(*shape, device=device)
    check(inputs, grads, device, interleaved=interleaved, mrope_section=list(sections))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("options", [{}, dict(offset=1.0, casting_mode="gemma"), dict(interleaved=True)], ids=str)
def test_equals_the_two_operators(options, dtype, device):
    """The rounding between the two steps included."""
    inputs, _ = make(2, 8, 2, 33, 128, dtype, device, 64)
    q, k, q_weight, k_weight, cos, sin = inputs
    interleaved = options.get("interleaved", False)
    of_norm = {name: value for name, value in options.items() if name != "interleaved"}
    normed = [torch.ops.liger.rms_norm(x, w, **of_norm) for x, w in ((q, q_weight), (k, k_weight))]
    expected = torch.ops.liger.rope(*normed, cos, sin, interleaved=interleaved)
    for ours, theirs in zip(qk_norm_rope(*inputs, **options), expected):
        if device == "cpu":
            assert torch.equal(ours, theirs)
        else:  # sums in another order may round to a neighbour
            torch.testing.assert_close(ours, theirs, rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("shape", [(0, 4, 2, 5, 8), (2, 0, 2, 5, 8), (2, 4, 0, 5, 8), (2, 4, 2, 0, 8), (2, 0, 0, 3, 8)])
def test_empty(shape, device):
    inputs, grads = make(*shape, torch.float32, device)
    outs = qk_norm_rope(*inputs)
    ours = [*outs, *torch.autograd.grad(outs, inputs[:4], grads)]
    expected = reference_qk_norm_rope(*inputs)
    expected = [*expected, *torch.autograd.grad(expected, inputs[:4], grads)]
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b)


def test_nan_and_infinity_stay_in_their_head(device):
    """A NaN spoils its head. An infinite value makes the other columns zero, and itself and its pair NaN."""
    (q, k, *rest), _ = make(1, 2, 1, 3, 16, torch.float32, device, 8)
    with torch.no_grad():
        q[0, 0, 1, 3], q[0, 1, 2, 5], q[0, 1, 0, 12] = float("nan"), float("inf"), float("inf")
    out, _ = qk_norm_rope(q, k, *rest)
    bad = torch.zeros_like(out, dtype=torch.bool)
    bad[0, 0, 1], bad[0, 1, 2, [1, 5]], bad[0, 1, 0, 12] = True, True, True
    assert torch.equal(~out.isfinite(), bad)
    assert not out[0, 1, [0, 2]][~bad[0, 1, [0, 2]]].any()


@pytest.mark.parametrize("needs_grad", [tuple(bool(n >> i & 1) for i in range(4)) for n in range(16)])
def test_only_required_gradients(needs_grad, device):
    inputs, grads = make(2, 4, 2, 5, 32, torch.float32, device)
    everything = torch.autograd.grad(qk_norm_rope(*inputs), inputs[:4], grads)
    some = [t.detach().requires_grad_(n) for t, n in zip(inputs, needs_grad)]
    outs = qk_norm_rope(*some, *inputs[4:])
    assert [o.requires_grad for o in outs] == [any(needs_grad)] * 2
    if any(needs_grad):
        wanted = [t for t in some if t.requires_grad]
        expected = [g for g, n in zip(everything, needs_grad) if n]
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(outs, wanted, grads), expected))


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_may_be_unused(used, device):
    inputs, grads = make(2, 4, 2, 5, 32, torch.float32, device)
    ours, theirs = (
        torch.autograd.grad(f(*inputs)[used], inputs[:4], grads[used], allow_unused=True)
        for f in (qk_norm_rope, reference_qk_norm_rope)
    )
    for a, b in zip(ours, theirs):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rotated", [32, 16])
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.library
def test_backward_overwrites_unreferenced_gradients(rotated, retain, device):
    (q, k, *rest), grads = make(2, 4, 2, 5, 32, torch.float32, device, rotated)
    incoming, outgoing = [], []
    outs = Probe.apply(incoming, True, *qk_norm_rope(*Probe.apply(outgoing, False, q, k), *rest))
    got = torch.autograd.grad(outs, [q, k, *rest[:2]], grads, retain_graph=retain)
    check_results([*qk_norm_rope(q, k, *rest), *got], reference_qk_norm_rope, [q, k, *rest], grads)
    assert (incoming == outgoing) != retain


def test_a_referenced_gradient_is_unchanged(device):
    (q, k, *rest), grads = make(2, 4, 2, 5, 32, torch.float32, device)
    outs = qk_norm_rope(q * 1.0, k * 1.0, *rest)
    held = []
    for out in outs:
        out.register_hook(lambda g: held.append(g))
    torch.autograd.grad([o * 2.0 for o in outs], [q, k], grads)
    for g in held:
        torch.testing.assert_close(g, next(2.0 * h for h in grads if h.shape == g.shape))


@pytest.mark.library
def test_forward_saves_its_inputs_only(device):
    inputs, _ = make(2, 4, 2, 5, 32, torch.bfloat16, device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        qk_norm_rope(*inputs)
    assert sorted(saved) == sorted(t.data_ptr() for t in inputs)


@pairwise(
    sizes=[(8, 8, None), (8, 4, None), (7, 4, None), (8, 8, [1, 1, 2])],
    interleaved=[False, True],
    with_weights=[True, False],
)
def test_gradcheck(interleaved, sizes, with_weights):
    size, rotated, sections = sizes
    inputs, _ = make(2, 2, 1, 3, size, torch.float64, "cpu", angle_dtype=torch.float64)
    shape = (1, 3, rotated) if sections is None else (3, 1, 3, rotated)
    cos, sin = angles(*shape, dtype=torch.float64)

    def function(q, k, q_weight=None, k_weight=None):
        return qk_norm_rope(
            q, k, q_weight, k_weight, cos, sin, 1e-5, 0.5, interleaved=interleaved, mrope_section=sections
        )

    assert torch.autograd.gradcheck(function, inputs[: 4 if with_weights else 2])


def test_autocast_promotes_and_keeps_half_precision(device):
    (q, k, *rest), _ = make(2, 4, 2, 5, 32, torch.bfloat16, device)
    with torch.autocast(device, torch.bfloat16):
        assert all(t.dtype == torch.bfloat16 for t in qk_norm_rope(q, k, *rest))
        assert all(t.dtype == torch.float32 for t in qk_norm_rope(q.float(), k, *rest))
        mixed = [rest[0].float(), *rest[1:]]
        assert all(t.dtype == torch.bfloat16 for t in qk_norm_rope(q, k, *mixed))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,weight_dtype", ROWS_AND_PARAMETERS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("q_heads,k_heads,size,rotated", [(32, 8, 128, 128), (16, 8, 256, 256), (24, 2, 128, 64)])
def test_large(dtype, weight_dtype, interleaved, q_heads, k_heads, size, rotated):
    inputs, grads = make(2, q_heads, k_heads, 1500, size, dtype, "cuda", rotated, weight_dtype)
    check(inputs, grads, "cuda", interleaved=interleaved)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    q = torch.randn(1, 2**31 // 4096 + 5, 32, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k = q[:, :1]
    weight = torch.randn(128, device="cuda", dtype=torch.bfloat16)
    cos, sin = angles(q.shape[2], 128, device="cuda")
    with path_taken("cuda"):
        ours, _ = qk_norm_rope(q, k, weight, weight, cos, sin)
    tail = [q[:, :, -7:], k[:, :, -7:], weight, weight, cos[-7:], sin[-7:]]
    exact, eager = reference_qk_norm_rope(*(t.double() for t in tail))[0], reference_qk_norm_rope(*tail)[0]
    assert_no_worse("tail", ours[:, :, -7:], eager, exact)


@pytest.mark.gpu
def test_heads_that_are_too_wide_are_refused():
    inputs, _ = make(1, 1, 1, 2, 2050, torch.bfloat16, "cuda")
    with pytest.raises(RuntimeError, match="qk_norm_rope: q must have heads of at most 2048 columns .got 2050"):
        qk_norm_rope(*inputs)


def arguments(**changes):
    (q, k, q_weight, k_weight, cos, sin), _ = make(2, 4, 2, 5, 16, torch.float32, "cpu", needs_grad=(False,) * 4)
    return {**dict(q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin), **changes}


# The checks of heads and angles are rope's, with their own tests.
ERRORS = {
    "integer q": (dict(q=torch.ones(2, 4, 5, 16, dtype=torch.long)), "q must be float32, float16, bfloat16 or float64"),
    "sparse k": (dict(k=torch.eye(4).to_sparse()), "k must be a dense, unquantized tensor"),
    "k of another head size": (dict(k=torch.ones(2, 2, 5, 8)), "k must have the batch, sequence and head size of q"),
    "R above D": (dict(cos=torch.ones(1, 5, 18)), "cos must rotate at most q's head size, 16"),
    "trained cos": (dict(cos=torch.ones(1, 5, 16, requires_grad=True)), "cos must not require a gradient"),
    "q_weight of another length": (
        dict(q_weight=torch.ones(64)),
        r"q_weight must have shape \[16\], the last dimension of q",
    ),
    "k_weight of two dimensions": (dict(k_weight=torch.ones(1, 16)), r"k_weight must have shape \[16\]"),
    "narrow q_weight": (dict(q_weight=torch.ones(16).half()), "q_weight must be float32 or have the dtype of q, Float"),
    "k_weight elsewhere": (dict(k_weight=torch.ones(16, device="meta")), "k_weight must be on cpu like k"),
    "weights of two dtypes": (
        {n: t if n == "q_weight" else t.half() for n, t in arguments().items()},
        "k_weight must have the dtype of q_weight, Float",
    ),
    "negative eps": (dict(eps=-1.0), "eps must be finite and not negative"),
    "unknown mode": (dict(casting_mode="no"), "casting_mode must be 'llama', 'gemma' or 'none'"),
    "two sections": (dict(mrope_section=[4, 4]), r"cos must have shape \(3, sequence, R\) or"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.library
def test_errors(case):
    changes, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"qk_norm_rope: {message}.*got "):
        qk_norm_rope(**arguments(**changes))


def noise(name, q, q_weight, k_weight, **others):
    """Gradients of fp32 weights add up few values that were rounded to half precision, and to nothing finer."""
    mixed = q.dtype in HALF_TYPES and any(w is not None and w.dtype != q.dtype for w in (q_weight, k_weight))
    return (0.0, 0.0, *[torch.finfo(q.dtype).eps] * 4) if mixed else ()


def vary(draw, arguments):
    if "cos" not in arguments:
        return
    if draw(st.booleans()):
        pairs = arguments["cos"].shape[-1] // 2
        first, second = sorted(draw(st.lists(st.integers(0, pairs), min_size=2, max_size=2)))
        arguments["mrope_section"] = [first, second - first, pairs - second]
        for name in ("cos", "sin"):
            arguments[name] = torch.stack([arguments[name], arguments[name] / 2, -arguments[name]])
