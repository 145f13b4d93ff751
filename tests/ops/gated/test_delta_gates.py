"""delta_gates against its formula in fp64."""

import importlib
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.checks import CPU_DTYPES, HALF_TYPES, check_op, gradients, path_taken, sizes_around_tiles
from tests.support.pairs import pairwise, sizes_by_device

delta_gates = torch.ops.liger.delta_gates
KERNELS = "delta_gates_fwd", "delta_gates_bwd"


def reference(a, b, a_log, dt_bias=None, lower_bound=None, beta_scale=1.0):
    """As models write it."""
    wide = torch.promote_types(a.dtype, torch.float32)
    u = a.to(wide) if dt_bias is None else a.to(wide) + dt_bias.to(wide)
    rate = a_log.to(wide).exp()
    rate = rate[:, None] if a.dim() > b.dim() else rate
    g = -rate * functional.softplus(u) if lower_bound is None else lower_bound * torch.sigmoid(rate * u)
    return g, torch.sigmoid(b) * beta_scale


def make(shape, dtype, device, channels=None, weight_dtype=None, with_bias=True):
    """shape: of b. channels: of a head, if each has a decay."""
    torch.manual_seed(0)
    of_a = shape if channels is None else (*shape, channels)
    a, b, dbeta = (torch.randn(s, device=device, dtype=dtype) for s in (of_a, shape, shape))
    dg = torch.randn(of_a, device=device, dtype=torch.promote_types(dtype, torch.float32))
    kind = dict(device=device, dtype=weight_dtype or dtype)
    a_log = torch.randn(shape[-1], **kind)
    bias = torch.randn(of_a[len(shape) - 1 :], **kind) if with_bias else None
    return [t if t is None else t.requires_grad_() for t in (4 * a.detach(), b, a_log, bias)], [dg, dbeta]


def check(inputs, grads, device, **options):
    def ours(*t: Tensor):
        return delta_gates(*t, **options)

    check_op(ours, lambda *t: reference(*t, **options), inputs, grads, device)


@sizes_by_device(
    cpu=[1, 7, 32, 130],
    cuda=[1, 7, 32, 72, 1000, *sizes_around_tiles(*KERNELS)],
    dtype=CPU_DTYPES,
    lower_bound=[None, -5.0],
)
def test_sizes(n, dtype, lower_bound, device):
    for shape in ((n,), (3, n), (2, 150, n)):
        check(*make(shape, dtype, device), device, lower_bound=lower_bound)


@pairwise(
    dtype=CPU_DTYPES,
    weight_dtype=[None, torch.float32],
    channels=[None, 1, 5, 64],
    lower_bound=[None, -5.0],
    beta_scale=[1.0, 2.0],
    with_bias=[True, False],
)
def test_options(dtype, weight_dtype, channels, lower_bound, beta_scale, with_bias, device):
    inputs, grads = make((2, 37, 6), dtype, device, channels, weight_dtype, with_bias)
    check(inputs, grads, device, lower_bound=lower_bound, beta_scale=beta_scale)


def test_upstream_of_one_result(device):
    inputs, (dg, dbeta) = make((7, 24), torch.float32, device)
    g, beta = delta_gates(*inputs)
    both = torch.autograd.grad((g, beta), inputs, (dg, dbeta), retain_graph=True)
    of_g = torch.autograd.grad(g, inputs, dg, allow_unused=True, retain_graph=True)
    of_beta = torch.autograd.grad(beta, inputs, dbeta, allow_unused=True)
    assert of_g[1] is None and all(t is None for i, t in enumerate(of_beta) if i != 1)
    assert torch.equal(of_beta[1], both[1]) and all(torch.equal(of_g[i], both[i]) for i in (0, 2, 3))


def test_nan_infinity_and_large_numbers(device):
    """The gradient at large numbers is that of softplus, not NaN."""
    values = torch.tensor([math.nan, -math.inf, math.inf, 0.0, -200.0, 30.0, 89.0, 200.0], device=device)
    inputs = [values[:, None].clone().requires_grad_(), values[:, None].clone(), values.new_zeros(1)]
    grads = [torch.ones_like(values)[:, None]] * 2
    for ours, theirs in zip(gradients(delta_gates, inputs, grads), gradients(reference, inputs, grads)):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_beta_is_rounded_once(dtype, device):
    (a, b, a_log, _), _ = make((64, 32), dtype, device)
    _, beta = delta_gates(a, b, a_log, beta_scale=2.0)
    wanted = (2 * torch.sigmoid(b.double())).to(dtype)
    assert (beta != wanted).double().mean() < 0.01


def test_the_formula_is_that_of_a_model():
    """Kimi's forget gate, whose projections are identities."""
    source = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    heads, channels = 3, 8
    config = type("Config", (), dict(linear_head_dim=channels, linear_num_heads=heads, hidden_size=heads * channels))
    gate = source.KimiLinearForgetGate(config)
    gate.f_a_proj = gate.f_b_proj = torch.nn.Identity()
    (a, b, a_log, bias), _ = make((2, 9, heads), torch.float32, "cpu", channels)
    gate.A_log.data.copy_(a_log.detach().view(1, 1, heads, 1))
    gate.dt_bias.data.copy_(bias.detach().flatten())
    torch.testing.assert_close(reference(a, b, a_log, bias)[0], gate(a.flatten(-2)))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    heads, channels = 64, 128
    rows = 2**31 // (heads * channels) + 5
    a = torch.randn(rows, heads, channels, device="cuda", dtype=torch.bfloat16)
    b, a_log = torch.randn(rows, heads, device="cuda", dtype=torch.bfloat16), torch.randn(heads, device="cuda")
    with path_taken("cuda"):
        g, beta = delta_gates(a, b, a_log)
    tail, _ = delta_gates(a[-7:].clone(), b[-7:].clone(), a_log)
    assert torch.equal(g[-7:], tail)


A, H = torch.ones(2, 8), torch.ones(8)
ERRORS = {
    "b of another shape": ((A, A[:1], H), "b must have the shape of a.*or that without its last dimension"),
    "b without two dimensions": ((A[None], H[:1], H), "b must have the shape of a.*or that without its last"),
    "dt_bias of another shape": ((A[..., None], A, H, H), r"dt_bias must have shape \[8, 1\]"),
}


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.library
def test_errors(case):
    arguments, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"delta_gates: {message}.*got "):
        delta_gates(*arguments)
