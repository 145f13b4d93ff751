"""qk_norm_rope: the options of its norms and what is between its steps. test_rotations.py has what rope does too."""

import pytest
import torch
from hypothesis import strategies as st

from tests.support.checks import CPU_DTYPES, HALF_TYPES, ROWS_AND_PARAMETERS
from tests.support.families.rotations import check, make
from tests.support.pairs import pairwise

NAME = "qk_norm_rope"
qk_norm_rope = torch.ops.liger.qk_norm_rope


@pairwise(dtypes=ROWS_AND_PARAMETERS, casting_mode=["llama", "gemma", "none"], offset=[0.0, 1.0], eps=[1e-6, 1e-2])
def test_options_of_the_norm(dtypes, offset, casting_mode, eps, device):
    dtype, weight_dtype = dtypes
    inputs, grads = make(NAME, 2, 4, 2, 5, 96, dtype, device, weight_dtype=weight_dtype)
    check(NAME, inputs, grads, device, eps=eps, offset=offset, casting_mode=casting_mode)


@pytest.mark.parametrize("with_weights", [(True, False), (False, True), (False, False)])
def test_without_weights(with_weights, device):
    inputs, grads = make(NAME, 2, 4, 2, 5, 64, torch.bfloat16, device)
    inputs[2:4] = [w if present else None for w, present in zip(inputs[2:4], with_weights)]
    check(NAME, inputs, grads, device, offset=0.5)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("options", [{}, dict(offset=1.0, casting_mode="gemma"), dict(interleaved=True)], ids=str)
def test_equals_the_two_operators(options, dtype, device):
    """The rounding between the two steps included."""
    inputs, _ = make(NAME, 2, 8, 2, 33, 128, dtype, device, 64)
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


def test_nan_and_infinity_stay_in_their_head(device):
    """A NaN spoils its head. An infinite value makes the other columns zero, and itself and its pair NaN."""
    (q, k, *rest), _ = make(NAME, 1, 2, 1, 3, 16, torch.float32, device, 8)
    with torch.no_grad():
        q[0, 0, 1, 3], q[0, 1, 2, 5], q[0, 1, 0, 12] = float("nan"), float("inf"), float("inf")
    out, _ = qk_norm_rope(q, k, *rest)
    bad = torch.zeros_like(out, dtype=torch.bool)
    bad[0, 0, 1], bad[0, 1, 2, [1, 5]], bad[0, 1, 0, 12] = True, True, True
    assert torch.equal(~out.isfinite(), bad)
    assert not out[0, 1, [0, 2]][~bad[0, 1, [0, 2]]].any()


@pytest.mark.library
def test_forward_saves_its_inputs_only(device):
    inputs, _ = make(NAME, 2, 4, 2, 5, 32, torch.bfloat16, device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        qk_norm_rope(*inputs)
    assert sorted(saved) == sorted(t.data_ptr() for t in inputs)


@pytest.mark.gpu
def test_heads_that_are_too_wide_are_refused():
    inputs, _ = make(NAME, 1, 1, 1, 2, 2050, torch.bfloat16, "cuda")
    with pytest.raises(RuntimeError, match="qk_norm_rope: q must have heads of at most 2048 columns .got 2050"):
        qk_norm_rope(*inputs)


def arguments(**changes):
    (q, k, q_weight, k_weight, cos, sin), _ = make(NAME, 2, 4, 2, 5, 16, torch.float32, "cpu")
    return {**dict(q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin), **changes}


# The checks of heads and angles are rope's, with their own tests.
ERRORS = {
    "weights of two dtypes": (
        {n: t if n == "q_weight" else t.half() for n, t in arguments().items()},
        "k_weight must have the dtype of q_weight, Float",
    ),
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
