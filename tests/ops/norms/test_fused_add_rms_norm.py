"""fused_add_rms_norm: torch.ops.liger.fused_add_rms_norm against addition and RMSNorm in fp64."""

import normalization
import pytest
import torch
from checks import (
    CPU_DTYPES,
    LAYOUTS,
    ROWS_AND_PARAMETERS,
    assert_no_worse,
    check_op,
    equal,
    more_rows_than_any_limit,
    path_taken,
    sizes_around_tiles,
)
from normalization import rms_norm as normalise
from pairs import either_or_both, pairwise, sizes_by_device
from torch import Tensor

fused = torch.ops.liger.fused_add_rms_norm


def reference(x: Tensor, residual: Tensor, weight: Tensor | None = None, *options, **named):
    s = x + residual
    return normalise(s, weight, *options, **named), s


def make(shape, dtype, device, weight_dtype=None, needs_grad=(True, True, True), with_weight=True):
    torch.manual_seed(0)  # compared rounding errors must not depend on which tests ran before
    x, residual = (torch.randn(shape, dtype=dtype, device=device).requires_grad_(needed) for needed in needs_grad[:2])
    weight = torch.randn(shape[-1], dtype=weight_dtype or dtype, device=device).requires_grad_(needs_grad[2])
    grads = [torch.randn(shape, dtype=dtype, device=device) for _ in range(2)]
    return [x, residual, weight if with_weight else None], grads


# Both sides of every tile boundary, model widths, and widths that only unaligned configs serve.
SIZES = sorted({1, 7, 33, 72, 130, 576, 1000, 3584, 11008, 40001, *sizes_around_tiles("rms_norm_fwd", "rms_norm_bwd")})


@sizes_by_device(cpu=[1, 7, 130, 1000, 11008], cuda=SIZES, dtype=CPU_DTYPES)
def test_sizes(n, dtype, device):
    (x, residual, weight), grads = make((5, n), dtype, device)
    size = normalization.terms((x + residual).detach(), weight, 1e-6) * float(grads[0].abs().max())
    check_op(fused, reference, [x, residual, weight], grads, device, size)


@pytest.mark.gpu
@pytest.mark.parametrize("n", sizes_around_tiles("rms_norm_fwd", "rms_norm_bwd"))
@pytest.mark.parametrize("dtype,parameter_dtype", ROWS_AND_PARAMETERS, ids=str)
def test_many_rows(n, dtype, parameter_dtype):
    """The other tests have few rows, for which there are separate configs."""
    rows = more_rows_than_any_limit("rms_norm_fwd", "rms_norm_bwd")
    inputs, grads = make((rows, n), dtype, "cuda", parameter_dtype)
    check_op(fused, reference, inputs, grads, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [100_000, 262_144])
def test_rows_wider_than_the_register_file(n):
    inputs, grads = make((3, n), torch.bfloat16, "cuda")
    check_op(fused, reference, inputs, grads, "cuda")


@sizes_by_device(cpu=[7, 4096], cuda=[7, 64, 130, 4096, 40_001], dtype=CPU_DTYPES, requires_grad=[True, False])
def test_s_equals_torchs_addition(n, dtype, requires_grad, device):
    (x, residual, weight), _ = make((5, n), dtype, device, needs_grad=(requires_grad,) * 3)
    with path_taken(device):
        _, s = fused(x, residual, weight)
    assert torch.equal(s, x + residual)


@pairwise(
    casting_mode=["llama", "gemma", "none"],
    offset=[0.0, 1.0],
    weight_dtype=[None, torch.float32],
    dtype=CPU_DTYPES,
    eps=[1e-6, 1e-2],
)
def test_options(dtype, weight_dtype, offset, casting_mode, eps, device):
    inputs, grads = make((3, 4, 96), dtype, device, weight_dtype)
    options = dict(eps=eps, offset=offset, casting_mode=casting_mode)
    check_op(lambda *a: fused(*a, **options), lambda *a: reference(*a, **options), inputs, grads, device)


