"""What Triton's interpreter must notice for tests of kernels to mean something."""

import pytest
import torch
import triton
import triton.language as tl

from liger_ops import functional as F
from tests.support.host import interpreter, kernel_process


@triton.jit
def copy(out, x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


def error_of(outs, xs, n):
    try:
        copy[(1,)](torch.zeros(outs), torch.ones(xs), n, BLOCK=16)
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("device", ["interpreted"])
def test_accesses_outside_of_tensors_are_errors(device):
    assert error_of(9, 9, 9) is None
    # The lane of 16 bytes that holds the last element may be read whole.
    assert error_of(9, 6, 8) is None
    assert "read of 4 bytes outside" in error_of(9, 6, 9)
    assert "write of 4 bytes outside of the launch's tensors: 36 bytes from the start of 36" in error_of(9, 12, 10)
    assert "outside" in error_of(0, 9, 1)


@pytest.mark.parametrize("device", ["interpreted"])
def test_operators_pass_addresses_of_known_memory(device):
    x = torch.randn(2, 16)
    F.relu_squared(x)
    first, last = kernel_process.span_of(x[1].data_ptr())
    assert first == x.data_ptr() and x.nbytes <= last - first < x.nbytes + 64
    assert (first, last) in interpreter.memory.spans


@pytest.mark.parametrize("device", ["interpreted"])
def test_bf16_is_rounded_to_even(device):
    numbers = torch.cat([torch.randn(1000), 1 + torch.arange(9) * 2**-8, torch.tensor([torch.nan, torch.inf, -0.0])])
    found = torch.from_numpy(interpreter.in_bf16(numbers.numpy()).view("int16")).view(torch.bfloat16)
    torch.testing.assert_close(found, numbers.bfloat16(), rtol=0, atol=0, equal_nan=True)
