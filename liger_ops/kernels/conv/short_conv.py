"""A depthwise causal convolution over time of a product, and a gate.

    u = r(B * x);  v[t] = r(bias + sum over k < width of weight[width - 1 - k] * u[t - k]);  y = r(C * v)

r() rounds to the dtype of the rows. B, C and x are thirds of the columns of bcx, (B, S, 3 * n), in this order.

As in causal_conv1d, a program walks over STEPS rows of BLOCK_N channels and keeps the last rows in registers, so that it
reads every row once; loads of UNROLL rows are in flight together. In backward it walks WIDTH - 1 rows further, and the
gradients of B and x lag by as many rows. Rows of another sample are skipped.

WIDTH is the width rounded up. MASKED = 0: it is the width, and there are no samples.
"""

import triton
import triton.language as tl

from ..elements import DTYPES, load_parameter
from ..table import HALVES, Config, Kernel
from .causal_conv1d import convolved, from_, sample_at, that_counts

HAS_BIAS = tl.constexpr(2)
HAS_SAMPLES = tl.constexpr(8)
NEEDS_DX = tl.constexpr(16)
NEEDS_DWEIGHT = tl.constexpr(32)
NEEDS_DBIAS = tl.constexpr(64)
# The values of WIDTH; the first is exact.
EXACT_WIDTH = tl.constexpr(3)
NARROW_WIDTH = tl.constexpr(4)
MAX_WIDTH = tl.constexpr(8)


