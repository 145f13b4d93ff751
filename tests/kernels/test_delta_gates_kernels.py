"""The delta_gates kernels, in Triton's interpreter on CPU tensors."""

import torch
from checks import assert_as_the_formula
from interpreted import cases

from liger_ops import functional as F

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.gated.delta_gates
from interpreter import find

BIAS, BOUND, NEEDS = 1, 2, 4 + 8 + 16
TYPES = {"fp32": torch.float32, "fp16": torch.float16}

def run(path, heads, channels, aligned, flags=BIAS, rows=37, of_rows="fp32", of_weight="fp32"):
    torch.manual_seed(0)
    n, nan = heads * channels, float("nan")
    a, b, dbeta = (torch.randn(rows, size).to(TYPES[of_rows]) for size in (n, heads, heads))
    a_log, bias = (torch.randn(size).to(TYPES[of_weight]) for size in (heads, n))
    dg = torch.randn(rows, n)
    # Rows are those of wider tensors.
    wide, steps = (torch.cat([torch.full_like(t, nan), t], -1) for t in (a, b))
    g, beta = torch.full((rows, n), nan), torch.full_like(b, nan)
    point = {"X": of_rows, "W": of_weight}
    forward, backward = (find("delta_gates_" + k).pick(point, n, aligned) for k in ("fwd", "bwd"))
    sizes = rows, n, channels, 2 * n, 2 * heads
    c = forward.config.constexprs
    forward.kernel.function[(-(-rows // (c["BLOCK_M"] * c["UNROLL"])) * -(-n // c["BLOCK_N"]),)](
        g, beta, wide[:, n:], steps[:, heads:], a_log, bias, *sizes, -5.0, 2.0, flags, **c)
    c = backward.config.constexprs
    shares = -(-rows // (c["BLOCK_M"] * c["UNROLL"] * c["STEPS"]))
    da, db, partial = torch.full_like(a, nan), torch.full_like(b, nan), torch.full((2, shares, n), nan)
    backward.kernel.function[(shares * -(-n // c["BLOCK_N"]),)](
        da, db, partial, dg, dbeta, wide[:, n:], steps[:, heads:], a_log, bias, *sizes, n, heads, -5.0, 2.0,
        flags | NEEDS, **c)
    rate, of_bias = partial.sum(1)
    numpy.savez(path, a=a, b=b, a_log=a_log, bias=bias, dg=dg, dbeta=dbeta, g=g, beta=beta, da=da, db=db,
                da_log=rate.view(heads, channels).sum(1), dbias=of_bias)
"""
QUICK = [(8, 1, True), (32, 1, True, 3), (64, 1, True, 0, 150), (72, 1, True, 1), (7, 1, False), (130, 1, False, 2)]
QUICK += [(4, 8, True), (3, 128, True, 3), (9, 64, True, 1, 3), (3, 5, False, 3), (2, 16, True, 2, 1)]
QUICK += [(32, 1, True, 1, 37, "fp16", weight) for weight in ("fp16", "fp32")]
THOROUGH = [(16, 64, True, 1, 100), (5, 50, False, 1, 140)]


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    got = interpreted
    heads, channels, _, flags = (*case, *(1,)[len(case) - 3 :])[:4]
    names = ["a", "b", "a_log", *["bias"] * (flags & 1)]

    def results(a, b, a_log, bias, dg, dbeta):
        rows = a.view(-1, heads, channels)
        given = dict(a=a, b=b, a_log=a_log, bias=bias)
        g, beta = F.delta_gates.reference(
            rows, b, a_log, bias.view(heads, channels) if flags & 1 else None, -5.0 if flags & 2 else None, 2.0
        )
        g = g.flatten(1)
        grads = torch.autograd.grad((g * dg).sum() + (beta * dbeta).sum(), [given[name] for name in names])
        return {"g": g, "beta": beta, **{f"d{name}": grad for name, grad in zip(names, grads)}}

    inputs = [got[name] for name in ("a", "b", "a_log", "bias", "dg", "dbeta")]
    wanted = ["g", "beta", *(f"d{name}" for name in names)]
    assert_as_the_formula([(name, got[name]) for name in wanted], results, inputs, got["a"].dtype)
