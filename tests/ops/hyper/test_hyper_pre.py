"""hyper_pre against its formula in fp64."""

import pytest
import torch
from torch import Tensor

from tests.support.checks import CPU_DTYPES, check_op, check_results, gradients
from tests.support.pairs import sizes_by_device

hyper_pre = torch.ops.liger.hyper_pre
OPTIONS = dict(norm_eps=1e-5, eps=1e-4)
WIDTHS = {"pre": 1, "pre and post": 2, "all": 3}


def reference(streams, fn, base, scale, norm_eps, eps, sinkhorn=20, post_scale=2.0, post_eps=0.0) -> tuple[Tensor, ...]:
    """As transformers' DeepseekV4HyperConnection, HYV4HyperConnection and their heads compute."""
    count, dtype = streams.shape[-2], streams.dtype
    wide = torch.promote_types(dtype, torch.float32)
    s, fn, base, scale = (t.to(wide) for t in (streams, fn, base, scale))
    flat = s.flatten(-2)
    u = (flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)) @ fn.T
    pre = torch.sigmoid(u[..., :count] * scale[0] + base[:count]) + eps
    results = [(pre.unsqueeze(-1) * s).sum(-2).to(dtype)]
    if len(scale) > 1:
        where = slice(count, 2 * count)
        results.append(post_scale * torch.sigmoid(u[..., where] * scale[1] + base[where]) + post_eps)
    if len(scale) > 2:
        rows = (count, count)
        c = (u[..., 2 * count :].unflatten(-1, rows) * scale[2] + base[2 * count :].view(rows)).softmax(-1) + eps
        c = c / (c.sum(-2, keepdim=True) + eps)
        for _ in range(sinkhorn - 1):
            c = c / (c.sum(-1, keepdim=True) + eps)
            c = c / (c.sum(-2, keepdim=True) + eps)
        results.append(c)
    return tuple(results)


def make(shape, dtype, device, kind="all", count=4, parameters=None):
    """shape: of x. Inputs and upstream gradients."""
    torch.manual_seed(0)
    groups = WIDTHS[kind]
    *rows, n = shape
    width = (count, 2 * count, count * (2 + count))[groups - 1]
    streams, x = torch.randn(*rows, count, n, device=device), torch.randn(shape, device=device)
    fn, base = (
        torch.randn(width, count * n, device=device) / max(1, count * n) ** 0.5,
        torch.randn(width, device=device),
    )
    scale = 0.5 + torch.rand(groups, device=device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    grads = [x.to(dtype), torch.randn(*rows, count, device=device).to(wide)]
    grads.append(torch.randn(*rows, count, count, device=device).to(wide))
    inputs = [streams.to(dtype), *(t.to(parameters or wide) for t in (fn, base, scale))]
    return [t.requires_grad_() for t in inputs], grads[:groups]


def check(inputs, grads, device, **options):
    given = OPTIONS | options
    check_op(
        lambda *tensors: tuple(hyper_pre(*tensors, **given)[: len(grads)]),
        lambda *tensors: reference(*tensors, **given),
        inputs,
        grads,
        device,
    )


@sizes_by_device(cpu=[1, 7, 64], cuda=[1, 7, 64, 131, 512, 4096], dtype=CPU_DTYPES)
def test_sizes(n, dtype, device):
    for shape in ((n,), (3, n), (2, 35, n)):
        check(*make(shape, dtype, device), device)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, n", [(4093, 72), (4160, 64), (70, 4096)])
def test_many_tokens_and_columns(tokens, n):
    """Few tokens, or few columns, have smaller blocks."""
    check(*make((tokens, n), torch.bfloat16, "cuda"), "cuda", sinkhorn=3)


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_kinds(kind, dtype, device):
    for sinkhorn in (1, 3):
        options = dict(sinkhorn=sinkhorn, post_scale=1.5, post_eps=1e-2)
        check(*make((5, 48), dtype, device, kind), device, **options)


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_numbers_of_streams(count, kind):
    """Other numbers than 4 have no kernel."""
    check(*make((6, 24), torch.float32, "cpu", kind, count), "cpu", sinkhorn=4)


@pytest.mark.gpu
def test_numbers_of_streams_without_a_kernel():
    inputs, grads = make((6, 24), torch.float32, "cuda", count=2)
    ours, formula = (lambda *t, op=op: tuple(op(*t, **OPTIONS)) for op in (hyper_pre, reference))
    check_results(gradients(ours, inputs, grads), formula, inputs, grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_half_precision(dtype, device):
    check(*make((9, 64), dtype, device, parameters=dtype), device, sinkhorn=2)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_results_that_are_used(used, device):
    inputs, grads = make((7, 32), torch.float32, device)
    ours, formula = (lambda *t, op=op: op(*t, **OPTIONS)[used] for op in (hyper_pre, reference))
    check_op(ours, formula, inputs, [grads[used]], device)


STREAMS, FN, BASE, SCALE = torch.ones(3, 4, 8), torch.ones(24, 32), torch.ones(24), torch.ones(3)
ERRORS = {
    "streams must have at least two dimensions": dict(streams=STREAMS[0, 0]),
    r"fn must have shape \(P, 32\)": dict(fn=FN[:, :8]),
    "fn must have 4, 8 or 24 rows for 4 streams": dict(fn=FN[:7]),
    r"scale must have shape \[3\]": dict(scale=SCALE[:2]),
    "eps must be finite and not negative": dict(eps=-1.0),
    "norm_eps must be finite and not negative": dict(norm_eps=-1.0),
    r"sinkhorn must lie in \[1, 1000\]": dict(sinkhorn=0),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    given = dict(streams=STREAMS, fn=FN, base=BASE, scale=SCALE, **OPTIONS) | ERRORS[message]
    with pytest.raises(RuntimeError, match=f"^hyper_pre: {message}.*got "):
        hyper_pre(**given)
