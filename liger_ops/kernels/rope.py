"""Rotary position embedding of q and k together: y = x * cos + rotate(x) * sin over the first R columns of a head.

A head's R columns form R / 2 pairs: columns (i, i + R / 2), or (2 i, 2 i + 1) where INTERLEAVED. For a pair (a, b)
    y_a = x_a * cos_a - x_b * sin_a        y_b = x_b * cos_b + x_a * sin_b
and the gradient is the same expression with (sin_a, sin_b) replaced by (-sin_b, -sin_a).

One program takes one position of one batch entry: the angles are read once for all heads of q and k, which are
walked in tiles of BLOCK_H. A tile is read whole before it is written, so that y may lie over x, and the next one is on its
way by then.
"""

import triton
import triton.language as tl

from .table import ACTIVATION_WEIGHT_DTYPES, Config, Kernel

INVERSE = tl.constexpr(1)
COMPLEX = tl.constexpr(2)  # cos and sin are one table of (cos, sin) pairs, which only interleaved pairs have


@triton.jit
def load_pairs(pointers, mask, half, INTERLEAVED: tl.constexpr):
    """pointers: (rows, columns) of the pairs' first members, or of both members where they are neighbours."""
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
def head_pointers(q, k, head, q_heads, q_stride, k_stride, ALIGNED: tl.constexpr):
    """Starts of heads numbered through q and on through k."""
    starts = tl.where(head < q_heads, q + head.to(tl.int64) * q_stride, k + (head - q_heads).to(tl.int64) * k_stride)
    if ALIGNED:
        # Both sides are aligned; not every compiler sees through the choice.
        starts = tl.multiple_of(starts, 16)
    return starts