@pairwise(
    needs_x=[True, False],
    needs_residual=[True, False],
    needs_weight=[True, False],
    with_weight=[True, False],
    n=[160, 131],
)
def test_only_required_gradients(needs_x, needs_residual, needs_weight, with_weight, n, device):
    inputs, grads = make((6, n), torch.float32, device, None, (needs_x, needs_residual, needs_weight), with_weight)
    check_op(fused, reference, inputs, grads, device)


@pytest.mark.parametrize("used", ["y", "s"])
@pytest.mark.parametrize("with_weight", [True, False])
def test_one_output_unused(used, with_weight, device):
    # If y is unused, the weight has no gradient, as in eager (tested below).
    inputs, grads = make((6, 160), torch.float32, device, needs_grad=(True, True, used == "y"), with_weight=with_weight)
    which = "ys".index(used)
    check_op(lambda *a: fused(*a)[which], lambda *a: reference(*a)[which], inputs, grads[which:], device)


def test_s_requires_grad_only_if_an_addend_does(device):
    inputs, _ = make((6, 160), torch.float32, device, needs_grad=(False, False, True))
    y, s = fused(*inputs)
    assert y.requires_grad and not s.requires_grad


def test_the_weight_has_no_gradient_if_y_is_unused(device):
    inputs, (_, ds) = make((6, 160), torch.float32, device)
    dx, dresidual, dweight = torch.autograd.grad(fused(*inputs)[1], inputs, ds, allow_unused=True)
    assert torch.equal(dx, ds) and torch.equal(dresidual, ds) and dweight is None


def test_both_outputs_receive_the_same_gradient(device):
    """The backward of y + s passes the same gradient tensor to both."""
    inputs, grads = make((6, 160), torch.float32, device)
    check_op(lambda *a: sum(fused(*a)), lambda *a: sum(reference(*a)), inputs, grads[:1], device)


def test_a_chain_of_residuals(device):
    """As in a model, s is also the residual of the next norm, so its gradient has two sources."""
    inputs, grads = make((6, 160), torch.bfloat16, device)

    def chain(op):
        def run(x, residual, weight):
            y, s = op(x, residual, weight)
            y, s = op(y.sin(), s, weight)
            return op(y.cos(), s, weight)

        return run

    check_op(chain(fused), chain(reference), inputs, grads, device)


