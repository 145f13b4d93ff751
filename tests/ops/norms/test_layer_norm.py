"""layer_norm: torch.ops.liger.layer_norm against torch.nn.functional.layer_norm in fp64."""

import normalization
import pytest
import torch
import torch.nn.functional as F
from checks import (
    CPU_DTYPES,
    LAYOUTS,
    ROWS_AND_PARAMETERS,
    assert_no_worse,
    check_op,
    more_rows_than_any_limit,
    sizes_around_tiles,
)
from pairs import either_or_both, pairwise, sizes_by_device
from torch import Tensor

layer_norm = torch.ops.liger.layer_norm


def reference(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5):
    # F.layer_norm on CPU accepts few combinations of dtypes; this accepts all of them.
    compute = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if p is None else p.to(compute) for p in (weight, bias))
    return F.layer_norm(x.to(compute), x.shape[-1:], weight, bias, eps).to(x.dtype)


def make(shape, dtype, device, parameter_dtype=None, needs_grad=(True, True, True), present=(True, True)):
    torch.manual_seed(0)  # compared rounding errors must not depend on which tests ran before
    x = torch.randn(shape, dtype=dtype, device=device).requires_grad_(needs_grad[0])
    weight, bias = (
        torch.randn(shape[-1], dtype=parameter_dtype or dtype, device=device).requires_grad_(needed)
        for needed in needs_grad[1:]
    )
    inputs = [x, weight if present[0] else None, bias if present[1] else None]
    return inputs, [torch.randn(shape, dtype=dtype, device=device)]


# Both sides of every tile boundary, model widths, and widths that only unaligned configs serve.
SIZES = sorted(
    {1, 7, 33, 72, 130, 768, 1000, 1600, 11008, 40001, *sizes_around_tiles("layer_norm_fwd", "layer_norm_bwd")}
)
PRESENT = {"weight and bias": (True, True), "weight": (True, False), "bias": (False, True), "neither": (False, False)}


@sizes_by_device(cpu=[1, 7, 130, 1000, 11008], cuda=SIZES, dtype=CPU_DTYPES)
def test_sizes(n, dtype, device):
    inputs, grads = make((5, n), dtype, device)
    size = normalization.terms(*inputs[:2], 1e-5, centred=True) * float(grads[0].abs().max())
    check_op(layer_norm, reference, inputs, grads, device, size)


@pytest.mark.gpu
@pytest.mark.parametrize("n", sizes_around_tiles("layer_norm_fwd", "layer_norm_bwd"))
@pytest.mark.parametrize("dtype,parameter_dtype", ROWS_AND_PARAMETERS, ids=str)
def test_many_rows(n, dtype, parameter_dtype):
    """The other tests have few rows, for which there are separate configs."""
    rows = more_rows_than_any_limit("layer_norm_fwd", "layer_norm_bwd")
    inputs, grads = make((rows, n), dtype, "cuda", parameter_dtype)
    check_op(layer_norm, reference, inputs, grads, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [100_000, 262_144])
def test_rows_wider_than_the_register_file(n):
    inputs, grads = make((3, n), torch.bfloat16, "cuda")
    check_op(layer_norm, reference, inputs, grads, "cuda")


@pairwise(present=PRESENT, parameter_dtype=[None, torch.float32], dtype=CPU_DTYPES, eps=[1e-5, 1e-2])
def test_options(dtype, parameter_dtype, present, eps, device):
    inputs, grads = make((3, 4, 96), dtype, device, parameter_dtype, present=PRESENT[present])
    check_op(lambda *a: layer_norm(*a, eps), lambda *a: reference(*a, eps), inputs, grads, device)


@pairwise(present=PRESENT, needs_x=[True, False], needs_weight=[True, False], needs_bias=[True, False], n=[160, 131])
def test_only_required_gradients(needs_x, needs_weight, needs_bias, present, n, device):
    inputs, grads = make((6, n), torch.float32, device, None, (needs_x, needs_weight, needs_bias), PRESENT[present])
    check_op(layer_norm, reference, inputs, grads, device)


@pytest.mark.parametrize("layout, grad_layout", either_or_both(LAYOUTS))
def test_layouts(layout, grad_layout, device):
    (x, weight, bias), (grad,) = make((3, 2, 5, 64), torch.bfloat16, device)
    if layout != "contiguous":
        x = LAYOUTS[layout](x.detach()).requires_grad_()
    if grad_layout != "contiguous":
        grad = LAYOUTS[grad_layout](grad)
    check_op(layer_norm, reference, [x, weight, bias], [grad], device)


def test_parameters_with_strides(device):
    (x, weight, bias), grads = make((4, 64), torch.float32, device)
    weight, bias = (torch.stack([p.detach(), p.detach()], 1)[:, 0].requires_grad_() for p in (weight, bias))
    check_op(layer_norm, reference, [x, weight, bias], grads, device)


