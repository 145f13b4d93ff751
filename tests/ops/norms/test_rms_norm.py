"""rms_norm: torch.ops.liger.rms_norm against the formula in fp64."""

import pytest
import torch
from checks import (
    CPU_DTYPES,
    LAYOUTS,
    OPCHECKS,
    ROWS_AND_PARAMETERS,
    assert_no_worse,
    check_deterministic,
    check_export,
    check_inductor,
    check_no_double_backward,
    check_one_graph,
    check_op,
    check_reads_only,
    check_script,
    check_second_backward,
    more_rows_than_any_limit,
    sizes_around_tiles,
)
from normalization import rms_norm as reference
from strategies import may_be_float32
from torch import Tensor

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


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_sizes(n, dtype, device):
    x, weight, grads = make((5, n), dtype, device)
    check_op(rms_norm, reference, [x, weight], grads, device)


@pytest.mark.gpu
@pytest.mark.parametrize("n", sizes_around_tiles("rms_norm_fwd", "rms_norm_bwd"))
@pytest.mark.parametrize("dtype,parameter_dtype", ROWS_AND_PARAMETERS, ids=str)
def test_many_rows(n, dtype, parameter_dtype):
    """The other tests have few rows, for which there are separate configs."""
    rows = more_rows_than_any_limit("rms_norm_fwd", "rms_norm_bwd")
    x, weight, grads = make((rows, n), dtype, "cuda", parameter_dtype)
    check_op(rms_norm, reference, [x, weight], grads, "cuda")


@pytest.mark.parametrize("n", [100_000, 262_144])
def test_rows_wider_than_the_register_file(n, device):
    x, weight, grads = make((3, n), torch.bfloat16, device)
    check_op(rms_norm, reference, [x, weight], grads, device)


@pytest.mark.parametrize("casting_mode", ["llama", "gemma", "none"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad_layout", ["contiguous", *LAYOUTS])
def test_layouts(layout, grad_layout, device):
    x, weight, (grad,) = make((3, 2, 5, 64), torch.bfloat16, device)
    x = LAYOUTS[layout](x.detach()).requires_grad_()
    if grad_layout != "contiguous":
        grad = LAYOUTS[grad_layout](grad)
    check_op(rms_norm, reference, [x, weight], [grad], device)


def test_dense_strides_are_preserved(device):
    x = torch.randn(2, 6, 4, 64, device=device).transpose(1, 2)
    assert rms_norm(x).stride() == x.stride()


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (2, 0, 8), (0,), (8,)])
def test_empty_and_one_dimensional(shape, device):
    x, weight, grads = make(shape, torch.float32, device)
    y = rms_norm(x, weight)
    assert y.shape == x.shape
    dx, dw = torch.autograd.grad(y, [x, weight], grads)
    assert dx.shape == x.shape and dw.shape == weight.shape
    if x.numel() == 0:
        assert not dw.any()


def test_nan_and_infinity_propagate(device):
    x = torch.randn(3, 64, device=device)
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    y = rms_norm(x, torch.ones(64, device=device))
    assert y[0].isnan().all() and y[1, 7].isnan() and (y[1, :7] == 0).all() and y[2].isfinite().all()


def test_inputs_are_not_written(device):
    x, weight, grads = make((4, 256), torch.float32, device)
    check_reads_only(rms_norm, [x, weight], grads)


def test_runs_are_bitwise_equal(device):
    x, weight, grads = make((1000, 1024), torch.bfloat16, device)
    check_deterministic(rms_norm, [x, weight], grads)


def test_retain_graph_and_second_backward(device):
    x, weight, grads = make((4, 64), torch.float32, device)
    check_second_backward(rms_norm, [x, weight], grads)


@pytest.mark.library
def test_double_backward_is_refused(device):
    x, weight, grads = make((4, 64), torch.float32, device)
    check_no_double_backward("rms_norm", rms_norm, [x, weight], grads)


@pytest.mark.library
def test_forward_mode_is_refused(device):
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.randn(4, 8, device=device), torch.ones(4, 8, device=device))
        with pytest.raises(RuntimeError, match="rms_norm: forward-mode"):
            rms_norm(x)


