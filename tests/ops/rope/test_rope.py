"""rope and rope_freqs_cis against the formula in fp64."""

import pytest
import torch
from checks import (
    CPU_DTYPES,
    HALF_TYPES,
    assert_no_worse,
    check_op,
    equal,
    path_taken,
)
from hypothesis import strategies as st
from pairs import pairwise, sizes_by_device
from rotations import ANGLE_LAYOUTS, LAYOUTS, Probe, angles, heads, reference, reference_freqs_cis

rope, rope_freqs_cis = torch.ops.liger.rope, torch.ops.liger.rope_freqs_cis


def make(
    batch, q_heads, k_heads, sequence, size, dtype, device, rotated=None, angle_dtype=torch.float32, angle_batch=1
):
    q, k = (heads(batch, h, sequence, size, dtype, device) for h in (q_heads, k_heads))
    cos, sin = angles(angle_batch, sequence, rotated or size, dtype=angle_dtype, device=device)
    grads = [heads(batch, h, sequence, size, dtype, device, False) for h in (q_heads, k_heads)]
    return q, k, cos, sin, grads


def check(q, k, cos, sin, grads, device, **options):
    check_op(
        lambda q, k: rope(q, k, cos, sin, **options),
        lambda q, k: reference(q, k, cos, sin, **options),
        [q, k],
        grads,
        device,
    )


# Head sizes of models, sizes between powers of two, one wider than any tile, and sizes with fewer pairs than a vector
# has elements.
@sizes_by_device(
    cpu=[2, 6, 96, 320],
    cuda=[2, 6, 20, 32, 64, 80, 96, 112, 128, 192, 256, 320],
    interleaved=[False, True],
    dtype=CPU_DTYPES,
)
def test_head_sizes(n, interleaved, dtype, device):
    q, k, cos, sin, grads = make(2, 5, 2, 3, n, dtype, device)
    check(q, k, cos, sin, grads, device, interleaved=interleaved)


# n: head size and rotated columns.
@sizes_by_device(
    cpu=[(128, 32), (100, 20), (64, 2), (33, 32)],
    cuda=[(128, 64), (128, 32), (80, 32), (96, 24), (100, 20), (64, 2), (256, 64), (33, 32)],
    interleaved=[False, True],
    dtype=CPU_DTYPES,
)
def test_partial_rotation(n, interleaved, dtype, device):
    q, k, cos, sin, grads = make(2, 3, 1, 4, n[0], dtype, device, n[1])
    check(q, k, cos, sin, grads, device, interleaved=interleaved)


WAYS = {
    "trailing": dict(trailing=True),
    "halves": dict(halves_out=True),
    "trailing halves": dict(trailing=True, halves_out=True),
}


def make_way(way, batch, q_heads, k_heads, sequence, size, dtype, device, rotated, **options):
    """With angles of the width that the options take."""
    width = rotated // 2 if "trailing" in WAYS[way] else rotated
    return make(batch, q_heads, k_heads, sequence, size, dtype, device, width, **options)


# n: head size and rotated columns, of DeepSeek-V4, MLA, and sizes that nothing divides.
@sizes_by_device(
    cpu=[(16, 16), (40, 16), (33, 6), (2, 2)],
    cuda=[(16, 16), (64, 64), (192, 64), (512, 64), (320, 192), (40, 16), (100, 20), (33, 6), (2, 2)],
    way=WAYS,
    dtype=CPU_DTYPES,
)
def test_pairs_at_the_end_and_into_halves(n, way, dtype, device):
    q, k, cos, sin, grads = make_way(way, 2, 5, 1, 3, n[0], dtype, device, n[1])
    check(q, k, cos, sin, grads, device, **WAYS[way])


