"""Streams pairs of rows through a program's shared memory: the next rows are copied while the current ones are used.

In backward of wide rows, a program has no free registers to prefetch into, and a multiprocessor has no room for a
second program. So rows are copied into a ring of slots in shared memory. A slot holds a piece of a row of both tensors:
PER tiles of LANES lanes each. A lane is 16 bytes. Every thread copies, reads and refills only its own lanes, so no
barrier is needed. This is correct only if all tensors have the same layout, which the build checks.

Offsets within a row and a slot are immediates in the instructions, so a thread holds one address per tensor. Addresses
are computed at the start of a row. A branch between the two passes over a row, such as the one in row_offset, would let
the compiler delay the sums of the first pass until after the second, with both rows in registers until then.
"""

import triton
import triton.language as tl

from .kept import lane_words, unpack
from .rows import row_offset

LANE_BYTES = tl.constexpr(16)
MOST_BYTES = tl.constexpr(96 * 1024)  # limit of a ring; the compiler needs the rest of the shared memory


@triton.constexpr_function
def ring_text(size):
    # The ring follows the compiler's own shared memory. aot/compile.py reads its size from the PTX comment.
    return f"""{{ /* ring {size} */
        .reg .u32 end;
        mov.u32 end, %dynamic_smem_size;
        mov.u32 $0, global_smem;
        add.u32 $0, $0, end;
        sub.u32 $0, $0, {size};
        }}"""


@triton.constexpr_function
def copy_text(column, slot, row):
    # A lane beyond the row is not read but filled with zeros.
    return f"""{{
        .reg .pred there;
        .reg .u32 size;
        setp.gt.s32 there, $4, {column};
        selp.u32 size, 16, 0, there;
        cp.async.cg.shared.global [$1+{slot[0]}], [$2+{row}], 16, size;
        cp.async.cg.shared.global [$1+{slot[1]}], [$3+{row}], 16, size;
        cp.async.commit_group;
        mov.u32 $0, 0;
        }}"""


@triton.constexpr_function
def load_text(column, at, absent):
    return f"""{{
        .reg .pred there;
        setp.gt.s32 there, $5, {column};
        mov.b32 $0, {absent};
        mov.b32 $1, {absent};
        mov.b32 $2, {absent};
        mov.b32 $3, {absent};
        @there ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{at}];
        }}"""


@triton.constexpr_function
def store_text(column, at):
    return f"""{{
        .reg .pred there;
        setp.gt.s32 there, $6, {column};
        @there st.global.v4.b32 [$1+{at}], {{$2, $3, $4, $5}};
        mov.u32 $0, 0;
        }}"""


@triton.constexpr_function
def wait_text(pending):
    return f"cp.async.wait_group {pending}; mov.u32 $0, 0;"


@triton.constexpr_function
def read_text(at):
    return f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{at}];"


@triton.constexpr_function
def ones(dtype):
    return {"bf16": 0x3F803F80, "fp16": 0x3C003C00, "fp32": 0x3F800000}[dtype.name]


@triton.jit
def row_start(tensor, row, inner_rows, outer, inner):
    return (tensor + row_offset(row, inner_rows, outer, inner)).to(tl.int64)


@triton.jit
def first_lane(start, LANES: tl.constexpr):
    """Address of each lane of a row's first tile."""
    return start + tl.arange(0, LANES) * LANE_BYTES


@triton.constexpr_function
def lane_columns(dtype):
    return 128 // dtype.primitive_bitwidth


