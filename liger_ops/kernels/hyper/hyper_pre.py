"""hyper_pre for 4 streams. A program of forward computes the logits of its tokens, stores them, and reads the same streams
again for their weighted sum. Backward is two launches: gradients of logits by blocks of tokens, then gradients of streams and
of fn by blocks of columns. A program of the second goes through all tokens, so that the gradient of fn is a sum in a fixed
order without partial sums.

streams: (tokens, 4 n), fn: (width, 4 n) with width 4 (pre), 8 (pre, post) or 24 (pre, post, comb)

With SPLIT, products of streams in 16 bits with numbers in fp32 keep the digits of fp32: each number is a sum of 16-bit
pieces, and the pieces of a matrix are rows of one product, which are added at its end. One launch before forward's splits fn.
"""

import triton
import triton.language as tl

from ..table import Config, Kernel

STREAMS = tl.constexpr(4)
WIDEST = tl.constexpr(32)  # the width, padded
PIECES = tl.constexpr(4)  # padded; the last one is free
NEEDS_DSTREAMS = tl.constexpr(1)
NEEDS_DFN = tl.constexpr(2)
# Numbers of a token for the second launch of backward, besides the gradients of its logits: pre, and the factor of streams.
PER_TOKEN = tl.constexpr(5)


@triton.jit
def pieces_of(v, like):
    """Three numbers of like's dtype, whose sum is v with the digits of fp32."""
    high = v.to(like.dtype.element_ty)
    rest = v - high.to(tl.float32)
    middle = rest.to(like.dtype.element_ty)
    return high, middle, (rest - middle.to(tl.float32)).to(like.dtype.element_ty)


@triton.jit
def added(product, total):
    """Their sum, rounded to nearest. Tensor cores cut off, and thousands of such sums would lose digits. A plain addition would
    become the product's own."""
    return tl.fma(product, 1.0, total)


@triton.jit
def sum_of_pieces(v, size: tl.constexpr):
    """(PIECES * WIDEST, size) -> (WIDEST, size), without the last piece, which repeats another."""
    last = tl.arange(0, PIECES * WIDEST)[:, None] >= (PIECES - 1) * WIDEST
    return tl.sum(tl.reshape(tl.where(last, 0.0, v), [PIECES, WIDEST, size]), axis=0)


@triton.jit
def hyper_pre_pieces_kernel(pieces, fn, count, BLOCK: tl.constexpr):
    """pieces: (3, count)"""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    high, middle, last = pieces_of(tl.load(fn + at, mask=mask, other=0.0), pieces)
    tl.store(pieces + at, high, mask=mask)
    tl.store(pieces + count + at, middle, mask=mask)
    tl.store(pieces + 2 * count + at, last, mask=mask)


