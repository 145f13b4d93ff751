"""rms_norm: torch.ops.liger.rms_norm against the formula in fp64."""

import normalization
import pytest
import torch
from checks import (
    CPU_DTYPES,
    LAYOUTS,
    ROWS_AND_PARAMETERS,
    assert_no_worse,
    check_op,
    more_rows_than_any_limit,
    sizes_around_tiles,
)
from normalization import rms_norm as reference
from pairs import either_or_both, pairwise, sizes_by_device

rms_norm = torch.ops.liger.rms_norm


def make(shape, dtype, device, weight_dtype=None, needs_grad=(True, True), with_weight=True):
    torch.manual_seed(0)  # compared rounding errors must not depend on which tests ran before
    x = torch.randn(shape, dtype=dtype, device=device).requires_grad_(needs_grad[0])
    weight = torch.randn(shape[-1], dtype=weight_dtype or dtype, device=device).requires_grad_(needs_grad[1])
    return x, weight if with_weight else None, [torch.randn(shape, dtype=dtype, device=device)]


# Both sides of every tile boundary, model widths, and widths that only unaligned configs serve.
SIZES = sorted(
    {1, 7, 33, 72, 130, 576, 1000, 3584, 6656, 11008, 40001, *sizes_around_tiles("rms_norm_fwd", "rms_norm_bwd")}
)


@sizes_by_device(cpu=[1, 7, 130, 1000, 11008], cuda=SIZES, dtype=CPU_DTYPES)
def test_sizes(n, dtype, device):
    x, weight, grads = make((5, n), dtype, device)
    size = normalization.terms(x, weight, 1e-6) * float(grads[0].abs().max())
    check_op(rms_norm, reference, [x, weight], grads, device, size)


@pytest.mark.gpu
@pytest.mark.parametrize("n", sizes_around_tiles("rms_norm_fwd", "rms_norm_bwd"))
@pytest.mark.parametrize("dtype,parameter_dtype", ROWS_AND_PARAMETERS, ids=str)
def test_many_rows(n, dtype, parameter_dtype):
    """The other tests have few rows, for which there are separate configs."""
    rows = more_rows_than_any_limit("rms_norm_fwd", "rms_norm_bwd")
    x, weight, grads = make((rows, n), dtype, "cuda", parameter_dtype)
    check_op(rms_norm, reference, [x, weight], grads, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [100_000, 262_144])
def test_rows_wider_than_the_register_file(n):
    x, weight, grads = make((3, n), torch.bfloat16, "cuda")
    check_op(rms_norm, reference, [x, weight], grads, "cuda")


@pairwise(
    casting_mode=["llama", "gemma", "none"],
    offset=[0.0, 1.0],
    weight_dtype=[None, torch.float32],
    dtype=CPU_DTYPES,
    eps=[1e-6, 1e-2],
)
def test_options(dtype, weight_dtype, offset, casting_mode, eps, device):
    x, weight, grads = make((3, 4, 96), dtype, device, weight_dtype)
    options = dict(eps=eps, offset=offset, casting_mode=casting_mode)
    check_op(
        lambda x, w: rms_norm(x, w, **options), lambda x, w: reference(x, w, **options), [x, weight], grads, device
    )


@pytest.mark.parametrize("needs_grad", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("with_weight", [True, False])
def test_only_required_gradients(needs_grad, with_weight, device):
    x, weight, grads = make((6, 160), torch.float32, device, needs_grad=needs_grad, with_weight=with_weight)
    check_op(rms_norm, reference, [x, weight], grads, device)


@pytest.mark.parametrize("layout, grad_layout", either_or_both(LAYOUTS))
def test_layouts(layout, grad_layout, device):
    x, weight, (grad,) = make((3, 2, 5, 64), torch.bfloat16, device)
    if layout != "contiguous":
        x = LAYOUTS[layout](x.detach()).requires_grad_()
    if grad_layout != "contiguous":
        grad = LAYOUTS[grad_layout](grad)
    check_op(rms_norm, reference, [x, weight], [grad], device)


def test_dense_strides_are_preserved(device):
    x = torch.randn(2, 6, 4, 64, device=device).transpose(1, 2)
    assert rms_norm(x).stride() == x.stride()


def test_nan_and_infinity_propagate(device):
    x = torch.randn(3, 64, device=device)
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    y = rms_norm(x, torch.ones(64, device=device))
    assert y[0].isnan().all() and y[1, 7].isnan() and (y[1, :7] == 0).all() and y[2].isfinite().all()


@pytest.mark.parametrize("offset", [0.0, 0.5])
@pytest.mark.parametrize("with_weight", [True, False])
def test_gradcheck(offset, with_weight):
    x, weight, _ = make((3, 5), torch.float64, "cpu", with_weight=with_weight)
    inputs = [x, weight] if with_weight else [x]
    assert torch.autograd.gradcheck(lambda x, w=None: rms_norm(x, w, 1e-5, offset), inputs)


@pytest.mark.gpu
def test_autocast_follows_pytorch():
    x, weight, _ = make((4, 64), torch.bfloat16, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        ours, theirs = rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)
    assert ours.dtype == theirs.dtype


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    n = 4096
    x = torch.randn(2**31 // n + 5, n, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    y = rms_norm(x, weight)
    assert_no_worse("tail", y[-7:], reference(x[-7:], weight), reference(x[-7:].double(), weight.double()))


ERRORS = {
    "integer x": (lambda: (torch.ones(2, 8, dtype=torch.long),), {}, "x must be float32, float16, bfloat16 or float64"),
    "scalar x": (lambda: (torch.tensor(1.0),), {}, "x must have at least one dimension"),
    "sparse x": (lambda: (torch.eye(8).to_sparse(),), {}, "x must be a dense, unquantized tensor"),
    "quantized x": (
        lambda: (torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8),),
        {},
        "x must be a dense, unquantized tensor",
    ),
    "sparse weight": (
        lambda: (torch.ones(2, 8), torch.ones(8).to_sparse()),
        {},
        "weight must be a dense, unquantized tensor",
    ),
    "weight of another length": (lambda: (torch.ones(2, 8), torch.ones(7)), {}, r"weight must have shape \[8\]"),
    "weight of two dimensions": (lambda: (torch.ones(2, 8), torch.ones(1, 8)), {}, r"weight must have shape \[8\]"),
    "narrow weight": (
        lambda: (torch.ones(2, 8), torch.ones(8).half()),
        {},
        "weight must be float32 or have the dtype of x",
    ),
    "weight elsewhere": (lambda: (torch.ones(2, 8), torch.ones(8, device="meta")), {}, "weight must be on cpu like x"),
    "negative eps": (lambda: (torch.ones(2, 8), None, -1.0), {}, "eps must be finite and not negative"),
    "unknown mode": (
        lambda: (torch.ones(2, 8),),
        dict(casting_mode="no"),
        "casting_mode must be 'llama', 'gemma' or 'none'",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.library
def test_errors(case):
    arguments, options, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"rms_norm: {message}.*got "):
        rms_norm(*arguments(), **options)


def noise(name, x, weight, eps, offset, casting_mode):
    return tuple(normalization.noise(1, [x], x, weight, eps, offset=offset))