@triton.constexpr_function
def slots_that_fit(slots, pieces, row_bytes):
    """Number of slots that fit, or 0 if one row does not fit: it is then not streamed."""
    fit = min(slots, MOST_BYTES.value * pieces // row_bytes) if slots else 0
    return fit if fit >= pieces else 0


@triton.jit
def columns_left(n, present, LANES: tl.constexpr, VEC: tl.constexpr):
    """Columns of a row from each lane's first column on. A lane exists in a tile if this exceeds the tile's start."""
    return tl.where(present, n, 0) - tl.arange(0, LANES) * VEC


@triton.jit
def make_ring(anchor, LANES: tl.constexpr, PER: tl.constexpr, SLOTS: tl.constexpr):
    """Addresses of the slots."""
    SLOT: tl.constexpr = 2 * PER * LANES * LANE_BYTES
    start = tl.inline_asm_elementwise(ring_text(SLOTS * SLOT), "=r,r", [anchor], dtype=tl.int32, is_pure=True, pack=1)
    ring = ()
    for s in tl.static_range(SLOTS):
        ring = ring + (start + s * SLOT,)
    return ring


@triton.jit
def rotate_ring(ring, PIECES: tl.constexpr, SLOTS: tl.constexpr):
    """The ring, rotated for the next row."""
    turned = ()
    for s in tl.static_range(SLOTS):
        turned = turned + (ring[(s + PIECES) % SLOTS],)
    return turned


@triton.jit
def copy_tile(
    slot, first, second, left, J: tl.constexpr, T: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """Starts to copy tile T of two rows to the slot's tile J."""
    LANE: tl.constexpr = LANES * LANE_BYTES
    tl.inline_asm_elementwise(
        copy_text(T * LANES * VEC, (2 * J * LANE, (2 * J + 1) * LANE), T * LANE), "=r,r,l,l,r",
        [slot + tl.arange(0, LANES) * LANE_BYTES, first, second, left], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_for_tiles(anchor, PENDING: tl.constexpr):
    """Waits for all copies except those of the last PENDING tiles."""
    tl.inline_asm_elementwise(wait_text(PENDING), "=r,r", [anchor], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def read_pair(ring, T: tl.constexpr, DTYPE: tl.constexpr, LANES: tl.constexpr, PER: tl.constexpr):
    """Tile T of both rows, in fp32: one tensor for each column of a lane."""
    LANE: tl.constexpr = LANES * LANE_BYTES
    J: tl.constexpr = T % PER
    at = ring[T // PER] + tl.arange(0, LANES) * LANE_BYTES
    first = tl.inline_asm_elementwise(
        read_text(2 * J * LANE), "=r,=r,=r,=r,r", [at],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    second = tl.inline_asm_elementwise(
        read_text((2 * J + 1) * LANE), "=r,=r,=r,=r,r", [at],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return unpack(first, DTYPE), unpack(second, DTYPE)


@triton.jit
def load_words(at, left, COLUMN: tl.constexpr, BYTE: tl.constexpr, DTYPE: tl.constexpr):
    return tl.inline_asm_elementwise(
        load_text(COLUMN, BYTE, ones(DTYPE)), "=&r,=&r,=&r,=&r,l,r", [at, left],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_lane(at, left, T: tl.constexpr, DTYPE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """Words of tile T of a row, or of a parameter, whose dtype may be wider. Absent lanes are ones."""
    COLUMN: tl.constexpr = T * LANES * VEC
    if VEC * DTYPE.primitive_bitwidth == 128:
        words = load_words(at, left, COLUMN, T * LANES * LANE_BYTES, DTYPE)
    else:
        # The lanes of a wider dtype are twice as far apart as `at` assumes.
        at += tl.arange(0, LANES) * LANE_BYTES
        words = load_words(at, left, COLUMN, 4 * COLUMN, DTYPE) + load_words(at, left, COLUMN, 4 * COLUMN + 16, DTYPE)
    return words


@triton.jit
def store_lane(at, left, words, T: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    tl.inline_asm_elementwise(
        store_text(T * LANES * VEC, T * LANES * LANE_BYTES), "=r,l,r,r,r,r,r", [at, words[0], words[1], words[2], words[3], left],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def store_sums(partial, sums, n, wanted, LANES: tl.constexpr, TILES: tl.constexpr, VEC: tl.constexpr):
    """Stores a row of fp32, from VEC tensors per tile."""
    at = partial.to(tl.int64) + tl.arange(0, LANES) * (4 * VEC)
    left = columns_left(n, wanted, LANES, VEC)
    for t in tl.static_range(TILES):
        for quarter in tl.static_range(VEC // 4):
            words = ()
            for i in tl.static_range(4):
                words = words + (sums[t * VEC + quarter * 4 + i].to(tl.int32, bitcast=True),)
            tl.inline_asm_elementwise(
                store_text(t * LANES * VEC, 4 * t * LANES * VEC + 16 * quarter), "=r,l,r,r,r,r,r",
                [at, words[0], words[1], words[2], words[3], left], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def store_gradient(out, sums, n, wanted, LANES: tl.constexpr, TILES: tl.constexpr, VEC: tl.constexpr):
    """Like store_sums, but in the dtype of `out`."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    if DTYPE == tl.float32:
        store_sums(out, sums, n, wanted, LANES, TILES, VEC)
    else:
        left = columns_left(n, wanted, LANES, VEC)
        for t in tl.static_range(TILES):
            values = ()
            for i in tl.static_range(VEC):
                values = values + (sums[t * VEC + i],)
            store_lane(first_lane(out.to(tl.int64), LANES), left, lane_words(values, DTYPE), t, LANES, VEC)


@triton.jit
def zero_sums(LANES: tl.constexpr, COUNT: tl.constexpr):
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros([LANES], tl.float32),)
    return sums


@triton.jit
def fill_ring(
    ring, x, dy, row, rows, programs, n, inner_rows, x_outer, x_inner, dy_outer, dy_inner,
    LANES: tl.constexpr, VEC: tl.constexpr, PER: tl.constexpr, PIECES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Starts to copy the first pieces of a program whose first row is `row`."""
    for s in tl.static_range(SLOTS):
        at = row + programs * (s // PIECES)
        first = first_lane(row_start(x, at, inner_rows, x_outer, x_inner), LANES)
        second = first_lane(row_start(dy, at, inner_rows, dy_outer, dy_inner), LANES)
        left = columns_left(n, at < rows, LANES, VEC)
        for j in tl.static_range(PER):
            copy_tile(ring[s], first, second, left, j, s % PIECES * PER + j, LANES, VEC)


@triton.jit
def pieces_ahead(
    x, dy, row, rows, programs, n, inner_rows, x_outer, x_inner, dy_outer, dy_inner,
    PIECES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """For each piece of a row: start addresses and number of columns of the rows that will refill its slot."""
    xs = ()
    dys = ()
    columns = ()
    for p in tl.static_range(PIECES):
        at = row + programs * ((p + SLOTS) // PIECES)
        xs = xs + (row_start(x, at, inner_rows, x_outer, x_inner),)
        dys = dys + (row_start(dy, at, inner_rows, dy_outer, dy_inner),)
        columns = columns + (tl.where(at < rows, n, 0),)
    return xs, dys, columns


@triton.jit
def refill(
    ring, xs_ahead, dys_ahead, columns_ahead, T: tl.constexpr,
    LANES: tl.constexpr, VEC: tl.constexpr, PER: tl.constexpr, PIECES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Refills the place of tile T with the tile that comes SLOTS pieces later."""
    copy_tile(
        ring[T // PER], first_lane(xs_ahead[T // PER], LANES), first_lane(dys_ahead[T // PER], LANES),
        columns_left(columns_ahead[T // PER], True, LANES, VEC),
        T % PER, (T // PER + SLOTS) % PIECES * PER + T % PER, LANES, VEC,
    )  # fmt: skip
