"""Statistics of the logits of a linear head on compute capability 9.0, from the fp32 sums of the GEMM that computes them.

The products x @ weight.T become v = scale * product. For each row and each tile of classes, `linear_statistics` writes what
log_probs.py keeps of a part of a row: the largest v, the sums of powers of two relative to it, and, with EXTRAS, more.
`linear_chosen` computes the v of some classes of each row, and `linear_statistics_combine` puts the tiles together: results, and
statistics for backward, as log_probs.py has them.

With STORES, `linear_statistics` writes v in 16 bits too, relative to the largest of its row and tile. However large v is, that
changes exp(v) by less than 0.08 % of the tile's largest exp(v). `linear_gradients` reads it.

A row's numbers depend on no other row.
"""

import triton
import triton.language as tl

from .. import hopper
from ..table import Config, Kernel
from . import _products
from ._flags import LOWEST, NOWHERE
from .log_probs import (
    AT_A_TIME,
    NO_POWER,
    OPTIONS,
    RESULTS,
    SHARE,
    columns_end,
    differentiate_span,
    finish_row,
    has_ids,
    load_ids,
    power_of,
    store_ignored,
)

PTX_NO_POWER = "0fC47A0000"
assert NO_POWER.value == -1000
TILE_N = _products.TILE["TILE_N"]


