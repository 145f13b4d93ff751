"""The products x @ weight.T of tokens and classes on compute capability 9.0, tile by tile, in PTX.

Two warpgroups of a program process tiles in turn: one multiplies while the other takes its sums further, so that the tensor
cores do not wait. A third warpgroup loads tiles. What becomes of a tile is the Epilogue's.
"""

from types import SimpleNamespace

from .. import hopper

# Rows of the two programs of a cluster.
PAIR_ROWS = 256
TILE = dict(TILE_M=128, TILE_N=192, TILE_K=64, PUT_N=32, STAGES=4)
WARPS = 12


class Epilogue:
    """What a kernel does with the products."""

    def skip(self, a, pair, label):
        """Jumps to the label if nothing is to be done in this pair of row tiles."""

    def begin(self, a):
        """Before the first tile of a warpgroup that multiplies."""

    def row(self, a, row, inside, first_column):
        """For each of the four rows of which a thread holds parts, before a tile's products."""

    def finish(self, a, tile):
        """tile.sums[half]: the products of 64 rows, of which a thread has TILE_N / 2. Number i of them is of the thread's row
        2 * half + i // 2 % 2, and of the column tile.column(i)."""


def tiles_of_products(
    a, x, weight, rows, n, columns, group, epilogue, TILE_M, TILE_N, TILE_K, PUT_N, STAGES,
):  # fmt: skip
    """x (rows, columns), weight (n, columns): tensor maps. `group`: pairs of row tiles that are completed for all classes before
    the next pairs. PUT_N: columns per output block. Returns with all warps together again."""
    # A warpgroup multiplies two halves of 64 rows. A stage has rows of the swizzled width that wgmma reads. The
    # programs of a cluster process adjacent row tiles, and share tiles of w.
    assert (TILE_M, TILE_K * 2, PUT_N * 2) == (128, hopper.ROW_BYTES, 64) and STAGES & (STAGES - 1) == 0
    assert hopper.CLUSTER * TILE_M == PAIR_ROWS

    x_tile_bytes = TILE_M * hopper.ROW_BYTES
    stage_bytes = x_tile_bytes + TILE_N * hopper.ROW_BYTES
    out_bytes = TILE_M * TILE_N * 2
    stages = a.shared(STAGES * stage_bytes + out_bytes + 8 * (2 * STAGES + 4))
    out = a.integer("add.u32", stages, STAGES * stage_bytes)
    full = a.integer("add.u32", out, out_bytes)
    empty = a.integer("add.u32", full, 8 * STAGES)
    multiply_turn = a.integer("add.u32", empty, 8 * STAGES)
    write_turn = a.integer("add.u32", multiply_turn, 16)

    thread = a.special("tid.x")
    lane = a.integer("and.b32", thread, hopper.WARP - 1)
    warp = a.integer("and.b32", a.integer("shr.u32", thread, 5), 3)
    role = a.integer("shr.u32", thread, 7)
    rank = a.special("cluster_ctarank")
    leads = a.test("eq.u32", thread, 0)
    for stage in range(STAGES):
        a.barrier(f"{full}+{8 * stage}", 1, leads)
        # One arrival per warp of a warpgroup, from both programs.
        a.barrier(f"{empty}+{8 * stage}", 4 * hopper.CLUSTER, leads)
    for turn in range(2):
        a.barrier(f"{multiply_turn}+{8 * turn}", 4, leads)
        a.barrier(f"{write_turn}+{8 * turn}", 4, leads)
    a.publish_barriers(leads)
    a.cluster_sync()

    pairs = a.integer("shr.u32", a.integer("add.u32", rows, PAIR_ROWS - 1), PAIR_ROWS.bit_length() - 1)
    tiles_n = a.integer("div.u32", a.integer("add.u32", n, TILE_N - 1), TILE_N)
    steps = a.integer("shr.u32", a.integer("add.u32", columns, TILE_K - 1), TILE_K.bit_length() - 1)
    total = a.integer("mul.lo.u32", pairs, tiles_n)
    clusters = a.integer("shr.u32", a.special("nctaid.x"), 1)
    per_group = a.integer("mul.lo.u32", group, tiles_n)
    tile = a.integer("shr.u32", a.special("ctaid.x"), 1)
    the_end = a.label("end")
    done = a.test("ge.u32", tile, total)

    def locate(skip):
        """(row tile, column tile) of this program. Jumps to `skip` if there is nothing to do."""
        at_group = a.integer("div.u32", tile, per_group)
        within = a.integer("sub.u32", tile, a.integer("mul.lo.u32", at_group, per_group))
        first = a.integer("mul.lo.u32", at_group, group)
        width = a.integer("min.u32", group, a.integer("sub.u32", pairs, first))
        tile_n = a.integer("div.u32", within, width)
        pair = a.integer("add.u32", first, a.integer("sub.u32", within, a.integer("mul.lo.u32", tile_n, width)))
        epilogue.skip(a, pair, skip)
        return a.integer("mad.lo.u32", pair, hopper.CLUSTER, rank), tile_n

    def next_tile(loop):
        a(f"add.u32 {tile}, {tile}, {clusters}")
        a(f"bra {loop}", a.test("lt.u32", tile, total))

    # ---- The warpgroup that loads, with one thread

    consumers, fetched = a.label("consumers"), a.label("fetched")
    a(f"bra {consumers}", a.test("ne.u32", role, 0))
    a("setmaxnreg.dec.sync.aligned.u32 40")
    a(f"bra {the_end}", a.test("ne.u32", thread, 0))
    a(f"bra {the_end}", done)
    stage, parity = a.integer("mov.u32", 0), a.integer("mov.u32", 1)
    loop = a.label("fetch")
    a.place(loop)
    tile_m, tile_n = locate(fetched)
    row = a.integer("mul.lo.u32", tile_m, TILE_M)
    # Each program fetches half of a tile of w, for both.
    half = a.integer("mul.lo.u32", rank, TILE_N // hopper.CLUSTER)
    w_row = a.integer("mad.lo.u32", tile_n, TILE_N, half)
    half_at = a.integer("mad.lo.u32", half, hopper.ROW_BYTES, x_tile_bytes)
    k = a.integer("mov.u32", 0)
    inner = a.label("fetch_k")
    a.place(inner)
    a.wait(a.integer("mad.lo.u32", stage, 8, empty), parity)
    ready = a.integer("mad.lo.u32", stage, 8, full)
    a.expect(ready, stage_bytes)
    to = a.integer("mad.lo.u32", stage, stage_bytes, stages)
    a.fetch(to, x, ready, k, row)
    a.fetch(a.integer("add.u32", to, half_at), weight, ready, k, w_row, multicast=True)
    a(f"add.u32 {stage}, {stage}, 1")
    wraps = a.test("eq.u32", stage, STAGES)
    a(f"mov.u32 {stage}, 0", wraps)
    a(f"xor.b32 {parity}, {parity}, 1", wraps)
    a(f"add.u32 {k}, {k}, {TILE_K}")
    a(f"bra {inner}", a.test("lt.u32", k, columns))
    a.place(fetched)
    next_tile(loop)
    a(f"bra.uni {the_end}")

    # ---- The two warpgroups that multiply

    a.place(consumers)
    a("setmaxnreg.inc.sync.aligned.u32 232")
    a(f"bra {the_end}", done)
    me = a.integer("sub.u32", role, 1)
    other = a.integer("xor.b32", me, 1)
    first_lane = a.test("eq.u32", lane, 0)
    one_of_two = a.test("lt.u32", lane, hopper.CLUSTER)
    epilogue.begin(a)
    step, turn = a.integer("mov.u32", 0), a.integer("mov.u32", 0)
    # The first of the two does not wait for its first turn.
    my_parity = a.integer("xor.b32", me, 1)
    loop, written, not_mine = a.label("tile"), a.label("written"), a.label("not_mine")
    a.place(loop)
    tile_m, tile_n = locate(written)
    mine = a.test("eq.u32", turn, me)
    a(f"xor.b32 {turn}, {turn}, 1")
    a(f"bra {not_mine}", f"!{mine}")

    # A thread holds parts of four rows.
    tile_row = a.integer("mul.lo.u32", tile_m, TILE_M)
    quad = a.integer("shr.u32", lane, 2)
    first_column = a.integer("mul.lo.u32", tile_n, TILE_N)
    row_of, inside = [], []
    for part in range(4):
        offset = part // 2 * 64 + part % 2 * 8
        row = a.integer("add.u32", tile_row, a.integer("mad.lo.u32", warp, 16, a.integer("add.u32", quad, offset)))
        is_row = a.test("lt.u32", row, rows)
        epilogue.row(a, row, is_row, first_column)
        row_of.append(row)
        inside.append(is_row)

    a.wait(a.integer("mad.lo.u32", me, 8, multiply_turn), my_parity)
    sums_of = [[a.real("mov.f32", "0f00000000") for _ in range(TILE_N // 2)] for _ in range(2)]
    k, loop_k = a.integer("mov.u32", 0), a.label("multiply")
    a.place(loop_k)
    stage = a.integer("and.b32", step, STAGES - 1)
    parity = a.integer("and.b32", a.integer("shr.u32", step, STAGES.bit_length() - 1), 1)
    a.wait(a.integer("mad.lo.u32", stage, 8, full), parity)
    at = a.integer("mad.lo.u32", stage, stage_bytes, stages)
    left, right = a.operand(at), a.operand(a.integer("add.u32", at, x_tile_bytes))
    a("wgmma.fence.sync.aligned")
    for part in range(4):  # 16 columns, 32 bytes
        b_part = a.make("b64", "add.u64", right, 2 * part)
        for half, sums_half in enumerate(sums_of):
            a_part = a.make("b64", "add.u64", left, 2 * part + half * (64 * hopper.ROW_BYTES >> 4))
            a.multiply(sums_half, a_part, b_part)
    a("wgmma.commit_group.sync.aligned")

    # The previous wgmma group is complete: its stage may be refilled.
    a("wgmma.wait_group.sync.aligned 1")
    last = a.integer("and.b32", a.integer("sub.u32", step, 1), STAGES - 1)
    a.arrive_at(lane, a.integer("mad.lo.u32", last, 8, empty), a.test("ne.and.u32", k, 0, one_of_two))
    a(f"add.u32 {step}, {step}, 1")
    a(f"add.u32 {k}, {k}, {TILE_K}")
    a(f"bra {loop_k}", a.test("lt.u32", k, columns))
    a.arrive(a.integer("mad.lo.u32", other, 8, multiply_turn), first_lane)
    a("wgmma.wait_group.sync.aligned 0")
    last = a.integer("and.b32", a.integer("sub.u32", step, 1), STAGES - 1)
    a.arrive_at(lane, a.integer("mad.lo.u32", last, 8, empty), one_of_two)

    def column(i):
        """Of a tile, for number i of a thread."""
        return a.integer("add.u32", lane_column, i // 4 * 8 + i % 2)

    lane_column = a.integer("mul.lo.u32", a.integer("and.b32", lane, 3), 2)
    epilogue.finish(
        a,
        SimpleNamespace(
            sums=sums_of, rows=row_of, inside=inside, row=tile_row, number=tile_n, first_column=first_column, column=column,
            classes_left=a.integer("sub.u32", n, first_column), lane=lane, warp=warp, role=role, first_lane=first_lane, out=out,
            wait=lambda: a.wait(a.integer("mad.lo.u32", me, 8, write_turn), my_parity),
            release=lambda: a.arrive(a.integer("mad.lo.u32", other, 8, write_turn), first_lane),
        ),
    )  # fmt: skip
    a(f"xor.b32 {my_parity}, {my_parity}, 1")
    a(f"bra.uni {written}")
    a.place(not_mine)
    a(f"add.u32 {step}, {step}, {steps}")
    a.place(written)
    next_tile(loop)

    a.place(the_end)
    # Waits for this program's stores, and for the other program, which may still write to this one's shared memory.
    a("cp.async.bulk.wait_group 0")
    a.cluster_sync(converged=False)


def store_tile(a, tile, to, packed_of, TILE_M, TILE_N, PUT_N):
    """Writes a tile of 16-bit numbers through shared memory, which the other warpgroup uses before and after. packed_of(half, i):
    a register with numbers i and i + 1."""
    tile.wait()
    block = PUT_N * 2 * TILE_M
    # Rows of an output block have 64 bytes. Their 16-byte pieces are swizzled, with a new order every second row.
    lane_row = a.integer("mad.lo.u32", tile.warp, 16, a.integer("and.b32", tile.lane, 15))
    piece = a.integer("shr.u32", tile.lane, 4)
    swaps = a.integer("and.b32", a.integer("shr.u32", lane_row, 1), 3)
    row_at = a.integer("mad.lo.u32", lane_row, 2 * PUT_N, tile.out)
    places = []
    for pieces in range(2):
        swapped = a.integer("xor.b32", a.integer("add.u32", piece, 2 * pieces), swaps)
        places.append(a.integer("mad.lo.u32", swapped, 16, row_at))
    for half in range(2):
        for j in range(0, TILE_N // 8, 2):
            packed = [packed_of(half, (j + which // 2) * 4 + which % 2 * 2) for which in range(4)]
            at = f"{places[j // 2 % 2]}+{j * 8 // PUT_N * block + half * 64 * 2 * PUT_N}"
            a(f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [{at}], {{{', '.join(packed)}}}")
    a("fence.proxy.async.shared::cta")
    a.warpgroup_sync(tile.role)
    not_writing = a.label("not_writing")
    a(f"bra {not_writing}", a.test("ne.u32", tile.warp, 0))
    for i in range(TILE_N // PUT_N):
        column = a.integer("add.u32", tile.first_column, i * PUT_N)
        a.put(to, a.integer("add.u32", tile.out, i * block), column, tile.row, tile.first_lane)
    a("cp.async.bulk.commit_group", tile.first_lane)
    a("cp.async.bulk.wait_group.read 0", tile.first_lane)
    a("bar.warp.sync -1")
    a.place(not_writing)
    tile.release()


def over_quad(a, operation, value):
    """Over the four threads that share a row. operation: of two registers, such as add.f32."""
    for distance in (1, 2):
        there = a.integer("shfl.sync.bfly.b32", value, distance, 31, -1)
        a(f"{operation} {value}, {value}, {there}")
