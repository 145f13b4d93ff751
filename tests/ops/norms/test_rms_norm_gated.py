"""rms_norm_gated: its options and roundings against the formula in fp64. test_norms.py has what all norms do."""

import pytest
import torch
from hypothesis import strategies as st

from liger_ops import functional
from tests.support.checks import CPU_DTYPES, check_op, gradients
from tests.support.families.norms import check, make
from tests.support.families.norms import gated_terms as terms
from tests.support.pairs import pairwise, sizes_by_device

NAME = "rms_norm_gated"
gated, reference = torch.ops.liger.rms_norm_gated, functional.rms_norm_gated.reference


@sizes_by_device(
    cpu=[(3, 1), (4, 7), (2, 130), (8, 512)],
    cuda=[(3, 1), (4, 7), (2, 130), (8, 512), (8, 1024), (2, 8192), (3, 4096), (70_000, 1)],
    dtype=CPU_DTYPES,
    gate_first=[False, True],
)
def test_groups(n, dtype, gate_first, device):
    groups, size = n
    inputs, grads = make(NAME, (5, groups * size), dtype, device)
    options = dict(gate_first=gate_first, group_size=size)
    scale = terms(*inputs, 1e-6, **options) * float(grads[0].abs().max())
    check(NAME, inputs, grads, device, scale, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 128, 256])
def test_many_narrow_rows(n):
    check(NAME, *make(NAME, (100_000, n), torch.bfloat16, "cuda"), "cuda")


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
    inputs, grads = make(NAME, (3, 4, 96), dtype, device, weight_dtype)
    options = dict(eps=eps, offset=offset, casting_mode=casting_mode, activation=activation)
    options |= dict(gate_first=gate_first, group_size=group_size)
    if gate_first and casting_mode == "llama" and weight_dtype:
        grads = [grads[0].to(weight_dtype)]
    check(NAME, inputs, grads, device, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("casting_mode", ["llama", "gemma"])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_roundings(dtype, gate_first, casting_mode, weight_dtype, device):
    """Results equal the formula's except where its fp32 arithmetic rounds to the other neighbour. A rounding in the
    wrong place would change one result in four or more."""
    (x, gate, weight), _ = make(NAME, (64, 256), dtype, device, weight_dtype)
    options = dict(gate_first=gate_first, casting_mode=casting_mode)
    ours, theirs = gated(x, gate, weight, **options), reference(x, gate, weight, **options)
    wide = gate_first and casting_mode == "llama" and weight_dtype is not None
    assert ours.dtype == theirs.dtype == (torch.float32 if wide else dtype)
    differ = (ours - theirs).abs() > (1e-6 * theirs.abs() if wide else 0)
    assert differ.double().mean() < 0.02


def test_x_as_its_own_gate(device):
    (x, _, weight), grads = make(NAME, (4, 64), torch.float32, device)
    check_op(lambda x, w: gated(x, x, w), lambda x, w: reference(x, x, w), [x, weight], grads, device)


@pytest.mark.parametrize("gate_first", [True, False])
def test_dense_strides_are_preserved(gate_first, device):
    x, gate = (torch.randn(2, 6, 4, 64, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    assert gated(x, gate.contiguous(), torch.ones(64, device=device), gate_first=gate_first).stride() == x.stride()


def test_a_nan_in_the_gate(device):
    x, gate, weight = (t.detach() for t in make(NAME, (2, 64), torch.float32, device)[0])
    gate[0, 9] = float("nan")
    late, early = (gated(x, gate, weight, gate_first=first).isnan() for first in (False, True))
    assert late[0, 9] and late.sum() == 1
    assert early[0].all() and not early[1].any()


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_large_gates(activation, device):
    """Where the exponential overflows or vanishes, results and gradients stay finite."""
    (x, _, weight), grads = make(NAME, (4, 8), torch.float32, device)
    gate = torch.tensor([-1e4, -200.0, -89.0, -20.0, 20.0, 89.0, 200.0, 1e4], device=device).repeat(4, 1)
    options = dict(activation=activation)
    inputs = [x, gate.requires_grad_(), weight]
    check(NAME, inputs, grads, device, **options)
    assert all(t.isfinite().all() for t in gradients(lambda *t: gated(*t, **options), inputs, grads))


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_autocast_takes_the_wider_dtype(gate_dtype, weight_dtype, device):
    (x, gate, weight), _ = make(NAME, (4, 64), torch.bfloat16, device, weight_dtype)
    with torch.autocast(device, torch.bfloat16):
        assert gated(x, gate.to(gate_dtype), weight).dtype == gate_dtype


def test_the_upstream_gradient_is_reused_if_it_has_the_rows_dtype(device):
    """That of a wider result is not."""
    for weight_dtype in (torch.bfloat16, torch.float32):
        inputs, _ = make(NAME, (4, 64), torch.bfloat16, device, weight_dtype)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            (gated(*inputs, gate_first=True).sin().sum()).backward()
        names = {e.name.split(".")[0] for e in seen.events() if "rms_norm_gated_bwd" in e.name}
        assert names == {"liger::_rms_norm_gated_bwd" + ("_" if weight_dtype == torch.bfloat16 else "")}


def noise(name, x, gate, weight, eps, offset, casting_mode, **options):
    error = 2 * torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    error *= terms(x.detach(), gate.detach(), weight, eps, offset, **options)
    return tuple([0.0] + [error for t in (x, gate) if t.requires_grad])


def vary(draw, arguments):
    n = arguments["x"].shape[-1]
    arguments["group_size"] = draw(st.sampled_from([None, *(size for size in range(1, n + 1) if n % size == 0)]))