class Statistics(_products.Epilogue):
    def __init__(self, logits, shares, rows, tiles, scale, factor, stores, extras):
        self.logits, self.shares, self.rows, self.tiles = logits, shares, rows, tiles
        self.scale, self.factor, self.stores, self.extras = scale, factor, stores, extras

    def begin(self, a):
        self.slope = a.real("mul.f32", self.scale, self.factor)

    def finish(self, a, tile):
        def of_part(part):
            return [i for i in range(len(tile.sums[0])) if i // 2 % 2 == part % 2]

        levels = []
        if self.extras:
            # Products beyond the last class are 0.
            for part in range(4):
                levels.append(a.real("mov.f32", "0f00000000"))
                for i in of_part(part):
                    a(f"add.f32 {levels[-1]}, {levels[-1]}, {tile.sums[part // 2][i]}")
        # Few tiles have columns beyond the last class.
        whole = a.label("whole")
        a(f"bra {whole}", a.test("ge.s32", tile.classes_left, TILE_N))
        for half in range(2):
            for i, number in enumerate(tile.sums[half]):
                a(f"mov.f32 {number}, 0fFF800000", a.test("ge.u32", tile.column(i), tile.classes_left))
        a.place(whole)
        peaks = []
        for part in range(4):
            peak = a.real("mov.f32", "0fFF800000")
            for i in of_part(part):
                a(f"max.f32 {peak}, {peak}, {tile.sums[part // 2][i]}")
            _products.over_quad(a, "max.f32", peak)
            peaks.append(peak)
        if self.stores:
            bottoms = [a.real("neg.f32", a.real("mul.f32", peak, self.scale)) for peak in peaks]

            def relative(half, i):
                bottom = bottoms[2 * half + i // 2 % 2]
                low, high = (a.real("fma.rn.f32", v, self.scale, bottom) for v in tile.sums[half][i : i + 2])
                return a.integer("cvt.rn.bf16x2.f32", high, low)

            sizes = (_products.TILE[name] for name in ("TILE_M", "TILE_N", "PUT_N"))
            _products.store_tile(a, tile, self.logits, relative, *sizes)
        first_of_quad = a.test("eq.u32", a.integer("and.b32", tile.lane, 3), 0)
        for part, peak in enumerate(peaks):
            numbers = [tile.sums[part // 2][i] for i in of_part(part)]
            base = a.real("neg.f32", a.real("mul.f32", peak, self.slope))
            total, spread, squares = (a.real("mov.f32", "0f00000000") for _ in range(3))
            for number in numbers:
                exponent = a.real("fma.rn.f32", number, self.slope, base)
                # The limit avoids 0 * -inf. NaN stays NaN.
                exponent = a.real("max.NaN.f32", exponent, PTX_NO_POWER)
                power = a.real("ex2.approx.ftz.f32", exponent)
                a(f"add.f32 {total}, {total}, {power}")
                a(f"fma.rn.f32 {spread}, {power}, {exponent}, {spread}")
                if self.extras:
                    a(f"fma.rn.f32 {squares}, {power}, {power}, {squares}")
            shares = [a.real("mul.f32", peak, self.scale), total, spread]
            for share in (total, spread):
                _products.over_quad(a, "add.f32", share)
            if self.extras:
                level = a.real("mul.f32", levels[part], self.scale)
                first = a.integer("mov.u32", NOWHERE.value)
                for i, number in reversed(list(zip(of_part(part), numbers))):
                    column = a.integer("add.u32", tile.first_column, tile.column(i))
                    a(f"mov.u32 {first}, {column}", a.test("eq.f32", number, peak))
                for share in (squares, level):
                    _products.over_quad(a, "add.f32", share)
                _products.over_quad(a, "min.s32", first)
                shares += [squares, level, first]
            place = a.integer("mad.lo.u32", tile.rows[part], self.tiles, tile.number)
            to = a.make("b64", "mad.wide.u32", place, 4 * SHARE.value, self.shares)
            is_mine = a.test("lt.and.u32", tile.rows[part], self.rows, first_of_quad)
            for k, share in enumerate(shares):
                a(f"st.global.b32 [{to}+{4 * k}], {share}", is_mine)


def linear_statistics_kernel(
    a, logits, x, weight, shares, rows, n, columns, tiles, group, scale, factor,
    STORES, EXTRAS, TILE_M, TILE_N, TILE_K, PUT_N, STAGES,
):  # fmt: skip
    """logits (rows, n), x, weight: tensor maps. shares: (rows, tiles, SHARE). factor: log2(e) / temperature. scale: positive."""
    epilogue = Statistics(logits, shares, rows, tiles, scale, factor, STORES, EXTRAS)
    _products.tiles_of_products(a, x, weight, rows, n, columns, group, epilogue, TILE_M, TILE_N, TILE_K, PUT_N, STAGES)


@triton.jit
def linear_chosen_kernel(
    given, x, weight, index, n, columns, count, x_row, weight_row, first_class, classes, index_words, ignore_index, scale,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """given (rows, count): scale times the products of a row of x and the rows of weight that its ids name; 0 for others."""
    row = tl.program_id(0) // count
    k = tl.program_id(0) - row * count
    _, column, _, valid, _ = load_ids(index, row, k, count, index_words, ignore_index, first_class, classes, n, 1)
    y = tl.sum(tl.where(valid, column, 0), axis=0).to(tl.int64)
    known = tl.max(valid.to(tl.int32), axis=0) != 0
    total = tl.zeros([BLOCK_N], tl.float32)
    x_at, w_at = x + row.to(tl.int64) * x_row, weight + y * weight_row
    for start in range(0, tl.where(known, columns, 0), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        inside = cols < columns
        left = tl.load(x_at + cols, mask=inside, other=0.0).to(tl.float32)
        total += left * tl.load(w_at + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(given + tl.program_id(0), scale * tl.sum(total))


@triton.jit
def linear_statistics_combine_kernel(
    log_probs, entropy, stats, chosen, mean_logits, log_squares, is_top1, shares, index, given,
    n, tiles, count, first_class, classes, index_words, ignore_index, factor, inverse, softcap, flags,
    EXTRAS: tl.constexpr, IDS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """given: as linear_chosen writes it."""
    row = tl.program_id(0)
    if has_ids(index, row, count, index_words, ignore_index, first_class, classes, n, IDS):
        at = shares + row.to(tl.int64) * tiles * SHARE
        highest = tl.full([BLOCK_T], LOWEST, tl.float32)
        for start in range(0, tiles, BLOCK_T):
            tile = start + tl.arange(0, BLOCK_T)
            there = tl.load(at + tile * SHARE, mask=tile < tiles, other=LOWEST)
            highest = tl.maximum(highest, there)
        peak = tl.max(highest, axis=0)
        totals, spreads = tl.zeros([BLOCK_T], tl.float32), tl.zeros([BLOCK_T], tl.float32)
        squares, levels = tl.zeros([BLOCK_T], tl.float32), tl.zeros([BLOCK_T], tl.float32)
        firsts = tl.full([BLOCK_T], NOWHERE, tl.int32)
        for start in range(0, tiles, BLOCK_T):
            tile = start + tl.arange(0, BLOCK_T)
            inside = tile < tiles
            own = tl.load(at + tile * SHARE, mask=inside, other=LOWEST)
            total = tl.load(at + tile * SHARE + 1, mask=inside, other=0.0)
            shift, scale = power_of(own, peak, factor)
            totals += total * scale
            spreads += (tl.load(at + tile * SHARE + 2, mask=inside, other=0.0) + shift * total) * scale
            if EXTRAS:
                squares += tl.load(at + tile * SHARE + 3, mask=inside, other=0.0) * scale * scale
                levels += tl.load(at + tile * SHARE + 4, mask=inside, other=0.0)
                first = tl.load(at + tile * SHARE + 5, mask=inside, other=0.0).to(tl.int32, bitcast=True)
                firsts = tl.where(inside & (own == peak), tl.minimum(firsts, first), firsts)
        finish_row(
            log_probs, entropy, stats, chosen, mean_logits, log_squares, is_top1, given + row.to(tl.int64) * count, index, row, n,
            count, index_words, ignore_index, first_class, classes, peak, tl.sum(totals, axis=0), tl.sum(spreads, axis=0),
            tl.sum(squares, axis=0), tl.sum(levels, axis=0), tl.min(firsts, axis=0), inverse, softcap, flags,
            False, EXTRAS, IDS, True,
        )  # fmt: skip
    else:
        store_ignored(
            log_probs, entropy, stats, chosen, mean_logits, log_squares, is_top1, row, count, flags, EXTRAS, IDS
        )


@triton.jit
def linear_gradients_kernel(
    dlogits, logits, shares, index, stats, chosen, grad, grad_entropy, grad_log_sum_exp, n, tiles, count, dlogits_row, logits_row,
    first_class, classes, index_words, ignore_index, factor, inverse, softcap, flags,
    BLOCK_N: tl.constexpr, SKEWED: tl.constexpr, IDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """logits, shares: as linear_statistics writes them."""
    spans = tl.cdiv(columns_end(n, SKEWED), BLOCK_N)
    row = tl.program_id(0) // spans
    begin = (tl.program_id(0) - row * spans) * BLOCK_N
    end = tl.minimum(columns_end(n, SKEWED), begin + BLOCK_N)
    row_long = row.to(tl.int64)
    differentiate_span(
        dlogits + row_long * dlogits_row, logits + row_long * logits_row, shares + row_long * tiles * SHARE, row, begin, end,
        index, stats, chosen, grad, grad_entropy, grad_log_sum_exp, n, count, first_class, classes, index_words, ignore_index, factor, inverse,
        softcap, flags, False, BLOCK_N, SKEWED, IDS, TILE,
    )  # fmt: skip


EXTRAS = [{"EXTRAS": 0}, {"EXTRAS": 1}]
BFLOAT = [{"X": "bf16"}]

KERNELS = [
    Kernel(
        function=hopper.Assembly(linear_statistics_kernel),
        args={
            "logits": "map", "x": "map", "weight": "map", "shares": "*fp32", "rows": "i32", "n": "i32", "columns": "i32",
            "tiles": "i32", "group": "i32", "scale": "fp32", "factor": "fp32",
        },
        aligned=[],
        axes={"dtype": BFLOAT, "form": [extras | {"STORES": stores} for stores in (0, 1) for extras in EXTRAS]},
        configs=[Config(None, False, _products.WARPS, constexprs=_products.TILE)],
        archs=[hopper.ARCH],
    ),
    Kernel(
        function=linear_chosen_kernel,
        args={
            "given": "*fp32", "x": "*X", "weight": "*X", "index": "*i32", "n": "i32", "columns": "i32", "count": "i32",
            "x_row": "i64", "weight_row": "i64", "first_class": "i32", "classes": "i32", "index_words": "i32",
            "ignore_index": "i64", "scale": "fp32",
        },
        aligned=["x", "weight", "columns", "x_row", "weight_row"],
        axes={"dtype": BFLOAT},
        configs=[Config(None, aligned, 4, constexprs=dict(BLOCK_N=1024)) for aligned in (True, False)],
        archs=[hopper.ARCH],
    ),
    Kernel(
        function=linear_statistics_combine_kernel,
        args={
            **{name: kind for name, kind in RESULTS.items() if name != "logits"},
            "given": "*fp32", "n": "i32", "tiles": "i32", "count": "i32", **OPTIONS,
        },
        aligned=[],
        axes={"form": EXTRAS},
        configs=[Config(None, False, 4, constexprs=AT_A_TIME | dict(BLOCK_T=256))],
        archs=[hopper.ARCH],
    ),
    Kernel(
        function=linear_gradients_kernel,
        args={
            "dlogits": "*X", "logits": "*X", "shares": "*fp32", "index": "*i32", "stats": "*fp32", "chosen": "*fp32",
            "grad": "*fp32", "grad_entropy": "*fp32", "grad_log_sum_exp": "*fp32", "n": "i32", "tiles": "i32",
            "count": "i32", "dlogits_row": "i64", "logits_row": "i64", **OPTIONS,
        },
        aligned=["dlogits", "logits", "n", "dlogits_row", "logits_row"],
        axes={"dtype": BFLOAT},
        configs=[
            Config(
                None, aligned, 4,
                constexprs=AT_A_TIME | dict(BLOCK_N=4096, SKEWED=int(not aligned), TILE=TILE_N),
            )
            for aligned in (True, False)
        ],
        archs=[hopper.ARCH],
    ),
]  # fmt: skip
