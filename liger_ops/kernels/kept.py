"""Columns of a row that a program keeps in its shared memory between two looks at them.

Kept in registers, they would leave room for too few programs at a time; read again from the L2 cache, they cost half as
much again. Copied to shared memory, all are under way before the first is needed, and no register waits for them. Triton
gives a kernel no shared memory of its own; PTX does.

A lane is 16 bytes of a tile. What is kept begins at a 16-byte boundary, so that a lane is copied whole or not at all: of
one that the row leaves on either side, the rest is for the caller to drop.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def reservation(bytes_kept):
    return f"{{ .shared .align 16 .b8 kept[{bytes_kept}]; mov.u32 $0, kept; }}"


@triton.jit
def keep(row, begin, first, limit, KEPT: tl.constexpr, LANES: tl.constexpr):
    """Asks for the KEPT columns of a row from `begin` on, of which those of first..limit are there; where they will be."""
    BITS: tl.constexpr = row.dtype.element_ty.primitive_bitwidth
    VEC: tl.constexpr = 128 // BITS
    kept = tl.inline_asm_elementwise(
        reservation(KEPT * BITS // 8), "=r,r", [begin], dtype=tl.int32, is_pure=False, pack=1
    )
    for t in tl.static_range(KEPT // (LANES * VEC)):
        lane = t * LANES + tl.arange(0, LANES)
        column = begin + lane * VEC
        wanted = (column < limit) & (column + VEC > first)
        tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.s32 wanted, $3, 0;
            @wanted cp.async.cg.shared.global [$1], [$2], 16;
            mov.u32 $0, 0;
            }""",
            "=r,r,l,r", [kept + lane * 16, (row + column).to(tl.int64), wanted.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return kept


@triton.jit
def await_kept(kept):
    """Waits for what `keep` asked for."""
    kept = tl.inline_asm_elementwise(
        "cp.async.wait_all; mov.u32 $0, $1;", "=r,r", [kept], dtype=tl.int32, is_pure=False, pack=1
    )
    # The compiler may give a lane to another thread to read than to copy.
    tl.debug_barrier()
    return kept


@triton.jit
def read_kept(kept, tile, DTYPE: tl.constexpr, LANES: tl.constexpr):
    """A tile's lanes: as many tensors of fp32 as a lane has columns."""
    words = tl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [kept + (tile * LANES + tl.arange(0, LANES)) * 16],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return unpack(words, DTYPE)


@triton.jit
def unpack(words, DTYPE: tl.constexpr):
    """The columns that words hold, in fp32."""
    values = ()
    for i in tl.static_range(len(words)):
        if DTYPE == tl.float32:
            values = values + (words[i].to(tl.float32, bitcast=True),)
        elif DTYPE == tl.bfloat16:
            low = (words[i] << 16).to(tl.float32, bitcast=True)
            values = values + (low, (words[i] & -65536).to(tl.float32, bitcast=True))
        else:
            low = words[i].to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            values = values + (low, (words[i] >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
    return values


@triton.jit
def lane_words(values, DTYPE: tl.constexpr):
    """What read_kept returned, or is computed of it, as the four words of every lane."""
    words = ()
    for i in tl.static_range(4):
        if DTYPE == tl.float32:
            words = words + (values[i].to(tl.int32, bitcast=True),)
        elif DTYPE == tl.bfloat16:
            words = words + (packed("cvt.rn.bf16x2.f32 $0, $2, $1;", values[2 * i], values[2 * i + 1]),)
        else:
            words = words + (packed("cvt.rn.f16x2.f32 $0, $2, $1;", values[2 * i], values[2 * i + 1]),)
    return words


@triton.jit
def write_lanes(at, words):
    """To memory that is not read soon; `at`: where each lane goes."""
    tl.inline_asm_elementwise(
        "st.global.L1::evict_first.v4.b32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;", "=r,l,r,r,r,r",
        [at.to(tl.int64), words[0], words[1], words[2], words[3]], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def write_some_lanes(at, words, wanted):
    tl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        setp.ne.s32 wanted, $6, 0;
        @wanted st.global.L1::evict_first.v4.b32 [$1], {$2, $3, $4, $5};
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r,r,r,r", [at.to(tl.int64), words[0], words[1], words[2], words[3], wanted.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def packed(instruction: tl.constexpr, low, high):
    return tl.inline_asm_elementwise(instruction, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)
