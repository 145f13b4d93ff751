"""Divergence of a teacher's and a student's predictions, in rows of logits x_s and x_t of one chunk of tokens.

    v   = softcap * tanh(scale * (x + bias) / softcap), or scale * (x + bias) without a softcap
    p   = softmax(v / temperature)
    d   = log p_s - log p_t,  m = (1 - beta) p_s + beta p_t

    kind      divergence                                   gradient by v_s / temperature
    FORWARD   KL(p_t || p_s)                               p_s - p_t
    REVERSE   KL(p_s || p_t)                               p_s (d - mean),  mean = sum p_s d
    MIXTURE   beta KL(p_t || m) + (1 - beta) KL(p_s || m)  (1 - beta) p_s (log p_s - log m - mean),
                                                           mean = sum p_s (log p_s - log m)

If the two are close, the terms of a divergence nearly cancel. Three measures keep its digits. d is the difference of two
logits, which is exact for close logits, less one number per row. KL sums p (d - 1 + exp(-d)), which has no negative
terms and does not depend on that number in first order. Exponentials and logarithms of small arguments are series.

Phases of a program: SCANS finds the largest logits and the sums of exponentials, VALUES adds up the divergence, WRITES
stores the gradient, which may overwrite x_s. A row is split among programs, `part` columns each, so that the rows in use
stay in the L2 cache between the phases. With WAITS, the programs of a row wait for each other: the host does not split a
row among more programs than the device has multiprocessors, and programs take up rows in the order in which they start.
arrived: zeros, the number of programs that started, then one counter per row. In a mixture, VALUES overwrites x_t with log m - log p_s for
the gradient (KEEPS).

stats: (5, tokens), for a gradient that is computed later: largest v_s, sum of exponentials relative to it, the same of
the teacher, and the mean.
"""

import triton
import triton.language as tl

from ..elements import DTYPES
from ..functions import expm1_less_x, log1p
from ..rows import LOG2E
from ..table import Config, Kernel
from ._flags import LN2, LOWEST, MOST_PARTS
from ._rows import lane_columns, softcapped, start_order
from .log_probs import power_of, rebased

FORWARD = tl.constexpr(0)
REVERSE = tl.constexpr(1)
MIXTURE = tl.constexpr(2)

SCANS = tl.constexpr(1)
VALUES = tl.constexpr(2)
WRITES = tl.constexpr(4)
WAITS = tl.constexpr(8)
KEEPS = tl.constexpr(16)
KNOWN = tl.constexpr(32)  # the statistics are given
SAVES = tl.constexpr(64)  # the statistics are stored
HAS_MASK = tl.constexpr(128)
HAS_UPSTREAM = tl.constexpr(256)
S_BIAS = tl.constexpr(512)
T_BIAS = tl.constexpr(1024)
S_CAP = tl.constexpr(2048)
T_CAP = tl.constexpr(4096)

SHARES = tl.constexpr(6)  # numbers that a program stores about its part of a row
LEAST_PART = tl.constexpr(4096)  # columns
VEC = tl.constexpr(4)  # fp32 logits per load
NEAR = tl.constexpr(0.5)  # below this, series replace exponentials


@triton.jit
def store_span(row, cols, values, mask, whole):
    """whole: nothing is masked. Such a store can be as wide as its alignment permits."""
    values = values.to(row.dtype.element_ty)
    if whole:
        tl.store(row + cols, values)
    else:
        tl.store(row + cols, values, mask=mask)


@triton.jit
def load_pair(s_row, t_row, cols, mask, whole):
    """x_s and x_t. Both loads start before either is used."""
    if whole:
        x_s = tl.load(s_row + cols)
        x_t = tl.load(t_row + cols)
    else:
        x_s = tl.load(s_row + cols, mask=mask, other=0.0)
        x_t = tl.load(t_row + cols, mask=mask, other=0.0)
    return x_s, x_t


@triton.jit
def logits_of(x, bias, cols, mask, scale, softcap, biased, capped, CAPPED: tl.constexpr):
    """(v, its derivative by scale * (x + bias))"""
    if biased != 0:
        x += tl.load(bias + cols, mask=mask, other=0.0)
    v = x * scale
    slope = tl.full(v.shape, 1.0, tl.float32)
    if CAPPED:
        if capped != 0:
            v, slope = softcapped(v, softcap)
    return v, slope


