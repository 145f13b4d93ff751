"""The products of low-rank adapters (LoRA) with 16-bit activations, each in one pass over the activations.

    rows           t = x A^T and u = dy B       (T, R) from (T, C) and an adapter
    columns        dA = u^T x and dB = dy^T t   (R, C) from (T, C) and (T, R)
    rows_columns   u and dB                     both, of an adapter of few ranks
    expand         t B^T and u A                (T, C) from (T, R) and an adapter

T: tokens, C: features, R: ranks, those of each adapter padded to a multiple of RANK_STEP. (T, R) is in fp32.

Tensor cores multiply: an fp32 number is the sum of 16-bit pieces, each nearest to what is left. Three pieces hold all digits
of an fp32 number, two enough for a result in 16 bits. An fp32 adapter comes as such pieces, (R, C) each: at w those nearest
to the numbers, a `w_piece` after them the next, and a `w_piece` before them the last, as lora_linear.py stores them. Because
tensor cores truncate their sums, the products of blocks are added outside of them.

Masks of dropout are not stored: a hash of the adapter's seed, the row and the column says whether an element is kept.
"""

import triton
import triton.language as tl

from ..table import Config, Kernel

RANK_STEP = tl.constexpr(16)
HAS_ADDEND = tl.constexpr(1)