@triton.jit
def rope_kernel(
    out_q, out_k, q, k, cos, sin,
    positions, q_heads, k_heads, half, width, section_1, section_2,
    out_q_batch, out_q_head, out_q_position, out_k_batch, out_k_head, out_k_position,
    q_batch, q_head, q_position, k_batch, k_head, k_position,
    angle_batch, angle_position, angle_section, flags,
    INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    # 64-bit before the products: a tensor may hold more than 2**31 elements.
    program = tl.program_id(0).to(tl.int64)
    batch = (tl.program_id(0) // positions).to(tl.int64)
    position = program - batch * positions
    q += batch * q_batch + position * q_position
    k += batch * k_batch + position * k_position
    out_q += batch * out_q_batch + position * out_q_position
    out_k += batch * out_k_batch + position * out_k_position
    heads = q_heads + k_heads
    first_head = tl.program_id(1) * BLOCK_H
    head_step = tl.num_programs(1) * BLOCK_H
    SPREAD: tl.constexpr = 2 if INTERLEAVED else 1

    for first in range(0, half, BLOCK_R):
        cols = SPREAD * first + tl.arange(0, SPREAD * BLOCK_R)
        inside = (cols < SPREAD * half)[None, :]
        section = (cols >= SPREAD * section_1).to(tl.int64) + (cols >= SPREAD * section_2).to(tl.int64)
        angle = (batch * angle_batch + position * angle_position + section * angle_section + cols)[None, :]
        # All that the first tile needs is asked for before any of it is waited for.
        head = first_head + tl.arange(0, BLOCK_H)
        x = head_pointers(q, k, head, q_heads, q_head, k_head, ALIGNED)[:, None] + cols[None, :]
        a, b = load_pairs(x, (head < heads)[:, None] & inside, half, INTERLEAVED)
        cos_a, cos_b = load_pairs(cos + angle, inside, half, INTERLEAVED)
        sin_a, sin_b = load_pairs(sin + angle, inside, half, INTERLEAVED)
        if INTERLEAVED:
            is_complex = (flags & COMPLEX) != 0
            cos_b, sin_a = tl.where(is_complex, sin_a, cos_b), tl.where(is_complex, cos_b, sin_a)
        inverse = (flags & INVERSE) != 0
        sin_a, sin_b = tl.where(inverse, -sin_b, sin_a), tl.where(inverse, -sin_a, sin_b)
        for block in range(first_head, heads, head_step):
            head = block + tl.arange(0, BLOCK_H)
            later = head + head_step
            x = head_pointers(q, k, later, q_heads, q_head, k_head, ALIGNED)[:, None] + cols[None, :]
            later_a, later_b = load_pairs(x, (later < heads)[:, None] & inside, half, INTERLEAVED)
            y = head_pointers(out_q, out_k, head, q_heads, out_q_head, out_k_head, ALIGNED)[:, None] + cols[None, :]
            mask = (head < heads)[:, None] & inside
            store_pairs(y, a * cos_a - b * sin_a, b * cos_b + a * sin_b, mask, half, INTERLEAVED)
            a = later_a
            b = later_b

    # Partial rotary: the columns up to width pass through.
    for first in range(2 * half, width, BLOCK_R):
        cols = first + tl.arange(0, BLOCK_R)
        for block in range(first_head, heads, head_step):
            head = block + tl.arange(0, BLOCK_H)
            mask = (head < heads)[:, None] & (cols < width)[None, :]
            x = head_pointers(q, k, head, q_heads, q_head, k_head, ALIGNED)[:, None] + cols[None, :]
            y = head_pointers(out_q, out_k, head, q_heads, out_q_head, out_k_head, ALIGNED)[:, None] + cols[None, :]
            tl.store(y, tl.load(x, mask=mask, other=0.0), mask=mask)


def config(max_n, block_h, block_r, num_warps, aligned=True, **more):
    constexprs = dict(BLOCK_H=block_h, BLOCK_R=block_r, ALIGNED=int(aligned))
    return Config(max_n, aligned, num_warps, constexprs=constexprs, **more)


KERNELS = [
    Kernel(
        function=rope_kernel,
        args={
            "out_q": "*X", "out_k": "*X", "q": "*X", "k": "*X", "cos": "*W", "sin": "*W",
            "positions": "i32", "q_heads": "i32", "k_heads": "i32", "half": "i32", "width": "i32",
            "section_1": "i32", "section_2": "i32",
            "out_q_batch": "i64", "out_q_head": "i64", "out_q_position": "i64",
            "out_k_batch": "i64", "out_k_head": "i64", "out_k_position": "i64",
            "q_batch": "i64", "q_head": "i64", "q_position": "i64",
            "k_batch": "i64", "k_head": "i64", "k_position": "i64",
            "angle_batch": "i64", "angle_position": "i64", "angle_section": "i64", "flags": "i32",
        },
        aligned=[
            "out_q", "out_k", "q", "k", "cos", "sin", "half", "width", "section_1", "section_2",
            "out_q_batch", "out_q_head", "out_q_position", "out_k_batch", "out_k_head", "out_k_position",
            "q_batch", "q_head", "q_position", "k_batch", "k_head", "k_position",
            "angle_batch", "angle_position", "angle_section",
        ],
        axes={"dtype": ACTIVATION_WEIGHT_DTYPES, "interleaved": [{"INTERLEAVED": 0}, {"INTERLEAVED": 1}]},
        # Widths are those of R. A thread of an aligned config holds 8 pairs. us on an H200 in bf16, where a copy took 47.1 and
        # 149.5: 8192 positions of 40 heads of 128 47.0, 16384 of 72 151.8; where the compiler has its will, 69 registers leave
        # room for 7 programs at a time instead of 8: 48.2 and 153.3.
        configs=[
            config(32, 32, 16, 2),
            config(64, 16, 32, 2),
            config(128, 16, 64, 4, programs_per_sm=8, halves_only=True),
            config(128, 16, 64, 4),
            config(None, 4, 128, 2),
            config(64, 16, 32, 2, aligned=False),
            config(None, 8, 64, 2, aligned=False),
        ],
    ),
]  # fmt: skip
