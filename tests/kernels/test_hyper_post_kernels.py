"""The hyper_post kernels, in Triton's interpreter on CPU tensors."""

import torch
from interpreted import cases

from liger_ops import functional as F

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.hyper.hyper_post
from interpreter import find

def run(path, n, aligned, dtype, has_comb, rounded):
    torch.manual_seed(0)
    tokens = 3
    names = {"fp16": torch.float16, "fp32": torch.float32}
    y, streams, dout = (torch.randn(tokens, *s, n).to(names[dtype]) for s in ((), (4,), (4,)))
    post, comb = torch.randn(tokens, 4), torch.randn(tokens, 4, 4)
    out, dy, dstreams, dpost, dcomb = (torch.full_like(t, float("nan")) for t in (streams, y, streams, post, comb))
    flags = has_comb + 2 * rounded
    for name, tensors, needs in (("hyper_post_fwd", (out, y, streams, post, comb), 0),
                                 ("hyper_post_bwd", (dy, dstreams, dpost, dcomb, dout, y, streams, post, comb), 12)):
        variant = find(name).pick({"X": dtype}, n, aligned)
        variant.kernel.function[(tokens,)](*tensors, tokens, n, flags + needs, **variant.config.constexprs)
    numpy.savez(path, y=y, streams=streams, dout=dout, post=post, comb=comb, out=out, dy=dy, dstreams=dstreams,
                dpost=dpost, dcomb=dcomb)
"""
QUICK = [(64, True, "fp32", 1, 0), (200, True, "fp16", 1, 1), (37, False, "fp32", 0, 0), (1032, True, "fp16", 0, 1)]


def assert_close(got, expected):
    limit = 2e-3 if got.dtype == torch.float16 else 2e-5
    assert float((got.double() - expected).abs().max()) <= limit * float(expected.abs().max())


@cases(QUICK)
def test_kernels_interpreted(case, interpreted):
    *_, has_comb, rounded = case
    got = interpreted
    inputs = [got[name].double().requires_grad_() for name in ("y", "streams", "post", "comb")[: 3 + has_comb]]
    out = F.hyper_post.reference(*inputs, rounded=bool(rounded))
    gradients = torch.autograd.grad(out, inputs, got["dout"].double())
    for name, exact in zip(("out", "dy", "dstreams", "dpost", "dcomb"), (out.detach(), *gradients)):
        assert_close(got[name], exact)
