"""Low-rank adapters (LoRA) of each expert. The grouped GEMMs of moe_experts.py add their products as a last step.

    pack      an adapter of any strides -> (E, C, pieces, padded ranks)
    rows      t = scale x A^T and u = scale dy B: (rows, r) in fp32, and in pieces for the GEMM's last step
    columns   dA = u^T x and dB = dy^T t of each expert
    add       t B^T and u A onto the result of PyTorch's grouped GEMM

C: features, which are an adapter's other dimension. Ranks are padded to a multiple of RANK_STEP. Pieces are those of
../linear/lora_products.py: three 16-bit numbers, or one in fp32. Beside fp16 rows, adapters in fp32 are pieces only where the
result is rounded to fp16, because pieces in fp16 cannot hold small numbers.
"""

import triton
import triton.language as tl

from ..linear.lora_products import split, times_pieces
from ..table import Config, Kernel
from ._tiles import ADAPTER_PIECES, GATHERS, ROUTES, TILE_ROWS, place_of, rows_of, with_adapter


@triton.jit
def moe_adapters_pack_kernel(
    out, adapter, experts, features, ranks, padded, a_expert, a_feature, a_rank,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """out: (experts, features, pieces, padded)."""
    X: tl.constexpr = out.dtype.element_ty
    PIECES: tl.constexpr = 1 if X == tl.float32 else ADAPTER_PIECES
    blocks = tl.cdiv(experts, BLOCK_E)
    block = tl.program_id(0) // blocks
    # Of some layouts neighbouring experts are neighbours, of others neighbouring ranks or features.
    expert = ((tl.program_id(0) - block * blocks) * BLOCK_E + tl.arange(0, BLOCK_E)).to(tl.int64)[None, :]
    pair = block.to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    feature, rank = pair // padded, pair % padded
    fits = (feature < features) & (expert < experts)
    at = adapter + expert * a_expert + feature * a_feature + rank * a_rank
    found = tl.load(at, mask=fits & (rank < ranks), other=0.0).to(tl.float32)
    to = out + ((expert * features + feature) * PIECES) * padded + rank
    if PIECES == 1:
        tl.store(to, found, mask=fits)
    else:
        high, middle, rest = split(found, X)
        tl.store(to, high, mask=fits)
        tl.store(to + padded, middle, mask=fits)
        tl.store(to + 2 * padded, rest.to(X), mask=fits)


@triton.jit
def moe_adapters_rows_kernel(
    out, pieces, x, packed, offsets, tiles, tokens, features, ranks, padded, x_row, scale, flags,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out (rows, ranks) = scale x @ the adapter of the rows' expert. pieces: out as with_adapter takes it."""
    X: tl.constexpr = pieces.dtype.element_ty
    PARTS: tl.constexpr = TILE_ROWS // BLOCK_T
    blocks = tl.cdiv(padded, BLOCK_R)
    part = tl.program_id(0) // blocks
    tile = part // PARTS
    if tile >= tl.load(tiles):
        return
    expert, row, inside = rows_of(tile, tiles, offsets, part % PARTS, BLOCK_T)
    rank = (tl.program_id(0) - part * blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    exists = rank < padded
    gathers = (flags & GATHERS) != 0
    x += tl.where(gathers, tl.load(tokens + row, mask=inside & gathers, other=0), row).to(tl.int64)[:, None] * x_row
    total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for start in tl.range(0, features, BLOCK_C, num_stages=STAGES):
        feature = start + tl.arange(0, BLOCK_C)
        fits = feature < features
        mask = fits[:, None] & exists[None, :]
        left = tl.load(x + feature[None, :], mask=fits[None, :], other=0.0)
        if packed.dtype.element_ty == tl.float32:
            right = tl.load(
                packed + (expert * features + feature)[:, None] * padded + rank[None, :], mask=mask, other=0.0
            )
            total = tl.dot(left.to(tl.float32), right, total, input_precision="ieee")
        else:
            at = packed + (expert * features + feature)[:, None] * (ADAPTER_PIECES * padded) + rank[None, :]
            part_sum = tl.dot(left, tl.load(at + 2 * padded, mask=mask, other=0.0))
            part_sum = tl.dot(left, tl.load(at + padded, mask=mask, other=0.0), part_sum)
            total += tl.dot(left, tl.load(at, mask=mask, other=0.0), part_sum)
    total *= scale
    row = row.to(tl.int64)[:, None]
    tl.store(out + row * ranks + rank[None, :], total, mask=inside[:, None] & (rank < ranks)[None, :])
    mask = inside[:, None] & exists[None, :]
    if X == tl.float32:
        tl.store(pieces + row * padded + rank[None, :], total, mask=mask)
    else:
        high, middle, _ = split(total, X)
        to = pieces + row * (2 * padded) + rank[None, :]
        tl.store(to, high, mask=mask)
        tl.store(to + padded, middle, mask=mask)


@triton.jit
def moe_adapters_columns_kernel(
    out, x, v, offsets, tokens, features, ranks, x_row, out_expert, out_feature, out_rank, flags,
    PIECES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out of each expert, of any strides, (features, ranks) = the sum over its rows of x^T v. v: (rows, ranks)."""
    rank_blocks, feature_blocks = tl.cdiv(ranks, BLOCK_R), tl.cdiv(features, BLOCK_C)
    block = tl.program_id(0) % (rank_blocks * feature_blocks)
    expert = tl.program_id(0) // (rank_blocks * feature_blocks)
    feature = block // rank_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    rank = block % rank_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    feature_fits, rank_fits = feature < features, rank < ranks
    gathers = (flags & GATHERS) != 0
    end = tl.load(offsets + expert + 1)
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in tl.range(tl.load(offsets + expert), end, BLOCK_T, num_stages=STAGES):
        row = start + tl.arange(0, BLOCK_T)
        fits = row < end
        at = tl.where(gathers, tl.load(tokens + row, mask=fits & gathers, other=0), row).to(tl.int64)[:, None] * x_row
        right = tl.load(x + at + feature[None, :], mask=fits[:, None] & feature_fits[None, :], other=0.0)
        v_at = row.to(tl.int64)[:, None] * ranks + rank[None, :]
        left = tl.trans(tl.load(v + v_at, mask=fits[:, None] & rank_fits[None, :], other=0.0))
        if PIECES == 1:
            total = tl.dot(left, right.to(tl.float32), total, input_precision="ieee")
        else:
            total += times_pieces(left, right, PIECES)
    to = out + expert.to(tl.int64) * out_expert + rank.to(tl.int64)[:, None] * out_rank
    to += feature.to(tl.int64)[None, :] * out_feature
    tl.store(to, total.to(out.dtype.element_ty), mask=rank_fits[:, None] & feature_fits[None, :])


@triton.jit
def moe_adapters_add_kernel(
    out, v, packed, offsets, tiles, most_tiles, n, padded, GROUP: tl.constexpr, BLOCK_N: tl.constexpr
):
    """out (rows, n) += v @ the adapter of the rows' expert."""
    tile, column = place_of(most_tiles, tl.cdiv(n, BLOCK_N), GROUP)
    if tile >= tl.load(tiles):
        return
    expert, row, inside = rows_of(tile, tiles, offsets)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    total = with_adapter(tl.zeros([TILE_ROWS, BLOCK_N], tl.float32), v, packed, expert, row, cols, cols < n, n, padded)
    to = out + row.to(tl.int64)[:, None] * n + cols[None, :]
    mask = inside[:, None] & (cols < n)[None, :]
    total += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=mask)


# Rows, adapters as they are stored, and adapters as they are packed.
DTYPES = [("bf16", "bf16"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32")]
PIECES = {("bf16", "bf16"): 2, ("bf16", "fp32"): 3, ("fp16", "fp16"): 2, ("fp16", "fp32"): 1, ("fp32", "fp32"): 1}


def tiles(*sizes, only):
    """sizes: (most ranks, BLOCK_T, BLOCK_C, BLOCK_R). The last one serves tensors that are not aligned, and sums in fp32."""
    aligned = [i + 1 < len(sizes) for i in range(len(sizes))]
    return [
        Config(ranks, whole, 4, constexprs=dict(BLOCK_T=t, BLOCK_C=c, BLOCK_R=r, STAGES=3), only=only if whole else {})
        for whole, (ranks, t, c, r) in zip(aligned, sizes)
    ]


KERNELS = [
    Kernel(
        function=moe_adapters_pack_kernel,
        args={
            "out": "*P", "adapter": "*W", "experts": "i32", "features": "i32", "ranks": "i32", "padded": "i32",
            "a_expert": "i64", "a_feature": "i64", "a_rank": "i64",
        },
        aligned=[],
        axes={"dtype": [{"P": p, "W": w} for p, w in [*DTYPES[:2], ("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32")]]},
        configs=[Config(None, False, 4, constexprs=dict(BLOCK_P=64, BLOCK_E=16))],
    ),
    Kernel(
        function=moe_adapters_rows_kernel,
        args={
            "out": "*fp32", "pieces": "*X", "x": "*X", "packed": "*P", **ROUTES, "tokens": "*i32", "features": "i32",
            "ranks": "i32", "padded": "i32", "x_row": "i64", "scale": "fp32", "flags": "i32",
        },
        aligned=["out", "pieces", "x", "packed", "features", "padded", "x_row"],
        axes={"dtype": [{"X": x, "P": p} for x, p in DTYPES]},
        configs=tiles((16, 64, 128, 16), (None, 64, 64, 32), (None, 32, 32, 16), only={"P": ("bf16", "fp16")}),
    ),
    Kernel(
        function=moe_adapters_columns_kernel,
        args={
            "out": "*W", "x": "*X", "v": "*fp32", "offsets": "*i32", "tokens": "*i32", "features": "i32", "ranks": "i32",
            "x_row": "i64", "out_expert": "i64", "out_feature": "i64", "out_rank": "i64", "flags": "i32",
        },
        aligned=["x", "v", "features", "ranks", "x_row"],
        axes={"dtype": [{"X": x, "W": w, "PIECES": pieces} for (x, w), pieces in PIECES.items()]},
        configs=tiles((16, 64, 128, 16), (None, 64, 128, 32), (None, 32, 32, 16), only={"PIECES": (2, 3)}),
    ),
    Kernel(
        function=moe_adapters_add_kernel,
        args={
            "out": "*X", "v": "*X", "packed": "*X", **ROUTES, "most_tiles": "i32", "n": "i32", "padded": "i32",
        },
        aligned=["out", "v", "packed", "n", "padded"],
        axes={"dtype": [{"X": "bf16"}]},
        configs=[Config(None, True, 8, constexprs=dict(GROUP=8, BLOCK_N=128))],
        archs=[90],
    ),
]  # fmt: skip
