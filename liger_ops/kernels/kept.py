"""Columns of a row that a program keeps in shared memory between two passes over them.

Kept in registers, the columns would leave room for too few programs per multiprocessor; reading them again from the L2
cache takes longer. Copies to shared memory are all in flight before the first column is needed, and occupy no
registers. Triton cannot declare shared memory, so this file does it in inline PTX.

A lane is 16 bytes of a tile. The kept columns begin at a 16-byte boundary, and a lane is copied completely or not at
all. The caller masks elements of a lane that lie outside the row.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def reservation(bytes_kept):
    return f"{{ .shared .align 16 .b8 kept[{bytes_kept}]; mov.u32 $0, kept; }}"


@triton.jit
def keep(row, begin, first, limit, KEPT: tl.constexpr, LANES: tl.constexpr):
    """Starts to copy the columns first..limit among the KEPT columns from `begin` on. Returns the shared address."""
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
    """Waits for the copies that `keep` started."""
    kept = tl.inline_asm_elementwise(
        "cp.async.wait_all; mov.u32 $0, $1;", "=r,r", [kept], dtype=tl.int32, is_pure=False, pack=1
    )
    # The thread that reads a lane may not be the thread that copied it.
    tl.debug_barrier()
    return kept


@triton.jit
def read_kept(kept, tile, DTYPE: tl.constexpr, LANES: tl.constexpr):
    """The lanes of a tile in fp32: one tensor for each column of a lane."""
    words = tl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [kept + (tile * LANES + tl.arange(0, LANES)) * 16],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return unpack(words, DTYPE)


@triton.jit
def unpack(words, DTYPE: tl.constexpr):
    """The columns that are packed in 32-bit words, in fp32."""
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
    """Packs the columns of every lane, in the form that read_kept returns, into four 32-bit words."""
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
    """Stores lanes to memory that is not read again soon. `at`: address of each lane."""
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
