"""RMS norm of every head of q and k, then rotary position embedding, in one kernel.

    normed = x * rsqrt(mean(x^2) + eps) * (weight + offset)        (rounded to its dtype, as rms_norm returns it)
    y = normed * cos + rotate(normed) * sin                        (see rope.py)

A head is a row of pairs. The first R / 2 pairs are those that rope rotates. The other `width` - R columns form pairs as
well, which are not rotated: column R + i and the one `rest` columns after it, or neighbours if INTERLEAVED. So one tile
of PAIRS pairs holds whole heads for any R, and a thread has both members of its pairs.

Forward: a program processes heads of one token, HEADS at a time; all of them, or, if tokens are few, every `splits`-th
tile. Angles stay in registers. The heads of k are numbered after those of q.

Backward: programs are persistent. They process HEADS heads at a time, of all tokens: first those of q, then those of
k. Heads are numbered across tokens, so that few heads of k fill a tile. A program sums the gradient of a weight in
registers and writes it once, as one row of partial sums. Statistics are recomputed, because x is read anyway.
A tile is read completely before it is written, so gradients may overwrite the incoming gradients.
"""

import triton
import triton.language as tl

from ..rows import round_if
from ..table import Config, Kernel, fewer_when_mixed
from .rope import INVERSE, head_pointers, load_angles

# The lowest two bits are rope's flags.
HAS_Q_WEIGHT = tl.constexpr(4)
HAS_K_WEIGHT = tl.constexpr(8)
ROUND_FIRST = tl.constexpr(16)  # casting mode "llama": heads are rounded before they are multiplied by the weight
NEEDS_WEIGHTS = tl.constexpr(32)
MAX_WIDTH = tl.constexpr(2048)  # columns of a head; they must fit into registers


@triton.jit
def pair_columns(half, rest, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, JOINT: tl.constexpr):
    """(pairs, columns, distances), each with a leading dimension of 1. A pair's second member lies `distances` after
    its column. If JOINT, columns are those of both members."""
    pairs = tl.arange(0, PAIRS)[None, :]
    if JOINT:
        columns = tl.arange(0, 2 * PAIRS)[None, :]
        distances = columns
    elif INTERLEAVED:
        columns = 2 * pairs
        distances = tl.full([1, PAIRS], 1, tl.int32)
    else:
        columns = pairs + tl.where(pairs < half, 0, half)
        distances = tl.where(pairs < half, half, rest)
    return pairs, columns, distances


