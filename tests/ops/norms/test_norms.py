"""What all norms do, against their formulas in fp64; test_reference.py and tests/transformers check those."""

import pytest
import torch

from liger_ops.reference import operators
from tests.support.calls import outputs
from tests.support.checks import (
    CPU_DTYPES,
    ROWS_AND_PARAMETERS,
    assert_no_worse,
    more_rows_than_any_limit,
    path_taken,
    sizes_around_tiles,
)
from tests.support.families.norms import NORMS, check, make
from tests.support.pairs import sizes_by_device

each = pytest.mark.parametrize("name", NORMS)
# Both sides of every tile boundary, model widths, and widths that only unaligned configs serve.
AROUND_TILES = [(name, n) for name, norm in NORMS.items() for n in sizes_around_tiles(*norm.kernels)]
OTHERS = [(name, n) for name in NORMS for n in (1, 7, 33, 130, 576, 768, 1000, 1600, 3584, 6656, 11008, 40001)]
CPU_SIZES = [(name, n) for name in NORMS for n in (1, 7, 130, 1000, 11008)]


@sizes_by_device(cpu=CPU_SIZES, cuda=AROUND_TILES + OTHERS, dtype=CPU_DTYPES)
def test_sizes(n, dtype, device):
    name, n = n
    inputs, grads = make(name, (5, n), dtype, device)
    for options in ({}, dict(gate_first=True)) if name == "rms_norm_gated" else ({},):
        size = NORMS[name].terms(*inputs, **options) * float(grads[0].abs().max())
        check(name, inputs, grads, device, size, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name, n", AROUND_TILES)
@pytest.mark.parametrize("dtype,parameter_dtype", ROWS_AND_PARAMETERS, ids=str)
def test_many_rows(name, n, dtype, parameter_dtype):
    """More than programs, and more than those for which there are separate configs."""
    rows = max(2000, more_rows_than_any_limit(*NORMS[name].kernels))
    for groups in (1, 3) if name == "rms_norm_gated" else (1,):
        inputs, grads = make(name, (rows, groups * n), dtype, "cuda", parameter_dtype)
        check(name, inputs, grads, "cuda", **(dict(group_size=n) if name == "rms_norm_gated" else {}))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [100_000, 262_144])
@each
def test_rows_wider_than_the_register_file(name, n):
    check(name, *make(name, (3, n), torch.bfloat16, "cuda"), "cuda")


@each
def test_dense_strides_are_preserved(name, device):
    x = torch.randn(2, 6, 4, 64, device=device).transpose(1, 2)
    for y in outputs(getattr(torch.ops.liger, name)(*[x] * NORMS[name].rows)):
        assert y.stride() == x.stride()


@each
def test_nan_and_infinity_propagate(name, device):
    x, *others = (t.detach() for t in make(name, (3, 64), torch.float32, device)[0])
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    y, *_ = outputs(getattr(torch.ops.liger, name)(x, *others))
    assert y[0].isnan().all() and y[2].isfinite().all()
    assert y[1].isnan().all() if name == "layer_norm" else y[1, 7].isnan() and (y[1, :7] == 0).all()


@pytest.mark.gpu
@each
def test_more_than_2_to_the_31_elements(name):
    n, norm = 4096, NORMS[name]
    options = dict(group_size=512) if name == "rms_norm_gated" else {}
    x, weight = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((2**31 // n + 5, n), (n,)))

    def call(op, x, weight):
        return outputs(op(*[x] * norm.rows, *[weight] * norm.parameters, **options))

    with path_taken("cuda"):
        ours = call(getattr(torch.ops.liger, name), x, weight)
    formula, tail = operators()[name].reference, x[-7:]
    eager, exact = call(formula, tail, weight), call(formula, tail.double(), weight.double())
    for results in zip([y[-7:] for y in ours], eager, exact, strict=True):
        assert_no_worse("tail", *results)


X, W = torch.ones(2, 8), torch.ones(8)
# The wording of rules, and those of one norm; test_wrong_calls.py tests that every argument has them.
ERRORS = [
    ("rms_norm", (X.long(),), {}, "x must be float32, float16, bfloat16 or float64"),
    ("rms_norm", (torch.tensor(1.0),), {}, "x must have at least one dimension"),
    ("rms_norm", (X.to_sparse(),), {}, "x must be a dense, unquantized tensor"),
    ("rms_norm", (torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),), {}, "x must be a dense, unquantized tensor"),
    ("rms_norm", (X, W[:7]), {}, r"weight must have shape \[8\]"),
    ("rms_norm", (X, W.half()), {}, "weight must be float32 or have the dtype of x"),
    ("rms_norm", (X, W.to("meta")), {}, "weight must be on cpu like x"),
    ("rms_norm", (X, None, -1.0), {}, "eps must be finite and not negative"),
    ("rms_norm", (X,), dict(casting_mode="no"), "casting_mode must be 'llama', 'gemma' or 'none'"),
    ("fused_add_rms_norm", (X, X[0]), {}, r"residual must have the shape of x, \[2, 8\]"),
    ("fused_add_rms_norm", (X, X.half()), {}, "residual must have the dtype of x, Float"),
    ("layer_norm", (X, None, W[:7]), {}, r"bias must have shape \[8\]"),
    ("layer_norm", (X.half(), W.half(), W), {}, "bias must have the dtype of weight"),
    ("layer_norm", (X, None, None, float("inf")), {}, "eps must be finite"),
    ("rms_norm_gated", (X, X[:1]), {}, "gate must have the shape of x"),
    ("rms_norm_gated", (X, X, None, -1.0), {}, "eps must be finite and not negative"),
    ("rms_norm_gated", (X, X), dict(activation="relu"), "activation must be 'silu' or 'sigmoid'"),
    ("rms_norm_gated", (X, X), dict(group_size=3), "group_size must divide the number of columns, 8"),
    ("rms_norm_gated", (X, X), dict(group_size=0), "group_size must divide the number of columns, 8"),
]


@pytest.mark.parametrize("name, arguments, options, message", ERRORS)
@pytest.mark.library
def test_errors(name, arguments, options, message):
    with pytest.raises(RuntimeError, match=f"^{name}: {message}.*got "):
        getattr(torch.ops.liger, name)(*arguments, **options)
