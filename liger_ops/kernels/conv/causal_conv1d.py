"""Depthwise causal convolution over time of channel-last rows, and silu.

    v[t] = bias + sum over k < width of weight[width - 1 - k] * x[t - k * dilation];  y = silu(v) or v

A program walks over STEPS rows of BLOCK_N columns, in each of BLOCK_M chunks of time. It keeps the last rows in registers,
so that it reads every row once; loads of UNROLL rows are in flight together. Rows that are `dilation` apart form a
sequence of their own (`phase` is its first row) that is convolved without gaps. WIDTH is the width rounded up: taps beyond
`width` are skipped.

In backward, dx[t] needs dv of the next rows: a program walks WIDTH - 1 rows further than its chunk, and what it has of dx
lags by as many rows. Rows before the first are those of the initial state.

Rows of another sample are skipped: `sample` holds a number for every row. Without samples and with every tap in use,
nothing is selected (MASKED = 0).

The channels form up to three parts, each a tensor of its own in y. Part i has `groups` times `size<i>` channels. In x, the
columns of the parts alternate group by group, `pitch` columns apart: [part 0, part 1, part 2, columns of no part]. A block
of columns lies in one part.
"""

import triton
import triton.language as tl

from ..functions import sigmoid, sigmoid_and_slope
from ..table import ACTIVATION_WEIGHT_DTYPES, HALVES, Config, Kernel

SILU = tl.constexpr(1)
HAS_BIAS = tl.constexpr(2)
HAS_STATE = tl.constexpr(4)
HAS_SAMPLES = tl.constexpr(8)
NEEDS_DX = tl.constexpr(16)
NEEDS_DWEIGHT = tl.constexpr(32)
NEEDS_DBIAS = tl.constexpr(64)
NEEDS_DSTATE = tl.constexpr(128)
# The values of WIDTH.
NARROW_WIDTH = tl.constexpr(4)
MAX_WIDTH = tl.constexpr(8)


@triton.jit
def select(part, a, b, c):
    return tl.where(part == 0, a, tl.where(part == 1, b, c))


@triton.jit
def columns_of(groups, size0, size1, size2, pitch, BLOCK_N: tl.constexpr):
    """Of this program: its share of rows, its part, that part's columns in all, and of its own columns (1, BLOCK_N): the
    numbers in the part, among all channels, and in x."""
    blocks0, blocks1 = tl.cdiv(groups * size0, BLOCK_N), tl.cdiv(groups * size1, BLOCK_N)
    blocks = blocks0 + blocks1 + tl.cdiv(groups * size2, BLOCK_N)
    share = tl.program_id(0) // blocks
    block = tl.program_id(0) - share * blocks
    part = (block >= blocks0).to(tl.int32) + (block >= blocks0 + blocks1).to(tl.int32)
    size, before = select(part, size0, size1, size2), select(part, 0, size0, size0 + size1)
    cols = (block - select(part, 0, blocks0, blocks0 + blocks1)) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    x_cols = cols + (cols // size) * (pitch - size) + before
    return share, part, groups * size, cols, groups * before + cols, x_cols


@triton.jit
def place(share, length, dilation, chunks, BLOCK_M: tl.constexpr, STEPS: tl.constexpr):
    """Of a share of rows: batch, phase, first steps (BLOCK_M, 1)."""
    sequence = share // chunks
    chunk = share - sequence * chunks
    batch = sequence // dilation
    phase = sequence - batch * dilation
    first = (chunk * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]) * STEPS
    return batch.to(tl.int64), phase, first


@triton.jit
def row_at(x, state, t, x_row, past, n, mask, flags):
    """Row t of x, or of the state if t is negative. x and state point to columns of the batch's first row."""
    value = tl.load(x + t.to(tl.int64) * x_row, mask=mask & (t >= 0), other=0.0)
    if flags & HAS_STATE:
        earlier = mask & (t < 0) & (t + past >= 0)
        value = tl.where(t < 0, tl.load(state + (t + past).to(tl.int64) * n, mask=earlier, other=0.0), value)
    return value


@triton.jit
def sample_at(sample, t, length, flags):
    inside = tl.minimum(tl.maximum(t, 0), length - 1)
    return tl.load(sample + inside, mask=(inside >= 0) & ((flags & HAS_SAMPLES) != 0), other=0)


@triton.jit
def taps(weight, channels, valid, width, WIDTH: tl.constexpr):
    """The weight of the row k steps ago, k < WIDTH."""
    found = ()
    for k in tl.static_range(WIDTH):
        at = weight + channels.to(tl.int64) * width + (width - 1 - k)
        found = found + (tl.load(at, mask=valid & (k < width), other=0.0).to(tl.float32),)
    return found


