"""The products of low-rank adapters (LoRA) with 16-bit activations, each in one pass over the activations.

    rows      t = x A^T and u = dy B       (T, R) from (T, C) and an adapter
    columns   dA = u^T x and dB = dy^T t   (R, C) from (T, C) and (T, R)
    expand    t B^T and u A                (T, C) from (T, R) and an adapter

T: tokens, C: features, R: ranks, those of each adapter padded to a multiple of RANK_STEP. (T, R) is in fp32.

Tensor cores multiply: an fp32 number is the sum of 16-bit pieces, each nearest to what is left. Three pieces hold all digits
of an fp32 number, two enough for a result in 16 bits. Because tensor cores truncate their sums, the products of blocks are
added outside of them.

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
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return mixed(mixed(rows.to(tl.uint32) ^ low) + high)


@triton.jit
def kept(tile, keys, columns, threshold):
    """The tile with 0 where an element is dropped. threshold: see threshold_of in csrc/gemm/lora_dropout.h, which has
    the same hash."""
    x = keys[:, None] ^ (columns.to(tl.uint32) * 0x9E3779B1)[None, :]
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return tl.where(x.to(tl.int32, bitcast=True) >= threshold, tile, 0.0)


@triton.jit
def split(x, X: tl.constexpr):
    """The first two pieces in dtype X, and what is left."""
    high = x.to(X)
    rest = x - high.to(tl.float32)
    middle = rest.to(X)
    return high, middle, rest - middle.to(tl.float32)


@triton.jit
def times(x, w, PIECES: tl.constexpr):
    """x w, of 16-bit x and PIECES of w. The smallest products come first."""
    if PIECES == 1:
        out = tl.dot(x, w)
    else:
        high, middle, rest = split(w, x.dtype)
        if PIECES == 3:
            out = tl.dot(x, rest.to(x.dtype))
            out = tl.dot(x, middle, out)
        else:
            out = tl.dot(x, middle)
        out = tl.dot(x, high, out)
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
    out, x, w, seeds, tokens, features, ranks, padded, rank, splits, x_row, w_step, out_row, out_split, scale, threshold,
    BY_FEATURE: tl.constexpr, DROPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out (splits, T, R) = scale x w^T, each split over a part of C. w: (R, C), or with BY_FEATURE (C, R), with neighbours in its
    last dimension. ranks: those of w. padded: those of out. rank: that of one adapter, padded."""
    PIECES: tl.constexpr = 3 if w.dtype.element_ty == tl.float32 else 1
    blocks = tl.cdiv(padded, BLOCK_R)
    block = tl.program_id(0) % blocks
    part = tl.program_id(0) // blocks % splits
    row = tl.program_id(0) // blocks // splits * BLOCK_T + tl.arange(0, BLOCK_T)
    column = block * BLOCK_R + tl.arange(0, BLOCK_R)
    row_fits, column_fits = row < tokens, column < ranks
    share = tl.cdiv(tl.cdiv(features, splits), BLOCK_C) * BLOCK_C
    end = tl.minimum((part + 1) * share, features)
    x += row.to(tl.int64)[:, None] * x_row
    if DROPS:
        keys = row_keys(tl.load(seeds + block * BLOCK_R // rank), row)
    total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for start in tl.range(part * share, end, BLOCK_C, num_stages=STAGES):
        feature = start + tl.arange(0, BLOCK_C)
        fits = feature < features
        left = tl.load(x + feature[None, :], mask=row_fits[:, None] & fits[None, :], other=0.0)
        if BY_FEATURE:
            at = feature.to(tl.int64)[:, None] * w_step + column[None, :]
        else:
            at = column.to(tl.int64)[None, :] * w_step + feature[:, None]
        right = tl.load(w + at, mask=fits[:, None] & column_fits[None, :], other=0.0)
        if DROPS:
            left = kept(left, keys, feature, threshold)
        total += times(left, right, PIECES)
    to = out + part.to(tl.int64) * out_split + row.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(to, total * scale, mask=row_fits[:, None] & (column < padded)[None, :])


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
    feature = tl.program_id(0) // blocks // splits * BLOCK_C + tl.arange(0, BLOCK_C)
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
            right = kept(right, row_keys(seed, row), feature, threshold)
        total += times_pieces(tl.trans(left), right, PIECES)
    to = out + part.to(tl.int64) * out_split + column.to(tl.int64)[:, None] * out_rank
    to += feature.to(tl.int64)[None, :] * out_feature
    tl.store(to, total * scale, mask=column_fits[:, None] & feature_fits[None, :])


@triton.jit
def lora_expand_kernel(
    out, v, w, addend, seeds, tokens, features, ranks, padded, rank, v_row, w_step, out_row, addend_row, scale, threshold, flags,
    BY_FEATURE: tl.constexpr, DROPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out (T, C) = addend + scale v w. v: (T, R), w: (R, C), or with BY_FEATURE (C, R). ranks: those of w. padded: those of v."""
    blocks = tl.cdiv(features, BLOCK_C)
    row = tl.program_id(0) // blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    feature = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    row_fits, fits = row < tokens, feature < features
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for start in range(0, padded, BLOCK_R):
        column = start + tl.arange(0, BLOCK_R)
        column_fits = column < ranks
        left = tl.load(
            v + row.to(tl.int64)[:, None] * v_row + column[None, :],
            mask=row_fits[:, None] & column_fits[None, :], other=0.0,
        )  # fmt: skip
        if BY_FEATURE:
            at = feature.to(tl.int64)[None, :] * w_step + column[:, None]
        else:
            at = column.to(tl.int64)[:, None] * w_step + feature[None, :]
        right = tl.load(w + at, mask=column_fits[:, None] & fits[None, :], other=0.0)
        X: tl.constexpr = out.dtype.element_ty
        high, middle, _ = split(left, X)
        if w.dtype.element_ty == tl.float32:
            part = tl.dot(middle, right.to(X))
            part += times(high, right, 2)
        else:
            part = tl.dot(middle, right)
            part = tl.dot(high, right, part)
        if DROPS:
            part = kept(part, row_keys(tl.load(seeds + start // rank), row), feature, threshold)
        total += part
    total *= scale
    mask = row_fits[:, None] & fits[None, :]
    at = addend + row.to(tl.int64)[:, None] * addend_row + feature[None, :]
    total += tl.load(at, mask=mask & ((flags & HAS_ADDEND) != 0), other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64)[:, None] * out_row + feature[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def lora_drop_kernel(
    out, x, seeds, tokens, features, x_row, out_row, scale, threshold, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    """out (T, C) = scale x with dropout."""
    blocks = tl.cdiv(features, BLOCK_C)
    row = tl.program_id(0) // blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    feature = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (row < tokens)[:, None] & (feature < features)[None, :]
    tile = tl.load(x + row.to(tl.int64)[:, None] * x_row + feature[None, :], mask=mask)
    tile = kept(tile * scale, row_keys(tl.load(seeds), row), feature, threshold)
    tl.store(out + row.to(tl.int64)[:, None] * out_row + feature[None, :], tile, mask=mask)


DTYPES = [{"X": "bf16", "W": "bf16"}, {"X": "bf16", "W": "fp32"}, {"X": "fp16", "W": "fp16"}]
# A, B, and A with dropout.
ADAPTERS = [{"BY_FEATURE": 0, "DROPS": 0}, {"BY_FEATURE": 1, "DROPS": 0}, {"BY_FEATURE": 0, "DROPS": 1}]


def configs(tiles, **constexprs):
    """tiles: (most ranks, BLOCK_T, BLOCK_C, BLOCK_R, warps). The last one serves tensors that are not aligned."""
    return [
        Config(ranks, i + 1 < len(tiles), warps, constexprs=dict(BLOCK_T=t, BLOCK_C=c, BLOCK_R=r, **constexprs))
        for i, (ranks, t, c, r, warps) in enumerate(tiles)
    ]


KERNELS = [
    Kernel(
        function=lora_rows_kernel,
        args={
            "out": "*fp32", "x": "*X", "w": "*W", "seeds": "*i64", "tokens": "i32", "features": "i32", "ranks": "i32",
            "padded": "i32", "rank": "i32", "splits": "i32", "x_row": "i64", "w_step": "i64", "out_row": "i64", "out_split": "i64",
            "scale": "fp32", "threshold": "i32",
        },
        aligned=["out", "x", "w", "features", "ranks", "padded", "rank", "x_row", "w_step", "out_row", "out_split"],
        axes={"dtype": DTYPES, "adapter": ADAPTERS},
        configs=configs(
            [(16, 64, 128, 16, 4), (32, 64, 64, 32, 4), (None, 64, 64, 64, 4), (None, 32, 64, 16, 4)], STAGES=4
        ),
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
            "drops": [{"DROPS": 0}, {"DROPS": 1}],
        },
        configs=configs(
            [(16, 64, 128, 16, 4), (32, 64, 128, 32, 4), (None, 64, 128, 64, 4), (None, 32, 64, 16, 4)], STAGES=3
        ),
    ),
    Kernel(
        function=lora_expand_kernel,
        args={
            "out": "*X", "v": "*fp32", "w": "*W", "addend": "*X", "seeds": "*i64", "tokens": "i32", "features": "i32",
            "ranks": "i32", "padded": "i32", "rank": "i32", "v_row": "i64", "w_step": "i64", "out_row": "i64",
            "addend_row": "i64", "scale": "fp32", "threshold": "i32", "flags": "i32",
        },
        aligned=["out", "v", "w", "addend", "features", "ranks", "padded", "rank", "v_row", "w_step", "out_row", "addend_row"],
        axes={"dtype": DTYPES, "adapter": ADAPTERS},
        configs=configs([(16, 64, 128, 16, 4), (None, 64, 128, 32, 4), (None, 32, 64, 16, 4)]),
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
