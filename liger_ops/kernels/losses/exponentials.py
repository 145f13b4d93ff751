"""A chunk of fused_linear_cross_entropy on compute capability 9.0, with a GEMM that outputs exponentials.

For a token with logits x_j and true class y, let E_j = exp(x_j - x_y), and s the sum of E_j over j != y. Then

  loss = log(1 + s), d loss / d x_j = E_j / (1 + s), d loss / d x_y = -s / (1 + s).

So E, up to one factor per row, is all that the three GEMMs of a chunk need, and no separate pass over the logits
remains. The GEMM x @ w.T outputs E in bf16 instead of the logits, each rounded once from fp32. It omits E_y, and writes
sums of E per row and tile. x_y is computed by a separate dot product (`true_logits`). `weigh` then computes the losses
and the factors v = g / (1 + s) of all rows. The gradients are dw = E.T @ (v x) and dx = v (E @ w) (`rescale`).

With upstream gradients a of the loss (including the class weight) and c of its logsumexp (from the z-loss), v becomes
(a + c) / (1 + s), and the true class's term -s becomes (c - a s) / (a + c).

If a token's loss exceeds about 44, E may overflow. A tile with such a row records the row's largest logit (`highest`),
and a second launch computes the tiles of such rows again, with that logit in place of x_y. In `raised`, the first flag
is for all rows, and one flag follows per 256 rows. If the first flag is not set, the second launch returns at once.

If the classes are split over processes, x_y comes from the process that has class y, before the GEMM. Each process adds
up its own sums (`add_sums`), and may have raised its own rows. `weigh` combines the sums of all processes.
"""

import triton
import triton.language as tl

from .. import hopper
from ..rows import LOG2E
from ..table import Config, Kernel
from . import _products
from ._flags import ADD_Z_LOSS, HAS_GRAD, SAVE_Z_LOSS
from ._gradient import upstream_gradients
from ._rows import load_target, load_weight, log1p

# Special values of `highest`, of `classes`, and of `base` for a row without a class. ELSEWHERE: another process's class.
UNKNOWN, BAD_CLASS, NO_CLASS = tl.constexpr(-(1 << 31)), tl.constexpr(-2), tl.constexpr(1e30)
ELSEWHERE = tl.constexpr(-3)
ROWS_TO_A_FLAG = tl.constexpr(_products.PAIR_ROWS)
# In addition to the flags of _flags.py.
TAKES, WEIGHS = tl.constexpr(1 << 16), tl.constexpr(1 << 17)

PTX_LOG2E, PTX_LARGE = "0f3FB8AA3B", "0f5F800000"  # 2^64