@triton.jit
def rows_before(x, state, sample, phase, first, dilation, x_row, past, n, valid, length, flags, WIDTH: tl.constexpr):
    """The WIDTH - 1 rows before step `first`, and their samples."""
    rows = ()
    samples = ()
    for i in tl.static_range(WIDTH - 1):
        t = phase + (first + (i - (WIDTH - 1))) * dilation
        rows = rows + (row_at(x, state, t, x_row, past, n, valid & (t < length), flags),)
        samples = samples + (sample_at(sample, t, length, flags),)
    return rows, samples


@triton.jit
def that_counts(value, samples, at: tl.constexpr, k: tl.constexpr, width, MASKED: tl.constexpr):
    """The value that meets tap k at samples[at], or 0. Not a product with zero: rows of another sample may be infinite."""
    if MASKED:
        value = tl.where((samples[at - k] == samples[at]) & (k < width), value, 0.0)
    return value


@triton.jit
def convolved(
    rows, samples, w, bias, width, at: tl.constexpr, dtype: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):
    """v at rows[at]; rounded if the weight has x's dtype."""
    v = bias
    for k in tl.static_range(WIDTH):
        v += w[k] * that_counts(rows[at - k].to(tl.float32), samples, at, k, width, MASKED)
    return v.to(dtype).to(tl.float32)


@triton.jit
def from_(values, start: tl.constexpr, count: tl.constexpr):
    kept = ()
    for i in tl.static_range(count):
        kept = kept + (values[start + i],)
    return kept


