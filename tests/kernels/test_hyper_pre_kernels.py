"""The hyper_pre kernels, in Triton's interpreter on CPU tensors."""

import torch
from interpreted import cases

from liger_ops import functional as F

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.hyper.hyper_pre
from interpreter import find

def run(path, n, width, aligned, dtype, split, hopper, sinkhorn):
    torch.manual_seed(0)
    tokens, groups = 21, {4: 1, 8: 2, 24: 3}[width]
    names = {"fp16": torch.float16, "fp32": torch.float32}
    streams, dx = torch.randn(tokens, 4, n).to(names[dtype]), torch.randn(tokens, n).to(names[dtype])
    # Pieces in fp16 have few digits of small numbers.
    fn = torch.randn(width, 4 * n) * (1 if split else n ** -0.5)
    base, scale = torch.randn(width), 0.5 + torch.rand(groups)
    dpost, dcomb = torch.randn(tokens, 4), torch.randn(tokens, 4, 4)
    none = lambda *shape: torch.full(shape, float("nan"))
    x, post, comb = torch.full_like(dx, float("nan")), none(tokens, 4), none(tokens, 4, 4)
    logits, rstd, dlogits = none(tokens, width), none(tokens), none(tokens, width)
    fn_pieces, pieces = none(3, width, 4 * n).to(streams.dtype), none(tokens, 4, 32).to(streams.dtype)
    numbers, sums = none(tokens, 5), none(tokens, 2 * sinkhorn, 4)
    dstreams, dfn, dbase, dscale = (torch.full_like(t, float("nan")) for t in (streams, fn, base, scale))
    # Kernels for Hopper have pieces alone.
    suffix = "_hopper" if hopper else ""
    def of(name):
        choices = {"X": "bf16" if split else dtype} | ({} if "pieces" in name else {"SPLIT": split})
        return find(name).pick(choices, n, aligned)
    def start(name, grid, *arguments):
        variant = of(name)
        programs = grid(variant.config.constexprs)
        variant.kernel.function[(programs,)](*arguments, **variant.constexprs)
    of_tokens = lambda c: -(-tokens // c["BLOCK_T"])
    if split:
        start("hyper_pre_pieces", lambda c: -(-fn.numel() // c["BLOCK"]), fn_pieces, fn, fn.numel())
    start("hyper_pre_fwd" + suffix, of_tokens, x, post, comb, logits, rstd, streams, fn, fn_pieces, base, scale,
          tokens, n, width, sinkhorn, 1e-5, 1e-3, 1.5, 1e-2)
    partial = none(2, of_tokens(of("hyper_pre_bwd_logits").config.constexprs), width)
    start("hyper_pre_bwd_logits", of_tokens, dlogits, pieces, numbers, partial, sums, dx, dpost, dcomb, streams, logits, rstd,
          base, scale, tokens, n, width, sinkhorn, 1e-3, 1.5)
    start("hyper_pre_bwd" + suffix, lambda c: 4 * -(-n // c["BLOCK_H"]), dstreams, dfn, dbase, dscale, dx, streams, fn,
          dlogits, pieces, numbers, partial, tokens, n, width, partial.shape[1], 3)
    numpy.savez(path, streams=streams, fn=fn, base=base, scale=scale, dx=dx, dpost=dpost, dcomb=dcomb, x=x, post=post,
                comb=comb, dstreams=dstreams, dfn=dfn, dbase=dbase, dscale=dscale)
"""
QUICK = [
    (64, 24, True, "fp32", 0, 0, 4), (200, 8, True, "fp16", 0, 0, 1), (37, 4, False, "fp32", 0, 0, 1),
    (48, 24, True, "fp16", 1, 0, 20), (136, 24, True, "fp16", 1, 1, 3), (37, 24, False, "fp16", 1, 1, 2),
]  # fmt: skip


def assert_close(got, expected):
    limit = 2e-3 if got.dtype == torch.float16 else 2e-5
    assert float((got.double() - expected).abs().max()) <= limit * float(expected.abs().max())


@cases(QUICK)
def test_kernels_interpreted(case, interpreted):
    n, width, *_, sinkhorn = case
    got = interpreted
    inputs = [got[name].double().requires_grad_() for name in ("streams", "fn", "base", "scale")]
    results = F.hyper_pre.reference(*inputs, 1e-5, 1e-3, sinkhorn, 1.5, 1e-2)[: {4: 1, 8: 2, 24: 3}[width]]
    upstream = [got[name].double() for name in ("dx", "dpost", "dcomb")][: len(results)]
    gradients = torch.autograd.grad(results, inputs, upstream)
    for name, exact in zip(("x", "post", "comb"), results):
        assert_close(got[name], exact.detach())
    for name, exact in zip(("streams", "fn", "base", "scale"), gradients):
        assert_close(got["d" + name], exact)
