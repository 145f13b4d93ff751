"""rms_norm_gated: torch.ops.liger.rms_norm_gated against the formula in fp64."""

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
    gradients,
    more_rows_than_any_limit,
    path_taken,
    sizes_around_tiles,
)
from hypothesis import strategies as st
from normalization import rms_norm_gated as reference
from pairs import either_or_both, pairwise, sizes_by_device

gated = torch.ops.liger.rms_norm_gated
KERNELS = "rms_norm_gated_fwd", "rms_norm_gated_bwd"


def make(shape, dtype, device, weight_dtype=None, needs_grad=(True, True, True), with_weight=True):
    torch.manual_seed(0)  # compared rounding errors must not depend on which tests ran before
    x, gate = (torch.randn(shape, dtype=dtype, device=device).requires_grad_(needed) for needed in needs_grad[:2])
    weight = torch.randn(shape[-1], dtype=weight_dtype or dtype, device=device).requires_grad_(needs_grad[2])
    return [x, gate, weight if with_weight else None], [torch.randn(shape, dtype=dtype, device=device)]


def terms(x, gate, weight, eps, offset=0.0, activation="silu", gate_first=False, group_size=None, **_):
    """Magnitude of the terms of the gradients of x and gate, for upstream gradients of 1."""
    if x.numel() == 0:
        return 0.0
    with torch.no_grad():
        z = gate.double()
        act = z.sigmoid() if activation == "sigmoid" else torch.nn.functional.silu(z)
        rows = (x.double() * act if gate_first else x.double()).unflatten(-1, (-1, group_size or x.shape[-1]))
        size = normalization.terms(rows, None, eps)
        size *= 1.0 if weight is None else float((weight.double() + offset).abs().max())
        return size * max(1.0, float(act.abs().max()), 1.1 * float(x.abs().max()))


# Both sides of every tile boundary, usual widths, and widths that only unaligned configs serve.
SIZES = sorted({1, 7, 33, 72, 130, 576, 1000, 3584, 6656, 11008, 40001, *sizes_around_tiles(*KERNELS)})


@sizes_by_device(cpu=[1, 7, 130, 1000, 11008], cuda=SIZES, dtype=CPU_DTYPES, gate_first=[False, True])
def test_sizes(n, dtype, gate_first, device):
    inputs, grads = make((5, n), dtype, device)
    size = terms(*inputs, 1e-6, gate_first=gate_first) * float(grads[0].abs().max())
    options = dict(gate_first=gate_first)
    check_op(lambda *t: gated(*t, **options), lambda *t: reference(*t, **options), inputs, grads, device, size)


@sizes_by_device(
    cpu=[(3, 1), (4, 7), (2, 130), (8, 512)],
    cuda=[(3, 1), (4, 7), (2, 130), (8, 512), (8, 1024), (2, 8192), (3, 4096), (70_000, 1)],
    dtype=CPU_DTYPES,
    gate_first=[False, True],
)
def test_groups(n, dtype, gate_first, device):
    groups, size = n
    inputs, grads = make((5, groups * size), dtype, device)
    options = dict(gate_first=gate_first, group_size=size)
    scale = terms(*inputs, 1e-6, **options) * float(grads[0].abs().max())
    check_op(lambda *t: gated(*t, **options), lambda *t: reference(*t, **options), inputs, grads, device, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("n", sizes_around_tiles(*KERNELS))
@pytest.mark.parametrize("dtype,parameter_dtype", ROWS_AND_PARAMETERS, ids=str)
@pytest.mark.parametrize("groups", [1, 3])
def test_many_rows(n, dtype, parameter_dtype, groups):
    """More than programs, so that programs sum over several."""
    rows = max(2000, more_rows_than_any_limit(*KERNELS))
    inputs, grads = make((rows, groups * n), dtype, "cuda", parameter_dtype)
    options = dict(group_size=n)
    check_op(lambda *t: gated(*t, **options), lambda *t: reference(*t, **options), inputs, grads, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 128, 256])
def test_many_narrow_rows(n):
    inputs, grads = make((100_000, n), torch.bfloat16, "cuda")
    check_op(gated, reference, inputs, grads, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [100_000, 262_144])
def test_rows_wider_than_the_register_file(n):
    inputs, grads = make((3, n), torch.bfloat16, "cuda")
    check_op(gated, reference, inputs, grads, "cuda")