@triton.jit
def load_members(head, at, exists, half, rest, width, other: tl.constexpr, JOINT: tl.constexpr):
    """Both members of the pairs `at` of heads that start at `head`, in fp32."""
    pairs, columns, distances = at
    if JOINT:
        both = tl.load(head + columns, mask=exists & (columns < width), other=other)
        a, b = tl.split(tl.reshape(both, [both.shape[0], both.shape[1] // 2, 2]))
    else:
        inside = exists & (pairs < half + rest)
        a = tl.load(head + columns, mask=inside, other=other)
        b = tl.load(head + columns + distances, mask=inside & (columns + distances < width), other=other)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def store_members(head, at, a, b, exists, half, rest, width, JOINT: tl.constexpr):
    pairs, columns, distances = at
    if JOINT:
        tl.store(head + columns, tl.interleave(a, b), mask=exists & (columns < width))
    else:
        inside = exists & (pairs < half + rest)
        tl.store(head + columns, a, mask=inside)
        tl.store(head + columns + distances, b, mask=inside & (columns + distances < width))


@triton.jit
def load_weight(weight, at, present, half, rest, width, offset, JOINT: tl.constexpr):
    a, b = load_members(weight, at, present, half, rest, width, 1.0, JOINT)
    return tl.where(present, a + offset, 1.0), tl.where(present, b + offset, 1.0)


@triton.jit
def angles_of(
    cos, sin, at, exists, half, section_1, section_2, angle_section, flags,
    INTERLEAVED: tl.constexpr, JOINT: tl.constexpr,
):  # fmt: skip
    _, columns, distances = at
    SPREAD: tl.constexpr = 2 if INTERLEAVED else 1
    section = (columns >= SPREAD * section_1).to(tl.int64) + (columns >= SPREAD * section_2).to(tl.int64)
    places = section * angle_section + columns
    return load_angles(cos, sin, places, exists & (columns < SPREAD * half), distances, flags, JOINT)


@triton.jit
def rotate(a, b, angles, rotated):
    cos_a, cos_b, sin_a, sin_b = angles
    return tl.where(rotated, a * cos_a - b * sin_a, a), tl.where(rotated, b * cos_b + a * sin_b, b)


@triton.jit
def choose(which, of_q, of_k, MULTIPLE: tl.constexpr):
    # Both are multiples, but not every compiler infers it.
    return tl.multiple_of(tl.where(which == 0, of_q, of_k), MULTIPLE)


@triton.jit
def qk_norm_rope_fwd_kernel(
    out_q, out_k, q, k, q_weight, k_weight, cos, sin,
    positions, q_heads, k_heads, half, rest, width, section_1, section_2, splits,
    out_q_batch, out_q_head, out_q_position, out_k_batch, out_k_head, out_k_position,
    q_batch, q_head, q_position, k_batch, k_head, k_position,
    angle_batch, angle_position, angle_section, eps, offset, flags,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    BYTES: tl.constexpr = 16 if ALIGNED else 1
    # Unaligned columns are loaded one by one; together, they would have to change threads.
    JOINT: tl.constexpr = INTERLEAVED and ALIGNED
    dtype: tl.constexpr = q.dtype.element_ty
    token = tl.program_id(0) // splits
    # 64-bit before the multiplications: a tensor may have more than 2**31 elements.
    batch = (token // positions).to(tl.int64)
    position = token.to(tl.int64) - batch * positions
    q += batch * q_batch + position * q_position
    k += batch * k_batch + position * k_position
    out_q += batch * out_q_batch + position * out_q_position
    out_k += batch * out_k_batch + position * out_k_position
    at = pair_columns(half, rest, PAIRS, INTERLEAVED, JOINT)
    rotated = at[0] < half
    # One address per head, so that a thread reads its own angles. Shared by the heads, they would pass through shared
    # memory.
    start = batch * angle_batch + position * angle_position + tl.zeros([HEADS, 1], tl.int64)
    every = tl.full([HEADS, 1], True, tl.int1)
    angles = angles_of(
        cos + start, sin + start, at, every, half, section_1, section_2, angle_section, flags, INTERLEAVED, JOINT
    )
    for block in range(tl.program_id(0) - token * splits, tl.cdiv(q_heads + k_heads, HEADS), splits):
        head = block * HEADS + tl.arange(0, HEADS)
        exists = (head < q_heads + k_heads)[:, None]
        of_q = (head < q_heads)[:, None]
        x = head_pointers(q, k, head, q_heads, q_head, k_head, BYTES)
        a, b = load_members(x, at, exists, half, rest, width, 0.0, JOINT)
        weight = head_pointers(q_weight, k_weight, head, q_heads, 0, 0, BYTES)
        present = exists & ((flags & tl.where(of_q, HAS_Q_WEIGHT, HAS_K_WEIGHT)) != 0)
        weight_a, weight_b = load_weight(weight, at, present, half, rest, width, offset, JOINT)
        scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1)[:, None] / width + eps)
        a = round_if(a * scale, flags & ROUND_FIRST, dtype) * weight_a
        b = round_if(b * scale, flags & ROUND_FIRST, dtype) * weight_b
        a, b = rotate(a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32), angles, rotated)
        out = head_pointers(out_q, out_k, head, q_heads, out_q_head, out_k_head, BYTES)
        store_members(out, at, a, b, exists, half, rest, width, JOINT)


@triton.jit
def qk_norm_rope_bwd_kernel(
    dq, dk, partial, grad_q, grad_k, q, k, q_weight, k_weight, cos, sin,
    tokens, positions, q_heads, k_heads, half, rest, width, section_1, section_2,
    dq_batch, dq_head, dq_position, dk_batch, dk_head, dk_position,
    grad_q_batch, grad_q_head, grad_q_position, grad_k_batch, grad_k_head, grad_k_position,
    q_batch, q_head, q_position, k_batch, k_head, k_position,
    angle_batch, angle_position, angle_section, eps, offset, flags,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    BYTES: tl.constexpr = 16 if ALIGNED else 1
    ELEMENTS: tl.constexpr = 8 if ALIGNED else 1
    JOINT: tl.constexpr = INTERLEAVED and ALIGNED
    dtype: tl.constexpr = q.dtype.element_ty
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    at = pair_columns(half, rest, PAIRS, INTERLEAVED, JOINT)
    rotated = at[0] < half

    for which in range(0, 2):
        present = (flags & tl.where(which == 0, HAS_Q_WEIGHT, HAS_K_WEIGHT)) != 0
        weight = choose(which, q_weight, k_weight, BYTES)
        weight_a, weight_b = load_weight(weight, at, present, half, rest, width, offset, JOINT)
        heads = tl.where(which == 0, q_heads, k_heads)
        x = choose(which, q, k, BYTES)
        x_batch = choose(which, q_batch, k_batch, ELEMENTS)
        x_head = choose(which, q_head, k_head, ELEMENTS)
        x_position = choose(which, q_position, k_position, ELEMENTS)
        grad = choose(which, grad_q, grad_k, BYTES)
        grad_batch = choose(which, grad_q_batch, grad_k_batch, ELEMENTS)
        grad_head = choose(which, grad_q_head, grad_k_head, ELEMENTS)
        grad_position = choose(which, grad_q_position, grad_k_position, ELEMENTS)
        out = choose(which, dq, dk, BYTES)
        out_batch = choose(which, dq_batch, dk_batch, ELEMENTS)
        out_head = choose(which, dq_head, dk_head, ELEMENTS)
        out_position = choose(which, dq_position, dk_position, ELEMENTS)
        sums_a = tl.zeros([HEADS, PAIRS], tl.float32)
        sums_b = tl.zeros([HEADS, PAIRS], tl.float32)
        for block in range(program, tl.cdiv(tokens * heads, HEADS), programs):
            row = (block * HEADS + tl.arange(0, HEADS))[:, None]
            exists = row < tokens * heads
            token = row // heads
            batch = token // positions
            head = (row - token * heads).to(tl.int64)
            position = (token - batch * positions).to(tl.int64)
            batch = batch.to(tl.int64)
            grads = grad + batch * grad_batch + head * grad_head + position * grad_position
            grad_a, grad_b = load_members(grads, at, exists, half, rest, width, 0.0, JOINT)
            a, b = load_members(
                x + batch * x_batch + head * x_head + position * x_position,
                at, exists, half, rest, width, 0.0, JOINT,
            )  # fmt: skip
            start_of_angles = batch * angle_batch + position * angle_position
            angles = angles_of(
                cos + start_of_angles, sin + start_of_angles,
                at, exists, half, section_1, section_2, angle_section, flags | INVERSE, INTERLEAVED, JOINT,
            )  # fmt: skip
            grad_a, grad_b = rotate(grad_a, grad_b, angles, rotated)
            scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1)[:, None] / width + eps)
            dots = tl.sum(grad_a * weight_a * a + grad_b * weight_b * b, axis=1)[:, None]
            a *= scale
            b *= scale
            sums_a += grad_a * round_if(a, flags & ROUND_FIRST, dtype)
            sums_b += grad_b * round_if(b, flags & ROUND_FIRST, dtype)
            mean = dots * scale / width
            store_members(
                out + batch * out_batch + head * out_head + position * out_position, at,
                (grad_a * weight_a - a * mean) * scale, (grad_b * weight_b - b * mean) * scale,
                exists, half, rest, width, JOINT,
            )  # fmt: skip
        store_members(
            partial + (which * programs + program).to(tl.int64) * width, at,
            tl.sum(sums_a, axis=0)[None, :], tl.sum(sums_b, axis=0)[None, :],
            (flags & NEEDS_WEIGHTS) != 0, half, rest, width, JOINT,
        )  # fmt: skip


def config(max_n, heads, pairs, num_warps, programs_per_sm=0, aligned=True):
    constexprs = dict(HEADS=heads, PAIRS=pairs, ALIGNED=int(aligned))
    return Config(max_n, aligned, num_warps, programs_per_sm, constexprs)


# The norm's weights W and the angles A. Weights that are wider than q and k come with angles that are.
DTYPES = (
    {"X": "bf16", "W": "bf16", "A": "bf16"},
    {"X": "bf16", "W": "bf16", "A": "fp32"},
    {"X": "bf16", "W": "fp32", "A": "fp32"},
    {"X": "fp16", "W": "fp16", "A": "fp16"},
    {"X": "fp16", "W": "fp16", "A": "fp32"},
    {"X": "fp16", "W": "fp32", "A": "fp32"},
    {"X": "fp32", "W": "fp32", "A": "fp32"},
)
AXES = {"dtype": DTYPES, "interleaved": [{"INTERLEAVED": 0}, {"INTERLEAVED": 1}]}
SIZES = dict.fromkeys(("positions", "q_heads", "k_heads", "half", "rest", "width", "section_1", "section_2"), "i32")
SCALARS = {"eps": "fp32", "offset": "fp32", "flags": "i32"}


def strides(*tensors):
    return {f"{t}_{d}": "i64" for t in tensors for d in ("batch", "head", "position")}


ANGLES = dict.fromkeys(("angle_batch", "angle_position", "angle_section"), "i64")
ALIGNED_SIZES = ["half", "rest", "width", "section_1", "section_2"]
INPUTS = {"q": "*X", "k": "*X", "q_weight": "*W", "k_weight": "*W", "cos": "*A", "sin": "*A"}
FORWARD_STRIDES = strides("out_q", "out_k", "q", "k") | ANGLES
BACKWARD_STRIDES = strides("dq", "dk", "grad_q", "grad_k", "q", "k") | ANGLES

KERNELS = [
    Kernel(
        function=qk_norm_rope_fwd_kernel,
        args={"out_q": "*X", "out_k": "*X", **INPUTS, **SIZES, "splits": "i32", **FORWARD_STRIDES, **SCALARS},
        aligned=["out_q", "out_k", *INPUTS, *ALIGNED_SIZES, *FORWARD_STRIDES],
        axes=AXES,
        # max_n limits the columns of a head. A thread has eight pairs of one head.
        configs=fewer_when_mixed([
            config(64, 16, 32, 2),
            config(128, 8, 64, 2),
            config(256, 8, 128, 4),
            config(512, 4, 256, 4),
            config(128, 16, 64, 4, aligned=False),
            config(512, 4, 256, 4, aligned=False),
            config(None, 1, 1024, 8, aligned=False),
        ]),
    ),
    Kernel(
        function=qk_norm_rope_bwd_kernel,
        args={
            "dq": "*X", "dk": "*X", "partial": "*fp32", "grad_q": "*X", "grad_k": "*X", **INPUTS,
            "tokens": "i32", **SIZES, **BACKWARD_STRIDES, **SCALARS,
        },
        aligned=["dq", "dk", "partial", "grad_q", "grad_k", *INPUTS, *ALIGNED_SIZES, *BACKWARD_STRIDES],
        axes=AXES,
        configs=fewer_when_mixed([
            config(64, 32, 32, 4, 4),
            config(128, 16, 64, 4, 4),
            config(256, 8, 128, 4, 4),
            config(512, 4, 256, 4, 4),
            config(128, 8, 64, 4, 4, aligned=False),
            config(512, 2, 256, 4, 4, aligned=False),
            config(None, 1, 1024, 8, 1, aligned=False),
        ]),
    ),
]  # fmt: skip