def test_dense_strides_are_preserved(device):
    x = torch.randn(2, 6, 4, 64, device=device).transpose(1, 2)
    assert layer_norm(x).stride() == x.stride()


# With a mean of 1e3, computing a variance of 1 from the sum of squares would cancel in fp32. The remaining error is the
# rounding of the mean, in eager too; enough rows make its maximum comparable.
@pytest.mark.parametrize("n", [64, 1000, 4096, 20_000, 40_008])
def test_a_large_mean_causes_no_cancellation(n, device):
    (x, weight, bias), grads = make((64, n), torch.float32, device)
    x = (x.detach() + 1e3).requires_grad_()
    check_op(layer_norm, reference, [x, weight, bias], grads, device)


def test_a_constant_row_becomes_the_bias(device):
    bias = torch.randn(64, device=device)
    y = layer_norm(torch.full((2, 64), 7.0, device=device), torch.ones(64, device=device), bias)
    assert torch.equal(y, bias.expand(2, 64))


def test_nan_and_infinity_propagate(device):
    x = torch.randn(3, 64, device=device)
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    y = layer_norm(x, torch.ones(64, device=device))
    assert y[:2].isnan().all() and y[2].isfinite().all()


@pytest.mark.parametrize("present", PRESENT)
def test_gradcheck(present):
    (x, weight, bias), _ = make((3, 5), torch.float64, "cpu", present=PRESENT[present])
    function = {
        "weight and bias": lambda x, w, b: layer_norm(x, w, b),
        "weight": lambda x, w: layer_norm(x, w),
        "bias": lambda x, b: layer_norm(x, None, b),
        "neither": lambda x: layer_norm(x),
    }[present]
    assert torch.autograd.gradcheck(function, [t for t in (x, weight, bias) if t is not None])


@pytest.mark.gpu
def test_autocast_follows_pytorch():
    (x, weight, bias), _ = make((4, 64), torch.bfloat16, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        ours, theirs = layer_norm(x, weight, bias, 1e-5), F.layer_norm(x, (64,), weight, bias, 1e-5)
    assert ours.dtype == theirs.dtype


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    n = 4096
    x = torch.randn(2**31 // n + 5, n, device="cuda", dtype=torch.bfloat16)
    weight, bias = (torch.randn(n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    y = layer_norm(x, weight, bias)
    tail = x[-7:]
    assert_no_worse(
        "tail", y[-7:], reference(tail, weight, bias), reference(tail.double(), weight.double(), bias.double())
    )


ones = torch.ones
ERRORS = {
    "integer x": (lambda: (ones(2, 8, dtype=torch.long),), "x must be float32, float16, bfloat16 or float64"),
    "scalar x": (lambda: (torch.tensor(1.0),), "x must have at least one dimension"),
    "sparse x": (lambda: (torch.eye(8).to_sparse(),), "x must be a dense, unquantized tensor"),
    "quantized x": (
        lambda: (torch.quantize_per_tensor(ones(8), 0.1, 0, torch.qint8),),
        "x must be a dense, unquantized tensor",
    ),
    "sparse weight": (lambda: (ones(8, 8), ones(8).to_sparse()), "weight must be a dense, unquantized tensor"),
    "sparse bias": (lambda: (ones(8, 8), ones(8), ones(8).to_sparse()), "bias must be a dense, unquantized tensor"),
    "weight of another length": (lambda: (ones(2, 8), ones(7)), r"weight must have shape \[8\]"),
    "weight of two dimensions": (lambda: (ones(2, 8), ones(1, 8)), r"weight must have shape \[8\]"),
    "bias of another length": (lambda: (ones(2, 8), None, ones(9)), r"bias must have shape \[8\]"),
    "narrow weight": (lambda: (ones(2, 8), ones(8).half()), "weight must be float32 or have the dtype of x"),
    "narrow bias": (lambda: (ones(2, 8), None, ones(8).half()), "bias must be float32 or have the dtype of x"),
    "parameters of two dtypes": (
        lambda: (ones(2, 8).half(), ones(8).half(), ones(8)),
        "bias must have the dtype of weight",
    ),
    "weight elsewhere": (lambda: (ones(2, 8), ones(8, device="meta")), "weight must be on cpu like x"),
    "bias elsewhere": (lambda: (ones(2, 8), ones(8), ones(8, device="meta")), "bias must be on cpu like x"),
    "negative eps": (lambda: (ones(2, 8), None, None, -1.0), "eps must be finite"),
    "infinite eps": (lambda: (ones(2, 8), None, None, float("inf")), "eps must be finite"),
}


@pairwise(case=ERRORS, requires_grad=[True, False])
def test_errors(case, requires_grad):
    arguments, message = ERRORS[case]
    arguments = [
        a.requires_grad_(requires_grad) if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments()
    ]
    with pytest.raises(RuntimeError, match=f"layer_norm: {message}.*got "):
        layer_norm(*arguments)


def noise(name, x, weight, bias, eps):
    return tuple(normalization.noise(1, [x], x, weight, eps, centred=True))