@pytest.mark.parametrize("offset", [0.0, 0.5])
@pytest.mark.parametrize("with_weight", [True, False])
def test_gradcheck(offset, with_weight):
    x, weight, _ = make((3, 5), torch.float64, "cpu", with_weight=with_weight)
    inputs = [x, weight] if with_weight else [x]
    assert torch.autograd.gradcheck(lambda x, w=None: rms_norm(x, w, 1e-5, offset), inputs)


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_opcheck(with_weight, requires_grad, device):
    x, weight, _ = make((4, 16), torch.float32, device, needs_grad=(requires_grad,) * 2, with_weight=with_weight)
    torch.library.opcheck(rms_norm.default, (x, weight), dict(offset=0.5), test_utils=OPCHECKS)


def test_compile_makes_one_graph_for_all_sizes(device):
    calls = [make(shape, torch.float32, device) for shape in [(4, 64), (6, 128), (10, 256)]]
    check_one_graph(lambda x, w: rms_norm(x, w) * 2, [([x, weight], grads) for x, weight, grads in calls])


@pytest.mark.library
def test_inductor(device):
    x, weight, grads = make((4, 64), torch.float32, device)
    check_inductor(lambda x, w: rms_norm(x + 1, w).relu(), [x, weight], grads)


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.liger.rms_norm(x, self.weight, 1e-5)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.library
def test_export_keeps_the_op_and_the_batch_dynamic(strict, device):
    inputs, others = ([torch.randn(batch, 32, device=device)] for batch in (4, 9))
    check_export(rms_norm, Module().to(device), inputs, others, strict)


def test_script(device, tmp_path):
    calls = [[torch.randn(shape, device=device, requires_grad=True)] for shape in [(4, 32), (2, 3, 32)]]
    check_script(Module().to(device), calls, tmp_path / "module.pt")


def test_meta():
    x = torch.empty(5, 3, 64, device="meta", dtype=torch.bfloat16).transpose(0, 1)
    y = rms_norm(x, torch.empty(64, device="meta"))
    assert (y.shape, y.stride(), y.dtype, y.device.type) == (x.shape, x.stride(), x.dtype, "meta")


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


@pytest.mark.gpu
def test_double_on_cuda_is_refused():
    with pytest.raises(RuntimeError, match="x must be float32, float16 or bfloat16"):
        rms_norm(torch.ones(2, 8, device="cuda", dtype=torch.float64))


