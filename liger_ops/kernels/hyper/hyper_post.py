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
def each_stream(at, n, mask):
    """Numbers of the 4 streams, as they are."""
    s0, s1 = tl.load(at, mask=mask, other=0.0), tl.load(at + n, mask=mask, other=0.0)
    s2, s3 = tl.load(at + 2 * n, mask=mask, other=0.0), tl.load(at + 3 * n, mask=mask, other=0.0)
    return s0, s1, s2, s3


@triton.jit
def widened(s0, s1, s2, s3):
    return s0.to(tl.float32), s1.to(tl.float32), s2.to(tl.float32), s3.to(tl.float32)


@triton.jit
def dots(s, g0, g1, g2, g3, EACH: tl.constexpr):
    """Products of one stream and four, summed over EACH neighbours: what a thread has, so that it keeps one sum of each."""
    shape: tl.constexpr = [s.shape[0] // EACH, EACH]
    t0, t1 = tl.sum(tl.reshape(s * g0, shape), 1), tl.sum(tl.reshape(s * g1, shape), 1)
    t2, t3 = tl.sum(tl.reshape(s * g2, shape), 1), tl.sum(tl.reshape(s * g3, shape), 1)
    return t0, t1, t2, t3


@triton.jit
def store_sums(at, a0, a1, a2, a3):
    j = tl.arange(0, STREAMS)
    tl.store(at + j, pick(j, tl.sum(a0, 0), tl.sum(a1, 0), tl.sum(a2, 0), tl.sum(a3, 0)))


@triton.jit
def hyper_post_bwd_kernel(
    dy, dstreams, dpost, dcomb, dout, y, streams, post, comb, tokens, n, flags,
    BLOCK_H: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    of_post, of_comb = token * STREAMS, token * STREAMS * STREAMS
    p0, p1 = loaded(post + of_post, y, flags), loaded(post + of_post + 1, y, flags)
    p2, p3 = loaded(post + of_post + 2, y, flags), loaded(post + of_post + 3, y, flags)
    has_comb = (flags & HAS_COMB) != 0
    zero = tl.zeros([BLOCK_H // EACH], tl.float32)
    q0, q1, q2, q3 = zero, zero, zero, zero
    # For each stream that goes in, its products with the gradients of the streams that come out.
    a00, a01, a02, a03 = zero, zero, zero, zero
    a10, a11, a12, a13 = zero, zero, zero, zero
    a20, a21, a22, a23 = zero, zero, zero, zero
    a30, a31, a32, a33 = zero, zero, zero, zero
    # Each block is loaded while the one before it is computed.
    h = tl.arange(0, BLOCK_H)
    mask = h < n
    at = token * STREAMS * n + h
    w0, w1, w2, w3 = each_stream(dout + at, n, mask)
    u0, u1, u2, u3 = each_stream(streams + at, n, mask & has_comb)
    u = tl.load(y + token * n + h, mask=mask, other=0.0)
    for first in range(0, n, BLOCK_H):
        g0, g1, g2, g3 = widened(w0, w1, w2, w3)
        s0, s1, s2, s3 = widened(u0, u1, u2, u3)
        v = u.to(tl.float32)
        later = first + BLOCK_H + tl.arange(0, BLOCK_H)
        is_later = later < n
        w0, w1, w2, w3 = each_stream(dout + token * STREAMS * n + later, n, is_later)
        u0, u1, u2, u3 = each_stream(streams + token * STREAMS * n + later, n, is_later & has_comb)
        u = tl.load(y + token * n + later, mask=is_later, other=0.0)

        h = first + tl.arange(0, BLOCK_H)
        mask = h < n
        t0, t1, t2, t3 = dots(v, g0, g1, g2, g3, EACH)
        q0, q1, q2, q3 = q0 + t0, q1 + t1, q2 + t2, q3 + t3
        if (flags & NEEDS_DY) != 0:
            tl.store(dy + token * n + h, p0 * g0 + p1 * g1 + p2 * g2 + p3 * g3, mask=mask)
        if has_comb:
            t0, t1, t2, t3 = dots(s0, g0, g1, g2, g3, EACH)
            a00, a01, a02, a03 = a00 + t0, a01 + t1, a02 + t2, a03 + t3
            t0, t1, t2, t3 = dots(s1, g0, g1, g2, g3, EACH)
            a10, a11, a12, a13 = a10 + t0, a11 + t1, a12 + t2, a13 + t3
            t0, t1, t2, t3 = dots(s2, g0, g1, g2, g3, EACH)
            a20, a21, a22, a23 = a20 + t0, a21 + t1, a22 + t2, a23 + t3
            t0, t1, t2, t3 = dots(s3, g0, g1, g2, g3, EACH)
            a30, a31, a32, a33 = a30 + t0, a31 + t1, a32 + t2, a33 + t3
        if (flags & NEEDS_DSTREAMS) != 0:
            for i in tl.static_range(STREAMS):
                if has_comb:
                    c = comb + of_comb + i * STREAMS
                    ds = loaded(c, y, flags) * g0 + loaded(c + 1, y, flags) * g1
                    ds += loaded(c + 2, y, flags) * g2 + loaded(c + 3, y, flags) * g3
                else:
                    ds = pick(i, g0, g1, g2, g3)
                tl.store(dstreams + (token * STREAMS + i) * n + h, ds, mask=mask)
    store_sums(dpost + of_post, q0, q1, q2, q3)
    if has_comb:
        store_sums(dcomb + of_comb, a00, a01, a02, a03)
        store_sums(dcomb + of_comb + STREAMS, a10, a11, a12, a13)
        store_sums(dcomb + of_comb + 2 * STREAMS, a20, a21, a22, a23)
        store_sums(dcomb + of_comb + 3 * STREAMS, a30, a31, a32, a33)


DTYPES = [{"X": "bf16"}, {"X": "fp16"}, {"X": "fp32"}]
OPTIONS = {"tokens": "i32", "n": "i32", "flags": "i32"}


def config(aligned, block_h, warps=4, **constexprs):
    return Config(None, aligned, warps, constexprs=dict(BLOCK_H=block_h, **constexprs))


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
        # One warp, whose sums need no barrier. Without vectors, a thread has no neighbours.
        configs=[config(True, 256, 1, EACH=8), config(False, 64, 1, EACH=1)],
    ),
]  # fmt: skip
