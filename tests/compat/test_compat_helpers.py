"""liger_ops.compat: helpers that other code imports from liger_kernel, and modules for Megatron's layers."""

import operator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from liger_ops import functional as F
from tests.support.checks import check_results, equal, gradients

pytestmark = pytest.mark.usefixtures("liger_kernel_served")


# ---- For Triton kernels of other code


def test_settings_of_kernels(monkeypatch):
    from liger_kernel.ops.utils import calculate_settings, is_hip

    found = {n: calculate_settings(n) for n in (1, 3, 1024, 2047, 2049, 8192, 20000, 65536)}
    assert found == {
        1: (1, 4), 3: (4, 4), 1024: (1024, 4), 2047: (2048, 8), 2049: (4096, 8), 8192: (8192, 16), 20000: (32768, 32),
        65536: (65536, 32),
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=r"at most 65536 \(got 65537\)"):
        calculate_settings(65537)
    assert not is_hip()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert is_hip() and calculate_settings(65536) == (65536, 16)


def test_decorators_and_versions(monkeypatch):
    from liger_kernel.ops.utils import (
        amp_custom_bwd,
        amp_custom_fwd,
        compare_version,
        device_context,
        ensure_contiguous,
        get_amp_custom_fwd_bwd,
    )

    x = torch.randn(3, 4)

    class Double(torch.autograd.Function):
        @staticmethod
        @ensure_contiguous
        @amp_custom_fwd
        def forward(ctx, x, y=None):
            """Twice."""
            assert x.is_contiguous() and (y is None or y.is_contiguous())
            return x * 2

        @staticmethod
        @ensure_contiguous
        @amp_custom_bwd
        def backward(ctx, dy):
            assert dy.is_contiguous()
            return dy * 2, None

    leaf = x.T.requires_grad_()
    with device_context("cpu"), device_context(torch.device("meta")):
        Double.apply(leaf).backward(x.T)
    assert torch.equal(leaf.grad, 2 * x.T) and Double.forward.__doc__ == "Twice."
    assert ensure_contiguous(lambda ctx, *, x: x.is_contiguous())(None, x=x.T)
    current = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: current.append(device) or nullcontext())
    with device_context("cuda:3"):
        assert current == [torch.device("cuda:3")]
    assert get_amp_custom_fwd_bwd() == (amp_custom_fwd, amp_custom_bwd)
    assert compare_version("torch", operator.ge, "2.4.0") and not compare_version("torch", operator.lt, "2.4.0")
    assert not compare_version("a_package_that_is_missing", operator.ge, "0.0")


# ---- Experts