class Exponentials(_products.Epilogue):
    def __init__(self, e, sums, base, classes, highest, raised, rows, sums_row, scale, is_again):
        self.e, self.sums, self.base, self.classes, self.highest, self.raised = e, sums, base, classes, highest, raised
        self.rows, self.sums_row, self.scale, self.is_again = rows, sums_row, scale, is_again
        self.exponent, self.true_column = [], []

    def skip(self, a, pair, label):
        """In a second launch, without a raised row."""
        flag = a.make("b64", "mad.wide.u32", pair, 4, self.raised)
        skipped = a.new("b32")
        a(f"mov.u32 {skipped}, 1")
        a(f"ld.global.u32 {skipped}, [{flag}+4]", self.is_again)
        a(f"bra {label}", a.test("eq.u32", skipped, 0))

    def begin(self, a):
        self.factor = a.real("mul.f32", self.scale, PTX_LOG2E)

    def row(self, a, row, inside, first_column):
        at_base, at_class, at_highest = (
            a.make("b64", "mad.wide.u32", row, 4, p) for p in (self.base, self.classes, self.highest)
        )
        lowered, of_class = a.real("mov.f32", "0f00000000"), a.integer("mov.u32", -1)
        a(f"ld.global.f32 {lowered}, [{at_base}]", inside)
        a(f"ld.global.u32 {of_class}, [{at_class}]", inside)
        was_high = a.integer("mov.u32", UNKNOWN.value)
        a(f"ld.global.u32 {was_high}, [{at_highest}]", a.test("lt.and.u32", row, self.rows, self.is_again))
        is_high = a.test("ne.s32", was_high, UNKNOWN.value)
        a(f"mov.b32 {lowered}, {ordered(a, was_high)}", is_high)
        self.exponent.append(a.real("neg.f32", a.real("mul.f32", lowered, PTX_LOG2E)))
        self.true_column.append(a.integer("sub.u32", of_class, first_column))

    def finish(self, a, tile):
        # True classes and columns beyond n get -inf. Few tiles contain any.
        TILE_N = 2 * len(tile.sums[0])
        common = a.label("common")
        special = a.test("lt.u32", tile.classes_left, TILE_N)
        for column in self.true_column:
            special = a.test("lt.or.u32", column, TILE_N, special)
        a(f"bra {common}", f"!{special}")
        for half in range(2):
            for i, sum_here in enumerate(tile.sums[half]):
                column = tile.column(i)
                drop = a.test("eq.u32", column, self.true_column[2 * half + i // 2 % 2])
                a(f"mov.f32 {sum_here}, 0fFF800000", a.test("ge.or.u32", column, tile.classes_left, drop))
        a.place(common)
        totals = [a.real("mov.f32", "0f00000000") for _ in range(4)]

        def powers(half, i):
            part, pair = 2 * half + i // 2 % 2, []
            for sum_here in tile.sums[half][i : i + 2]:
                power = a.real("fma.rn.f32", sum_here, self.factor, self.exponent[part])
                pair.append(a.real("ex2.approx.ftz.f32", power))
                a(f"add.f32 {totals[part]}, {totals[part]}, {pair[-1]}")
            return a.integer("cvt.rn.bf16x2.f32", pair[1], pair[0])

        _products.store_tile(a, tile, self.e, powers, *(_products.TILE[name] for name in ("TILE_M", "TILE_N", "PUT_N")))
        # For a row that may overflow, each thread that found it records its largest logit of this tile.
        for part in range(4):
            fits = a.label("fits")
            a(f"bra {fits}", a.test("leu.f32", totals[part], PTX_LARGE))
            a(f"bra {fits}", f"!{tile.inside[part]}")
            top = a.real("mov.f32", "0fFF800000")
            for i, sum_here in enumerate(tile.sums[part // 2]):
                if i // 2 % 2 == part % 2:
                    a(f"max.f32 {top}, {top}, {sum_here}")
            row = tile.rows[part]
            bits = a.integer("mov.b32", a.real("mul.f32", top, self.scale))
            a(f"red.global.max.s32 [{a.make('b64', 'mad.wide.u32', row, 4, self.highest)}], {ordered(a, bits)}")
            flag = a.integer("shr.u32", row, _products.PAIR_ROWS.bit_length() - 1)
            a(f"st.global.u32 [{a.make('b64', 'mad.wide.u32', flag, 4, self.raised)}+4], 1")
            a(f"st.global.u32 [{self.raised}], 1")
            a.place(fits)
        first_of_quad = a.test("eq.u32", a.integer("and.b32", tile.lane, 3), 0)
        for part in range(4):
            _products.over_quad(a, "add.f32", totals[part])
            to = a.make("b64", "mul.wide.u32", tile.rows[part], self.sums_row)
            to = a.make("b64", "add.u64", to, a.make("b64", "cvt.u64.u32", tile.number))
            to = a.make("b64", "add.u64", self.sums, a.make("b64", "shl.b64", to, 2))
            a(f"st.global.f32 [{to}], {totals[part]}", a.test("lt.and.u32", tile.rows[part], self.rows, first_of_quad))
        self.exponent, self.true_column = [], []


def fused_linear_cross_entropy_exp_logits_kernel(
    a, e, x, weight, sums, base, classes, highest, raised, rows, n, columns, sums_row, group, again, scale,
    TILE_M, TILE_N, TILE_K, PUT_N, STAGES,
):  # fmt: skip
    """e (rows, n) = exp(scale * x @ weight.T - base), and its sums per tile of TILE_N classes (rows, sums_row).

    e, x, weight: tensor maps.
    """
    is_again, nothing_to_do = a.test("ne.u32", again, 0), a.label("nothing_to_do")
    any_raised = a.integer("mov.u32", 1)
    a(f"ld.global.u32 {any_raised}, [{raised}]", is_again)
    a(f"bra {nothing_to_do}", a.test("eq.u32", any_raised, 0))
    epilogue = Exponentials(e, sums, base, classes, highest, raised, rows, sums_row, scale, is_again)
    _products.tiles_of_products(a, x, weight, rows, n, columns, group, epilogue, TILE_M, TILE_N, TILE_K, PUT_N, STAGES)
    a.place(nothing_to_do)


def ordered(a, bits):
    """Maps the bits of a float to an integer with the same order, and back."""
    sign = a.integer("shr.s32", bits, 31)
    return a.integer("xor.b32", bits, a.integer("and.b32", sign, 0x7FFFFFFF))


@triton.jit
def float_of_order(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def fused_linear_cross_entropy_true_logits_kernel(
    base, classes, highest, raised, x, weight, target, n, columns, x_row, weight_row, target_words, ignore_index,
    first_class, all_classes, scale, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """base: the logit of each row's true class, -inf if another process has that class; classes: that class, counted
    from first_class, -1 for a row without one. Also initialises `highest` and `raised`."""
    row = tl.program_id(0)
    y = load_target(target, row, target_words, True)
    counted = y != ignore_index
    is_class = counted & (y >= 0) & (y < all_classes)
    y -= first_class
    known = is_class & (y >= 0) & (y < n)
    total = tl.zeros([BLOCK_N], tl.float32)
    x_at, w_at = x + row * x_row, weight + y * weight_row
    for start in range(0, tl.where(known, columns, 0), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        inside = cols < columns
        left = tl.load(x_at + cols, mask=inside, other=0.0).to(tl.float32)
        total += left * tl.load(w_at + cols, mask=inside, other=0.0).to(tl.float32)
    # For a row without a class, every exponential is 0.
    tl.store(base + row, tl.where(known, scale * tl.sum(total), tl.where(is_class, float("-inf"), NO_CLASS)))
    absent = tl.where(counted, tl.where(is_class, ELSEWHERE, BAD_CLASS), -1)
    tl.store(classes + row, tl.where(known, y, absent).to(tl.int32))
    tl.store(highest + row, UNKNOWN)
    tl.store(raised, 0, mask=row == 0)
    tl.store(raised + 1 + row // ROWS_TO_A_FLAG, 0, mask=row % ROWS_TO_A_FLAG == 0)


@triton.jit
def row_sum(sums, row, tiles, sums_row, BLOCK_T: tl.constexpr):
    partial = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, tiles, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)
        partial += tl.load(sums + row.to(tl.int64) * sums_row + tile, mask=tile < tiles, other=0.0)
    return tl.sum(partial)


@triton.jit
def fused_linear_cross_entropy_add_sums_kernel(
    facts, sums, base, highest, rows, tiles, sums_row, BLOCK_T: tl.constexpr
):
    """facts (2, rows): the logit that a row's exponentials are relative to, and their sum."""
    row = tl.program_id(0)
    order = tl.load(highest + row)
    tl.store(facts + row, tl.where(order != UNKNOWN, float_of_order(order), tl.load(base + row)))
    tl.store(facts + rows + row, row_sum(sums, row, tiles, sums_row, BLOCK_T))


@triton.jit
def fused_linear_cross_entropy_weigh_kernel(
    loss, z_loss, factor, taken, weighed, e, x, sums, gathered, base, classes, highest, target, class_weight, grad, totals,
    rows, columns, tiles, sums_row, ranks, e_row, x_row, target_words, grad_stride, lse_square_scale, flags,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes the losses, factor (v) and weighed (v x) of every row, and the gradient of its true logit: into e
    without the factor, or, with the flag TAKES, into `taken` including it. A row's weighed x may overwrite its sums. class_weight, target: of all classes. gathered: the facts of
    all `ranks` processes (ranks, 2, rows); without processes `ranks` is 0, and the row's own sums are read."""
    row = tl.program_id(0)
    at_row = row.to(tl.int64)
    y = tl.load(classes + row)
    x_y = tl.load(base + row)
    order = tl.load(highest + row)
    rescued = order != UNKNOWN
    # What this process's exponentials are relative to.
    here = tl.where(rescued, float_of_order(order), x_y)
    top = here
    others = 0.0
    if ranks == 0:
        others = row_sum(sums, row, tiles, sums_row, BLOCK_T)
    else:
        for rank in range(ranks):
            top = tl.maximum(top, tl.load(gathered + rank * 2 * rows + row))
        for rank in range(ranks):
            at = gathered + rank * 2 * rows + row
            others += tl.load(at + rows) * tl.exp2((tl.load(at) - top) * LOG2E)
        rescued = top != x_y
    true = tl.where(rescued, tl.exp2((x_y - top) * LOG2E), 1.0)
    total = others + true
    known = (y >= 0) | (y == ELSEWHERE)
    w_y = load_weight(class_weight, load_target(target, row, target_words, True), known, flags)
    nll = tl.where(rescued, top - x_y + tl.log(total), log1p(others))
    lse = x_y + nll
    row_z_loss = lse_square_scale * lse * lse
    row_loss = w_y * nll + tl.where((flags & ADD_Z_LOSS) != 0, row_z_loss, 0.0)
    absent = tl.where(y == BAD_CLASS, float("nan"), 0.0)
    tl.store(loss + row, tl.where(known, row_loss, absent))
    tl.store(z_loss + row, tl.where(known, row_z_loss, absent), mask=(flags & SAVE_Z_LOSS) != 0)

    by_weight, by_count = upstream_gradients(grad, totals, row, grad_stride, flags, (flags & HAS_GRAD) != 0)
    pull = by_weight * w_y
    spill = by_count * 2 * lse_square_scale * lse
    slope = pull + spill
    f = tl.where(known, slope / total * tl.exp2((here - top) * LOG2E), 0.0)
    own = spill * true - pull * others
    tl.store(factor + row, f)
    if flags & TAKES:
        tl.store(taken + row, tl.where(y >= 0, own / total, 0.0))
    else:
        tl.store(e + at_row * e_row + y, tl.where(slope == 0, 0.0, own / slope).to(e.dtype.element_ty), mask=y >= 0)
    if flags & WEIGHS:
        for start in range(0, columns, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            inside = cols < columns
            part = tl.load(x + at_row * x_row + cols, mask=inside & known, other=0.0).to(tl.float32)
            tl.store(weighed + at_row * columns + cols, (part * f).to(weighed.dtype.element_ty), mask=inside)


@triton.jit
def fused_linear_cross_entropy_rescale_kernel(
    dx, factor, taken, classes, weight, columns, weight_row, scale, flags, BLOCK_N: tl.constexpr
):
    """dx *= factor, plus the part of the true class if it was taken."""
    row = tl.program_id(0)
    y = tl.load(classes + row)
    f = tl.load(factor + row)
    back = 0.0
    if flags & TAKES:
        back = tl.load(taken + row) * scale
    known = (y >= 0) | (y == ELSEWHERE)
    for start in range(0, columns, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        inside = cols < columns
        at = dx + row.to(tl.int64) * columns + cols
        part = tl.load(at, mask=inside & known, other=0.0).to(tl.float32) * f
        if flags & TAKES:
            w = tl.load(weight + y.to(tl.int64) * weight_row + cols, mask=inside & (y >= 0), other=0.0)
            part += back * w.to(tl.float32)
        tl.store(at, part.to(dx.dtype.element_ty), mask=inside)


BFLOAT = {"dtype": [{"X": "bf16"}]}


def row_configs(**constexprs):
    # Tensor maps need the same alignment as an aligned config; every table ends with a config for any alignment.
    return [Config(None, aligned, 4, constexprs=constexprs | dict(BLOCK_N=1024)) for aligned in (True, False)]


KERNELS = [
    Kernel(
        function=hopper.Assembly(fused_linear_cross_entropy_exp_logits_kernel),
        args={
            "e": "map", "x": "map", "weight": "map", "sums": "*fp32", "base": "*fp32", "classes": "*i32",
            "highest": "*i32", "raised": "*i32", "rows": "i32", "n": "i32", "columns": "i32", "sums_row": "i32",
            "group": "i32", "again": "i32", "scale": "fp32",
        },
        aligned=[],
        axes=BFLOAT,
        configs=[Config(None, False, _products.WARPS, constexprs=_products.TILE)],
        archs=[hopper.ARCH],
    ),
    Kernel(
        function=fused_linear_cross_entropy_true_logits_kernel,
        args={
            "base": "*fp32", "classes": "*i32", "highest": "*i32", "raised": "*i32", "x": "*X", "weight": "*X",
            "target": "*i32", "n": "i32", "columns": "i32", "x_row": "i64", "weight_row": "i64", "target_words": "i32",
            "ignore_index": "i64", "first_class": "i32", "all_classes": "i32", "scale": "fp32",
        },
        aligned=["x", "weight", "columns", "x_row", "weight_row"],
        axes=BFLOAT,
        configs=row_configs(),
    ),
    Kernel(
        function=fused_linear_cross_entropy_add_sums_kernel,
        args={
            "facts": "*fp32", "sums": "*fp32", "base": "*fp32", "highest": "*i32", "rows": "i32", "tiles": "i32",
            "sums_row": "i32",
        },
        aligned=[],
        axes={"kind": [{"BLOCK_T": 1024}]},
        configs=[Config(None, False, 4)],
    ),
    Kernel(
        function=fused_linear_cross_entropy_weigh_kernel,
        args={
            "loss": "*fp32", "z_loss": "*fp32", "factor": "*fp32", "taken": "*fp32", "weighed": "*X", "e": "*bf16", "x": "*X",
            "sums": "*fp32", "gathered": "*fp32", "base": "*fp32", "classes": "*i32", "highest": "*i32",
            "target": "*i32", "class_weight": "*fp32", "grad": "*fp32", "totals": "*fp32", "rows": "i32",
            "columns": "i32", "tiles": "i32", "sums_row": "i32", "ranks": "i32", "e_row": "i64", "x_row": "i64",
            "target_words": "i32", "grad_stride": "i64", "lse_square_scale": "fp32", "flags": "i32",
        },
        aligned=["weighed", "x", "columns", "x_row"],
        axes=BFLOAT,
        configs=row_configs(BLOCK_T=1024),
    ),
    Kernel(
        function=fused_linear_cross_entropy_rescale_kernel,
        args={
            "dx": "*X", "factor": "*fp32", "taken": "*fp32", "classes": "*i32", "weight": "*X",
            "columns": "i32", "weight_row": "i64", "scale": "fp32", "flags": "i32",
        },
        aligned=["dx", "weight", "columns", "weight_row"],
        axes=BFLOAT,
        configs=row_configs(),
    ),
]  # fmt: skip