@triton.jit
def causal_conv1d_fwd_kernel(
    y0, y1, y2, x, weight, bias, sample, state,
    length, groups, size0, size1, size2, pitch, width, dilation, chunks, x_batch, x_row, flags,
    WIDTH: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    share, part, n, cols, channels, x_cols = columns_of(groups, size0, size1, size2, pitch, BLOCK_N)
    batch, phase, first = place(share, length, dilation, chunks, BLOCK_M, STEPS)
    valid = cols < n
    past = (width - 1) * dilation
    all_channels = groups * (size0 + size1 + size2)
    x += batch * x_batch + x_cols
    y = select(part, y0, y1, y2) + batch * length * n + cols
    sample += batch * length
    state += batch * past * all_channels + channels
    dtype: tl.constexpr = x.dtype.element_ty
    rounded: tl.constexpr = dtype if weight.dtype.element_ty == dtype else tl.float32
    w = taps(weight, channels, valid, width, WIDTH)
    b = tl.load(bias + channels, mask=valid & ((flags & HAS_BIAS) != 0), other=0.0).to(tl.float32)
    rows, samples = rows_before(
        x, state, sample, phase, first, dilation, x_row, past, all_channels, valid, length, flags, WIDTH
    )
    for start in range(0, STEPS, UNROLL):
        for i in tl.static_range(UNROLL):
            t = phase + (first + start + i) * dilation
            rows = rows + (tl.load(x + t.to(tl.int64) * x_row, mask=valid & (t < length), other=0.0),)
            samples = samples + (sample_at(sample, t, length, flags),)
        for i in tl.static_range(UNROLL):
            t = phase + (first + start + i) * dilation
            v = convolved(rows, samples, w, b, width, WIDTH - 1 + i, rounded, WIDTH, MASKED)
            v = tl.where((flags & SILU) != 0, v * sigmoid(v), v)
            tl.store(y + t.to(tl.int64) * n, v.to(dtype), mask=valid & (t < length))
        rows = from_(rows, UNROLL, WIDTH - 1)
        samples = from_(samples, UNROLL, WIDTH - 1)


@triton.jit
def slope(v, flags):
    s, ds = sigmoid_and_slope(v)
    return tl.where((flags & SILU) != 0, s + v * ds, 1.0)


@triton.jit
def next_rows(
    rows, samples, x, dy, sample, phase, first, dilation, x_row, dy_row, valid, length, flags, COUNT: tl.constexpr
):
    """rows and samples, and COUNT more from step `first` on, with their dy."""
    grads = ()
    for i in tl.static_range(COUNT):
        t = phase + (first + i) * dilation
        rows = rows + (tl.load(x + t.to(tl.int64) * x_row, mask=valid & (t < length), other=0.0),)
        grads = grads + (tl.load(dy + t.to(tl.int64) * dy_row, mask=valid & (t < length), other=0.0),)
        samples = samples + (sample_at(sample, t, length, flags),)
    return rows, samples, grads


@triton.jit
def upstream(
    rows, samples, w, b, grad, phase, step, dilation, valid, length, width, flags,
    at: tl.constexpr, rounded: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The gradient of v at rows[at], which is row `step` of the sequence."""
    v = convolved(rows, samples, w, b, width, at, rounded, WIDTH, MASKED)
    return tl.where(valid & (phase + step * dilation < length), grad.to(tl.float32) * slope(v, flags), 0.0)


@triton.jit
def store_dx(
    dx, dstate, dvs, samples, w, phase, first, lag, dilation, dx_row, past, all_channels, valid, length, width, flags,
    i: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The row of step first + lag, which has met all rows that read it: dvs[i:][:WIDTH]."""
    out = tl.zeros(dvs[i].shape, tl.float32)
    for k in tl.static_range(WIDTH):
        out += w[k] * that_counts(dvs[i + k], samples, i + k, k, width, MASKED)
    t = phase + (first + lag) * dilation
    dtype: tl.constexpr = dx.dtype.element_ty
    wanted = valid & (t < length) & (lag >= 0) & ((flags & NEEDS_DX) != 0)
    tl.store(dx + t.to(tl.int64) * dx_row, out.to(dtype), mask=wanted)
    if flags & NEEDS_DSTATE:
        earlier = valid & (first + lag < 0) & (t + past >= 0)
        tl.store(dstate + (t + past).to(tl.int64) * all_channels, out.to(dtype), mask=earlier)


@triton.jit
def causal_conv1d_bwd_kernel(
    dx, dstate, dweight, dbias, dy0, dy1, dy2, x, weight, bias, sample, state,
    length, groups, size0, size1, size2, pitch, width, dilation, chunks,
    dy_batch0, dy_batch1, dy_batch2, dy_row0, dy_row1, dy_row2, x_batch, x_row, flags,
    WIDTH: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """dx: (B, length, groups * pitch). dweight, dbias: fp32, one share per program over all channels: (shares, channels,
    width) and (shares, channels)."""
    share, part, n, cols, channels, x_cols = columns_of(groups, size0, size1, size2, pitch, BLOCK_N)
    batch, phase, first = place(share, length, dilation, chunks, BLOCK_M, STEPS)
    valid = cols < n
    past = (width - 1) * dilation
    all_channels = groups * (size0 + size1 + size2)
    dx_row = groups * pitch
    dy_row = select(part, dy_row0, dy_row1, dy_row2)
    x += batch * x_batch + x_cols
    dy = select(part, dy0, dy1, dy2) + batch * select(part, dy_batch0, dy_batch1, dy_batch2) + cols
    dx += batch * length * dx_row + x_cols
    sample += batch * length
    state += batch * past * all_channels + channels
    dstate += batch * past * all_channels + channels
    dtype: tl.constexpr = x.dtype.element_ty
    rounded: tl.constexpr = dtype if weight.dtype.element_ty == dtype else tl.float32
    w = taps(weight, channels, valid, width, WIDTH)
    b = tl.load(bias + channels, mask=valid & ((flags & HAS_BIAS) != 0), other=0.0).to(tl.float32)
    rows, samples = rows_before(
        x, state, sample, phase, first, dilation, x_row, past, all_channels, valid, length, flags, WIDTH
    )
    # Upstream of the convolution. Of rows before the chunk it is not needed, or zero.
    dvs = ()
    dws = ()
    for _ in tl.static_range(WIDTH - 1):
        dvs = dvs + (tl.zeros([BLOCK_M, BLOCK_N], tl.float32),)
    for _ in tl.static_range(WIDTH):
        dws = dws + (tl.zeros([BLOCK_M, BLOCK_N], tl.float32),)
    db = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, STEPS, UNROLL):
        rows, samples, grads = next_rows(
            rows, samples, x, dy, sample, phase, first + start, dilation, x_row, dy_row, valid, length, flags, UNROLL
        )
        for i in tl.static_range(UNROLL):
            dv = upstream(
                rows, samples, w, b, grads[i], phase, first + start + i, dilation, valid, length, width, flags,
                WIDTH - 1 + i, rounded, WIDTH, MASKED,
            )  # fmt: skip
            dvs = dvs + (dv,)
            db += dv
            sums = ()
            for k in tl.static_range(WIDTH):
                before = that_counts(rows[WIDTH - 1 + i - k].to(tl.float32), samples, WIDTH - 1 + i, k, width, MASKED)
                sums = sums + (dws[k] + dv * before,)
            dws = sums
            store_dx(
                dx, dstate, dvs, samples, w, phase, first, start + i - (WIDTH - 1), dilation, dx_row, past, all_channels,
                valid, length, width, flags, i, WIDTH, MASKED,
            )  # fmt: skip
        rows = from_(rows, UNROLL, WIDTH - 1)
        samples = from_(samples, UNROLL, WIDTH - 1)
        dvs = from_(dvs, UNROLL, WIDTH - 1)
    # Rows of the next chunk, of which only dx of the last rows is still missing something.
    rows, samples, grads = next_rows(
        rows, samples, x, dy, sample, phase, first + STEPS, dilation, x_row, dy_row, valid, length, flags, WIDTH - 1
    )
    for i in tl.static_range(WIDTH - 1):
        dv = upstream(
            rows, samples, w, b, grads[i], phase, first + STEPS + i, dilation, valid, length, width, flags,
            WIDTH - 1 + i, rounded, WIDTH, MASKED,
        )  # fmt: skip
        dvs = dvs + (dv,)
        store_dx(
            dx, dstate, dvs, samples, w, phase, first, STEPS + i - (WIDTH - 1), dilation, dx_row, past, all_channels,
            valid, length, width, flags, i, WIDTH, MASKED,
        )  # fmt: skip
    inside = tl.reshape(valid, [BLOCK_N])
    share_at = share.to(tl.int64) * all_channels + tl.reshape(channels, [BLOCK_N])
    for k in tl.static_range(WIDTH):
        wanted = inside & (k < width) & ((flags & NEEDS_DWEIGHT) != 0)
        tl.store(dweight + share_at * width + (width - 1 - k), tl.sum(dws[k], axis=0), mask=wanted)
    tl.store(dbias + share_at, tl.sum(db, axis=0), mask=inside & ((flags & NEEDS_DBIAS) != 0))


def config(max_n, block_m, block_n, steps, *, unroll=4, warps=4, aligned=True, only=None):
    constexprs = dict(BLOCK_M=block_m, BLOCK_N=block_n, STEPS=steps, UNROLL=unroll)
    return Config(max_n, aligned, warps, constexprs=constexprs, only=only or {})


NARROW, WIDE = ({"WIDTH": (w.value,)} for w in (NARROW_WIDTH, MAX_WIDTH))
WIDTHS = [{"WIDTH": width.value, "MASKED": m} for width, m in ((NARROW_WIDTH, 0), (NARROW_WIDTH, 1), (MAX_WIDTH, 1))]
AXES = {"dtype": ACTIVATION_WEIGHT_DTYPES, "width": WIDTHS}
COLUMNS = ["size0", "size1", "size2", "pitch"]
SIZES = {name: "i32" for name in ("length", "groups", *COLUMNS, "width", "dilation", "chunks")}
UPSTREAM = {f"dy_{stride}{part}": "i64" for stride in ("batch", "row") for part in range(3)}

KERNELS = [
    Kernel(
        function=causal_conv1d_fwd_kernel,
        args={
            "y0": "*X", "y1": "*X", "y2": "*X", "x": "*X", "weight": "*W", "bias": "*W", "sample": "*i32", "state": "*X",
            **SIZES, "x_batch": "i64", "x_row": "i64", "flags": "i32",
        },
        aligned=["y0", "y1", "y2", "x", "state", *COLUMNS, "x_batch", "x_row"],
        axes=AXES,
        configs=[
            config(None, 2, 256, 32, only=NARROW),
            config(None, 1, 512, 32, only=WIDE),
            config(None, 1, 256, 32, aligned=False),
        ],
    ),
    Kernel(
        function=causal_conv1d_bwd_kernel,
        args={
            "dx": "*X", "dstate": "*X", "dweight": "*fp32", "dbias": "*fp32", "dy0": "*X", "dy1": "*X", "dy2": "*X",
            "x": "*X", "weight": "*W", "bias": "*W", "sample": "*i32", "state": "*X",
            **SIZES, **UPSTREAM, "x_batch": "i64", "x_row": "i64", "flags": "i32",
        },
        aligned=["dx", "dstate", "dy0", "dy1", "dy2", "x", "state", *COLUMNS, *UPSTREAM, "x_batch", "x_row"],
        axes=AXES,
        # Sums and rows of backward take registers: a thread has 2 columns, or 4. A warp has a chunk of its own.
        configs=[
            config(None, 4, 64, 256, unroll=8, only=NARROW | {"MASKED": (0,)} | HALVES),
            config(None, 4, 128, 128, only=NARROW),
            config(None, 1, 256, 128, only=WIDE),
            config(None, 1, 128, 128, aligned=False),
        ],
    ),
]  # fmt: skip