@pytest.mark.parametrize("layout, residual_layout", either_or_both(LAYOUTS))
def test_layouts_of_the_inputs(layout, residual_layout, device):
    (x, residual, weight), grads = make((3, 2, 5, 64), torch.bfloat16, device)
    if layout != "contiguous":
        x = LAYOUTS[layout](x.detach()).requires_grad_()
    if residual_layout != "contiguous":
        residual = LAYOUTS[residual_layout](residual.detach()).requires_grad_()
    check_op(fused, reference, [x, residual, weight], grads, device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", ["contiguous", "transposed heads"])
def test_layouts_of_the_gradients(layout, x_layout, device):
    (x, residual, weight), grads = make((3, 2, 5, 64), torch.bfloat16, device)
    if x_layout != "contiguous":
        x = LAYOUTS[x_layout](x.detach()).requires_grad_()
    for which in (0, 1):
        changed = [LAYOUTS[layout](g) if i == which else g for i, g in enumerate(grads)]
        check_op(fused, reference, [x, residual, weight], changed, device)


def test_dense_strides_are_preserved(device):
    x, residual = (torch.randn(2, 6, 4, 64, device=device).transpose(1, 2) for _ in range(2))
    y, s = fused(x, residual)
    assert y.stride() == s.stride() == x.stride()


def test_nan_and_infinity_propagate(device):
    x, residual = torch.randn(3, 64, device=device), torch.randn(3, 64, device=device)
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    y, s = fused(x, residual, torch.ones(64, device=device))
    assert y[0].isnan().all() and y[1, 7].isnan() and (y[1, :7] == 0).all() and y[2].isfinite().all()
    assert torch.equal(s.nan_to_num(), (x + residual).nan_to_num())


def test_x_as_its_own_residual(device):
    (x, _, weight), grads = make((4, 64), torch.float32, device)
    check_op(lambda x, w: fused(x, x, w), lambda x, w: reference(x, x, w), [x, weight], grads, device)


@pytest.mark.parametrize("offset", [0.0, 0.5])
@pytest.mark.parametrize("with_weight", [True, False])
def test_gradcheck(offset, with_weight):
    inputs, _ = make((3, 5), torch.float64, "cpu", with_weight=with_weight)
    wanted = [t for t in inputs if t is not None]
    assert torch.autograd.gradcheck(lambda x, residual, w=None: fused(x, residual, w, 1e-5, offset), wanted)


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


@pytest.mark.gpu
def test_autocast_follows_rms_norm():
    (x, residual, weight), _ = make((4, 64), torch.bfloat16, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y, s = fused(x, residual, weight)
        expected = torch.ops.liger.rms_norm(x, weight)
    assert y.dtype == s.dtype == expected.dtype


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    n = 4096
    x = torch.randn(2**31 // n + 5, n, device="cuda", dtype=torch.bfloat16)
    residual, weight = torch.randn_like(x), torch.randn(n, device="cuda", dtype=torch.bfloat16)
    y, s = fused(x, residual, weight)
    tail = [x[-7:], residual[-7:], weight]
    assert torch.equal(s[-7:], x[-7:] + residual[-7:])
    assert_no_worse("tail", y[-7:], reference(*tail)[0], reference(*(t.double() for t in tail))[0])


ones = torch.ones
ERRORS = {
    "integer x": (lambda: [ones(2, 8, dtype=torch.long)] * 2, {}, "x must be float32, float16, bfloat16 or float64"),
    "scalar x": (lambda: [torch.tensor(1.0)] * 2, {}, "x must have at least one dimension"),
    "sparse x": (lambda: (torch.eye(8).to_sparse(), torch.eye(8)), {}, "x must be a dense, unquantized tensor"),
    "sparse residual": (
        lambda: (torch.eye(8), torch.eye(8).to_sparse()),
        {},
        "residual must be a dense, unquantized tensor",
    ),
    "sparse weight": (
        lambda: (ones(2, 8), ones(2, 8), ones(8).to_sparse()),
        {},
        "weight must be a dense, unquantized tensor",
    ),
    "residual of another shape": (lambda: (ones(2, 8), ones(8)), {}, r"residual must have the shape of x, \[2, 8\]"),
    "residual of another dtype": (
        lambda: (ones(2, 8), ones(2, 8).half()),
        {},
        "residual must have the dtype of x, Float",
    ),
    "residual elsewhere": (lambda: (ones(2, 8), ones(2, 8, device="meta")), {}, "residual must be on cpu like x"),
    "weight of another length": (lambda: (ones(2, 8), ones(2, 8), ones(7)), {}, r"weight must have shape \[8\]"),
    "narrow weight": (
        lambda: (ones(2, 8), ones(2, 8), ones(8).half()),
        {},
        "weight must be float32 or have the dtype of x",
    ),
    "weight elsewhere": (lambda: (ones(2, 8), ones(2, 8), ones(8, device="meta")), {}, "weight must be on cpu like x"),
    "negative eps": (lambda: (ones(2, 8), ones(2, 8), None, -1.0), {}, "eps must be finite and not negative"),
    "unknown mode": (
        lambda: [ones(2, 8)] * 2,
        dict(casting_mode="no"),
        "casting_mode must be 'llama', 'gemma' or 'none'",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_errors(case, requires_grad):
    arguments, options, message = ERRORS[case]
    arguments = [
        a.requires_grad_(requires_grad) if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments()
    ]
    with pytest.raises(RuntimeError, match=f"fused_add_rms_norm: {message}.*got "):
        fused(*arguments, **options)


def noise(name, x, residual, weight, eps, offset, casting_mode):
    return tuple(normalization.noise(2, [x, residual], x + residual, weight, eps, offset=offset))
