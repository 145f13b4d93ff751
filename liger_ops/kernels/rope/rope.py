"""Rotary position embedding of q and k in one kernel: y = x * cos + rotate(x) * sin over R columns of a head.

A head's R columns form R / 2 pairs: columns (i, i + R / 2), or (2 i, 2 i + 1) if INTERLEAVED. For a pair (a, b)
    y_a = x_a * cos_a - x_b * sin_a        y_b = x_b * cos_b + x_a * sin_b
and the gradient is the same expression with (sin_a, sin_b) replaced by (-sin_b, -sin_a). If MIXED, x has pairs
(2 i, 2 i + 1) and y has pairs (i, i + R / 2), or with READS_HALVES the other way around. Columns are counted from the
first that is rotated. The other columns, `rest_width` of them from column `rest` on, are copied.

One program processes all heads of one position of one batch entry, or some of these heads.

If everything is aligned, the rotated columns of all heads of q and k form a row of pieces with PIECE pairs each. A
thread processes one piece at a time, for any R, and reads its own angles, mostly from the cache. Otherwise a thread
processes single pairs: PIECE pairs at a time of PIECES heads share their angles, and all columns of a head share its
address. In both cases a pair is read completely before it is written, so y may overwrite x, unless MIXED.
"""

import triton
import triton.language as tl

from ..table import ACTIVATION_WEIGHT_DTYPES, Config, Kernel

INVERSE = tl.constexpr(1)
COMPLEX = tl.constexpr(2)  # cos and sin are one table of (cos, sin) pairs; only if INTERLEAVED
READS_HALVES = tl.constexpr(4)  # only if MIXED
# How pairs lie in a head.
HALVES = tl.constexpr(0)
INTERLEAVED = tl.constexpr(1)
MIXED = tl.constexpr(2)


