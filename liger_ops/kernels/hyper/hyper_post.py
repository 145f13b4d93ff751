"""hyper_post for 4 streams: a program has one token, whose numbers are scalars.

y: (tokens, n), streams: (tokens, 4, n), post: (tokens, 4), comb: (tokens, 4, 4)
"""

import triton
import triton.language as tl

from ..table import Config, Kernel
from .hyper_pre import STREAMS, pick

HAS_COMB = tl.constexpr(1)
ROUNDED = tl.constexpr(2)
NEEDS_DY = tl.constexpr(4)
NEEDS_DSTREAMS = tl.constexpr(8)


@triton.jit
def rounded(v, like, flags):
    """v as a step rounds it, if steps round."""
    return tl.where((flags & ROUNDED) != 0, v.to(like.dtype.element_ty).to(tl.float32), v)


@triton.jit
def loaded(at, like, flags):
    return rounded(tl.load(at), like, flags)


@triton.jit
def hyper_post_fwd_kernel(out, y, streams, post, comb, tokens, n, flags, BLOCK_H: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    post += token * STREAMS
    comb += token * STREAMS * STREAMS
    for first in range(0, n, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        mask = h < n
        v = tl.load(y + token * n + h, mask=mask, other=0.0).to(tl.float32)
        at = streams + token * STREAMS * n + h
        s0 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        s1 = tl.load(at + n, mask=mask, other=0.0).to(tl.float32)
        s2 = tl.load(at + 2 * n, mask=mask, other=0.0).to(tl.float32)
        s3 = tl.load(at + 3 * n, mask=mask, other=0.0).to(tl.float32)
        for j in tl.static_range(STREAMS):
            if (flags & HAS_COMB) != 0:
                mix = loaded(comb + j, y, flags) * s0 + loaded(comb + STREAMS + j, y, flags) * s1
                mix += loaded(comb + 2 * STREAMS + j, y, flags) * s2
                mix += loaded(comb + 3 * STREAMS + j, y, flags) * s3
                mix = rounded(mix, y, flags)
            else:
                mix = pick(j, s0, s1, s2, s3)
            result = rounded(loaded(post + j, y, flags) * v, y, flags) + mix
            tl.store(out + (token * STREAMS + j) * n + h, result, mask=mask)


@triton.jit
def hyper_post_bwd_kernel(
    dy, dstreams, dpost, dcomb, dout, y, streams, post, comb, tokens, n, flags, BLOCK_H: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    of_post, of_comb = token * STREAMS, token * STREAMS * STREAMS
    p0, p1 = loaded(post + of_post, y, flags), loaded(post + of_post + 1, y, flags)
    p2, p3 = loaded(post + of_post + 2, y, flags), loaded(post + of_post + 3, y, flags)
    # For each stream that goes in, its products with the gradients of the streams that come out.
    j = tl.arange(0, STREAMS)
    posts = tl.zeros([STREAMS], tl.float32)
    zero = tl.zeros([BLOCK_H], tl.float32)
    q0, q1, q2, q3 = zero, zero, zero, zero
    a00, a01, a02, a03 = zero, zero, zero, zero
    a10, a11, a12, a13 = zero, zero, zero, zero
    a20, a21, a22, a23 = zero, zero, zero, zero
    a30, a31, a32, a33 = zero, zero, zero, zero
    has_comb = (flags & HAS_COMB) != 0
    for first in range(0, n, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        mask = h < n
        at = (token * STREAMS) * n + h
        g0 = tl.load(dout + at, mask=mask, other=0.0).to(tl.float32)
        g1 = tl.load(dout + at + n, mask=mask, other=0.0).to(tl.float32)
        g2 = tl.load(dout + at + 2 * n, mask=mask, other=0.0).to(tl.float32)
        g3 = tl.load(dout + at + 3 * n, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(y + token * n + h, mask=mask, other=0.0).to(tl.float32)
        q0 += g0 * v
        q1 += g1 * v
        q2 += g2 * v
        q3 += g3 * v
        if (flags & NEEDS_DY) != 0:
            tl.store(dy + token * n + h, p0 * g0 + p1 * g1 + p2 * g2 + p3 * g3, mask=mask)
        if has_comb:
            s0 = tl.load(streams + at, mask=mask, other=0.0).to(tl.float32)
            s1 = tl.load(streams + at + n, mask=mask, other=0.0).to(tl.float32)
            s2 = tl.load(streams + at + 2 * n, mask=mask, other=0.0).to(tl.float32)
            s3 = tl.load(streams + at + 3 * n, mask=mask, other=0.0).to(tl.float32)
            a00 += s0 * g0
            a01 += s0 * g1
            a02 += s0 * g2
            a03 += s0 * g3
            a10 += s1 * g0
            a11 += s1 * g1
            a12 += s1 * g2
            a13 += s1 * g3
            a20 += s2 * g0
            a21 += s2 * g1
            a22 += s2 * g2
            a23 += s2 * g3
            a30 += s3 * g0
            a31 += s3 * g1
            a32 += s3 * g2
            a33 += s3 * g3
        if (flags & NEEDS_DSTREAMS) != 0:
            for i in tl.static_range(STREAMS):
                if has_comb:
                    c = comb + of_comb + i * STREAMS
                    ds = loaded(c, y, flags) * g0 + loaded(c + 1, y, flags) * g1
                    ds += loaded(c + 2, y, flags) * g2 + loaded(c + 3, y, flags) * g3
                else:
                    ds = pick(i, g0, g1, g2, g3)
                tl.store(dstreams + at + i * n, ds, mask=mask)
    posts = pick(j, tl.sum(q0, 0), tl.sum(q1, 0), tl.sum(q2, 0), tl.sum(q3, 0))
    tl.store(dpost + of_post + j, posts)
    if has_comb:
        row = pick(j, tl.sum(a00, 0), tl.sum(a01, 0), tl.sum(a02, 0), tl.sum(a03, 0))
        tl.store(dcomb + of_comb + j, row)
        row = pick(j, tl.sum(a10, 0), tl.sum(a11, 0), tl.sum(a12, 0), tl.sum(a13, 0))
        tl.store(dcomb + of_comb + STREAMS + j, row)
        row = pick(j, tl.sum(a20, 0), tl.sum(a21, 0), tl.sum(a22, 0), tl.sum(a23, 0))
        tl.store(dcomb + of_comb + 2 * STREAMS + j, row)
        row = pick(j, tl.sum(a30, 0), tl.sum(a31, 0), tl.sum(a32, 0), tl.sum(a33, 0))
        tl.store(dcomb + of_comb + 3 * STREAMS + j, row)


DTYPES = [{"X": "bf16"}, {"X": "fp16"}, {"X": "fp32"}]
OPTIONS = {"tokens": "i32", "n": "i32", "flags": "i32"}


def config(aligned, block_h, warps=4):
    return Config(None, aligned, warps, constexprs=dict(BLOCK_H=block_h))


KERNELS = [
    Kernel(
        function=hyper_post_fwd_kernel,
        args={"out": "*X", "y": "*X", "streams": "*X", "post": "*fp32", "comb": "*fp32", **OPTIONS},
        aligned=["out", "y", "streams", "n"],
        axes={"dtype": DTYPES},
        configs=[config(True, 1024), config(False, 512)],
    ),
    Kernel(
        function=hyper_post_bwd_kernel,
        args={
            "dy": "*X", "dstreams": "*X", "dpost": "*fp32", "dcomb": "*fp32", "dout": "*X", "y": "*X", "streams": "*X",
            "post": "*fp32", "comb": "*fp32", **OPTIONS,
        },
        aligned=["dy", "dstreams", "dout", "y", "streams", "n"],
        axes={"dtype": DTYPES},
        configs=[config(True, 512), config(False, 512)],
    ),
]  # fmt: skip
