"""hyper_post against its formula in fp64."""

import pytest
import torch
from torch import Tensor

from tests.support.checks import CPU_DTYPES, check_op, check_results, gradients
from tests.support.pairs import pairwise, sizes_by_device

hyper_post = torch.ops.liger.hyper_post


def reference(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor | None = None, rounded: bool = True) -> Tensor:
    """As transformers' DeepseekV4DecoderLayer and, if not `rounded`, HYV4DecoderLayer compute."""
    if rounded:
        post, comb = post.to(y.dtype), None if comb is None else comb.to(y.dtype)
        mix = streams if comb is None else comb.transpose(-1, -2) @ streams
        return post.unsqueeze(-1) * y.unsqueeze(-2) + mix
    wide = torch.promote_types(y.dtype, torch.float32)
    s = streams.to(wide)
    mix = s if comb is None else comb.to(wide).transpose(-1, -2) @ s
    return (post.to(wide).unsqueeze(-1) * y.to(wide).unsqueeze(-2) + mix).to(y.dtype)


def make(shape, dtype, device, has_comb=True, count=4, numbers=None):
    """shape: of y. Inputs and upstream gradients."""
    torch.manual_seed(0)
    *rows, n = shape
    y, streams, dout = (torch.randn(*rows, *s, n, device=device).to(dtype) for s in ((), (count,), (count,)))
    numbers = numbers or (torch.float64 if dtype == torch.float64 else torch.float32)
    post, comb = (torch.randn(*rows, *s, device=device).to(numbers) for s in ((count,), (count, count)))
    return [t.requires_grad_() for t in (y, streams, post, *([comb] if has_comb else []))], [dout]


def check(inputs, grads, device, rounded=True):
    def pair(op):
        return lambda *tensors: op(*tensors, rounded=rounded)

    check_op(pair(hyper_post), pair(reference), inputs, grads, device)


@sizes_by_device(cpu=[1, 7, 264], cuda=[1, 7, 131, 512, 1032, 4096], dtype=CPU_DTYPES)
def test_sizes(n, dtype, device):
    for shape in ((n,), (3, n), (2, 5, n)):
        check(*make(shape, dtype, device), device)


@pairwise(dtype=CPU_DTYPES, has_comb=[True, False], rounded=[True, False])
def test_kinds(dtype, has_comb, rounded, device):
    check(*make((9, 72), dtype, device, has_comb), device, rounded)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_numbers_of_streams(count):
    """Other numbers than 4 have no kernel."""
    for has_comb in (True, False):
        check(*make((6, 24), torch.float32, "cpu", has_comb, count), "cpu")


@pytest.mark.gpu
def test_numbers_of_streams_without_a_kernel():
    inputs, grads = make((6, 24), torch.float32, "cuda", count=2)
    check_results(gradients(hyper_post, inputs, grads), reference, inputs, grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_in_half_precision(dtype, device):
    for rounded in (True, False):
        check(*make((9, 64), dtype, device, numbers=dtype), device, rounded)


Y, STREAMS, POST, COMB = torch.ones(3, 8), torch.ones(3, 4, 8), torch.ones(3, 4), torch.ones(3, 4, 4)
ERRORS = {
    "one dimension": ((Y, STREAMS[0, 0], POST, COMB), "streams must have at least two dimensions"),
    "dtype of y": ((Y.half(), STREAMS, POST, COMB), "y must have the dtype of streams"),
    "shape of y": ((Y[:2], STREAMS, POST, COMB), r"y must have shape \[3, 8\]"),
    "post": ((Y, STREAMS, POST[:, :2], COMB), r"post must have shape \[3, 4\]"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    arguments, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"hyper_post: {message}.*got "):
        hyper_post(*arguments)