@triton.jit
def place(columns, chunks, BLOCK_N: tl.constexpr, STEPS: tl.constexpr):
    """Of this program: its share of rows, its batch, its first row and its channels (BLOCK_N,)."""
    blocks = tl.cdiv(columns, BLOCK_N)
    share = tl.program_id(0) // blocks
    channels = (tl.program_id(0) - share * blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch = share // chunks
    return share, batch.to(tl.int64), (share - batch * chunks) * STEPS, channels


@triton.jit
def parameters(weight, wide_weight, bias, wide_bias, channels, valid, width, flags, WIDTH: tl.constexpr):
    """The weight of the row k steps ago, k < WIDTH, and the bias."""
    w = ()
    for k in tl.static_range(WIDTH):
        at = channels.to(tl.int64) * width + (width - 1 - k)
        w = w + (load_parameter(weight, wide_weight, at, valid & (k < width)),)
    return w, load_parameter(bias, wide_bias, channels, valid & ((flags & HAS_BIAS) != 0))


@triton.jit
def product(b, x):
    return (b.to(tl.float32) * x.to(tl.float32)).to(b.dtype)


@triton.jit
def rows_before(bcx, sample, first, columns, row, valid, length, flags, WIDTH: tl.constexpr):
    """B, x and their product in the WIDTH - 1 rows before `first`, and the samples of these rows."""
    bs = ()
    xs = ()
    us = ()
    samples = ()
    for i in tl.static_range(WIDTH - 1):
        t = first + (i - (WIDTH - 1))
        at = bcx + t.to(tl.int64) * row
        inside = valid & (t >= 0) & (t < length)
        b = tl.load(at, mask=inside, other=0.0)
        x = tl.load(at + 2 * columns, mask=inside, other=0.0)
        bs = bs + (b,)
        xs = xs + (x,)
        us = us + (product(b, x),)
        samples = samples + (sample_at(sample, t, length, flags),)
    return bs, xs, us, samples


@triton.jit
def short_conv_fwd_kernel(
    y, bcx, weight, wide_weight, bias, wide_bias, sample,
    length, columns, width, chunks, bcx_batch, bcx_row, flags,
    WIDTH: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    share, batch, first, channels = place(columns, chunks, BLOCK_N, STEPS)
    valid = channels < columns
    bcx += batch * bcx_batch + channels
    y += batch * length * columns + channels
    sample += batch * length
    dtype: tl.constexpr = bcx.dtype.element_ty
    w, v0 = parameters(weight, wide_weight, bias, wide_bias, channels, valid, width, flags, WIDTH)
    _, _, us, samples = rows_before(bcx, sample, first, columns, bcx_row, valid, length, flags, WIDTH)
    for start in range(0, STEPS, UNROLL):
        gates = ()
        for i in tl.static_range(UNROLL):
            t = first + start + i
            at = bcx + t.to(tl.int64) * bcx_row
            inside = valid & (t < length)
            b = tl.load(at, mask=inside, other=0.0)
            gates = gates + (tl.load(at + columns, mask=inside, other=0.0),)
            us = us + (product(b, tl.load(at + 2 * columns, mask=inside, other=0.0)),)
            samples = samples + (sample_at(sample, t, length, flags),)
        for i in tl.static_range(UNROLL):
            t = first + start + i
            v = convolved(us, samples, w, v0, width, WIDTH - 1 + i, dtype, WIDTH, MASKED)
            tl.store(y + t.to(tl.int64) * columns, (gates[i].to(tl.float32) * v).to(dtype), mask=valid & (t < length))
        us = from_(us, UNROLL, WIDTH - 1)
        samples = from_(samples, UNROLL, WIDTH - 1)


@triton.jit
def short_conv_bwd_kernel(
    dbcx, dweight, dbias, dy, bcx, weight, wide_weight, bias, wide_bias, sample,
    length, columns, width, chunks, dy_batch, dy_row, bcx_batch, bcx_row, flags,
    WIDTH: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """dbcx: (B, length, 3 * columns). dweight, dbias: fp32, one share per program: (shares, columns, width) and (shares,
    columns)."""
    share, batch, first, channels = place(columns, chunks, BLOCK_N, STEPS)
    valid = channels < columns
    bcx += batch * bcx_batch + channels
    dbcx += batch * length * 3 * columns + channels
    dy += batch * dy_batch + channels
    sample += batch * length
    dtype: tl.constexpr = bcx.dtype.element_ty
    needs_dx = (flags & NEEDS_DX) != 0
    w, v0 = parameters(weight, wide_weight, bias, wide_bias, channels, valid, width, flags, WIDTH)
    bs, xs, us, samples = rows_before(bcx, sample, first, columns, bcx_row, valid, length, flags, WIDTH)
    # Upstream of the convolution. Of rows before the chunk it is not needed, or zero.
    dvs = ()
    dws = ()
    for _ in tl.static_range(WIDTH - 1):
        dvs = dvs + (tl.zeros([BLOCK_N], tl.float32),)
    for _ in tl.static_range(WIDTH):
        dws = dws + (tl.zeros([BLOCK_N], tl.float32),)
    db = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, STEPS + WIDTH - 1, UNROLL):
        gates = ()
        grads = ()
        for i in tl.static_range(UNROLL):
            t = first + start + i
            at = bcx + t.to(tl.int64) * bcx_row
            inside = valid & (t < length)
            b = tl.load(at, mask=inside, other=0.0)
            gates = gates + (tl.load(at + columns, mask=inside, other=0.0),)
            x = tl.load(at + 2 * columns, mask=inside, other=0.0)
            grads = grads + (tl.load(dy + t.to(tl.int64) * dy_row, mask=inside, other=0.0),)
            bs = bs + (b,)
            xs = xs + (x,)
            us = us + (product(b, x),)
            samples = samples + (sample_at(sample, t, length, flags),)
        for i in tl.static_range(UNROLL):
            t = first + start + i
            own = start + i < STEPS
            upstream = grads[i].to(tl.float32)
            v = convolved(us, samples, w, v0, width, WIDTH - 1 + i, dtype, WIDTH, MASKED)
            at = dbcx + t.to(tl.int64) * (3 * columns)
            tl.store(at + columns, (upstream * v).to(dtype), mask=valid & (t < length) & own & needs_dx)
            dv = upstream * gates[i].to(tl.float32)
            dvs = dvs + (dv,)
            counted = tl.where(own, dv, 0.0)
            db += counted
            sums = ()
            for k in tl.static_range(WIDTH):
                before = tl.where(own, us[WIDTH - 1 + i - k].to(tl.float32), 0.0)
                before = that_counts(before, samples, WIDTH - 1 + i, k, width, MASKED)
                sums = sums + (dws[k] + counted * before,)
            dws = sums
            # The row WIDTH - 1 steps ago has now met all rows that read it.
            du = tl.zeros([BLOCK_N], tl.float32)
            for k in tl.static_range(WIDTH):
                du += w[k] * that_counts(dvs[i + k], samples, i + k, k, width, MASKED)
            lag = start + i - (WIDTH - 1)
            t = first + lag
            at = dbcx + t.to(tl.int64) * (3 * columns)
            wanted = valid & (t < length) & (lag >= 0) & (lag < STEPS) & needs_dx
            tl.store(at, (du * xs[i].to(tl.float32)).to(dtype), mask=wanted)
            tl.store(at + 2 * columns, (du * bs[i].to(tl.float32)).to(dtype), mask=wanted)
        bs = from_(bs, UNROLL, WIDTH - 1)
        xs = from_(xs, UNROLL, WIDTH - 1)
        us = from_(us, UNROLL, WIDTH - 1)
        samples = from_(samples, UNROLL, WIDTH - 1)
        dvs = from_(dvs, UNROLL, WIDTH - 1)
    at = share.to(tl.int64) * columns + channels
    for k in tl.static_range(WIDTH):
        wanted = valid & (k < width) & ((flags & NEEDS_DWEIGHT) != 0)
        tl.store(dweight + at * width + (width - 1 - k), dws[k], mask=wanted)
    tl.store(dbias + at, db, mask=valid & ((flags & NEEDS_DBIAS) != 0))


def config(steps, *, unroll, block=128, aligned=False, only=None):
    return Config(None, aligned, 4, constexprs=dict(BLOCK_N=block, STEPS=steps, UNROLL=unroll), only=only or {})


# Elsewhere a thread has one column, so that a variant serves calls of any alignment.
EXACT = {"WIDTH": (EXACT_WIDTH.value,)}
WIDTHS = [{"WIDTH": w.value, "MASKED": int(w is not EXACT_WIDTH)} for w in (EXACT_WIDTH, NARROW_WIDTH, MAX_WIDTH)]
AXES = {"dtype": DTYPES, "width": WIDTHS}
INPUTS = {
    "bcx": "*X", "weight": "*X", "wide_weight": "*fp32", "bias": "*X", "wide_bias": "*fp32", "sample": "*i32",
    **{name: "i32" for name in ("length", "columns", "width", "chunks")},
}  # fmt: skip
STRIDES = {"bcx_batch": "i64", "bcx_row": "i64"}

KERNELS = [
    Kernel(
        function=short_conv_fwd_kernel,
        args={"y": "*X", **INPUTS, **STRIDES, "flags": "i32"},
        aligned=["y", "bcx", "columns", "bcx_batch", "bcx_row"],
        axes=AXES,
        configs=[
            config(32, unroll=4, block=512, aligned=True, only=EXACT | HALVES),
            config(32, unroll=4, only=EXACT),
            config(32, unroll=2),
        ],
    ),
    Kernel(
        function=short_conv_bwd_kernel,
        args={
            "dbcx": "*X", "dweight": "*fp32", "dbias": "*fp32", "dy": "*X", **INPUTS,
            "dy_batch": "i64", "dy_row": "i64", **STRIDES, "flags": "i32",
        },
        aligned=["dbcx", "dy", "bcx", "columns", "dy_batch", "dy_row", "bcx_batch", "bcx_row"],
        axes=AXES,
        configs=[
            config(64, unroll=2, block=512, aligned=True, only=EXACT | HALVES),
            config(64, unroll=4, only=EXACT),
            config(64, unroll=2),
        ],
    ),
]  # fmt: skip
