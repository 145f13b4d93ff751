"""What rope does, and qk_norm_rope after its norms, against the formula in fp64."""

import pytest
import torch

from tests.support.checks import (
    CPU_DTYPES,
    ROWS_AND_PARAMETERS,
    assert_no_worse,
    check_results,
    path_taken,
    sizes_around_tiles,
)
from tests.support.families.rotations import angles, check, make
from tests.support.oracles.rotations import FORMULAS
from tests.support.pairs import pairwise, sizes_by_device
from tests.support.rows import Bound, contiguous, of_temporaries

OPERATORS = {name: getattr(torch.ops.liger, name) for name in FORMULAS}
each = pytest.mark.parametrize("name", OPERATORS)
# Head sizes of models, sizes between powers of two, both sides of every tile boundary, and fewer pairs than a vector
# has elements.
SIZES = sorted(
    {2, 6, 20, 32, 80, 96, 112, 192, 320, 1000}
    | {n + n % 2 for n in sizes_around_tiles("qk_norm_rope_fwd", "qk_norm_rope_bwd") if n > 1}
)


@each
@sizes_by_device(cpu=[2, 6, 96, 320], cuda=SIZES, interleaved=[False, True], dtype=CPU_DTYPES)
def test_head_sizes(name, n, interleaved, dtype, device):
    check(name, *make(name, 2, 5, 2, 3, n, dtype, device), device, interleaved=interleaved)


# n: head size and rotated columns.
@each
@sizes_by_device(
    cpu=[(128, 32), (100, 20), (64, 2), (33, 32), (37, 20), (64, 0)],
    cuda=[(128, 64), (128, 32), (256, 64), (80, 32), (96, 24), (100, 20), (64, 2), (33, 32), (37, 20), (64, 0)],
    interleaved=[False, True],
    dtype=CPU_DTYPES,
)
def test_partial_rotation(name, n, interleaved, dtype, device):
    check(name, *make(name, 2, 3, 1, 4, n[0], dtype, device, n[1]), device, interleaved=interleaved)


# Multi-head, grouped-query and multi-query attention, counts that do not fill a tile, more heads in k than in q, none.
@each
@pytest.mark.parametrize(
    "q_heads, k_heads, batch, sequence",
    [
        (32, 8, 2, 17), (8, 8, 3, 1), (96, 8, 1, 1), (71, 1, 1, 1), (7, 3, 2, 17), (1, 1, 3, 1), (2, 9, 2, 17),
        (0, 2, 2, 5), (4, 0, 2, 5),
    ],
)  # fmt: skip
def test_head_counts(name, q_heads, k_heads, batch, sequence, device):
    check(name, *make(name, batch, q_heads, k_heads, sequence, 64, torch.bfloat16, device), device)


@each
@pairwise(dtypes=ROWS_AND_PARAMETERS, own_dtype=[False, True], angle_batch=[1, 3])
def test_angles(name, dtypes, own_dtype, angle_batch, device):
    dtype, weight_dtype = dtypes
    angle_dtype = dtype if own_dtype else torch.float32
    inputs, grads = make(name, 3, 4, 2, 5, 64, dtype, device, None, weight_dtype, angle_dtype, angle_batch)
    check(name, inputs, grads, device)
    if angle_batch == 1:
        flat = [*inputs[:-2], *(t[0] for t in inputs[-2:])]
        assert all(torch.equal(a, b) for a, b in zip(OPERATORS[name](*inputs), OPERATORS[name](*flat)))


GRADIENTS = {
    "positions first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "heads first": lambda t: t.contiguous(),
    "strided columns": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded heads": lambda t: t[:, :1].expand_as(t),
}


@each
@pytest.mark.parametrize("grad_layout", GRADIENTS)
@pytest.mark.parametrize("layout", ["positions first", "heads first"])
def test_results_and_gradients_preserve_the_layout(name, layout, grad_layout, device):
    inputs, grads = make(name, 2, 4, 2, 5, 32, torch.float32, device)
    inputs[:2] = (GRADIENTS[layout](t.detach()).requires_grad_() for t in inputs[:2])
    outs = OPERATORS[name](*inputs)
    assert all(o.stride() == t.stride() for o, t in zip(outs, inputs))
    got = torch.autograd.grad(outs, inputs[:2], [GRADIENTS[grad_layout](g) for g in grads])
    assert all(g.stride() == t.stride() for g, t in zip(got, inputs))