@pairwise(way=WAYS, angle_batch=[1, 3], own_dtype=[False, True], layout=LAYOUTS)
def test_layouts_of_pairs_at_the_end_and_into_halves(way, angle_batch, own_dtype, layout, device):
    angle_dtype = torch.bfloat16 if own_dtype else torch.float32
    q, k, cos, sin, grads = make_way(
        way, 3, 4, 2, 5, 48, torch.bfloat16, device, 32, angle_dtype=angle_dtype, angle_batch=angle_batch
    )
    q, k = (LAYOUTS[layout](t.detach()).requires_grad_() for t in (q, k))
    check(q, k, cos, sin, [LAYOUTS[layout](g) for g in grads], device, **WAYS[way])
    # A part of a wider table.
    wide = [torch.cat([t, t], -1)[..., : t.shape[-1]] for t in (cos, sin)]
    assert equal(rope(q, k, *wide, **WAYS[way]), rope(q, k, cos, sin, **WAYS[way]))


@pytest.mark.parametrize("way", WAYS)
def test_sections_of_pairs_at_the_end_and_into_halves(way, device):
    q, k, *_, grads = make(2, 3, 2, 5, 40, torch.float32, device)
    width = 16 if "trailing" in WAYS[way] else 32
    cos, sin = (t.view(3, 2, 5, width) for t in angles(6, 5, width, device=device))
    check(q, k, cos, sin, grads, device, mrope_section=[3, 8, 5], **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_gradients_at_the_end_and_into_halves(way, device):
    """Gradients of trailing pairs may overwrite those of the results, gradients of halves may not."""
    q, k, cos, sin, grads = make_way(way, 2, 3, 1, 4, 24, torch.float64, "cpu", 16, angle_dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q, k: rope(q, k, cos, sin, **WAYS[way]), [q, k])
    for wanted in ([q], [k], [q, k]):
        outs = rope(q, k, cos, sin, **WAYS[way])
        loss = sum((o * g).sum() for o, g in zip(outs, grads))
        expected = torch.autograd.grad(reference(q, k, cos, sin, **WAYS[way]), wanted, grads, allow_unused=True)
        torch.testing.assert_close(torch.autograd.grad(loss, wanted), expected)


def test_angles_of_pairs_at_the_end(device):
    q, k, cos, sin, _ = make(1, 2, 1, 3, 8, torch.float32, device, 6)
    with pytest.raises(RuntimeError, match="rope: cos must rotate at most q's head size, 8 .got 12 columns"):
        rope(q, k, cos, sin, trailing=True)
    with pytest.raises(RuntimeError, match=r"rope: mrope_section must be three sizes that add up to 8 / 2"):
        rope(q, k, *(t[..., :4].expand(3, 1, 3, 4) for t in (cos, sin)), trailing=True, mrope_section=[1, 1, 1])


# Multi-head, grouped-query and multi-query attention, counts that do not fill a tile, and more heads in k than in q.
@pytest.mark.parametrize(
    "q_heads, k_heads, batch, sequence",
    [(32, 8, 2, 17), (8, 8, 3, 1), (71, 1, 1, 1), (7, 3, 2, 17), (1, 1, 3, 1), (2, 9, 2, 17)],
)
def test_head_counts(q_heads, k_heads, batch, sequence, device):
    q, k, cos, sin, grads = make(batch, q_heads, k_heads, sequence, 64, torch.bfloat16, device)
    check(q, k, cos, sin, grads, device)


@pairwise(angle_batch=[1, 3], own_dtype=[False, True], dtype=CPU_DTYPES)
def test_angles(dtype, own_dtype, angle_batch, device):
    angle_dtype = dtype if own_dtype else torch.float32
    q, k, cos, sin, grads = make(3, 4, 2, 5, 64, dtype, device, None, angle_dtype, angle_batch)
    check(q, k, cos, sin, grads, device)
    if angle_batch == 1:
        ours, flat = rope(q, k, cos, sin), rope(q, k, cos[0], sin[0])
        assert all(torch.equal(a, b) for a, b in zip(ours, flat))


@pytest.mark.parametrize("layout", ANGLE_LAYOUTS)
def test_layouts_of_angles(layout, device):
    q, k, cos, sin, grads = make(2, 4, 2, 5, 64, torch.float32, device, angle_batch=2)
    check(q, k, ANGLE_LAYOUTS[layout](cos), ANGLE_LAYOUTS[layout](sin), grads, device)
    check(q, k, ANGLE_LAYOUTS[layout](cos), sin if layout != "expanded" else sin[:1].expand_as(sin), grads, device)


@pairwise(
    q_layout=LAYOUTS,
    k_layout=["positions first", "heads first", "slice of a fused projection", "strided columns"],
    grad_layout=["positions first", "heads first", "strided columns", "expanded heads"],
)
def test_layouts(q_layout, k_layout, grad_layout, device):
    q, k, cos, sin, grads = make(2, 4, 2, 5, 32, torch.bfloat16, device)
    q, k = (LAYOUTS[layout](t.detach()).requires_grad_() for layout, t in ((q_layout, q), (k_layout, k)))
    check(q, k, cos, sin, [LAYOUTS[grad_layout](g) for g in grads], device)


@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", ["positions first", "heads first"])
def test_results_and_gradients_preserve_the_layout(layout, grad_layout, device):
    q, k, cos, sin, grads = make(2, 4, 2, 5, 32, torch.float32, device)
    q, k = (LAYOUTS[layout](t.detach()).requires_grad_() for t in (q, k))
    outs = rope(q, k, cos, sin)
    assert all(o.stride() == t.stride() for o, t in zip(outs, (q, k)))
    got = torch.autograd.grad(outs, [q, k], [LAYOUTS[grad_layout](g) for g in grads])
    assert all(g.stride() == t.stride() for g, t in zip(got, (q, k)))


@pytest.mark.parametrize("turned", [None, 0, 1])
def test_an_unreferenced_gradient_of_another_layout_is_not_overwritten(turned, device):
    q, k, cos, sin, grads = make(2, 4, 2, 5, 32, torch.float32, device)
    expected = torch.autograd.grad(rope(q, k, cos, sin), [q, k], grads)

    outs = rope(q, k, cos, sin)
    for i, (out, grad) in enumerate(zip(outs, grads)):
        like = (LAYOUTS["heads first"](grad) if i == turned else out).detach()
        # A hook's new tensor has no other reference.
        out.register_hook(lambda _, grad=grad, like=like: torch.empty_like(like).copy_(grad))
    got = torch.autograd.grad(sum(out.sum() for out in outs), [q, k])
    assert all(g.stride() == t.stride() for g, t in zip(got, (q, k))) and equal(got, expected)


@pairwise(
    sections_and_size=[((16, 24, 24), 128), ((8, 12, 12), 64), ((3, 0, 5), 16), ((8, 8, 16), 80)],
    interleaved=[False, True],
    angle_batch=[None, 1, 2],
)
def test_multimodal_sections(sections_and_size, interleaved, angle_batch, device):
    sections, size = sections_and_size
    rotated = 2 * sum(sections)
    q, k, _, _, grads = make(2, 4, 2, 5, size, torch.bfloat16, device)
    shape = (3, 5, rotated) if angle_batch is None else (3, angle_batch, 5, rotated)
    cos, sin = angles(*shape, device=device)
    check(q, k, cos, sin, grads, device, interleaved=interleaved, mrope_section=list(sections))


@pairwise(size_and_rotated=[(128, 128), (64, 32), (80, 80), (20, 6)], angle_batch=[None, 1, 2], dtype=CPU_DTYPES)
def test_complex_angles(size_and_rotated, angle_batch, dtype, device):
    size, rotated = size_and_rotated
    q, k, _, _, grads = make(2, 4, 2, 5, size, dtype, device)
    shape = (5, rotated // 2) if angle_batch is None else (angle_batch, 5, rotated // 2)
    freqs_cis = torch.complex(*angles(*shape, device=device))
    for table in (freqs_cis, freqs_cis.conj(), torch.stack([freqs_cis] * 2, -1)[..., 0]):
        check_op(
            lambda q, k: rope_freqs_cis(q, k, table),
            lambda q, k: reference_freqs_cis(q, k, table),
            [q, k],
            grads,
            device,
        )


@pytest.mark.parametrize("shape", [(0, 4, 2, 5, 8), (2, 0, 2, 5, 8), (2, 4, 0, 5, 8), (2, 4, 2, 0, 8), (2, 0, 0, 3, 8)])
def test_empty(shape, device):
    q, k, cos, sin, grads = make(*shape, torch.float32, device)
    check_empty = lambda *t: all(a.shape == b.shape for a, b in zip(t, (q, k)))  # noqa: E731
    outs = rope(q, k, cos, sin)
    assert check_empty(*outs) and check_empty(*torch.autograd.grad(outs, [q, k], grads))
    for ours, expected in zip(outs, reference(q, k, cos, sin)):
        torch.testing.assert_close(ours, expected)


def test_no_rotated_columns(device):
    q, k, cos, sin, _ = make(2, 4, 2, 5, 8, torch.float32, device)
    assert all(torch.equal(a, b) for a, b in zip(rope(q, k, cos[..., :0], sin[..., :0]), (q, k)))


def test_nan_and_infinity_stay_in_their_pair(device):
    q, k, cos, sin, _ = make(1, 2, 1, 3, 16, torch.float32, device)
    with torch.no_grad():
        q[0, 0, 1, 3], q[0, 1, 2, 5] = float("nan"), float("inf")
    out, _ = rope(q, k, cos, sin)
    bad = torch.zeros_like(out, dtype=torch.bool)
    bad[0, 0, 1, [3, 11]] = bad[0, 1, 2, [5, 13]] = True
    assert torch.equal(~out.isfinite(), bad)


@pytest.mark.parametrize("needs_grad", [(True, False), (False, True), (False, False)])
def test_only_required_gradients(needs_grad, device):
    q, k, cos, sin, grads = make(2, 4, 2, 5, 32, torch.float32, device)
    everything = torch.autograd.grad(rope(q, k, cos, sin), [q, k], grads)
    some = [t.detach().requires_grad_(n) for t, n in zip((q, k), needs_grad)]
    outs = rope(*some, cos, sin)
    if not any(needs_grad):
        assert not any(o.requires_grad for o in outs)
        return
    wanted = needs_grad.index(True)
    assert torch.equal(torch.autograd.grad(outs, some[wanted], grads)[0], everything[wanted])


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_may_be_unused(used, device):
    q, k, cos, sin, grads = make(2, 4, 2, 5, 32, torch.float32, device)
    ours, theirs = (
        torch.autograd.grad(f(q, k, cos, sin)[used], [q, k], grads[used], allow_unused=True) for f in (rope, reference)
    )
    torch.testing.assert_close(ours[used], theirs[used])
    assert ours[1 - used] is None


@pytest.mark.parametrize("rotated", [32, 16])
@pytest.mark.parametrize("retain", [False, True])
def test_backward_rotates_unreferenced_gradients_in_place(rotated, retain, device):
    q, k, cos, sin, grads = make(2, 4, 2, 5, 32, torch.float32, device, rotated)
    expected = torch.autograd.grad(reference(q, k, cos, sin), [q, k], grads)
    incoming, outgoing = [], []
    outs = Probe.apply(incoming, True, *rope(*Probe.apply(outgoing, False, q, k), cos, sin))
    got = torch.autograd.grad(outs, [q, k], grads, retain_graph=retain)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b)
    assert (incoming == outgoing) != retain


def test_a_referenced_gradient_is_unchanged(device):
    q, k, cos, sin, grads = make(2, 4, 2, 5, 32, torch.float32, device)
    outs = rope(q * 1.0, k * 1.0, cos, sin)
    held = []
    for out in outs:
        out.register_hook(lambda g: held.append(g))
    torch.autograd.grad([o * 2.0 for o in outs], [q, k], grads)
    assert sorted(g.shape for g in held) == sorted(g.shape for g in grads)
    for g in held:
        expected = next(2.0 * h for h in grads if h.shape == g.shape)
        torch.testing.assert_close(g, expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated,sections", [(8, None), (4, None), (8, [1, 1, 2])])
def test_gradcheck(interleaved, rotated, sections):
    q, k = (heads(2, h, 3, 8, torch.float64, "cpu") for h in (2, 1))
    shape = (1, 3, rotated) if sections is None else (3, 1, 3, rotated)
    cos, sin = angles(*shape, dtype=torch.float64)
    function = lambda q, k: rope(q, k, cos, sin, interleaved=interleaved, mrope_section=sections)  # noqa: E731
    assert torch.autograd.gradcheck(function, [q, k])


def test_gradcheck_complex():
    q, k = (heads(2, h, 3, 8, torch.float64, "cpu") for h in (2, 1))
    freqs_cis = torch.complex(*angles(3, 3, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda q, k: rope_freqs_cis(q, k, freqs_cis), [q, k])


def test_autocast_promotes_like_multiplication(device):
    q, k, cos, sin, _ = make(2, 4, 2, 5, 32, torch.bfloat16, device)
    with torch.autocast(device, torch.bfloat16):
        assert all(t.dtype == torch.bfloat16 for t in rope(q, k, cos, sin))
        assert all(t.dtype == torch.float32 for t in rope(q.float(), k, cos.bfloat16(), sin.bfloat16()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_large(dtype, interleaved):
    q, k, cos, sin, grads = make(2, 32, 8, 1500, 128, dtype, "cuda")
    check(q, k, cos, sin, grads, "cuda", interleaved=interleaved)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    q = torch.randn(1, 2**31 // 4096 + 5, 32, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k = q[:, :1]
    cos, sin = angles(q.shape[2], 128, device="cuda")
    with path_taken("cuda"):
        ours, _ = rope(q, k, cos, sin)
    tail = [q[:, :, -7:], k[:, :, -7:], cos[-7:], sin[-7:]]
    exact, eager = reference(*(t.double() for t in tail))[0], reference(*tail)[0]
    assert_no_worse("tail", ours[:, :, -7:], eager, exact)


def arguments(**changes):
    q, k, cos, sin, _ = make(2, 4, 2, 5, 16, torch.float32, "cpu")
    return {**dict(q=q.detach(), k=k.detach(), cos=cos, sin=sin), **changes}


ERRORS = {
    "integer q": (dict(q=torch.ones(2, 4, 5, 16, dtype=torch.long)), "q must be float32, float16, bfloat16 or float64"),
    "q of three dimensions": (dict(q=torch.ones(4, 5, 16)), r"q must have shape \(batch, heads, sequence, head size\)"),
    "k of another dtype": (dict(k=torch.ones(2, 2, 5, 16).half()), "k must have the dtype of q, Float"),
    "k of another batch": (
        dict(k=torch.ones(1, 2, 5, 16)),
        r"k must have the batch, sequence and head size of q, \[2, 4, 5, 16\]",
    ),
    "k of another sequence": (dict(k=torch.ones(2, 2, 4, 16)), "k must have the batch, sequence and head size of q"),
    "k of another head size": (dict(k=torch.ones(2, 2, 5, 8)), "k must have the batch, sequence and head size of q"),
    "k elsewhere": (dict(k=torch.ones(2, 2, 5, 16, device="meta")), "k must be on cpu like q"),
    "sparse q": (dict(q=torch.eye(4).to_sparse()), "q must be a dense, unquantized tensor"),
    "sparse cos": (dict(cos=torch.ones(1, 5, 16).to_sparse()), "cos must be a dense, unquantized tensor"),
    "sparse sin": (dict(sin=torch.ones(1, 5, 16).to_sparse()), "sin must be a dense, unquantized tensor"),
    "cos of one dimension": (
        dict(cos=torch.ones(16)),
        r"cos must have shape \(sequence, R\) or \(1 or batch, sequence, R\)",
    ),
    "cos of another sequence": (dict(cos=torch.ones(1, 4, 16)), "cos must have one row for each of q's 5 positions"),
    "cos of another batch": (dict(cos=torch.ones(3, 5, 16)), "cos must have a batch of 1 or 2, that of q"),
    "odd R": (dict(cos=torch.ones(1, 5, 15), sin=torch.ones(1, 5, 15)), "cos must have an even last dimension"),
    "R above D": (dict(cos=torch.ones(1, 5, 18)), "cos must rotate at most q's head size, 16"),
    "narrow cos": (dict(cos=torch.ones(1, 5, 16).half()), "cos must be float32 or have the dtype of q, Float"),
    "cos elsewhere": (dict(cos=torch.ones(1, 5, 16, device="meta")), "cos must be on cpu like q"),
    "sin of another shape": (dict(sin=torch.ones(1, 5, 8)), r"sin must have the shape of cos, \[1, 5, 16\]"),
    "sin of another dtype": (dict(sin=torch.ones(1, 5, 16).half()), "sin must have the dtype of cos, Float"),
    "trained cos": (dict(cos=torch.ones(1, 5, 16, requires_grad=True)), "cos must not require a gradient"),
    "sections of plain angles": (dict(mrope_section=[2, 3, 3]), r"cos must have shape \(3, sequence, R\) or"),
    "two sections": (
        dict(cos=torch.ones(3, 5, 16), sin=torch.ones(3, 5, 16), mrope_section=[4, 4]),
        "mrope_section must be three sizes that add up to 16 / 2",
    ),
    "sections too long": (
        dict(cos=torch.ones(3, 5, 16), sin=torch.ones(3, 5, 16), mrope_section=[2, 3, 4]),
        "mrope_section must be three sizes that add up to 16 / 2",
    ),
    "a negative section": (
        dict(cos=torch.ones(3, 5, 16), sin=torch.ones(3, 5, 16), mrope_section=[-1, 4, 5]),
        "mrope_section must be three sizes that add up to 16 / 2",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    changes, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"rope: {message}.*got "):
        rope(**arguments(**changes))


COMPLEX_ERRORS = {
    "real": (torch.ones(5, 8), "be ComplexFloat"),
    "too wide": (torch.ones(5, 9, dtype=torch.complex64), "rotate at most q's head size, 16"),
    "of another sequence": (torch.ones(4, 8, dtype=torch.complex64), "have one row for each of q's 5 positions"),
    "trained": (torch.ones(5, 8, dtype=torch.complex64, requires_grad=True), "not require a gradient"),
}


@pytest.mark.parametrize("case", COMPLEX_ERRORS)
def test_complex_errors(case):
    freqs_cis, message = COMPLEX_ERRORS[case]
    q, k = (arguments()[name] for name in "qk")
    with pytest.raises(RuntimeError, match=f"rope_freqs_cis: freqs_cis must {message}.*got "):
        rope_freqs_cis(q, k, freqs_cis)


def vary(draw, arguments):
    if "cos" not in arguments:
        return
    if arguments["trailing"]:
        for name in ("cos", "sin"):
            arguments[name] = arguments[name][..., : arguments[name].shape[-1] // 2]
    if draw(st.booleans()):
        pairs = arguments["cos"].shape[-1] // (1 if arguments["trailing"] else 2)
        first, second = sorted(draw(st.lists(st.integers(0, pairs), min_size=2, max_size=2)))
        arguments["mrope_section"] = [first, second - first, pairs - second]
        for name in ("cos", "sin"):
            arguments[name] = torch.stack([arguments[name], arguments[name] / 2, -arguments[name]])