@triton.jit
def gap_of(v_s, v_t):
    """The difference; 0 for two logits of -inf."""
    return tl.where(v_s == v_t, 0.0, v_s - v_t)


@triton.jit
def series_expm1(x):
    """exp(x) - 1 for |x| < NEAR."""
    return x + expm1_less_x(x)


@triton.jit
def relative_entropy(p, q, x):
    """p x - p + q >= 0, with x = log p - log q."""
    bend = 1 / 120 - x * (1 / 720 - x * (1 / 5040 - x * (1 / 40320)))
    near = p * x * x * (1 / 2 - x * (1 / 6 - x * (1 / 24 - x * bend)))
    return tl.where(tl.abs(x) < NEAR, near, tl.where(p == 0, 0.0, p * (x - 1)) + q)


@triton.jit
def mixture(p_s, p_t, d, beta):
    """(beta p_t (log p_t - log m) + (1 - beta) p_s (log p_s - log m), log m - log p_s)"""
    leads = d >= 0
    size = tl.abs(d)
    share = tl.where(leads, beta, 1 - beta)  # of the smaller probability
    small = series_expm1(-size)
    power = tl.exp2(-size * LOG2E)
    log_m = log1p(share * tl.where(size < NEAR, small, power - 1))  # relative to the larger probability
    low = share * tl.where(size < NEAR, 1 + small, power)
    value = -log_m * (1 - share + low) - tl.where(low == 0, 0.0, low * size)
    return tl.where(leads, p_s, p_t) * value, tl.where(leads, log_m, log_m + size)


@triton.jit
def offset_of(s_peak, s_total, t_peak, t_total, inverse):
    """The difference of the normalisers."""
    return (s_peak - t_peak) + tl.log(tl.div_rn(s_total, t_total)) / inverse


@triton.jit
def gradient_of(p_s, p_t, d, level, mean, beta, KIND: tl.constexpr):
    """level: log m - log p_s"""
    if KIND == FORWARD:
        slope = tl.where(tl.abs(d) < NEAR, p_t * series_expm1(d), p_s - p_t)
    elif KIND == REVERSE:
        slope = tl.where(p_s == 0, 0.0, p_s * (d - mean))
    else:
        slope = tl.where(p_s == 0, 0.0, p_s * ((beta - 1) * (level + mean)))
    return slope


@triton.jit
def moved(pull, total, shift, new_shift):
    """The sum of e * (v_s - v_t - shift) for another shift."""
    return pull + tl.where(total == 0, 0.0, total * (shift - new_shift))


@triton.jit
def joined(s_peak, s_total, s_spread, pull, t_peak, t_total, factor):
    """Sums of lanes or parts, relative to the largest peaks."""
    s_top = tl.max(s_peak, axis=0)
    t_top = tl.max(t_peak, axis=0)
    _, t_scale = power_of(t_peak, t_top, factor)
    pull = moved(pull, s_total, s_peak - t_peak, s_top - t_top)
    s_total, s_spread, s_scale = rebased(s_total, s_spread, s_peak, s_top, factor)
    return (
        s_top, tl.sum(s_total, axis=0), tl.sum(s_spread, axis=0), tl.sum(pull * s_scale, axis=0), t_top,
        tl.sum(t_total * t_scale, axis=0),
    )  # fmt: skip


@triton.jit
def load_tiles(row, start, end, LANES: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr):
    tiles = ()
    for i in tl.static_range(TILES):
        cols = lane_columns(start + i * LANES * VEC, LANES, VEC)
        if WHOLE:
            tiles = tiles + (tl.load(row + cols),)
        else:
            tiles = tiles + (tl.load(row + cols, mask=cols < end, other=0.0),)
    return tiles