INTERPRETED = """
import sys, types, torch, numpy
sys.path.insert(0, "tests/support")
package = types.ModuleType("liger_ops"); package.__path__ = ["liger_ops"]; sys.modules["liger_ops"] = package
from liger_ops.kernels import find

TYPES = {"fp32": torch.float32, "fp16": torch.float16}

def run(path, n, aligned, of_rows="fp32", of_weight="fp32", residual=1, mode=1, rows=9):
    choices = {"X": of_rows, "W": of_weight, "RESIDUAL": residual}
    has_weight, offset = mode & 1, 0.5 * (mode & 1)
    two_levels = 2, (2 * n, n)
    inner, strides = (0, (0, n)) if aligned else two_levels
    forward, backward = (find(k).pick(choices, n, aligned) for k in ("rms_norm_fwd", "rms_norm_bwd"))
    torch.manual_seed(0)
    x, r, dy, ds = (torch.randn(rows, n).to(TYPES[of_rows]) for _ in range(4))
    w = torch.randn(n).to(TYPES[of_weight])
    y, s, rstd, dx = torch.full_like(x, float("nan")), torch.empty_like(x), torch.empty(rows), torch.full_like(x, float("nan"))
    c = forward.config.constexprs
    forward.kernel.function[(-(-rows // c["BLOCK_M"]),)](
        y, s, rstd, x, r, w, rows, n, inner, *strides * 3, 0.25, offset, mode | 8, **forward.constexprs)
    s = s if residual else x
    # In the interpreter, a loop over rows counts in Python integers, which the kernel takes in two levels only.
    inner, strides = two_levels
    c = backward.config.constexprs
    got, few = {}, min(rows, c["BLOCK_M"])
    for name, programs, count, final in (("", 2, rows, 0), ("_final", 1, few, 32)):
        dw, partial = torch.full_like(w, float("nan")), torch.full((2, n), float("nan"))
        backward.kernel.function[(programs,)](
            dx.fill_(float("nan")), dw, partial, dy, ds, s, w, rstd, count, n, inner, *strides * 4, offset,
            mode | 16 * has_weight | final, **backward.constexprs)
        untouched = [partial if final else dw] if has_weight else [partial, dw]
        assert all(t.isnan().all() for t in untouched)
        got["dx" + name] = dx[:count].clone()
        if has_weight:
            got["dw" + name] = dw if final else partial.sum(0)
    numpy.savez(path, x=x, r=r, w=w, dy=dy, ds=ds, y=y, s=s, **got)
"""
INTERPRETED_CASES = [(40, True), (128, True), (2560, True), (5000, True), (60, False), (700, False)]
# Streamed rows: one row per slot, a third of a row, half a row.
INTERPRETED_CASES += [(4000, True, "fp16", "fp32"), (12_288, True, "fp16", "fp16"), (12_296, True, "fp16", "fp16")]
# Without a residual, in each casting mode (1: has a weight, 2: rows are rounded before the weight).
INTERPRETED_CASES += [(n, True, "fp16", "fp16", 0, mode) for n in (40, 12_288) for mode in (0, 1, 3)]
INTERPRETED_CASES += [(60, False, "fp16", "fp16", 0, 3), (40, True, "fp32", "fp32", 0, 3)]
INTERPRETED_CASES += [(700, False, "fp32", "fp32", 0, 0)]


def formula(s, w, mode, dtype):
    """In fp64, except for the casting mode's rounding, which is the identity in backward. Epsilon is large, so that it
    matters."""
    normed = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 0.25)
    if mode & 2:
        normed = normed + (normed.to(dtype) - normed).detach()
    return normed if w is None else normed * (w + 0.5)


@pytest.mark.parametrize("case", INTERPRETED_CASES, ids=lambda case: "-".join(map(str, case)))
def test_kernels_interpreted(case, interpreted):
    """Runs the kernels on CPU tensors and checks every gradient."""
    got, (residual, mode) = interpreted[case], case[4:] or (1, 1)
    s = (got["x"] + residual * got["r"]).double().requires_grad_()
    w = got["w"].double().requires_grad_() if mode & 1 else None
    few = len(got["dx_final"])  # rows that one program processes per step

    def results(mode, final, rows):
        y = formula(s[:rows], w, mode, got["x"].dtype)
        loss = (y * got["dy"][:rows]).sum() + residual * (s * got["ds"])[:rows].sum()
        wanted = {name: t for name, t in (("dx", s), ("dw", w)) if t is not None}
        found = {name + final: grad for name, grad in zip(wanted, torch.autograd.grad(loss, wanted.values()))}
        return found | {"dx" + final: found["dx" + final][:rows]} | ({} if final else {"y": y.detach()})

    def of_mode(mode):
        return results(mode, "", len(s)) | results(mode, "_final", few) | ({"s": s.detach()} if residual else {})

    expected = of_mode(mode)
    for name, truth in expected.items():
        # fp32 and fp64 may round to neighbouring 16-bit values; the larger tolerance allows for it.
        exact = got[name].dtype == torch.float32 and (got["x"].dtype == torch.float32 or not mode & 2)
        tolerance = 2e-5 if exact else 4e-3
        torch.testing.assert_close(got[name].double(), truth, rtol=tolerance, atol=tolerance)
    if got["x"].dtype == torch.float16 and mode & 1:
        # The tolerance would hide rounding in the wrong place, so results must be closer to their own mode.
        other = of_mode(mode ^ 2)
        for name in ("y", "dw"):
            ours, theirs = (torch.linalg.vector_norm(got[name] - t[name]) for t in (expected, other))
            assert ours < theirs, name


def vary(draw, arguments):
    may_be_float32(draw, arguments, "weight")