@each
@pairwise(
    sections_and_size=[((16, 24, 24), 128), ((8, 12, 12), 64), ((3, 0, 5), 16), ((8, 8, 16), 80)],
    interleaved=[False, True],
    angle_batch=[None, 1, 2],
)
def test_multimodal_sections(name, sections_and_size, interleaved, angle_batch, device):
    sections, size = sections_and_size
    inputs, grads = make(name, 2, 4, 2, 5, size, torch.bfloat16, device)
    rotated = 2 * sum(sections)
    shape = (3, 5, rotated) if angle_batch is None else (3, angle_batch, 5, rotated)
    inputs[-2:] = angles(*shape, device=device)
    check(name, inputs, grads, device, interleaved=interleaved, mrope_section=list(sections))


@each
@pytest.mark.parametrize("used", [0, 1])
def test_one_result_may_be_unused(name, used, device):
    inputs, grads = make(name, 2, 4, 2, 5, 32, torch.float32, device)
    ours, theirs = (
        torch.autograd.grad(f(*inputs)[used], inputs[:-2], grads[used], allow_unused=True)
        for f in (OPERATORS[name], FORMULAS[name])
    )
    for a, b in zip(ours, theirs):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@each
def test_backward_keeps_other_columns_of_a_gradient_that_it_overwrites(name, device):
    (*learned, cos, sin), grads = make(name, 2, 4, 2, 5, 32, torch.float32, device, 16)
    call = Bound(lambda *t: OPERATORS[name](*t, cos, sin), FORMULAS[name], learned, [])
    found = of_temporaries(call, learned, grads, [contiguous] * (len(learned) + len(grads)))
    check_results(found, lambda *t: FORMULAS[name](*t, cos, sin), learned, grads)


@each
def test_autocast_promotes_rows_and_keeps_half_precision(name, device):
    (q, k, first, *rest), _ = make(name, 2, 4, 2, 5, 32, torch.bfloat16, device)
    with torch.autocast(device, torch.bfloat16):
        assert all(t.dtype == torch.bfloat16 for t in OPERATORS[name](q, k, first, *rest))
        assert all(t.dtype == torch.float32 for t in OPERATORS[name](q.float(), k, first, *rest))
        assert all(t.dtype == torch.bfloat16 for t in OPERATORS[name](q, k, first.float(), *rest))


@pytest.mark.gpu
@each
@pytest.mark.parametrize("dtype,weight_dtype", ROWS_AND_PARAMETERS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("q_heads,k_heads,size,rotated", [(32, 8, 128, 128), (16, 8, 256, 256), (24, 2, 128, 64)])
def test_large(name, dtype, weight_dtype, interleaved, q_heads, k_heads, size, rotated):
    inputs, grads = make(name, 2, q_heads, k_heads, 1500, size, dtype, "cuda", rotated, weight_dtype)
    check(name, inputs, grads, "cuda", interleaved=interleaved)


@pytest.mark.gpu
@each
def test_more_than_2_to_the_31_elements(name):
    q = torch.randn(1, 2**31 // 4096 + 5, 32, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k, (cos, sin) = q[:, :1], angles(q.shape[2], 128, device="cuda")
    weights = [torch.randn(128, device="cuda", dtype=torch.bfloat16)] * 2 if name == "qk_norm_rope" else []
    with path_taken("cuda"):
        ours, _ = OPERATORS[name](q, k, *weights, cos, sin)
    tail = [q[:, :, -7:], k[:, :, -7:], *weights, cos[-7:], sin[-7:]]
    exact, eager = FORMULAS[name](*(t.double() for t in tail))[0], FORMULAS[name](*tail)[0]
    assert_no_worse("tail", ours[:, :, -7:], eager, exact)