@triton.jit
def scan_span(
    s_row, t_row, s_bias, t_bias, begin, end, factor, s_scale, t_scale, s_softcap, t_softcap, flags,
    KIND: tl.constexpr, CAPPED: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """(peak, total, spread, pull, peak of the teacher, total of the teacher). spread: sum of 2 ** exponent * exponent;
    pull: sum of 2 ** exponent * (v_s - v_t), relative to the difference of the peaks, for REVERSE only. Every lane keeps its
    own."""
    s_peak = tl.full([LANES], LOWEST, tl.float32)
    t_peak = tl.full([LANES], LOWEST, tl.float32)
    s_total = tl.zeros([LANES], tl.float32)
    s_spread = tl.zeros([LANES], tl.float32)
    pull = tl.zeros([LANES], tl.float32)
    t_total = tl.zeros([LANES], tl.float32)
    for start in range(begin, end, TILES * LANES * VEC):
        s_tiles = ()
        t_tiles = ()
        new_s = s_peak
        new_t = t_peak
        if start + TILES * LANES * VEC <= end:
            raw_s = load_tiles(s_row, start, end, LANES, TILES, True)
            raw_t = load_tiles(t_row, start, end, LANES, TILES, True)
        else:
            raw_s = load_tiles(s_row, start, end, LANES, TILES, False)
            raw_t = load_tiles(t_row, start, end, LANES, TILES, False)
        for i in tl.static_range(TILES):
            cols = lane_columns(start + i * LANES * VEC, LANES, VEC)
            inside = cols < end
            v_s, _ = logits_of(
                raw_s[i], s_bias, cols, inside, s_scale, s_softcap, flags & S_BIAS, flags & S_CAP, CAPPED
            )
            v_t, _ = logits_of(
                raw_t[i], t_bias, cols, inside, t_scale, t_softcap, flags & T_BIAS, flags & T_CAP, CAPPED
            )
            v_s = tl.where(inside, v_s, float("-inf"))
            v_t = tl.where(inside, v_t, float("-inf"))
            new_s = tl.maximum(new_s, tl.max(v_s, axis=1))
            new_t = tl.maximum(new_t, tl.max(v_t, axis=1))
            s_tiles = s_tiles + (v_s,)
            t_tiles = t_tiles + (v_t,)
        if KIND == REVERSE:
            pull = moved(pull, s_total, s_peak - t_peak, new_s - new_t)
        s_total, s_spread, scale = rebased(s_total, s_spread, s_peak, new_s, factor)
        pull *= scale
        _, scale = power_of(t_peak, new_t, factor)
        t_total *= scale
        for i in tl.static_range(TILES):
            exponent, e = power_of(s_tiles[i], new_s[:, None], factor)
            s_total += tl.sum(e, axis=1)
            s_spread += tl.sum(e * exponent, axis=1)
            if KIND == REVERSE:
                pull += tl.sum(
                    tl.where(e == 0, 0.0, e * (gap_of(s_tiles[i], t_tiles[i]) - (new_s - new_t)[:, None])), axis=1
                )
            _, e = power_of(t_tiles[i], new_t[:, None], factor)
            t_total += tl.sum(e, axis=1)
        s_peak = new_s
        t_peak = new_t
    return joined(s_peak, s_total, s_spread, pull, t_peak, t_total, factor)


@triton.jit
def await_parts(arrived, count):
    tl.atomic_add(arrived, 1, sem="release")
    # atomic_add of 0 is a load with acquire semantics.
    while tl.atomic_add(arrived, 0, sem="acquire") < count:
        pass


@triton.jit
def share_of(shares, first, i, parts):
    """Number i of all parts of a row. Volatile, because other multiprocessors wrote them."""
    each = tl.arange(0, MOST_PARTS)
    return tl.load(
        shares + (first + each) * SHARES + i,
        mask=each < parts,
        other=LOWEST if i == 0 or i == 4 else 0.0,
        volatile=True,
    )


@triton.jit
def fused_linear_divergence_rows_kernel(
    dlogits, s, t, s_bias, t_bias, mask, grad, entropy, stats, values, shares, arrived,
    n, part, s_stride, t_stride, d_stride, stats_stride,
    factor, inverse, beta, s_scale, t_scale, s_softcap, t_softcap, flags,
    KIND: tl.constexpr, CAPPED: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """values: (rows, parts, 2), the sums of a part's divergence and of its share of the mean (MIXTURE). grad: the upstream
    gradient of each row. inverse: 1 / temperature, factor: log2(e) / temperature."""
    BLOCK: tl.constexpr = TILES * LANES * VEC
    parts = tl.cdiv(n, part)
    program = tl.program_id(0)
    if flags & WAITS:
        program = start_order(arrived)
    row = program // parts
    begin = tl.multiple_of((program - row * parts) * part, 8)
    program = program.to(tl.int64)
    end = tl.minimum(n, begin + part)
    leads = begin == 0
    writes = (flags & WRITES) != 0
    row = row.to(tl.int64)
    d_row = dlogits + row * d_stride
    counted = tl.load(mask + row, mask=(flags & HAS_MASK) != 0, other=1) != 0
    if counted:
        s_row = s + row * s_stride
        t_row = t + row * t_stride
        g = tl.load(grad + row, mask=(flags & HAS_UPSTREAM) != 0, other=1.0) * inverse
        first = row * parts
        if flags & SCANS:
            s_peak, s_total, s_spread, pull, t_peak, t_total = scan_span(
                s_row, t_row, s_bias, t_bias, begin, end, factor, s_scale, t_scale, s_softcap, t_softcap, flags,
                KIND, CAPPED, LANES, TILES,
            )  # fmt: skip
            mine = shares + program * SHARES
            tl.store(mine, s_peak)
            tl.store(mine + 1, s_total)
            tl.store(mine + 2, s_spread)
            tl.store(mine + 3, pull)
            tl.store(mine + 4, t_peak)
            tl.store(mine + 5, t_total)
            if flags & WAITS:
                await_parts(arrived + 1 + row, parts)
        if flags & (VALUES | WRITES):
            if flags & KNOWN:
                s_peak = tl.load(stats + row)
                s_total = tl.load(stats + stats_stride + row)
                t_peak = tl.load(stats + stats_stride * 2 + row)
                t_total = tl.load(stats + stats_stride * 3 + row)
                mean = tl.load(stats + stats_stride * 4 + row)
            else:
                # The program's own numbers too are read from memory.
                tl.debug_barrier()
                s_peak, s_total, s_spread, pull, t_peak, t_total = joined(
                    share_of(shares, first, 0, parts), share_of(shares, first, 1, parts),
                    share_of(shares, first, 2, parts), share_of(shares, first, 3, parts),
                    share_of(shares, first, 4, parts), share_of(shares, first, 5, parts), factor,
                )  # fmt: skip
                # Relative to the offset as it was rounded.
                rest = offset_of(s_peak, s_total, t_peak, t_total, inverse) - (s_peak - t_peak)
                mean = (tl.div_rn(pull, s_total) - rest) * inverse
                tl.store(entropy + row, tl.log(s_total) - tl.div_rn(s_spread * LN2, s_total), mask=leads)
                saves = leads & ((flags & SAVES) != 0)
                tl.store(stats + row, s_peak, mask=saves)
                tl.store(stats + stats_stride + row, s_total, mask=saves)
                tl.store(stats + stats_stride * 2 + row, t_peak, mask=saves)
                tl.store(stats + stats_stride * 3 + row, t_total, mask=saves)
                tl.store(stats + stats_stride * 4 + row, mean, mask=saves)
            offset = offset_of(s_peak, s_total, t_peak, t_total, inverse)
            of_s = tl.div_rn(1.0, s_total)
            of_t = tl.div_rn(1.0, t_total)
            if (KIND != MIXTURE) | ((flags & VALUES) != 0):
                # A mixture needs more registers, and writes no 16-bit numbers here.
                STEP: tl.constexpr = BLOCK // 2 if KIND == MIXTURE else BLOCK
                total = tl.zeros([STEP], tl.float32)
                shares_of_mean = tl.zeros([STEP], tl.float32)
                for start in range(begin, end, STEP):
                    cols = start + tl.arange(0, STEP)
                    inside = cols < end
                    whole = start + STEP <= end
                    x_s, x_t = load_pair(s_row, t_row, cols, inside, whole)
                    v_s, slope = logits_of(
                        x_s, s_bias, cols, inside, s_scale, s_softcap, flags & S_BIAS, flags & S_CAP, CAPPED
                    )
                    v_t, _ = logits_of(
                        x_t, t_bias, cols, inside, t_scale, t_softcap, flags & T_BIAS, flags & T_CAP, CAPPED
                    )
                    _, p_s = power_of(v_s, s_peak, factor)
                    _, p_t = power_of(v_t, t_peak, factor)
                    p_s *= of_s
                    p_t *= of_t
                    d = (gap_of(v_s, v_t) - offset) * inverse
                    if KIND == FORWARD:
                        total += tl.where(inside, relative_entropy(p_t, p_s, -d), 0.0)
                    elif KIND == REVERSE:
                        total += tl.where(inside, relative_entropy(p_s, p_t, d), 0.0)
                    else:
                        value, level = mixture(p_s, p_t, d, beta)
                        total += tl.where(inside, value, 0.0)
                        shares_of_mean -= tl.where(inside & (p_s != 0), p_s * level, 0.0)
                        if flags & KEEPS:
                            store_span(t_row, cols, level, inside, whole)
                    if (KIND != MIXTURE) & writes:
                        dx = gradient_of(p_s, p_t, d, 0.0, mean, beta, KIND) * (g * slope)
                        store_span(d_row, cols, dx, inside, whole)
                tl.store(values + program * 2, tl.sum(total, axis=0), mask=(flags & VALUES) != 0)
                tl.store(values + program * 2 + 1, tl.sum(shares_of_mean, axis=0), mask=(flags & VALUES) != 0)
            if KIND == MIXTURE:
                if writes:
                    if flags & VALUES:
                        if flags & WAITS:
                            await_parts(arrived + 1 + row, 2 * parts)
                        tl.debug_barrier()
                    if (flags & KNOWN) == 0:
                        each = tl.arange(0, MOST_PARTS)
                        mean = tl.sum(
                            tl.load(values + (first + each) * 2 + 1, mask=each < parts, other=0.0, volatile=True),
                            axis=0,
                        )
                    for start in range(begin, end, BLOCK):
                        cols = start + tl.arange(0, BLOCK)
                        inside = cols < end
                        whole = start + BLOCK <= end
                        x_s, level = load_pair(s_row, t_row, cols, inside, whole)
                        v_s, slope = logits_of(
                            x_s, s_bias, cols, inside, s_scale, s_softcap, flags & S_BIAS, flags & S_CAP, CAPPED
                        )
                        _, p_s = power_of(v_s, s_peak, factor)
                        p_s *= of_s
                        if (flags & KEEPS) == 0:
                            v_t, _ = logits_of(
                                level, t_bias, cols, inside, t_scale, t_softcap, flags & T_BIAS, flags & T_CAP, CAPPED
                            )
                            _, p_t = power_of(v_t, t_peak, factor)
                            _, level = mixture(p_s, p_t * of_t, (gap_of(v_s, v_t) - offset) * inverse, beta)
                        dx = gradient_of(p_s, 0.0, 0.0, level, mean, beta, KIND) * (g * slope)
                        store_span(d_row, cols, dx, inside, whole)
    else:
        idle = leads & ((flags & KNOWN) == 0)
        tl.store(entropy + row, 0.0, mask=idle)
        for i in tl.static_range(5):
            tl.store(stats + stats_stride * i + row, 0.0, mask=idle & ((flags & SAVES) != 0))
        for i in tl.static_range(2):
            tl.store(values + program * 2 + i, 0.0, mask=(flags & VALUES) != 0)
        if writes:
            for start in range(begin, end, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                store_span(d_row, cols, tl.zeros([BLOCK], tl.float32), cols < end, start + BLOCK <= end)


KERNELS = [
    Kernel(
        function=fused_linear_divergence_rows_kernel,
        args={
            "dlogits": "*X", "s": "*fp32", "t": "*fp32", "s_bias": "*fp32", "t_bias": "*fp32", "mask": "*u8",
            "grad": "*fp32", "entropy": "*fp32", "stats": "*fp32", "values": "*fp32", "shares": "*fp32",
            "arrived": "*i32", "n": "i32", "part": "i32", "s_stride": "i64", "t_stride": "i64",
            "d_stride": "i64", "stats_stride": "i64", "factor": "fp32", "inverse": "fp32", "beta": "fp32",
            "s_scale": "fp32", "t_scale": "fp32", "s_softcap": "fp32", "t_softcap": "fp32", "flags": "i32",
        },
        aligned=["dlogits", "s", "t", "s_bias", "t_bias", "part", "s_stride", "t_stride", "d_stride"],
        axes={
            "dtype": DTYPES,
            "kind": [{"KIND": 0}, {"KIND": 1}, {"KIND": 2}],
            "form": [{"CAPPED": 0}, {"CAPPED": 1}],
        },
        configs=[Config(None, True, 4, programs_per_sm=5, constexprs=dict(LANES=128, TILES=2))],
    )
]  # fmt: skip