@triton.jit
def load_pairs(pointers, mask, half, INTERLEAVED: tl.constexpr):
    """pointers: (rows, columns) of the first members of pairs, or of both members if INTERLEAVED."""
    if INTERLEAVED:
        both = tl.load(pointers, mask=mask, other=0.0)
        a, b = tl.split(tl.reshape(both, [both.shape[0], both.shape[1] // 2, 2]))
    else:
        a = tl.load(pointers, mask=mask, other=0.0)
        b = tl.load(pointers + half, mask=mask, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def store_pairs(pointers, a, b, mask, half, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        tl.store(pointers, tl.interleave(a, b), mask=mask)
    else:
        tl.store(pointers, a, mask=mask)
        tl.store(pointers + half, b, mask=mask)


@triton.jit
def load_angles(cos, sin, at, mask, half, flags, INTERLEAVED: tl.constexpr):
    cos_a, cos_b = load_pairs(cos + at, mask, half, INTERLEAVED)
    sin_a, sin_b = load_pairs(sin + at, mask, half, INTERLEAVED)
    if INTERLEAVED:
        is_complex = (flags & COMPLEX) != 0
        cos_b, sin_a = tl.where(is_complex, sin_a, cos_b), tl.where(is_complex, cos_b, sin_a)
    inverse = (flags & INVERSE) != 0
    sin_a, sin_b = tl.where(inverse, -sin_b, sin_a), tl.where(inverse, -sin_a, sin_b)
    return cos_a, cos_b, sin_a, sin_b


@triton.jit
def head_pointers(q, k, head, q_heads, q_stride, k_stride, MULTIPLE: tl.constexpr):
    """Start addresses of heads. The heads of k are numbered after those of q."""
    starts = tl.where(head < q_heads, q + head.to(tl.int64) * q_stride, k + (head - q_heads).to(tl.int64) * k_stride)
    # Both addresses are aligned, but not every compiler infers it.
    return tl.multiple_of(starts, MULTIPLE)[:, None]


@triton.jit
def load_piece(starts, first, inside, half, flags, PAIRS: tl.constexpr, PIECE: tl.constexpr, ALIGNED: tl.constexpr):
    """PIECE pairs from `first` on."""
    pair = first + tl.arange(0, PIECE)[None, :]
    cols = 2 * first + tl.arange(0, 2 * PIECE)[None, :]
    pairs_inside = inside if ALIGNED else inside & (pair < half)
    cols_inside = inside if ALIGNED else inside & (cols < 2 * half)
    if PAIRS == INTERLEAVED:
        a, b = load_pairs(starts + cols, cols_inside, half, True)
    elif PAIRS == HALVES:
        a, b = load_pairs(starts + pair, pairs_inside, half, False)
    elif flags & READS_HALVES:
        a, b = load_pairs(starts + pair, pairs_inside, half, False)
    else:
        a, b = load_pairs(starts + cols, cols_inside, half, True)
    return a, b


@triton.jit
def store_piece(
    starts, first, a, b, inside, half, flags, PAIRS: tl.constexpr, PIECE: tl.constexpr, ALIGNED: tl.constexpr
):
    pair = first + tl.arange(0, PIECE)[None, :]
    cols = 2 * first + tl.arange(0, 2 * PIECE)[None, :]
    pairs_inside = inside if ALIGNED else inside & (pair < half)
    cols_inside = inside if ALIGNED else inside & (cols < 2 * half)
    if PAIRS == INTERLEAVED:
        store_pairs(starts + cols, a, b, cols_inside, half, True)
    elif PAIRS == HALVES:
        store_pairs(starts + pair, a, b, pairs_inside, half, False)
    elif flags & READS_HALVES:
        store_pairs(starts + cols, a, b, cols_inside, half, True)
    else:
        store_pairs(starts + pair, a, b, pairs_inside, half, False)


@triton.jit
def rope_kernel(
    out_q, out_k, q, k, cos, sin,
    positions, q_heads, k_heads, half, second, rest, rest_width, section_1, section_2,
    out_q_batch, out_q_head, out_q_position, out_k_batch, out_k_head, out_k_position,
    q_batch, q_head, q_position, k_batch, k_head, k_position,
    angle_batch, angle_position, angle_section, flags,
    PAIRS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    # 64-bit before the multiplications: a tensor may have more than 2**31 elements.
    program = tl.program_id(0).to(tl.int64)
    batch = (tl.program_id(0) // positions).to(tl.int64)
    position = program - batch * positions
    q += batch * q_batch + position * q_position
    k += batch * k_batch + position * k_position
    out_q += batch * out_q_batch + position * out_q_position
    out_k += batch * out_k_batch + position * out_k_position
    cos += batch * angle_batch + position * angle_position
    sin += batch * angle_batch + position * angle_position
    heads = q_heads + k_heads
    start = tl.program_id(1) * PIECES
    step = tl.num_programs(1) * PIECES
    # Columns of angles from one pair to the next. Angles are in the order of halves if MIXED.
    SPREAD: tl.constexpr = 2 if PAIRS == INTERLEAVED else 1
    TOGETHER: tl.constexpr = PAIRS == INTERLEAVED

    if ALIGNED:
        in_head = half // PIECE
        for block in range(start, heads * in_head, step):
            piece = block + tl.arange(0, PIECES)
            inside = (piece < heads * in_head)[:, None]
            head = piece // in_head
            first = (PIECE * (piece - head * in_head))[:, None]
            a, b = load_piece(
                head_pointers(q, k, head, q_heads, q_head, k_head, 16), first, inside, half, flags, PAIRS, PIECE, True
            )
            cols = SPREAD * first + tl.arange(0, SPREAD * PIECE)[None, :]
            # If everything is aligned, sections begin at piece boundaries.
            section = (cols >= SPREAD * section_1).to(tl.int64) + (cols >= SPREAD * section_2).to(tl.int64)
            at = section * angle_section + cols
            cos_a, cos_b, sin_a, sin_b = load_angles(cos, sin, at, inside, second, flags, TOGETHER)
            y = head_pointers(out_q, out_k, head, q_heads, out_q_head, out_k_head, 16)
            ya, yb = a * cos_a - b * sin_a, b * cos_b + a * sin_b
            store_piece(y, first, ya, yb, inside, half, flags, PAIRS, PIECE, True)

        in_rest = rest_width // PIECE
        for block in range(start, heads * in_rest, step):
            piece = block + tl.arange(0, PIECES)
            inside = (piece < heads * in_rest)[:, None]
            head = piece // in_rest
            cols = (rest + PIECE * (piece - head * in_rest))[:, None] + tl.arange(0, PIECE)[None, :]
            x = head_pointers(q, k, head, q_heads, q_head, k_head, 16) + cols
            y = head_pointers(out_q, out_k, head, q_heads, out_q_head, out_k_head, 16) + cols
            tl.store(y, tl.load(x, mask=inside, other=0.0), mask=inside)
    else:
        for block in range(start, heads, step):
            head = block + tl.arange(0, PIECES)
            exists = (head < heads)[:, None]
            x = head_pointers(q, k, head, q_heads, q_head, k_head, 1)
            y = head_pointers(out_q, out_k, head, q_heads, out_q_head, out_k_head, 1)
            for first in range(0, half, PIECE):
                cols = (SPREAD * first + tl.arange(0, SPREAD * PIECE))[None, :]
                inside = cols < SPREAD * half
                section = (cols >= SPREAD * section_1).to(tl.int64) + (cols >= SPREAD * section_2).to(tl.int64)
                at = section * angle_section + cols
                cos_a, cos_b, sin_a, sin_b = load_angles(cos, sin, at, inside, second, flags, TOGETHER)
                a, b = load_piece(x, first, exists, half, flags, PAIRS, PIECE, False)
                ya, yb = a * cos_a - b * sin_a, b * cos_b + a * sin_b
                store_piece(y, first, ya, yb, exists, half, flags, PAIRS, PIECE, False)
            for first in range(0, rest_width, PIECE):
                cols = (first + tl.arange(0, PIECE))[None, :]
                inside = exists & (cols < rest_width)
                cols += rest
                tl.store(y + cols, tl.load(x + cols, mask=inside, other=0.0), mask=inside)


def config(max_n, piece, pieces, num_warps, aligned=True, only=None):
    constexprs = dict(PIECE=piece, PIECES=pieces, ALIGNED=int(aligned))
    return Config(max_n, aligned, num_warps, constexprs=constexprs, only=only or {})


KERNELS = [
    Kernel(
        function=rope_kernel,
        args={
            "out_q": "*X", "out_k": "*X", "q": "*X", "k": "*X", "cos": "*W", "sin": "*W",
            "positions": "i32", "q_heads": "i32", "k_heads": "i32", "half": "i32", "second": "i32",
            "rest": "i32", "rest_width": "i32", "section_1": "i32", "section_2": "i32",
            "out_q_batch": "i64", "out_q_head": "i64", "out_q_position": "i64",
            "out_k_batch": "i64", "out_k_head": "i64", "out_k_position": "i64",
            "q_batch": "i64", "q_head": "i64", "q_position": "i64",
            "k_batch": "i64", "k_head": "i64", "k_position": "i64",
            "angle_batch": "i64", "angle_position": "i64", "angle_section": "i64", "flags": "i32",
        },
        aligned=[
            "out_q", "out_k", "q", "k", "cos", "sin", "half", "second", "rest", "rest_width", "section_1", "section_2",
            "out_q_batch", "out_q_head", "out_q_position", "out_k_batch", "out_k_head", "out_k_position",
            "q_batch", "q_head", "q_position", "k_batch", "k_head", "k_position",
            "angle_batch", "angle_position", "angle_section",
        ],
        axes={"dtype": ACTIVATION_WEIGHT_DTYPES, "pairs": [{"PAIRS": p.value} for p in (HALVES, INTERLEAVED, MIXED)]},
        # max_n limits R. The shapes are the fastest ones on an H200 in bf16.
        configs=[
            config(64, 8, 64, 2, only={"PAIRS": (HALVES.value, INTERLEAVED.value)}),
            config(None, 8, 128, 4),
            config(None, 32, 4, 1, aligned=False),
        ],
    ),
]  # fmt: skip
