"""rope: its other pairs, complex angles and errors, against the formula in fp64. test_rotations.py has the rest."""

import pytest
import torch
from hypothesis import strategies as st

from tests.support.checks import CPU_DTYPES, check_op, equal
from tests.support.families.rotations import angles, check, make
from tests.support.oracles.rotations import reference
from tests.support.pairs import pairwise, sizes_by_device

rope, rope_freqs_cis = torch.ops.liger.rope, torch.ops.liger.rope_freqs_cis
WAYS = {
    "trailing": dict(trailing=True),
    "halves": dict(halves_out=True),
    "trailing halves": dict(trailing=True, halves_out=True),
}


def make_way(way, batch, q_heads, k_heads, sequence, size, dtype, device, rotated, **options):
    """With angles of the width that the options take."""
    width = rotated // 2 if "trailing" in WAYS[way] else rotated
    return make("rope", batch, q_heads, k_heads, sequence, size, dtype, device, width, **options)


# n: head size and rotated columns, of DeepSeek-V4, MLA, and sizes that nothing divides.
@sizes_by_device(
    cpu=[(16, 16), (40, 16), (33, 6), (2, 2)],
    cuda=[(16, 16), (64, 64), (192, 64), (512, 64), (320, 192), (40, 16), (100, 20), (33, 6), (2, 2)],
    way=WAYS,
    dtype=CPU_DTYPES,
    angle_batch=[1, 2],
    own_dtype=[False, True],
)
def test_pairs_at_the_end_and_into_halves(n, way, dtype, angle_batch, own_dtype, device):
    options = dict(angle_batch=angle_batch, angle_dtype=dtype if own_dtype else torch.float32)
    inputs, grads = make_way(way, 2, 5, 1, 3, n[0], dtype, device, n[1], **options)
    check("rope", inputs, grads, device, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_sections_of_pairs_at_the_end_and_into_halves(way, device):
    (q, k, *_), grads = make("rope", 2, 3, 2, 5, 40, torch.float32, device)
    width = 16 if "trailing" in WAYS[way] else 32
    cos, sin = (t.view(3, 2, 5, width) for t in angles(6, 5, width, device=device))
    check("rope", [q, k, cos, sin], grads, device, mrope_section=[3, 8, 5], **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_gradients_at_the_end_and_into_halves(way, device):
    """Gradients of trailing pairs may overwrite those of the results, gradients of halves may not."""
    (q, k, cos, sin), grads = make_way(way, 2, 3, 1, 4, 24, torch.float32, device, 16)
    for wanted in ([q], [k], [q, k]):
        outs = rope(q, k, cos, sin, **WAYS[way])
        loss = sum((o * g).sum() for o, g in zip(outs, grads))
        expected = torch.autograd.grad(reference(q, k, cos, sin, **WAYS[way]), wanted, grads, allow_unused=True)
        torch.testing.assert_close(torch.autograd.grad(loss, wanted), expected)


@pytest.mark.parametrize("turned", [None, 0, 1])
def test_an_unreferenced_gradient_of_another_layout_is_not_overwritten(turned, device):
    (q, k, cos, sin), grads = make("rope", 2, 4, 2, 5, 32, torch.float32, device)
    expected = torch.autograd.grad(rope(q, k, cos, sin), [q, k], grads)

    outs = rope(q, k, cos, sin)
    for i, (out, grad) in enumerate(zip(outs, grads)):
        like = (grad.contiguous() if i == turned else out).detach()
        # A hook's new tensor has no other reference.
        out.register_hook(lambda _, grad=grad, like=like: torch.empty_like(like).copy_(grad))
    got = torch.autograd.grad(sum(out.sum() for out in outs), [q, k])
    assert all(g.stride() == t.stride() for g, t in zip(got, (q, k))) and equal(got, expected)


def complex_reference(q, k, freqs_cis):
    def apply(x):
        compute = torch.promote_types(x.dtype, torch.float32)
        width = 2 * freqs_cis.shape[-1]
        pairs = torch.view_as_complex(x[..., :width].to(compute).unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * freqs_cis.unsqueeze(-3).to(pairs.dtype)).flatten(-2)
        return torch.cat((turned.to(x.dtype), x[..., width:]), -1)

    return apply(q), apply(k)


@pairwise(size_and_rotated=[(128, 128), (64, 32), (80, 80), (20, 6)], angle_batch=[None, 1, 2], dtype=CPU_DTYPES)
def test_complex_angles(size_and_rotated, angle_batch, dtype, device):
    size, rotated = size_and_rotated
    (q, k, *_), grads = make("rope", 2, 4, 2, 5, size, dtype, device)
    shape = (5, rotated // 2) if angle_batch is None else (angle_batch, 5, rotated // 2)
    freqs_cis = torch.complex(*angles(*shape, device=device))
    for table in (freqs_cis, freqs_cis.conj(), torch.stack([freqs_cis] * 2, -1)[..., 0]):
        check_op(
            lambda q, k: rope_freqs_cis(q, k, table),
            lambda q, k: complex_reference(q, k, table),
            [q, k],
            grads,
            device,
        )


def test_nan_and_infinity_stay_in_their_pair(device):
    (q, k, cos, sin), _ = make("rope", 1, 2, 1, 3, 16, torch.float32, device)
    with torch.no_grad():
        q[0, 0, 1, 3], q[0, 1, 2, 5] = float("nan"), float("inf")
    out, _ = rope(q, k, cos, sin)
    bad = torch.zeros_like(out, dtype=torch.bool)
    bad[0, 0, 1, [3, 11]] = bad[0, 1, 2, [5, 13]] = True
    assert torch.equal(~out.isfinite(), bad)


def arguments(**changes):
    (q, k, cos, sin), _ = make("rope", 2, 4, 2, 5, 16, torch.float32, "cpu")
    return {**dict(q=q.detach(), k=k.detach(), cos=cos, sin=sin), **changes}


ERRORS = {
    "q of three dimensions": (dict(q=torch.ones(4, 5, 16)), r"q must have shape \(batch, heads, sequence, head size\)"),
    "k of another batch": (
        dict(k=torch.ones(1, 2, 5, 16)),
        r"k must have the batch, sequence and head size of q, \[2, 4, 5, 16\]",
    ),
    "cos of one dimension": (
        dict(cos=torch.ones(16)),
        r"cos must have shape \(sequence, R\) or \(1 or batch, sequence, R\)",
    ),
    "cos of another sequence": (dict(cos=torch.ones(1, 4, 16)), "cos must have one row for each of q's 5 positions"),
    "cos of another batch": (dict(cos=torch.ones(3, 5, 16)), "cos must have a batch of 1 or 2, that of q"),
    "odd R": (dict(cos=torch.ones(1, 5, 15), sin=torch.ones(1, 5, 15)), "cos must have an even last dimension"),
    "R above D": (dict(cos=torch.ones(1, 5, 18)), "cos must rotate at most q's head size, 16"),
    "sin of another shape": (dict(sin=torch.ones(1, 5, 8)), r"sin must have the shape of cos, \[1, 5, 16\]"),
    "sections of plain angles": (dict(mrope_section=[2, 3, 3]), r"cos must have shape \(3, sequence, R\) or"),
    "two sections": (
        dict(cos=torch.ones(3, 5, 16), sin=torch.ones(3, 5, 16), mrope_section=[4, 4]),
        "mrope_section must be three sizes that add up to 16 / 2",
    ),
    "sections too long": (
        dict(cos=torch.ones(3, 5, 16), sin=torch.ones(3, 5, 16), mrope_section=[2, 3, 4]),
        "mrope_section must be three sizes that add up to 16 / 2",
    ),
    "pairs at the end above D": (
        dict(cos=torch.ones(1, 5, 12), sin=torch.ones(1, 5, 12), trailing=True),
        "cos must rotate at most q's head size, 16",
    ),
    "sections of other pairs at the end": (
        dict(cos=torch.ones(3, 5, 4), sin=torch.ones(3, 5, 4), trailing=True, mrope_section=[1, 1, 1]),
        "mrope_section must be three sizes that add up to 8 / 2",
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