@pytest.mark.parametrize("tile", [64, 4])
@pytest.mark.parametrize("tokens, experts, k", [(37, 5, 2), (1, 1, 1), (9, 8, 3), (0, 4, 2)])
def test_routing_metadata(tokens, experts, k, tile):
    from liger_kernel.ops.fused_moe import compute_routing_metadata

    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]).int() if tokens else torch.zeros(0, k).int()
    counts, starts, token_of_row, pair_of_row, row_of_pair, first, expert = compute_routing_metadata(ids, experts, tile)
    rows = [(int(e), t * k + j) for t, pair in enumerate(ids) for j, e in enumerate(pair)]
    rows.sort()
    assert pair_of_row.tolist() == [pair for _, pair in rows]
    assert token_of_row.tolist() == [pair // k for _, pair in rows]
    assert all(rows[row][1] == pair for pair, row in enumerate(row_of_pair.tolist()))
    assert counts.tolist() == [sum(e == i for e, _ in rows) for i in range(experts)]
    assert starts.tolist() == [sum(e < i for e, _ in rows) for i in range(experts + 1)]
    tiles = [(int(starts[i]) + at, i) for i in range(experts) for at in range(0, int(counts[i]), tile)]
    assert list(zip(first.tolist(), expert.tolist())) == tiles
    assert all(t.dtype == torch.int32 for t in (counts, starts, token_of_row, pair_of_row, row_of_pair, first, expert))


@pytest.mark.parametrize("shape", [(8,), (8, 5), (10, 3), (1, 2)])
def test_weights_of_two_bits(shape):
    from liger_kernel.ops.experimental.mm_int8int2 import matmul, pack_weights, unpack_weights

    weights = torch.randint(-1, 3, shape, dtype=torch.int8)
    packed = pack_weights(weights)
    assert packed.dtype == torch.uint8 and len(packed) == -(-shape[0] // 4)
    # The byte of row r holds the weights of rows r, r + K, r + 2 K and r + 3 K, the first one in its lowest bits.
    for r in range(shape[0]):
        bits = packed[r % len(packed)].int() >> 2 * (r // len(packed)) & 3
        assert torch.equal(bits - 1, weights[r].int())
    unpacked = unpack_weights(packed)
    assert torch.equal(unpacked[: shape[0]], weights.int()) and unpacked.dtype == torch.int32
    with pytest.raises(ValueError, match=r"bits must be 2 \(got 4\)"):
        pack_weights(weights, bits=4)
    if len(shape) == 2:
        a = torch.randint(-128, 128, (3, len(unpacked)), dtype=torch.int8)
        found = matmul(a, packed)
        assert found.dtype == torch.int32 and torch.equal(found, a.int() @ unpacked)
        with pytest.raises(AssertionError, match="columns"):
            matmul(a[:, :-1], packed)


# ---- Rotary position embedding


@pytest.mark.parametrize("size, width", [(41, 42), (40, 48), (16, 7), (9, 9)])
def test_rotation_of_heads_that_are_odd_or_narrower_than_the_angles(size, width):
    """Pairs are a half of the smaller size apart; what is left does not rotate."""
    from liger_kernel.transformers.functional import liger_rope

    q, k, angles = torch.randn(2, 3, 5, size), torch.randn(2, 1, 5, size), torch.randn(1, 5, (width + 1) // 2)
    cos, sin = (t.repeat(1, 1, 2)[..., :width] for t in (angles.cos(), angles.sin()))
    half = min(size, width) // 2

    def formula(q, k):
        def rotated(x):
            a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            c, s = (t[:, None, :, :half].to(x.dtype) for t in (cos, sin))
            return torch.cat([a * c - b * s, b * c + a * s, rest], -1)

        return rotated(q), rotated(k)

    inputs, grads_out = [q.requires_grad_(), k.requires_grad_()], [torch.randn_like(q), torch.randn_like(k)]
    check_results(gradients(lambda q, k: liger_rope(q, k, cos, sin), inputs, grads_out), formula, inputs, grads_out)


def test_angles_with_a_dimension_of_heads():
    from liger_kernel.ops import LigerRopeFunction

    q, k, angles = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 5, 4).repeat(1, 1, 2)
    expected = F.rope(q, k, angles.cos(), angles.sin())
    for dim, at in ((1, 1), (2, 2), (1, 2)):
        given = (t.unsqueeze(at) for t in (angles.cos(), angles.sin()))
        assert equal(LigerRopeFunction.apply(q, k, *given, None, dim), expected)


# ---- Megatron


def test_norm_of_megatron():
    from liger_kernel.megatron import LigerMegatronRMSNorm

    config, x = SimpleNamespace(normalization="RMSNorm", sequence_parallel=True), torch.randn(3, 2, 8)
    weight = LigerMegatronRMSNorm(config, 8).weight
    assert weight.sequence_parallel and bool((weight == 1).all())
    centred = LigerMegatronRMSNorm(SimpleNamespace(layernorm_zero_centered_gamma=True), (8,))
    assert not centred.weight.any() and not centred.weight.sequence_parallel and "zero_centered" in repr(centred)
    centred.weight.data.normal_()
    assert torch.equal(centred(x), F.rms_norm(x, centred.weight, 1e-5, 1.0))
    with pytest.raises(ValueError, match="got 'LayerNorm'"):
        LigerMegatronRMSNorm(SimpleNamespace(normalization="LayerNorm"), 8)


def test_calls_that_megatron_falls_back_for():
    from liger_kernel.megatron import LigerMegatronSwiGLU

    x, calls = torch.randn(3, 2, 8), []
    for given in ((x[0, 0], False, False), (None, True, False), (None, False, True)):
        with pytest.raises(RuntimeError, match="fallback_impl"):
            LigerMegatronSwiGLU()(x, *given)
    with_fallback = LigerMegatronSwiGLU(lambda *arguments: calls.append(arguments) or x)
    assert with_fallback(x, x[0, 0], True) is x and calls[0][2:] == (True, False)


def test_report_of_the_environment(capsys):
    from liger_kernel.env_report import print_env_report

    print_env_report()
    printed = capsys.readouterr().out
    assert f"PyTorch version: {torch.__version__}" in printed and "liger_ops version: " in printed
    assert ("CUDA version: Not available" in printed) == (not torch.cuda.is_available())