@pairwise(
    casting_mode=["llama", "gemma", "none"],
    activation=["silu", "sigmoid"],
    gate_first=[False, True],
    group_size=[None, 32, 24],
    offset=[0.0, 1.0],
    weight_dtype=[None, torch.float32],
    dtype=CPU_DTYPES,
    eps=[1e-6, 1e-2],
)
def test_options(dtype, weight_dtype, casting_mode, activation, gate_first, group_size, offset, eps, device):
    inputs, grads = make((3, 4, 96), dtype, device, weight_dtype)
    options = dict(eps=eps, offset=offset, casting_mode=casting_mode, activation=activation)
    options |= dict(gate_first=gate_first, group_size=group_size)
    if gate_first and casting_mode == "llama" and weight_dtype:
        grads = [grads[0].to(weight_dtype)]
    check_op(lambda *t: gated(*t, **options), lambda *t: reference(*t, **options), inputs, grads, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("casting_mode", ["llama", "gemma"])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_roundings(dtype, gate_first, casting_mode, weight_dtype, device):
    """Results equal the formula's except where its fp32 arithmetic rounds to the other neighbour. A rounding in the
    wrong place would change one result in four or more."""
    (x, gate, weight), _ = make((64, 256), dtype, device, weight_dtype)
    options = dict(gate_first=gate_first, casting_mode=casting_mode)
    ours, theirs = gated(x, gate, weight, **options), reference(x, gate, weight, **options)
    wide = gate_first and casting_mode == "llama" and weight_dtype is not None
    assert ours.dtype == theirs.dtype == (torch.float32 if wide else dtype)
    differ = (ours - theirs).abs() > (1e-6 * theirs.abs() if wide else 0)
    assert differ.double().mean() < 0.02


@pairwise(
    needs_x=[True, False],
    needs_gate=[True, False],
    needs_weight=[True, False],
    with_weight=[True, False],
    gate_first=[True, False],
    n=[160, 131],
)
def test_only_required_gradients(needs_x, needs_gate, needs_weight, with_weight, gate_first, n, device):
    inputs, grads = make((6, n), torch.float32, device, None, (needs_x, needs_gate, needs_weight), with_weight)
    options = dict(gate_first=gate_first)
    check_op(lambda *t: gated(*t, **options), lambda *t: reference(*t, **options), inputs, grads, device)


@pytest.mark.parametrize("layout, gate_layout", either_or_both(LAYOUTS))
def test_layouts_of_the_inputs(layout, gate_layout, device):
    (x, gate, weight), grads = make((3, 2, 5, 64), torch.bfloat16, device)
    if layout != "contiguous":
        x = LAYOUTS[layout](x.detach()).requires_grad_()
    if gate_layout != "contiguous":
        gate = LAYOUTS[gate_layout](gate.detach()).requires_grad_()
    options = dict(group_size=32)
    check_op(lambda *t: gated(*t, **options), lambda *t: reference(*t, **options), [x, gate, weight], grads, device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", ["contiguous", "transposed heads"])
def test_layouts_of_the_gradient(layout, x_layout, device):
    (x, gate, weight), (grad,) = make((3, 2, 5, 64), torch.bfloat16, device)
    if x_layout != "contiguous":
        x = LAYOUTS[x_layout](x.detach()).requires_grad_()
    options = dict(group_size=16)
    inputs, grads = [x, gate, weight], [LAYOUTS[layout](grad)]
    check_op(lambda *t: gated(*t, **options), lambda *t: reference(*t, **options), inputs, grads, device)


def test_a_gate_in_a_projection_needs_no_copy(device):
    """As the models have it: the gate is a slice of the columns of a wider tensor."""
    torch.manual_seed(0)
    projected = torch.randn(4, 6, 3 * 64, device=device, requires_grad=True)
    x, weight = (torch.randn(*s, device=device, requires_grad=True) for s in ((4, 6, 2, 32), (32,)))

    def step(op):
        return lambda x, projected, weight: op(x, projected[..., 64:128].unflatten(-1, (2, 32)), weight)

    check_op(step(gated), step(reference), [x, projected, weight], [torch.randn_like(x)], device)


def test_x_as_its_own_gate(device):
    (x, _, weight), grads = make((4, 64), torch.float32, device)
    check_op(lambda x, w: gated(x, x, w), lambda x, w: reference(x, x, w), [x, weight], grads, device)


def test_a_group_of_all_columns_is_the_default(device):
    inputs, grads = make((5, 96), torch.bfloat16, device)
    options = dict(group_size=96)
    assert equal(gradients(lambda *t: gated(*t, **options), inputs, grads), gradients(gated, inputs, grads))


def test_groups_are_rows_of_a_view(device):
    (x, gate, weight), _ = make((5, 96), torch.bfloat16, device)
    rows = gated(x.view(5, 3, 32), gate.view(5, 3, 32), weight[:32])
    assert torch.equal(gated(x, gate, weight[:32].repeat(3), group_size=32), rows.view(5, 96))


@pytest.mark.parametrize("gate_first", [True, False])
def test_dense_strides_are_preserved(gate_first, device):
    x, gate = (torch.randn(2, 6, 4, 64, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    assert gated(x, gate.contiguous(), torch.ones(64, device=device), gate_first=gate_first).stride() == x.stride()


def test_nan_and_infinity_propagate(device):
    x, gate = torch.randn(4, 64, device=device), torch.randn(4, 64, device=device)
    x[0, 5], x[1, 7], gate[2, 9] = float("nan"), float("inf"), float("nan")
    weight = torch.ones(64, device=device)
    y = gated(x, gate, weight)
    assert y[0].isnan().all() and y[1, 7].isnan() and (y[1, :7] == 0).all() and y[3].isfinite().all()
    assert y[2].isnan().sum() == 1 and y[2, 9].isnan()
    early = gated(x, gate, weight, gate_first=True)
    assert early[2].isnan().all() and early[3].isfinite().all()


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_large_gates(activation, device):
    """Where the exponential overflows or vanishes, results and gradients stay finite."""
    (x, _, weight), grads = make((4, 8), torch.float32, device)
    gate = torch.tensor([-1e4, -200.0, -89.0, -20.0, 20.0, 89.0, 200.0, 1e4], device=device).repeat(4, 1)
    options = dict(activation=activation)
    inputs = [x, gate.requires_grad_(), weight]
    check_op(lambda *t: gated(*t, **options), lambda *t: reference(*t, **options), inputs, grads, device)
    assert all(t.isfinite().all() for t in gradients(lambda *t: gated(*t, **options), inputs, grads))


@pairwise(
    offset=[0.0, 0.5],
    with_weight=[True, False],
    activation=["silu", "sigmoid"],
    gate_first=[True, False],
    group_size=[None, 2],
)
def test_gradcheck(with_weight, offset, activation, gate_first, group_size):
    options = dict(offset=offset, activation=activation, gate_first=gate_first, group_size=group_size)
    inputs, _ = make((3, 6), torch.float64, "cpu", with_weight=with_weight)
    wanted = [t for t in inputs if t is not None]
    assert torch.autograd.gradcheck(lambda x, gate, w=None: gated(x, gate, w, 1e-5, **options), wanted)


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_autocast_takes_the_wider_dtype(gate_dtype, weight_dtype, device):
    (x, gate, weight), _ = make((4, 64), torch.bfloat16, device, weight_dtype)
    with torch.autocast(device, torch.bfloat16):
        assert gated(x, gate.to(gate_dtype), weight).dtype == gate_dtype


def test_the_upstream_gradient_is_reused_if_it_has_the_rows_dtype(device):
    """That of a wider result is not."""
    for weight_dtype in (torch.bfloat16, torch.float32):
        inputs, _ = make((4, 64), torch.bfloat16, device, weight_dtype)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            (gated(*inputs, gate_first=True).sin().sum()).backward()
        names = {e.name.split(".")[0] for e in seen.events() if "rms_norm_gated_bwd" in e.name}
        assert names == {"liger::_rms_norm_gated_bwd" + ("_" if weight_dtype == torch.bfloat16 else "")}


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    n = 4096
    x = torch.randn(2**31 // n + 5, n, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    with path_taken("cuda"):
        y = gated(x, x, weight, group_size=512)
    tail = x[-7:], x[-7:]
    wide = reference(*(t.double() for t in (*tail, weight)), group_size=512)
    assert_no_worse("tail", y[-7:], reference(*tail, weight, group_size=512), wide)


X = torch.ones(2, 8)
ERRORS = {
    "integer x": (lambda: (X.long(), X), {}, "x must be float32, float16, bfloat16 or float64"),
    "scalar x": (lambda: (torch.tensor(1.0), X), {}, "x must have at least one dimension"),
    "sparse x": (lambda: (torch.eye(8).to_sparse(), X), {}, "x must be a dense, unquantized tensor"),
    "gate of another dtype": (lambda: (X, X.half()), {}, "gate must have the dtype of x"),
    "gate of another shape": (lambda: (X, X[:1]), {}, "gate must have the shape of x"),
    "sparse gate": (lambda: (X, X.to_sparse()), {}, "gate must be a dense, unquantized tensor"),
    "gate elsewhere": (lambda: (X, X.to("meta")), {}, "gate must be on cpu like x"),
    "weight of another length": (lambda: (X, X, torch.ones(7)), {}, r"weight must have shape \[8\]"),
    "narrow weight": (lambda: (X, X, torch.ones(8).half()), {}, "weight must be float32 or have the dtype of x"),
    "negative eps": (lambda: (X, X, None, -1.0), {}, "eps must be finite and not negative"),
    "unknown mode": (lambda: (X, X), dict(casting_mode="no"), "casting_mode must be 'llama', 'gemma' or 'none'"),
    "unknown activation": (lambda: (X, X), dict(activation="relu"), "activation must be 'silu' or 'sigmoid'"),
    "groups that do not fit": (lambda: (X, X), dict(group_size=3), "group_size must divide the number of columns, 8"),
    "empty groups": (lambda: (X, X), dict(group_size=0), "group_size must divide the number of columns, 8"),
}


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.library
def test_errors(case):
    arguments, options, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"rms_norm_gated: {message}.*got "):
        gated(*arguments(), **options)


def noise(name, x, gate, weight, eps, offset, casting_mode, **options):
    error = 2 * torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    error *= terms(x.detach(), gate.detach(), weight, eps, offset, **options)
    return tuple([0.0] + [error for t in (x, gate) if t.requires_grad])


def vary(draw, arguments):
    n = arguments["x"].shape[-1]
    arguments["group_size"] = draw(st.sampled_from([None, *(size for size in range(1, n + 1) if n % size == 0)]))