@triton.jit
def gate(logits, base, scale, token, inside, width, i):
    """sigmoid(logit * scale + base) of column i, for pre and post."""
    logit = tl.load(logits + token * width + i, mask=inside, other=0.0)
    return tl.sigmoid(logit * tl.load(scale + i // STREAMS) + tl.load(base + i))


@triton.jit
def first_comb(logits, base, scale, token, inside, width, eps):
    """Logits and softmax of comb, (tokens, 4, 4)."""
    i, j = tl.arange(0, STREAMS)[None, :, None], tl.arange(0, STREAMS)[None, None, :]
    column = 2 * STREAMS + i * STREAMS + j
    logit = tl.load(logits + token[:, None, None] * width + column, mask=inside[:, None, None], other=0.0)
    u = logit * tl.load(scale + 2) + tl.load(base + column)
    power = tl.exp(u - tl.max(u, axis=2, keep_dims=True))
    return logit, power / tl.sum(power, axis=2, keep_dims=True)


@triton.jit
def hyper_pre_fwd_kernel(
    x, post, comb, logits, rstd, streams, fn, pieces, base, scale,
    tokens, n, width, sinkhorn, norm_eps, eps, post_scale, post_eps,
    SPLIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """pieces: (3, width, 4 n), those of fn"""
    t = tl.arange(0, BLOCK_T)
    token = tl.program_id(0) * BLOCK_T + t
    inside = token < tokens
    token = token.to(tl.int64)
    columns = STREAMS * n
    row = tl.arange(0, WIDEST)
    if SPLIT:
        piece, of_piece = tl.arange(0, PIECES * WIDEST) // WIDEST, tl.arange(0, PIECES * WIDEST) % WIDEST
        of_row = ((piece * width + of_piece) * columns)[:, None]
        in_fn = ((piece < PIECES - 1) & (of_piece < width))[:, None]
        products = tl.zeros([PIECES * WIDEST, BLOCK_T], tl.float32)
        # Squares are the diagonal of a product, which costs the tensor cores less than the other threads.
        gram = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
        for first in tl.range(0, columns, BLOCK_K, num_stages=STAGES):
            k = first + tl.arange(0, BLOCK_K)
            at = streams + token[None, :] * columns + k[:, None]
            s = tl.load(at, mask=(k < columns)[:, None] & inside[None, :], other=0.0)
            w = tl.load(pieces + of_row + k[None, :], mask=in_fn & (k < columns)[None, :], other=0.0)
            products = added(tl.dot(w, s), products)
            gram = added(tl.dot(tl.trans(s), s), gram)
        acc = sum_of_pieces(products, BLOCK_T)
        squares = tl.sum(tl.where(t[:, None] == t[None, :], gram, 0.0), axis=0)
    else:
        acc = tl.zeros([WIDEST, BLOCK_T], tl.float32)
        of_column = tl.zeros([BLOCK_K, BLOCK_T], tl.float32)
        for first in range(0, columns, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            at = streams + token[None, :] * columns + k[:, None]
            v = tl.load(at, mask=(k < columns)[:, None] & inside[None, :], other=0.0).to(tl.float32)
            mask = (row < width)[:, None] & (k < columns)[None, :]
            w = tl.load(fn + row[:, None] * columns + k[None, :], mask=mask, other=0.0)
            acc = tl.dot(w, v, acc, input_precision="tf32x3")
            of_column += v * v
        squares = tl.sum(of_column, axis=0)
    r = tl.rsqrt(squares / columns + norm_eps)
    tl.store(rstd + token, r, mask=inside)
    tl.store(
        logits + token[None, :] * width + row[:, None], acc * r[None, :],
        mask=(row < width)[:, None] & inside[None, :],
    )  # fmt: skip
    # Other threads wrote some of what a thread reads next.
    tl.debug_barrier()
    if width > STREAMS:
        for i in tl.static_range(STREAMS):
            out = post_scale * gate(logits, base, scale, token, inside, width, STREAMS + i) + post_eps
            tl.store(post + token * STREAMS + i, out, mask=inside)
    if width > 2 * STREAMS:
        _, c = first_comb(logits, base, scale, token, inside, width, eps)
        c += eps
        c = c / (tl.sum(c, axis=1, keep_dims=True) + eps)
        for _ in range(1, sinkhorn):
            c = c / (tl.sum(c, axis=2, keep_dims=True) + eps)
            c = c / (tl.sum(c, axis=1, keep_dims=True) + eps)
        at = tl.arange(0, STREAMS)[None, :, None] * STREAMS + tl.arange(0, STREAMS)[None, None, :]
        tl.store(comb + token[:, None, None] * (STREAMS * STREAMS) + at, c, mask=inside[:, None, None])
    p0 = gate(logits, base, scale, token, inside, width, 0) + eps
    p1 = gate(logits, base, scale, token, inside, width, 1) + eps
    p2 = gate(logits, base, scale, token, inside, width, 2) + eps
    p3 = gate(logits, base, scale, token, inside, width, 3) + eps
    for first in range(0, n, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        mask = inside[:, None] & (h < n)[None, :]
        at = streams + token[:, None] * columns + h[None, :]
        out = p0[:, None] * tl.load(at, mask=mask, other=0.0).to(tl.float32)
        out += p1[:, None] * tl.load(at + n, mask=mask, other=0.0).to(tl.float32)
        out += p2[:, None] * tl.load(at + 2 * n, mask=mask, other=0.0).to(tl.float32)
        out += p3[:, None] * tl.load(at + 3 * n, mask=mask, other=0.0).to(tl.float32)
        tl.store(x + token[:, None] * n + h[None, :], out, mask=mask)


@triton.jit
def pick(i, a, b, c, d):
    return tl.where(i == 0, a, tl.where(i == 1, b, tl.where(i == 2, c, d)))


@triton.jit
def store_gradient(dlogits, pieces, token, column, width, value, mask, SPLIT: tl.constexpr):
    """Of logits. The last of its pieces repeats the first."""
    if SPLIT:
        high, middle, last = pieces_of(value, pieces)
        at = pieces + token * (PIECES * WIDEST) + column
        tl.store(at, high, mask=mask)
        tl.store(at + WIDEST, middle, mask=mask)
        tl.store(at + 2 * WIDEST, last, mask=mask)
        tl.store(at + 3 * WIDEST, high, mask=mask)
    else:
        tl.store(dlogits + token * width + column, value, mask=mask)


@triton.jit
def hyper_pre_bwd_logits_kernel(
    dlogits, pieces, numbers, partial, sums, dx, dpost, dcomb, streams, logits, rstd, base, scale,
    tokens, n, width, sinkhorn, eps, post_scale,
    SPLIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dlogits: (tokens, width), gradients of logits times rstd, or with SPLIT pieces: (tokens, PIECES, WIDEST); numbers:
    (tokens, PER_TOKEN); partial: (2, programs, width), the gradients of base, and of scale by columns; sums: (tokens,
    2 sinkhorn, 4), scratch."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < tokens
    token = token.to(tl.int64)
    columns = STREAMS * n
    d0, d1 = tl.zeros([BLOCK_T, BLOCK_H], tl.float32), tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    d2, d3 = tl.zeros([BLOCK_T, BLOCK_H], tl.float32), tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for first in range(0, n, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        mask = inside[:, None] & (h < n)[None, :]
        d = tl.load(dx + token[:, None] * n + h[None, :], mask=mask, other=0.0).to(tl.float32)
        at = streams + token[:, None] * columns + h[None, :]
        d0 += d * tl.load(at, mask=mask, other=0.0).to(tl.float32)
        d1 += d * tl.load(at + n, mask=mask, other=0.0).to(tl.float32)
        d2 += d * tl.load(at + 2 * n, mask=mask, other=0.0).to(tl.float32)
        d3 += d * tl.load(at + 3 * n, mask=mask, other=0.0).to(tl.float32)
    i = tl.arange(0, STREAMS)
    r = tl.load(rstd + token, mask=inside, other=0.0)
    mask = inside[:, None] & (i < STREAMS)[None, :]
    to_base = partial + tl.program_id(0).to(tl.int64) * width
    to_scale = to_base + tl.num_programs(0).to(tl.int64) * width

    s0, s1, s2, s3 = tl.sum(d0, axis=1), tl.sum(d1, axis=1), tl.sum(d2, axis=1), tl.sum(d3, axis=1)
    of_pre = pick(i[None, :], s0[:, None], s1[:, None], s2[:, None], s3[:, None])
    # The sum of logits times their gradients comes from all three groups of columns.
    logit = tl.load(logits + token[:, None] * width + i[None, :], mask=mask, other=0.0)
    factor = tl.load(scale)
    share = tl.sigmoid(logit * factor + tl.load(base + i)[None, :])
    tl.store(numbers + token[:, None] * PER_TOKEN + i[None, :], share + eps, mask=mask)
    du = of_pre * share * (1 - share)
    store_gradient(dlogits, pieces, token[:, None], i[None, :], width, du * factor * r[:, None], mask, SPLIT)
    if SPLIT:
        padded = tl.arange(0, PIECES * WIDEST)
        free = inside[:, None] & (padded % WIDEST >= width)[None, :]
        zero = tl.zeros([BLOCK_T, PIECES * WIDEST], pieces.dtype.element_ty)
        tl.store(pieces + token[:, None] * (PIECES * WIDEST) + padded[None, :], zero, mask=free)
    along = tl.sum(du * logit, axis=1) * factor
    tl.store(to_base + i, tl.sum(du, axis=0))
    tl.store(to_scale + i, tl.sum(du * logit, axis=0))
    if width > STREAMS:
        column = STREAMS + i
        logit_1 = tl.load(logits + token[:, None] * width + column[None, :], mask=mask, other=0.0)
        factor_1 = tl.load(scale + 1)
        share_1 = tl.sigmoid(logit_1 * factor_1 + tl.load(base + column)[None, :])
        upstream = tl.load(dpost + token[:, None] * STREAMS + i[None, :], mask=mask, other=0.0)
        du_1 = upstream * post_scale * share_1 * (1 - share_1)
        of_post = du_1 * factor_1 * r[:, None]
        store_gradient(dlogits, pieces, token[:, None], column[None, :], width, of_post, mask, SPLIT)
        along += tl.sum(du_1 * logit_1, axis=1) * factor_1
        tl.store(to_base + column, tl.sum(du_1, axis=0))
        tl.store(to_scale + column, tl.sum(du_1 * logit_1, axis=0))
    if width > 2 * STREAMS:
        logit_2, soft = first_comb(logits, base, scale, token, inside, width, eps)
        # The sums by which Sinkhorn's steps divide. Backward multiplies by them again instead of storing matrices.
        sums_at = sums + token[:, None, None] * (2 * STREAMS) * sinkhorn
        by_column, by_row = tl.arange(0, STREAMS)[None, None, :], tl.arange(0, STREAMS)[None, :, None]
        here = inside[:, None, None]
        c = soft + eps
        of_column = tl.sum(c, axis=1, keep_dims=True) + eps
        tl.store(sums_at + by_column, of_column, mask=here)
        c = c / of_column
        for step in range(1, sinkhorn):
            of_row = tl.sum(c, axis=2, keep_dims=True) + eps
            tl.store(sums_at + (2 * step - 1) * STREAMS + by_row, of_row, mask=here)
            c = c / of_row
            of_column = tl.sum(c, axis=1, keep_dims=True) + eps
            tl.store(sums_at + 2 * step * STREAMS + by_column, of_column, mask=here)
            c = c / of_column
        tl.debug_barrier()
        at_2 = by_row * STREAMS + by_column
        dc = tl.load(dcomb + token[:, None, None] * (STREAMS * STREAMS) + at_2, mask=here, other=0.0)
        for back in range(1, sinkhorn):
            step = sinkhorn - back
            of_column = tl.load(sums_at + 2 * step * STREAMS + by_column, mask=here, other=1.0)
            dc = (dc - tl.sum(dc * c, axis=1, keep_dims=True)) / of_column
            c = c * of_column
            of_row = tl.load(sums_at + (2 * step - 1) * STREAMS + by_row, mask=here, other=1.0)
            dc = (dc - tl.sum(dc * c, axis=2, keep_dims=True)) / of_row
            c = c * of_row
        of_column = tl.load(sums_at + by_column, mask=here, other=1.0)
        dc = (dc - tl.sum(dc * c, axis=1, keep_dims=True)) / of_column
        du_2 = soft * (dc - tl.sum(dc * soft, axis=2, keep_dims=True))
        factor_2 = tl.load(scale + 2)
        of_comb = du_2 * factor_2 * r[:, None, None]
        store_gradient(dlogits, pieces, token[:, None, None], 2 * STREAMS + at_2, width, of_comb, here, SPLIT)
        along += tl.sum(tl.sum(du_2 * logit_2, axis=2), axis=1) * factor_2
        column_2 = 2 * STREAMS + i[:, None] * STREAMS + i[None, :]
        tl.store(to_base + column_2, tl.sum(du_2, axis=0))
        tl.store(to_scale + column_2, tl.sum(du_2 * logit_2, axis=0))
    tl.store(numbers + token * PER_TOKEN + STREAMS, along * r * r / columns, mask=inside)


@triton.jit
def hyper_pre_bwd_kernel(
    dstreams, dfn, dbase, dscale, dx, streams, fn, dlogits, pieces, numbers, partial,
    tokens, n, width, parts, flags,
    SPLIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dlogits or pieces: as the first launch wrote them; partial: (2, parts, width)"""
    # Programs of the same columns of all streams are neighbours, so that dx comes from the L2 cache.
    stream = tl.program_id(0) % STREAMS
    h = tl.program_id(0) // STREAMS * BLOCK_H + tl.arange(0, BLOCK_H)
    columns = STREAMS * n
    row = tl.arange(0, WIDEST)
    k = stream * n + h
    of_fn = row[:, None].to(tl.int64) * columns + k[None, :]
    w_mask = (row < width)[:, None] & (h < n)[None, :]
    writes = (h < n) & ((flags & NEEDS_DSTREAMS) != 0)
    if SPLIT:
        # (all pieces of a gradient) (high w) + (its high piece) (middle w), in one product.
        all_rows = tl.arange(0, PIECES * WIDEST)
        piece, of_piece = all_rows // WIDEST, all_rows % WIDEST
        of_w = of_piece[:, None].to(tl.int64) * columns + k[None, :]
        high, middle, _ = pieces_of(
            tl.load(fn + of_w, mask=(of_piece < width)[:, None] & (h < n)[None, :], other=0.0), pieces
        )
        w = tl.where((piece == PIECES - 1)[:, None], middle, high)
        of_pieces = tl.zeros([PIECES * WIDEST, BLOCK_H], tl.float32)
        for first in tl.range(0, tokens, BLOCK_T, num_stages=STAGES):
            t = first + tl.arange(0, BLOCK_T)
            inside = t < tokens
            token = t.to(tl.int64)
            mask = inside[:, None] & (h < n)[None, :]
            s = tl.load(streams + token[:, None] * columns + k[None, :], mask=mask, other=0.0)
            at = pieces + token[:, None] * (PIECES * WIDEST) + all_rows[None, :]
            dl = tl.load(at, mask=inside[:, None], other=0.0)
            d = tl.load(dx + token[:, None] * n + h[None, :], mask=mask, other=0.0).to(tl.float32)
            pre = tl.load(numbers + token * PER_TOKEN + stream, mask=inside, other=0.0)
            factor = tl.load(numbers + token * PER_TOKEN + STREAMS, mask=inside, other=0.0)
            out = tl.dot(dl, w) + (pre[:, None] * d - factor[:, None] * s.to(tl.float32))
            tl.store(dstreams + token[:, None] * columns + k[None, :], out, mask=inside[:, None] & writes[None, :])
            of_pieces = added(tl.dot(tl.trans(dl), s), of_pieces)
        dw = sum_of_pieces(of_pieces, BLOCK_H)
    else:
        w = tl.load(fn + of_fn, mask=w_mask, other=0.0)
        dw = tl.zeros([WIDEST, BLOCK_H], tl.float32)
        for first in range(0, tokens, BLOCK_T):
            t = first + tl.arange(0, BLOCK_T)
            inside = t < tokens
            token = t.to(tl.int64)
            mask = inside[:, None] & (h < n)[None, :]
            s = tl.load(streams + token[:, None] * columns + k[None, :], mask=mask, other=0.0).to(tl.float32)
            dl = tl.load(
                dlogits + token[:, None] * width + row[None, :],
                mask=inside[:, None] & (row < width)[None, :],
                other=0.0,
            )
            pre = tl.load(numbers + token * PER_TOKEN + stream, mask=inside, other=0.0)
            factor = tl.load(numbers + token * PER_TOKEN + STREAMS, mask=inside, other=0.0)
            d = tl.load(dx + token[:, None] * n + h[None, :], mask=mask, other=0.0).to(tl.float32)
            out = tl.dot(dl, w, pre[:, None] * d - factor[:, None] * s, input_precision="tf32x3")
            tl.store(dstreams + token[:, None] * columns + k[None, :], out, mask=inside[:, None] & writes[None, :])
            if (flags & NEEDS_DFN) != 0:
                dw = tl.dot(tl.trans(dl), s, dw, input_precision="tf32x3")
    tl.store(dfn + of_fn, dw, mask=w_mask & ((flags & NEEDS_DFN) != 0))
    if tl.program_id(0) == 0:
        of_base, of_scale = tl.zeros([WIDEST], tl.float32), tl.zeros([WIDEST], tl.float32)
        for first in range(0, parts, BLOCK_T):
            part = first + tl.arange(0, BLOCK_T)
            mask = (part < parts)[:, None] & (row < width)[None, :]
            at = partial + part.to(tl.int64)[:, None] * width + row[None, :]
            of_base += tl.sum(tl.load(at, mask=mask, other=0.0), axis=0)
            of_scale += tl.sum(tl.load(at + parts.to(tl.int64) * width, mask=mask, other=0.0), axis=0)
        tl.store(dbase + row, of_base, mask=row < width)
        group = tl.where(row < 2 * STREAMS, row // STREAMS, 2)
        for i in tl.static_range(3):
            total = tl.sum(tl.where(group == i, of_scale, 0.0), axis=0)
            if (i < 2) & (width > i * STREAMS) | (width > 2 * STREAMS):
                tl.store(dscale + i, total)


SIZES = {"tokens": "i32", "n": "i32", "width": "i32"}
DTYPES = [{"X": "bf16", "SPLIT": 1}, {"X": "fp16", "SPLIT": 0}, {"X": "fp32", "SPLIT": 0}]
NUMBERS = dict.fromkeys(("logits", "rstd", "base", "scale"), "*fp32")


SPLITS = {"SPLIT": (1,)}


def config(aligned, warps, only=None, max_rows=None, max_n=None, **constexprs):
    return Config(max_n, aligned, warps, constexprs=constexprs, only=only or {}, max_rows=max_rows)


def with_hopper(function, args, aligned, configs, hopper_configs):
    """A kernel for every architecture, and that of compute capability 9.0, whose tensor cores read shared memory."""
    return [
        Kernel(function, args, aligned, {"dtype": DTYPES}, configs),
        Kernel(function, args, aligned, {"dtype": DTYPES[:1]}, hopper_configs, archs=[90], suffix="_hopper"),
    ]


KERNELS = [
    Kernel(
        function=hyper_pre_pieces_kernel,
        args={"pieces": "*X", "fn": "*fp32", "count": "i32"},
        aligned=["pieces", "fn", "count"],
        axes={"dtype": [{"X": "bf16"}]},
        configs=[config(True, 4, BLOCK=1024), config(False, 4, BLOCK=512)],
    ),
    *with_hopper(
        hyper_pre_fwd_kernel,
        {
            "x": "*X", "post": "*fp32", "comb": "*fp32", "logits": "*fp32", "rstd": "*fp32", "streams": "*X",
            "fn": "*fp32", "pieces": "*X", "base": "*fp32", "scale": "*fp32", **SIZES, "sinkhorn": "i32",
            "norm_eps": "fp32", "eps": "fp32", "post_scale": "fp32", "post_eps": "fp32",
        },
        ["x", "streams", "fn", "pieces", "n"],
        [
            config(True, 4, only=SPLITS, BLOCK_T=32, BLOCK_K=64, BLOCK_H=128, STAGES=4),
            config(True, 4, BLOCK_T=32, BLOCK_K=64, BLOCK_H=128, STAGES=1),
            config(False, 4, BLOCK_T=16, BLOCK_K=64, BLOCK_H=64, STAGES=1),
        ],
        [
            # Few tokens have few programs.
            config(True, 4, max_rows=4096, BLOCK_T=32, BLOCK_K=128, BLOCK_H=128, STAGES=4),
            config(True, 8, BLOCK_T=64, BLOCK_K=64, BLOCK_H=128, STAGES=4),
            config(False, 4, BLOCK_T=16, BLOCK_K=64, BLOCK_H=64, STAGES=1),
        ],
    ),
    Kernel(
        function=hyper_pre_bwd_logits_kernel,
        args={
            "dlogits": "*fp32", "pieces": "*X", "numbers": "*fp32", "partial": "*fp32", "sums": "*fp32", "dx": "*X",
            "dpost": "*fp32", "dcomb": "*fp32", "streams": "*X", **NUMBERS, **SIZES, "sinkhorn": "i32", "eps": "fp32",
            "post_scale": "fp32",
        },
        aligned=["dx", "streams", "n"],
        axes={"dtype": DTYPES},
        configs=[config(True, 4, BLOCK_T=16, BLOCK_H=128), config(False, 4, BLOCK_T=16, BLOCK_H=64)],
    ),
    *with_hopper(
        hyper_pre_bwd_kernel,
        {
            "dstreams": "*X", "dfn": "*fp32", "dbase": "*fp32", "dscale": "*fp32", "dx": "*X", "streams": "*X",
            "fn": "*fp32", "dlogits": "*fp32", "pieces": "*X", "numbers": "*fp32", "partial": "*fp32", **SIZES,
            "parts": "i32", "flags": "i32",
        },
        ["dstreams", "dfn", "dx", "streams", "fn", "pieces", "n"],
        [
            config(True, 4, only=SPLITS, BLOCK_T=32, BLOCK_H=64, STAGES=3),
            config(True, 4, BLOCK_T=32, BLOCK_H=64, STAGES=1),
            config(False, 4, BLOCK_T=32, BLOCK_H=32, STAGES=1),
        ],
        [
            config(True, 4, max_n=2048, BLOCK_T=64, BLOCK_H=64, STAGES=3),
            config(True, 8, BLOCK_T=64, BLOCK_H=128, STAGES=3),
            config(False, 4, BLOCK_T=32, BLOCK_H=64, STAGES=1),
        ],
    ),
]  # fmt: skip
