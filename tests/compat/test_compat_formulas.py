"""liger_ops.compat: what is served by a formula, against plain formulas in fp64."""

import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as TF

from tests.support.checks import (
    HALF_TYPES,
    assert_as_the_formula,
    assert_no_worse,
    check_one_graph,
    check_reads_only,
    check_results,
    equal,
    gradients,
    like,
    roundings,
)

pytestmark = pytest.mark.usefixtures("liger_kernel_served")
# ---- The formulas, as papers write them


def softmax(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def sparsemax(x, dim=-1):
    """The threshold is searched for in fp64; which elements are above it is not differentiated."""
    exact = x.detach().double()
    low, high = exact.amax(dim, keepdim=True) - 1, exact.amax(dim, keepdim=True)
    for _ in range(80):
        middle = (low + high) / 2
        enough = (exact - middle).relu().sum(dim, keepdim=True) >= 1
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    above = (exact > high + 1e-9).to(x.dtype)
    return above * (x - ((above * x).sum(dim, keepdim=True) - 1) / above.sum(dim, keepdim=True))


def dyt(x, alpha, gamma, beta=None):
    y = torch.tanh(alpha * x) * gamma
    return y if beta is None else y + beta


def poly_norm(x, weight, bias, eps=1e-6):
    def norm(u):
        return u / (u.square().mean(-1, keepdim=True) + eps).sqrt()

    return weight[0] * norm(x**3) + weight[1] * norm(x**2) + weight[2] * norm(x) + bias


def group_norm(x, weight, bias, groups, eps):
    parts = x.reshape(len(x), groups, -1)
    centred = parts - parts.mean(-1, keepdim=True)
    normed = (centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()).view(x.shape)
    shape = (1, -1) + (1,) * (x.dim() - 2)
    return normed * weight.view(shape) + bias.view(shape)


def modulated(x, weight, scale, shift, eps, offset):
    """scale, shift: (..., n) with 1 where they are the same for several rows."""
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    normed = normed if weight is None else normed * (weight + offset)
    y = normed * (1 + scale)
    return y if shift is None else y + shift


def multi_token(scores, weight, bias, sparse=False, **options):
    length = scores.shape[-1]
    lower = torch.ones(length, length, dtype=torch.bool).tril()
    activation = sparsemax if sparse else softmax
    rows = [TF.pad(activation(scores[..., i, : i + 1]), (0, length - i - 1)) for i in range(length)]
    mixed = TF.conv2d(torch.stack(rows, -2), weight, bias, **options)
    return torch.where(lower[: mixed.shape[-2], : mixed.shape[-1]], mixed, 0)


def neighborhood(q, k, v, size, dilation, scale):
    rows = []
    for i in range(q.shape[2]):
        near = [j for d in range(-(size // 2), size // 2 + 1) if 0 <= (j := i + d * dilation) < q.shape[2]]
        weights = softmax((q[:, :, i : i + 1] * k[:, :, near]).sum(-1) * scale)
        rows.append((weights.unsqueeze(-1) * v[:, :, near]).sum(-2))
    return torch.stack(rows, 2)


def attn_res(values, query, weight, eps=1e-6):
    keys = values / (values.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    alpha = softmax((keys * query).sum(-1).movedim(0, -1)).movedim(-1, 0)
    return (alpha.unsqueeze(-1) * values).sum(0)


def mhc_coeffs(x, phi, b, pre, post, res, tmax=20, rms_eps=1e-6, pre_eps=0.0, sinkhorn_eps=1e-6, post_mult=2.0):
    h = x.shape[-2]
    flat = x.reshape(*x.shape[:-2], -1)
    mix = flat @ phi / (flat.square().mean(-1, keepdim=True) + rms_eps).sqrt()
    m = (mix[..., 2 * h :] * res + b[2 * h :]).view(*x.shape[:-2], h, h)
    m = softmax(m) + sinkhorn_eps
    for i in range(2 * tmax - 1):
        m = m / (m.sum(-2 if i % 2 == 0 else -1, keepdim=True) + sinkhorn_eps)
    sigmoids = [1 / (1 + (-(mix[..., i : i + h] * a + b[i : i + h])).exp()) for i, a in ((0, pre), (h, post))]
    return sigmoids[0] + pre_eps, sigmoids[1] * post_mult, m


def mhc_pre(x, h_pre):
    return (h_pre.unsqueeze(-1) * x).sum(-2)


def mhc_post_res(x, f_out, h_post, h_res):
    return torch.einsum("...oi,...ic->...oc", h_res, x) + h_post.unsqueeze(-1) * f_out.unsqueeze(-2)


# ---- Calls: the name of the function below liger_, its options, the formula, and the inputs


def draw(*shapes, scale=1.0):
    return [torch.randn(shape) * scale for shape in shapes]


def steps(*shape):
    """Multiples of 1/16, whose sums and differences are exact: whether one is above a threshold is then certain."""
    return (torch.randn(shape) * 8).round() / 16


H, C = 3, 5
M = H * H + 2 * H
OF_GROUPS = dict(groups=2, stride=2, dilation=2, padding=2)
CALLS = {
    "softmax": ("softmax", {}, softmax, lambda: draw((4, 7, 33), scale=3)),
    "softmax of one column": ("softmax", {}, softmax, lambda: draw((5, 1))),
    "sparsemax": ("sparsemax", {}, sparsemax, lambda: [steps(6, 17)]),
    "sparsemax along 1": ("sparsemax", dict(dim=1), lambda x: sparsemax(x, 1), lambda: [steps(3, 9, 4)]),
    "dyt": ("dyt", {}, dyt, lambda: draw((2, 7, 33), 1, 33, 33)),
    "dyt without beta": ("dyt", dict(beta=None), dyt, lambda: draw((7, 5), 1, 5)),
    "poly_norm": ("poly_norm", {}, poly_norm, lambda: draw((2, 7, 33), 3, ())),
    "poly_norm with a large eps": (
        "poly_norm", dict(eps=0.1), lambda *t: poly_norm(*t, 0.1), lambda: draw((7, 6), 3, 1)
    ),
    "group_norm": (
        "group_norm", dict(num_channels=6, num_groups=3, eps=1e-5), lambda *t: group_norm(*t, 3, 1e-5),
        lambda: draw((2, 6, 11), 6, 6),
    ),
    "group_norm of images": (
        "group_norm", dict(num_channels=4, num_groups=1, eps=1e-2), lambda *t: group_norm(*t, 1, 1e-2),
        lambda: draw((2, 4, 3, 5), 4, 4),
    ),
    "modulated_rms_norm by token": (
        "modulated_rms_norm", dict(eps=1e-5, offset=1.0, casting_mode="gemma"), lambda *t: modulated(*t, 1e-5, 1.0),
        lambda: draw((2, 7, 33), 33, (2, 7, 33), (2, 7, 33)),
    ),
    "modulated_rms_norm by sequence": (
        "modulated_rms_norm", {},
        lambda x, w, scale, shift: modulated(x, w, scale.unsqueeze(1), shift.unsqueeze(1), 1e-6, 0.0),
        lambda: draw((3, 5, 8), 8, (3, 8), (3, 8)),
    ),
    "modulated_rms_norm of all": (
        "modulated_rms_norm", dict(W=None, shift=None, casting_mode="none"),
        lambda x, scale: modulated(x, None, scale, None, 1e-6, 0.0), lambda: draw((3, 5, 8), (1, 8)),
    ),
    "multi_token_attention": (
        "multi_token_attention", dict(padding=1), lambda *t: multi_token(*t, padding=1),
        lambda: draw((2, 4, 9, 9), (6, 4, 3, 3), 6),
    ),
    "multi_token_attention by group": (
        "multi_token_attention", dict(bias=None, **OF_GROUPS),
        lambda *t: multi_token(*t, None, **OF_GROUPS), lambda: draw((2, 4, 7, 7), (4, 2, 3, 3)),
    ),
    "sparse multi_token_attention": (
        "multi_token_attention", dict(sparse=True, padding=1), lambda *t: multi_token(*t, sparse=True, padding=1),
        lambda: [steps(2, 2, 8, 8), *draw((2, 2, 3, 3), 2)],
    ),
    "neighborhood_attention": (
        "fused_neighborhood_attention", dict(kernel_size=5), lambda *t: neighborhood(*t, 5, 1, 8**-0.5),
        lambda: draw(*[(2, 3, 13, 8)] * 3),
    ),
    "dilated neighborhood_attention": (
        "fused_neighborhood_attention", dict(kernel_size=3, dilation=3, scale=0.5),
        lambda *t: neighborhood(*t, 3, 3, 0.5), lambda: draw(*[(1, 2, 10, 5)] * 3),
    ),
    "attn_res": ("attn_res", {}, attn_res, lambda: draw((5, 2, 3, 17), 17, 17)),
    "attn_res of one block": (
        "attn_res", dict(eps=0.1), lambda *t: attn_res(*t, 0.1), lambda: draw((1, 6, 8), 8, 8)
    ),
    "mhc_coeffs": (
        "mhc_coeffs", dict(allow_fp32=True, tmax=4), lambda *t: mhc_coeffs(*t, tmax=4),
        lambda: draw((2, 4, H, C), (H * C, M), M, (), (), ()),
    ),
    "mhc_coeffs with options": (
        "mhc_coeffs", dict(allow_fp32=True, tmax=1, rms_eps=0.1, pre_eps=0.2, sinkhorn_eps=0.01, post_mult=3.0),
        lambda *t: mhc_coeffs(*t, 1, 0.1, 0.2, 0.01, 3.0), lambda: draw((4, H, C), (H * C, M), M, 1, 1, 1),
    ),
    "mhc_pre": ("mhc_pre", {}, mhc_pre, lambda: draw((2, 4, H, C), (2, 4, H))),
    "mhc_post_res": (
        "mhc_post_res", {}, mhc_post_res, lambda: draw((2, 4, H, C), (2, 4, C), (2, 4, H), (2, 4, H, H)),
    ),
}  # fmt: skip
# Parameters that stand in the middle of the arguments, by the option that replaces one of them.
POSITIONS = {"W": 1, "shift": 3, "bias": 2, "beta": 3}


def of(name):
    """Ours, the formula and the inputs as leaves."""
    from liger_kernel.transformers import functional

    stem, options, formula, inputs = CALLS[name]
    function = getattr(functional, f"liger_{stem}")

    def ours(*tensors):
        arguments = list(tensors)
        for option in sorted(options.keys() & POSITIONS, key=POSITIONS.get):
            arguments.insert(POSITIONS[option], options[option])
        return function(*arguments, **{k: v for k, v in options.items() if k not in POSITIONS})

    return ours, formula, [t.requires_grad_() for t in inputs()]


def cast(tensors, dtype):
    return [t.detach().to(dtype).requires_grad_() for t in tensors]


def upstream(function, tensors):
    out = function(*tensors)
    return [torch.randn_like(o) for o in (out if isinstance(out, tuple) else (out,))]


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients(name):
    """The error is that of fp32. In fp64, nothing is computed in fp32."""
    ours, formula, inputs = of(name)
    grads_out = upstream(ours, inputs)

    def results(*tensors):
        upstream = [g.to(tensors[0].dtype) for g in grads_out]
        return {str(i): t for i, t in enumerate(gradients(formula, tensors, upstream))}

    found, outs = gradients(ours, inputs, grads_out), len(grads_out)
    scale = max(float(g.abs().max()) for g in grads_out) * max(float(t.detach().abs().max()) for t in inputs)
    assert_as_the_formula(
        [(str(i), t) for i, t in enumerate(found)], results, inputs,
        scales={str(i): scale for i in range(outs, len(found))},
    )  # fmt: skip
    exact = cast(inputs, torch.float64)
    torch.testing.assert_close(gradients(ours, exact, [g.double() for g in grads_out]), [*results(*exact).values()])


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_16_bit_tensors_are_computed_in_fp32(name, dtype):
    """Results and gradients are those of fp32, rounded once."""
    ours, _, inputs = of(name)
    inputs = cast(inputs, dtype)
    grads_out = upstream(ours, inputs)
    expected = gradients(ours, cast(inputs, torch.float32), [g.float() for g in grads_out])
    found = gradients(ours, inputs, grads_out)
    of_results = torch.float32 if name.startswith("mhc_coeffs") else dtype
    assert [t.dtype for t in found] == [of_results] * len(grads_out) + [dtype] * len(inputs)
    assert equal(found, [e.to(t.dtype) for e, t in zip(expected, found)])


@pytest.mark.parametrize("name", CALLS)
def test_strides_and_inputs_that_stay(name):
    ours, _, inputs = of(name)
    strided = [t.detach().mT.contiguous().mT if t.dim() > 1 else t.detach().repeat_interleave(2)[::2].view(t.shape)
               for t in inputs]  # fmt: skip
    strided = [t.requires_grad_() for t in strided]
    grads_out = upstream(ours, inputs)
    check_results(gradients(ours, strided, grads_out), ours, inputs, grads_out)
    check_reads_only(ours, strided, grads_out)


# Rows along dimension 0 or 1 of so many tensors may vary in number.
OF_ROWS = {name: (0, 1) for name in ("softmax", "sparsemax", "dyt", "poly_norm")}
OF_ROWS |= {"mhc_pre": (0, 2), "attn_res of one block": (1, 1)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [n for n in CALLS if not re.search(" without | along | large | one column|dilated", n)]
)
def test_compiles_to_one_graph(name):
    torch._dynamo.reset()  # the calls share a code object, whose graphs are limited in number
    ours, _, inputs = of(name)
    calls = [inputs]
    if name in OF_ROWS:
        dim, count = OF_ROWS[name]
        more = [torch.cat([t, t], dim).detach().requires_grad_() for t in inputs[:count]]
        calls.append([*more, *inputs[count:]])
    check_one_graph(ours, [(x, upstream(ours, x)) for x in calls])


@pytest.mark.parametrize("name", ["softmax", "dyt", "poly_norm", "group_norm", "modulated_rms_norm by sequence", "attn_res",
                                  "mhc_coeffs", "mhc_pre", "mhc_post_res"])  # fmt: skip
def test_mixed_dtypes(name):
    """A bf16 input with fp32 weights: the result has the dtype of the input, each gradient that of its tensor."""
    ours, _, inputs = of(name)
    mixed = [inputs[0].detach().bfloat16().requires_grad_(), *inputs[1:]]
    found = gradients(ours, mixed, upstream(ours, mixed))
    assert [t.dtype for t in found[-len(mixed) :]] == [t.dtype for t in mixed]
    expected = torch.float32 if name == "mhc_coeffs" else torch.bfloat16
    assert all(t.dtype == expected for t in found[: -len(mixed)])


@pytest.mark.parametrize("name", ["softmax", "dyt", "poly_norm", "modulated_rms_norm of all", "mhc_pre"])
def test_no_rows(name):
    ours, _, inputs = of(name)
    empty = inputs[0].detach()[:0].requires_grad_()
    rest = [t[:0] if name == "mhc_pre" else t for t in inputs[1:]]
    found = ours(empty, *rest)
    assert found.numel() == 0 and torch.autograd.grad(found.sum(), empty)[0].shape == empty.shape


def test_functions_of_autograd_take_the_arguments_in_order():
    import liger_kernel.ops as ops
    from liger_kernel.functional import softmax as softmax_of_functional
    from liger_kernel.transformers import functional as F

    x, w, b, scale, shift = draw((2, 6, 8), 8, 8, (2, 8), (2, 8))
    scores, kernel = draw((2, 4, 8, 8), (4, 2, 3, 3))
    q, k, v = draw(*[(1, 2, 9, 4)] * 3)
    streams, phi, bias = draw((2, H, C), (H * C, M), M)
    one = torch.ones(())
    h = F.liger_mhc_coeffs(streams, phi, bias, one, one, one, allow_fp32=True, tmax=2, rms_eps=0.1, pre_eps=0.2,
                           sinkhorn_eps=0.3, post_mult=0.4)  # fmt: skip
    for found, expected in (
        (ops.LigerSoftmaxFunction.apply(x), F.liger_softmax(x)),
        (softmax_of_functional(x), F.liger_softmax(x)),
        (ops.LigerSparsemaxFunction.apply(x, 1), F.liger_sparsemax(x, dim=1)),
        (ops.LigerDyTFunction.apply(x, one, w, b), F.liger_dyt(x, one, w, b)),
        (ops.LigerPolyNormFunction.apply(x, w[:3], one, 0.1, True), F.liger_poly_norm(x, w[:3], one, eps=0.1)),
        (ops.LigerGroupNormFunction.apply(x, w[:6], b[:6], 6, 2, 0.1), F.liger_group_norm(x, w[:6], b[:6], 6, 2, 0.1)),
        (
            ops.LigerModulatedRMSNormFunction.apply(x, w, scale, shift, 0.1, 1.0, "gemma", True),
            F.liger_modulated_rms_norm(x, w, scale, shift, eps=0.1, offset=1.0, casting_mode="gemma"),
        ),
        (
            ops.LigerMultiTokenAttentionFunction.apply(scores, kernel, b[:4], 1, 2, 2, 2, True),
            F.liger_multi_token_attention(scores, kernel, b[:4], padding=2, dilation=2, groups=2, sparse=True),
        ),
        (
            ops.LigerFusedNeighborhoodAttentionFunction.apply(q, k, v, 3, 2, 0.3),
            F.liger_fused_neighborhood_attention(q, k, v, kernel_size=3, dilation=2, scale=0.3),
        ),
        (ops.LigerAttnResFunction.apply(x, w, b, 0.1), F.liger_attn_res(x, w, b, eps=0.1)),
        (F.liger_attn_res(list(x), w, b, eps=0.1), F.liger_attn_res(x, w, b, eps=0.1)),
        (ops.LigerMHCCoeffsFunction.apply(streams, phi, bias, one, one, one, True, 2, 0.1, 0.2, 0.3, 0.4), h),
        (ops.LigerMHCPreFunction.apply(streams, h[0]), F.liger_mhc_pre(streams, h[0])),
        (ops.LigerMHCPostResFunction.apply(streams, x[:, 0, :C], *h[1:]),
         F.liger_mhc_post_res(streams, x[:, 0, :C], *h[1:])),
        (F.liger_mhc_apply(streams, x[:, 0, :C], *h, return_x_in=True),
         (F.liger_mhc_post_res(streams, x[:, 0, :C], *h[1:]), F.liger_mhc_pre(streams, h[0]))),
    ):  # fmt: skip
        assert repr(found) == repr(expected)


# ---- Edges


def test_values_at_the_edges():
    from liger_kernel.transformers.functional import liger_poly_norm, liger_softmax, liger_sparsemax

    # Far from 0 the sums would lose the digits of the differences.
    far = torch.tensor([1e6, 1e6 + 0.5, 0.0])
    assert torch.equal(liger_sparsemax(far), torch.tensor([0.25, 0.75, 0.0]))
    assert torch.equal(liger_sparsemax(torch.tensor([2.0, -math.inf, 2.0])), torch.tensor([0.5, 0.0, 0.5]))
    assert torch.equal(liger_sparsemax(torch.zeros(2, 4)), torch.full((2, 4), 0.25))
    assert liger_sparsemax(torch.tensor([1.0, math.nan])).isnan().all()
    # The cube of 60 overflows in fp16.
    large, weight, bias = (
        torch.full((1, 4), 60.0).half(),
        torch.tensor([1.0, 2.0, 3.0]).half(),
        torch.tensor(4.0).half(),
    )
    assert torch.equal(liger_poly_norm(large, weight, bias), torch.full((1, 4), 10.0).half())
    assert torch.equal(liger_softmax(torch.tensor([6e4, 6e4]).half()), torch.tensor([0.5, 0.5]).half())


def test_wrong_arguments():
    from liger_kernel.transformers import LigerMHC
    from liger_kernel.transformers import functional as F
    from liger_kernel.transformers.fused_neighborhood_attention import LigerFusedNeighborhoodAttention
    from liger_kernel.transformers.group_norm import LigerGroupNorm

    x, one = torch.randn(2, 6, 8), torch.ones(())
    for error, words, call in (
        (AssertionError, "num_channels=5", lambda: F.liger_group_norm(x, one, one, 5, 5, 1e-5)),
        (AssertionError, "num_groups=4", lambda: F.liger_group_norm(x, one, one, 6, 4, 1e-5)),
        (AssertionError, "must be a multiple", lambda: LigerGroupNorm(6, 4)),
        (AssertionError, "at least 3", lambda: LigerGroupNorm(6, 3)(torch.randn(2, 6))),
        (AssertionError, "init_fn", lambda: LigerGroupNorm(6, 3, init_fn="random")),
        (AssertionError, "divides 12", lambda: F.liger_modulated_rms_norm(x, None, torch.randn(5, 8))),
        (AssertionError, "scale", lambda: F.liger_modulated_rms_norm(x, None, torch.randn(4))),
        (AssertionError, "as many", lambda: F.liger_modulated_rms_norm(x, None, x, x[0])),
        (ValueError, r"\(B, C, L, L\)", lambda: F.liger_multi_token_attention(x[None], x)),
        (AssertionError, "allow_fp32", lambda: F.liger_mhc_coeffs(x, x, one, one, one, one)),
        (AssertionError, "phi must", lambda: F.liger_mhc_coeffs(x, x, one, one, one, one, allow_fp32=True)),
        (ValueError, "must have shape", lambda: LigerMHC(nn.Linear(8, 8), hc=5, c=8)(x)),
        (ValueError, "divisible", lambda: LigerFusedNeighborhoodAttention(8, 3)),
        (ValueError, "odd", lambda: LigerFusedNeighborhoodAttention(8, 2, kernel_size=4)),
        (ValueError, "kernel_size .* positive", lambda: LigerFusedNeighborhoodAttention(8, 2, kernel_size=0)),
        (ValueError, "dilation .* positive", lambda: LigerFusedNeighborhoodAttention(8, 2, dilation=0)),
        (NotImplementedError, "attention_mask", lambda: LigerFusedNeighborhoodAttention(8, 2)(x, x)),
    ):
        with pytest.raises(error, match=words):
            call()


# ---- Modules


def test_modules():
    from liger_kernel.transformers import (
        LigerDyT,
        LigerModulatedRMSNorm,
        LigerMultiTokenAttention,
        LigerPolyNorm,
        LigerSoftmax,
        LigerSparsemax,
    )
    from liger_kernel.transformers import functional as F
    from liger_kernel.transformers.group_norm import LigerGroupNorm

    x, scale = draw((2, 6, 8), (2, 8))
    scores = torch.randn(2, 4, 8, 8)
    for module, arguments, shapes, call in (
        (LigerSoftmax(), (x,), {}, F.liger_softmax),
        (LigerSparsemax(1), (x,), {}, lambda x: F.liger_sparsemax(x, 1)),
        (LigerDyT(8), (x,), dict(alpha=(1,), gamma=(8,), beta=(8,)), F.liger_dyt),
        (LigerPolyNorm(0.1), (x,), dict(weight=(3,), bias=()), lambda *t: F.liger_poly_norm(*t, 0.1)),
        (LigerGroupNorm(6, 3, 0.1, bias=True), (x,), dict(weight=(6,), bias=(6,)),
         lambda *t: F.liger_group_norm(*t, 6, 3, 0.1)),
        (LigerModulatedRMSNorm(8, 0.1, 1.0, "gemma"), (x, scale, scale + 1), dict(weight=(8,)),
         lambda x, scale, shift, w: F.liger_modulated_rms_norm(x, w, scale, shift, 0.1, 1.0, "gemma")),
        (LigerMultiTokenAttention(4, 6, 3, padding=1, groups=2, sparse=True), (scores,),
         dict(weight=(6, 2, 3, 3), bias=(6,)),
         lambda *t: F.liger_multi_token_attention(*t, padding=1, groups=2, sparse=True)),
    ):  # fmt: skip
        parameters = dict(module.named_parameters())
        assert {name: tuple(p.shape) for name, p in parameters.items()} == shapes
        for p in parameters.values():
            p.data.normal_()
        assert torch.equal(module(*arguments), call(*arguments, *parameters.values()))
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        assert torch.equal(compiled(*arguments), module(*arguments))
        assert repr(module).startswith(f"{type(module).__name__}(")
    assert LigerDyT(8, beta=False, init_alpha=0.25).alpha.item() == 0.25 and LigerDyT(8, beta=False).beta is None
    assert torch.equal(LigerPolyNorm().weight, torch.full((3,), 1 / 3)) and LigerPolyNorm().bias == 1
    assert LigerModulatedRMSNorm(8, elementwise_affine=False).weight is None
    assert not LigerGroupNorm(6, 3).bias.any() and LigerGroupNorm(6, 3, init_fn="zeros").weight.sum() == 0
    assert not LigerMultiTokenAttention(4, 4, 3).bias.any()


def test_neighborhood_attention_layers():
    from liger_kernel.transformers import functional as F
    from liger_kernel.transformers.fused_neighborhood_attention import (
        LigerFusedNeighborhoodAttention,
        LigerFusedNeighborhoodAttentionConfig,
        LigerFusedNeighborhoodAttentionLayer,
    )

    x, config = torch.randn(2, 9, 8), LigerFusedNeighborhoodAttentionConfig(8, 2, kernel_size=3, dilation=2)
    layer = LigerFusedNeighborhoodAttentionLayer(**config.to_dict())
    inner = layer.attention
    normed, projections = layer.layer_norm(x), (inner.q_proj, inner.k_proj, inner.v_proj)
    heads = [projection(normed).view(2, 9, 2, 4).transpose(1, 2) for projection in projections]
    attended = F.liger_fused_neighborhood_attention(*heads, 3, 2).transpose(1, 2).reshape(2, 9, 8)
    torch.testing.assert_close(layer(x), x + inner.out_proj(attended))
    assert len(layer.state_dict()) == 10
    dropping = LigerFusedNeighborhoodAttention(8, 2, dropout=1.0, bias=False)
    assert not dropping(x).any() and dropping.eval()(x).any() and dropping.q_proj.bias is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_hyper_connections_around_a_layer(dtype):
    from liger_kernel.transformers import LigerMHC
    from liger_kernel.transformers.functional import liger_mhc_forward

    layer = nn.Linear(C, C, bias=False)
    module = LigerMHC(layer, hc=H, c=C, tmax=3, phi_dtype=dtype, allow_fp32=dtype is torch.float32)
    assert {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)} == {
        "phi": (H * C, M), "b": (M,), "alpha_pre": (), "alpha_post": (), "alpha_res": (),
    }  # fmt: skip
    assert module.phi.dtype == dtype and module.b.dtype == torch.float32
    parameters = [*dict(module.named_parameters(recurse=False)).values(), layer.weight]
    x = torch.randn(2, 4, H, C).to(dtype).requires_grad_()

    def formula(x, phi, b, pre, post, res, weight):
        h_pre, h_post, h_res = (t.to(x.dtype) for t in mhc_coeffs(x, phi, b, pre, post, res, tmax=3))
        f_out = TF.linear(mhc_pre(x, h_pre).to(weight.dtype), weight)
        return mhc_post_res(x, f_out.to(x.dtype), h_post, h_res)

    def ours(x, *_):
        return module(x)

    inputs, grads_out = [x, *parameters], [torch.randn(2, 4, H, C).to(dtype)]
    exact = gradients(formula, [like(t, torch.float64) for t in inputs], grads_out)
    # Between the layer and the streams, values have the dtype of x, so gradients in fp32 have its roundings too.
    bounds = roundings(formula, inputs, grads_out, exact, dtype)
    eager = gradients(formula, [like(t) for t in inputs], grads_out)
    for i, (a, b, truth) in enumerate(zip(gradients(ours, inputs, grads_out), eager, exact, strict=True)):
        assert_no_worse(f"result {i}", a, b, truth, scale=1.0 if i else 0.0, bounds=(bounds, i))
    assert torch.equal(torch.compile(module, fullgraph=True, backend="eager")(x), module(x))
    out, coefficients = liger_mhc_forward(x, layer, *parameters[:-1], allow_fp32=True, tmax=3, return_coeffs=True)
    assert torch.equal(out, module(x)) and [t.shape[-1] for t in coefficients] == [H, H, H]
    row_sums = torch.stack([coefficients[2].sum(-1), coefficients[2].sum(-2)])
    assert float((row_sums.detach() - 1).abs().max()) < 0.1
    with pytest.warns(UserWarning, match="at most 16"):
        LigerMHC(nn.Identity(), hc=17, c=1)
