"""Shared code of the loss kernels that write the gradient of a row's logits."""

import triton
import triton.language as tl

from ..kept import lane_words, read_kept, write_lanes, write_some_lanes
from ._flags import HAS_SMOOTHING, HAS_SOFTCAP, HAS_WEIGHT, MEAN, MOST_SKEW
from ._rows import exp, exp_over, load_weight, same_alignment, skew_of, softcapped


@triton.jit
def write_gradient(
    out, x_row, cols, mask, skew, y, top, slope, slope_y, drop_y, tilt, weight, softcap, flags,
    EXTRAS: tl.constexpr, WHOLE: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    if WHOLE:
        x = tl.load(x_row + cols, eviction_policy=POLICY).to(tl.float32)
    else:
        x = tl.load(x_row + cols, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if EXTRAS:
        chain = tl.full(x.shape, 1.0, tl.float32)
        if flags & HAS_SOFTCAP:
            x, chain = softcapped(x, softcap)
        e = exp(x - top, out.dtype.element_ty)
        drop = tl.where(cols == y, drop_y, 0.0) + tilt * load_weight(weight, cols - skew, mask, flags)
        dx = (e * tl.where(cols == y, slope_y, slope) - drop) * chain
    else:
        dx = exp_over(x, top, out.dtype.element_ty) * slope
    dx = dx.to(out.dtype.element_ty)
    if WHOLE:
        tl.store(out + cols, dx, eviction_policy=POLICY)
    else:
        tl.store(out + cols, dx, mask=mask, eviction_policy=POLICY)


@triton.jit
def upstream_gradients(grad, totals, row, stride, flags, known):
    """Upstream gradients of a row's loss and of its z-loss. In a mean, the two have different divisors."""
    grad = tl.load(grad + row.to(tl.int64) * stride, mask=known, other=1.0)
    mean = (flags & MEAN) != 0
    by_weight = tl.load(totals, mask=mean, other=1.0)
    by_count = tl.load(totals + 1, mask=mean, other=1.0)
    # Rounded correctly, because it multiplies a whole row. A fast division is off by up to 2 ulp.
    return tl.where(mean, tl.div_rn(grad, by_weight), grad), tl.where(mean, tl.div_rn(grad, by_count), grad)


@triton.jit
def gradient_terms(
    classes, y, is_class, top, total, miss, grad, grad_z, weight, weight_sum, label_smoothing, lse_square_scale, flags,
    EXTRAS: tl.constexpr,
):  # fmt: skip
    """(slope, slope_y, drop_y, tilt): d loss / d x_k = exp(x_k - top) * slope - tilt * w_k. For the true class, slope_y
    replaces slope, and drop_y is subtracted. y: index of the true class's weight, valid if is_class."""
    # With p = exp(x - top) / total:
    # d loss / d x_k = p_k * (pull + spill) - tilt * w_k, and for the true class
    #                  p_y * spill - (1 - p_y) * pull - tilt * w_y
    pull = grad
    spill = grad_z * 2 * lse_square_scale * (top + tl.log(total))
    tilt = 0.0
    if EXTRAS:
        w_y = load_weight(weight, y, is_class, flags)
        pull = grad * w_y
        if flags & HAS_SMOOTHING:
            pull *= 1 - label_smoothing
            tilt = grad * label_smoothing / classes
            sum_w = tl.load(weight_sum, mask=(flags & HAS_WEIGHT) != 0, other=classes.to(tl.float32))
            spill += grad * label_smoothing * (sum_w / classes)
    return tl.div_rn(pull + spill, total), tl.div_rn(spill, total), pull * miss, tilt


@triton.jit
def gradient_span(
    out, x_row, begin, end, n, y, top, slope, slope_y, drop_y, tilt, weight, softcap, flags,
    BLOCK_N: tl.constexpr, SKEWED: tl.constexpr, EXTRAS: tl.constexpr, BACKWARDS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of the columns begin..end of one row. Without extras, write_true writes the true class."""
    skew = 0
    aligned = True
    if SKEWED:
        skew = skew_of(x_row)
        # If not, the row is written element by element.
        aligned = same_alignment(out, skew)
    y = (y + skew).to(tl.int32)
    limit = n + skew
    BLOCK: tl.constexpr = BLOCK_N // 4 if EXTRAS else BLOCK_N
    for block in range(0, end - begin, BLOCK):
        # Backwards, because the columns read last are most likely still in the cache.
        start = begin + ((end - begin - 1) // BLOCK * BLOCK - block if BACKWARDS else block)
        cols = start + tl.arange(0, BLOCK)
        mask = cols < limit
        if SKEWED:
            mask &= cols >= skew
        if SKEWED and (aligned & (start >= skew) & (start + BLOCK <= limit)):
            write_gradient(
                tl.multiple_of(out - skew, 16), tl.multiple_of(x_row - skew, 16), cols, mask, skew,
                y, top, slope, slope_y, drop_y, tilt, weight, softcap, flags, EXTRAS, True, POLICY,
            )  # fmt: skip
        else:
            write_gradient(
                out - skew, x_row - skew, cols, mask, skew,
                y, top, slope, slope_y, drop_y, tilt, weight, softcap, flags, EXTRAS, False, POLICY,
            )  # fmt: skip


@triton.jit
def gradient_kept(
    out, kept, begin, n, skew, top, slope,
    DTYPE: tl.constexpr, KEPT: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, SKEWED: tl.constexpr,
):  # fmt: skip
    """gradient_span for the KEPT columns from `begin` on, without extras. skew: the logits' skew."""
    VEC: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    limit = n + skew
    aligned = True
    if SKEWED:
        aligned = same_alignment(out, skew)
    for tile in range(0, KEPT // (LANES * VEC), TILES):
        start = begin + tile * (LANES * VEC)
        whole = aligned & (start >= skew) & (start + TILES * LANES * VEC <= limit)
        for t in tl.static_range(TILES):
            first = start + (t * LANES + tl.arange(0, LANES)) * VEC
            values = read_kept(kept, tile + t, DTYPE, LANES)
            dx = ()
            for i in tl.static_range(VEC):
                dx = dx + (exp_over(values[i], top, DTYPE) * slope,)
            if whole:
                write_lanes(out - skew + first, lane_words(dx, DTYPE))
            elif start < limit:
                # In a row's first and last tile, only one lane is partial.
                lanes = aligned & (first >= skew) & (first + VEC <= limit)
                write_some_lanes(out - skew + first, lane_words(dx, DTYPE), lanes)
                for i in tl.static_range(VEC):
                    at = first + i
                    tl.store(out - skew + at, dx[i].to(DTYPE), mask=(at >= skew) & (at < limit) & (lanes == 0))


@triton.jit
def write_true(out, begin, end, n, skew, y, x_y, top, slope_y, drop_y):
    """Overwrites the gradient of the true class if the class is in begin..end. x_y: its logit, read before any gradient
    was written."""
    tl.debug_barrier()
    at_y = exp(x_y - top, out.dtype.element_ty) * slope_y - drop_y
    mine = (y >= 0) & (y < n) & (y + skew >= begin) & (y + skew < end)
    tl.store(out + y, at_y.to(out.dtype.element_ty), mask=mine)


@triton.jit
def zero_span(out, begin, end, n, BLOCK_N: tl.constexpr, SKEWED: tl.constexpr):
    zeros = tl.zeros([BLOCK_N], out.dtype.element_ty)
    skew = 0
    if SKEWED:
        skew = skew_of(out)
        out = tl.multiple_of(out - skew, 16)
    for start in range(begin, end, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        if SKEWED:
            if (start >= skew) & (start + BLOCK_N <= n + skew):
                tl.store(out + cols, zeros)
            else:
                tl.store(out + cols, zeros, mask=(cols >= skew) & (cols < n + skew))
        else:
            tl.store(out + cols, zeros, mask=cols < n)


@triton.jit
def columns_end(n, SKEWED: tl.constexpr):
    """Upper bound of the end of a row of n columns, for any skew."""
    return n + MOST_SKEW if SKEWED else n