@triton.jit
def mixed(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_keys(seed, rows):
    first = mixed((seed & 0xFFFFFFFF).to(tl.uint32))
    second = mixed(first + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    return mixed(rows.to(tl.uint32) ^ first) + second


@triton.jit
def kept(tile, keys, start, threshold, BLOCK_C: tl.constexpr):
    """The tile of columns from `start`, an even number, with 0 where an element is dropped. threshold: see threshold_of in
    csrc/gemm/adapters/lora_dropout.h, which has the same hash. One hash serves two columns: integers are what dropout costs."""
    pair = start // 2 + tl.arange(0, BLOCK_C // 2)
    x = (keys[:, None] ^ (pair.to(tl.uint32) * 0x9E3779B1)[None, :]) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = tl.interleave(x, x * 0x9E3779B1)
    return tl.where(x.to(tl.int32, bitcast=True) >= threshold, tile, 0.0)


@triton.jit
def split(x, X: tl.constexpr):
    """The first two pieces in dtype X, and what is left."""
    high = x.to(X)
    rest = x - high.to(tl.float32)
    middle = rest.to(X)
    return high, middle, rest - middle.to(tl.float32)


@triton.jit
def times(x, w, w_piece, mask, PIECES: tl.constexpr):
    """x w, of 16-bit x and w in PIECES. The smallest products come first."""
    if PIECES == 1:
        out = tl.dot(x, tl.load(w, mask=mask, other=0.0))
    else:
        out = tl.dot(x, tl.load(w - w_piece, mask=mask, other=0.0))
        out = tl.dot(x, tl.load(w + w_piece, mask=mask, other=0.0), out)
        out = tl.dot(x, tl.load(w, mask=mask, other=0.0), out)
    return out


@triton.jit
def times_pieces(v, x, PIECES: tl.constexpr):
    """v x, of PIECES of v and 16-bit x."""
    high, middle, rest = split(v, x.dtype)
    if PIECES == 3:
        out = tl.dot(rest.to(x.dtype), x)
        out = tl.dot(middle, x, out)
    else:
        out = tl.dot(middle, x)
    return tl.dot(high, x, out)


@triton.jit
def lora_rows_kernel(
    out, x, w, seeds, tokens, features, padded, rank, splits, x_row, w_row, w_piece, out_row, out_split, scale, threshold,
    PIECES: tl.constexpr, DROPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out (splits, T, R) = scale x w^T, each split over a part of C. w: (R, C). padded: R. rank: that of one adapter, padded."""
    blocks = tl.cdiv(padded, BLOCK_R)
    block = tl.program_id(0) % blocks
    part = tl.program_id(0) // blocks % splits
    row = tl.program_id(0) // blocks // splits * BLOCK_T + tl.arange(0, BLOCK_T)
    column = block * BLOCK_R + tl.arange(0, BLOCK_R)
    row_fits, column_fits = row < tokens, column < padded
    share = tl.cdiv(tl.cdiv(features, splits), BLOCK_C) * BLOCK_C
    end = tl.minimum((part + 1) * share, features)
    x += row.to(tl.int64)[:, None] * x_row
    w += column.to(tl.int64)[None, :] * w_row
    if DROPS:
        keys = row_keys(tl.load(seeds + block * BLOCK_R // rank), row)
    total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for start in tl.range(part * share, end, BLOCK_C, num_stages=STAGES):
        feature = start + tl.arange(0, BLOCK_C)
        fits = feature < features
        left = tl.load(x + feature[None, :], mask=row_fits[:, None] & fits[None, :], other=0.0)
        if DROPS:
            left = kept(left, keys, start, threshold, BLOCK_C)
        total += times(left, w + feature[:, None], w_piece, fits[:, None] & column_fits[None, :], PIECES)
    to = out + part.to(tl.int64) * out_split + row.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(to, total * scale, mask=row_fits[:, None] & column_fits[None, :])


@triton.jit
def lora_columns_kernel(
    out, x, v, seeds, tokens, features, ranks, rank, splits, x_row, v_row, out_split, out_rank, out_feature, scale, threshold,
    PIECES: tl.constexpr, DROPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out (splits, R, C), of any strides, = scale v^T x, each split over a part of T. v: (T, R)."""
    blocks = tl.cdiv(ranks, BLOCK_R)
    block = tl.program_id(0) % blocks
    part = tl.program_id(0) // blocks % splits
    first = tl.program_id(0) // blocks // splits * BLOCK_C
    feature = first + tl.arange(0, BLOCK_C)
    column = block * BLOCK_R + tl.arange(0, BLOCK_R)
    feature_fits, column_fits = feature < features, column < ranks
    share = tl.cdiv(tl.cdiv(tokens, splits), BLOCK_T) * BLOCK_T
    end = tl.minimum((part + 1) * share, tokens)
    if DROPS:
        seed = tl.load(seeds + block * BLOCK_R // rank)
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in tl.range(part * share, end, BLOCK_T, num_stages=STAGES):
        row = start + tl.arange(0, BLOCK_T)
        fits, at = row < tokens, row.to(tl.int64)[:, None]
        right = tl.load(x + at * x_row + feature[None, :], mask=fits[:, None] & feature_fits[None, :], other=0.0)
        left = tl.load(v + at * v_row + column[None, :], mask=fits[:, None] & column_fits[None, :], other=0.0)
        if DROPS:
            right = kept(right, row_keys(seed, row), first, threshold, BLOCK_C)
        total += times_pieces(tl.trans(left), right, PIECES)
    to = out + part.to(tl.int64) * out_split + column.to(tl.int64)[:, None] * out_rank
    to += feature.to(tl.int64)[None, :] * out_feature
    tl.store(to, total * scale, mask=column_fits[:, None] & feature_fits[None, :])


@triton.jit
def lora_rows_columns_kernel(
    rows, columns, x, w, v, tokens, features, ranks, share, x_row, w_row, w_piece, v_row, rows_part, columns_part, rows_scale,
    columns_scale, PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """rows (parts, T, BLOCK_R) = scale x w^T, each part over BLOCK_C of C, and columns (parts, C, ranks) = scale x^T v, each
    over `share` of T. w: (BLOCK_R, C), v: (T, BLOCK_R)."""
    blocks = tl.cdiv(features, BLOCK_C)
    feature = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    part = tl.program_id(0) // blocks
    column = tl.arange(0, BLOCK_R)
    fits, column_fits = feature < features, column < ranks
    rows += (tl.program_id(0) % blocks).to(tl.int64) * rows_part
    w += column.to(tl.int64)[None, :] * w_row + feature[:, None]
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in tl.range(part * share, tl.minimum((part + 1) * share, tokens), BLOCK_T, num_stages=STAGES):
        row = start + tl.arange(0, BLOCK_T)
        row_fits, at = row < tokens, row.to(tl.int64)[:, None]
        here = tl.load(x + at * x_row + feature[None, :], mask=row_fits[:, None] & fits[None, :], other=0.0)
        left = tl.load(v + at * v_row + column[None, :], mask=row_fits[:, None] & column_fits[None, :], other=0.0)
        of_rows = times(here, w, w_piece, fits[:, None], PIECES) * rows_scale
        tl.store(rows + at * BLOCK_R + column[None, :], of_rows, mask=row_fits[:, None])
        total += times_pieces(tl.trans(left), here, 3 if PIECES == 3 else 2)
    to = columns + part.to(tl.int64) * columns_part + feature.to(tl.int64)[None, :] * ranks + column[:, None]
    tl.store(to, total * columns_scale, mask=column_fits[:, None] & fits[None, :])


@triton.jit
def lora_expand_kernel(
    out, v, w, addend, seeds, tokens, features, ranks, padded, rank, v_row, w_row, w_piece, out_row, addend_row, scale, threshold,
    flags, PIECES: tl.constexpr, DROPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out (T, C) = addend + scale v w. v: (T, R), w: (R, C). ranks: those that are not padding. padded: R."""
    blocks = tl.cdiv(features, BLOCK_C)
    row = tl.program_id(0) // blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.program_id(0) % blocks * BLOCK_C
    feature = first + tl.arange(0, BLOCK_C)
    row_fits, fits = row < tokens, feature < features
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for start in range(0, padded, BLOCK_R):
        column = start + tl.arange(0, BLOCK_R)
        column_fits = column < ranks
        left = tl.load(
            v + row.to(tl.int64)[:, None] * v_row + column[None, :],
            mask=row_fits[:, None] & column_fits[None, :], other=0.0,
        )  # fmt: skip
        at = w + column.to(tl.int64)[:, None] * w_row + feature[None, :]
        inside = column_fits[:, None] & fits[None, :]
        right = tl.load(at, mask=inside, other=0.0)
        high, middle, _ = split(left, right.dtype)
        if DROPS:
            part = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        else:
            part = total
        part = tl.dot(middle, right, part)
        if PIECES == 3:
            part = tl.dot(high, tl.load(at + w_piece, mask=inside, other=0.0), part)
        part = tl.dot(high, right, part)
        if DROPS:
            total += kept(part, row_keys(tl.load(seeds + start // rank), row), first, threshold, BLOCK_C)
        else:
            total = part
    total *= scale
    mask = row_fits[:, None] & fits[None, :]
    # A masked load would still move the tile to another layout.
    if flags & HAS_ADDEND:
        at = addend + row.to(tl.int64)[:, None] * addend_row + feature[None, :]
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64)[:, None] * out_row + feature[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def lora_drop_kernel(
    out, x, seeds, tokens, features, x_row, out_row, scale, threshold, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    """out (T, C) = scale x with dropout."""
    blocks = tl.cdiv(features, BLOCK_C)
    row = tl.program_id(0) // blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.program_id(0) % blocks * BLOCK_C
    feature = first + tl.arange(0, BLOCK_C)
    mask = (row < tokens)[:, None] & (feature < features)[None, :]
    tile = tl.load(x + row.to(tl.int64)[:, None] * x_row + feature[None, :], mask=mask)
    tile = kept(tile * scale, row_keys(tl.load(seeds), row), first, threshold, BLOCK_C)
    tl.store(out + row.to(tl.int64)[:, None] * out_row + feature[None, :], tile, mask=mask)


# Adapters of x's dtype, and in fp32.
DTYPES = [{"X": "bf16", "PIECES": 1}, {"X": "bf16", "PIECES": 3}, {"X": "fp16", "PIECES": 1}]
DROPS = [{"DROPS": 0}, {"DROPS": 1}]


def config(ranks, t, c, r, programs=0, pieces=(1, 3), aligned=True, keeps_all=False, **constexprs):
    """ranks: the most that it takes. programs: per multiprocessor. keeps_all: no dropout."""
    sizes = dict(BLOCK_T=t, BLOCK_C=c, BLOCK_R=r, **constexprs)
    only = {"PIECES": pieces} | ({"DROPS": (0,)} if keeps_all else {})
    return Config(ranks, aligned, 4, programs, constexprs=sizes, only=only)


KERNELS = [
    Kernel(
        function=lora_rows_kernel,
        args={
            "out": "*fp32", "x": "*X", "w": "*X", "seeds": "*i64", "tokens": "i32", "features": "i32", "padded": "i32",
            "rank": "i32", "splits": "i32", "x_row": "i64", "w_row": "i64", "w_piece": "i64", "out_row": "i64",
            "out_split": "i64", "scale": "fp32", "threshold": "i32",
        },
        aligned=["out", "x", "w", "features", "padded", "rank", "x_row", "w_row", "w_piece", "out_row", "out_split"],
        axes={"dtype": DTYPES, "drops": DROPS},
        configs=[
            config(16, 64, 128, 16, pieces=(1,), STAGES=4),
            config(32, 64, 128, 32, pieces=(1,), STAGES=4),
            config(48, 64, 64, 16, pieces=(3,), STAGES=6),
            config(None, 64, 64, 64, pieces=(1,), STAGES=5),
            config(None, 64, 64, 64, pieces=(3,), STAGES=3),
            config(None, 32, 64, 16, aligned=False, STAGES=4),
        ],
    ),
    Kernel(
        function=lora_columns_kernel,
        args={
            "out": "*fp32", "x": "*X", "v": "*fp32", "seeds": "*i64", "tokens": "i32", "features": "i32", "ranks": "i32",
            "rank": "i32", "splits": "i32", "x_row": "i64", "v_row": "i64", "out_split": "i64", "out_rank": "i64",
            "out_feature": "i64", "scale": "fp32", "threshold": "i32",
        },
        aligned=["out", "x", "v", "features", "ranks", "rank", "x_row", "v_row", "out_split"],
        axes={
            "pieces": [{"X": "bf16", "PIECES": 2}, {"X": "bf16", "PIECES": 3}, {"X": "fp16", "PIECES": 2}],
            "drops": DROPS,
        },
        configs=[
            config(None, 32, 256, 16, pieces=(2, 3), STAGES=3),
            config(None, 32, 64, 16, pieces=(2, 3), aligned=False, STAGES=3),
        ],
    ),
    Kernel(
        function=lora_rows_columns_kernel,
        args={
            "rows": "*fp32", "columns": "*fp32", "x": "*X", "w": "*X", "v": "*fp32", "tokens": "i32", "features": "i32",
            "ranks": "i32", "share": "i32", "x_row": "i64", "w_row": "i64", "w_piece": "i64", "v_row": "i64",
            "rows_part": "i64", "columns_part": "i64", "rows_scale": "fp32", "columns_scale": "fp32",
        },
        aligned=[
            "rows", "columns", "x", "w", "v", "features", "ranks", "share", "x_row", "w_row", "w_piece", "v_row", "rows_part",
            "columns_part",
        ],
        axes={"dtype": DTYPES},
        configs=[config(None, 32, 256, 16, STAGES=3)],
    ),
    Kernel(
        function=lora_expand_kernel,
        args={
            "out": "*X", "v": "*fp32", "w": "*X", "addend": "*X", "seeds": "*i64", "tokens": "i32", "features": "i32",
            "ranks": "i32", "padded": "i32", "rank": "i32", "v_row": "i64", "w_row": "i64", "w_piece": "i64", "out_row": "i64",
            "addend_row": "i64", "scale": "fp32", "threshold": "i32", "flags": "i32",
        },
        aligned=[
            "out", "v", "w", "addend", "features", "ranks", "padded", "rank", "v_row", "w_row", "w_piece", "out_row",
            "addend_row",
        ],
        axes={"dtype": DTYPES, "drops": DROPS},
        configs=[
            config(None, 64, 128, 16, programs=4, keeps_all=True),
            config(None, 64, 128, 16),
            config(None, 32, 64, 16, aligned=False),
        ],
    ),
    Kernel(
        function=lora_drop_kernel,
        args={
            "out": "*X", "x": "*X", "seeds": "*i64", "tokens": "i32", "features": "i32", "x_row": "i64",
            "out_row": "i64", "scale": "fp32", "threshold": "i32",
        },
        aligned=[],
        axes={"dtype": [{"X": "fp32"}]},
        configs=[Config(None, False, 4, constexprs=dict(BLOCK_T=8, BLOCK_C=256))],
    ),
]  # fmt: skip
