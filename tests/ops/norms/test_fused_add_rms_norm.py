"""fused_add_rms_norm: its second result, and gradients that meet. test_norms.py has what all norms do, test_rms_norm.py
the options."""

import pytest
import torch

from liger_ops import functional
from tests.support.checks import CPU_DTYPES, check_op, equal, path_taken
from tests.support.families import norms
from tests.support.families.norms import make
from tests.support.pairs import sizes_by_device

NAME = "fused_add_rms_norm"
fused, reference = torch.ops.liger.fused_add_rms_norm, functional.fused_add_rms_norm.reference


@sizes_by_device(cpu=[7, 4096], cuda=[7, 64, 130, 4096, 40_001], dtype=CPU_DTYPES, requires_grad=[True, False])
def test_s_equals_torchs_addition(n, dtype, requires_grad, device):
    x, residual, weight = (t.detach().requires_grad_(requires_grad) for t in make(NAME, (5, n), dtype, device)[0])
    with torch.no_grad():
        x[0, 0], x[1, 0] = float("nan"), float("inf")
    with path_taken(device):
        _, s = fused(x, residual, weight)
    torch.testing.assert_close(s, x + residual, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("used", ["y", "s"])
@pytest.mark.parametrize("with_weight", [True, False])
def test_one_output_unused(used, with_weight, device):
    (x, residual, weight), grads = make(NAME, (6, 160), torch.float32, device)
    # If y is unused, the weight has no gradient, as in eager (tested below).
    inputs, which = [x, residual, weight.requires_grad_(used == "y") if with_weight else None], "ys".index(used)
    check_op(lambda *a: fused(*a)[which], lambda *a: reference(*a)[which], inputs, grads[which:], device)


def test_s_requires_grad_only_if_an_addend_does(device):
    x, residual, weight = make(NAME, (6, 160), torch.float32, device)[0]
    y, s = fused(x.detach(), residual.detach(), weight)
    assert y.requires_grad and not s.requires_grad


def test_the_weight_has_no_gradient_if_y_is_unused(device):
    inputs, (_, ds) = make(NAME, (6, 160), torch.float32, device)
    dx, dresidual, dweight = torch.autograd.grad(fused(*inputs)[1], inputs, ds, allow_unused=True)
    assert torch.equal(dx, ds) and torch.equal(dresidual, ds) and dweight is None


def test_both_outputs_receive_the_same_gradient(device):
    """The backward of y + s passes the same gradient tensor to both."""
    inputs, grads = make(NAME, (6, 160), torch.float32, device)
    check_op(lambda *a: sum(fused(*a)), lambda *a: sum(reference(*a)), inputs, grads[:1], device)


def test_a_chain_of_residuals(device):
    """As in a model, s is also the residual of the next norm, so its gradient has two sources."""
    inputs, grads = make(NAME, (6, 160), torch.bfloat16, device)

    def chain(op):
        def run(x, residual, weight):
            y, s = op(x, residual, weight)
            y, s = op(y.sin(), s, weight)
            return op(y.cos(), s, weight)

        return run

    check_op(chain(fused), chain(reference), inputs, grads, device)


def test_x_as_its_own_residual(device):
    (x, _, weight), grads = make(NAME, (4, 64), torch.float32, device)
    check_op(lambda x, w: fused(x, x, w), lambda x, w: reference(x, x, w), [x, weight], grads, device)


def test_a_gradient_of_s_alone_is_passed_through(device):
    """It is returned unchanged: it remains the caller's tensor and stays differentiable."""
    x, residual, other = (torch.randn(4, 64, device=device, requires_grad=True) for _ in range(3))
    s, given = fused(x, residual)[1], torch.ones(4, 64, device=device)
    s.backward(given, create_graph=True)
    assert not given.requires_grad
    s = fused(x, residual)[1]
    of_x, of_other = torch.autograd.grad((s + other).square().sum(), [x, other], create_graph=True)
    second = torch.autograd.grad(of_x.sum() + of_other.sum(), [x, other])
    assert all(torch.equal(t, torch.full_like(t, 4)) for t in second)


def test_autocast_on_cpu_adds_in_the_wider_dtype():
    x, residual, weight = torch.randn(4, 64).bfloat16(), torch.randn(4, 64), torch.randn(64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y, s = fused(x, residual, weight)
        assert s.dtype == (x + residual).dtype == y.dtype == torch.float32
        assert all(t.dtype == torch.bfloat16 for t in fused(x, x, weight))
    assert equal([y, s], fused(x.float(), residual, weight.float()))


def noise(name, x, residual, weight, eps, offset, **_):
    return tuple(norms.noise(2, [x, residual], x + residual, weight, eps, offset=offset))
