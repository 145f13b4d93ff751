"""Flags, limits and constants of the loss kernels. The host uses the integers under the same names."""

import triton.language as tl

HAS_WEIGHT = tl.constexpr(1)
HAS_SMOOTHING = tl.constexpr(2)
HAS_SOFTCAP = tl.constexpr(4)
SAVE_STATS = tl.constexpr(8)
SAVE_Z_LOSS = tl.constexpr(16)
SAVE_METRICS = tl.constexpr(32)
ADD_Z_LOSS = tl.constexpr(64)  # to every row's loss; reductions add it later, because its mean has another divisor
MEAN = tl.constexpr(128)
FROM_PARTIAL = tl.constexpr(256)
TO_PARTIAL = tl.constexpr(512)
SAVE_TOTALS = tl.constexpr(1024)
HAS_GRAD = tl.constexpr(2048)
COUNT_ONLY = tl.constexpr(4096)
HAS_TOTALS = tl.constexpr(8192)
LOCAL = tl.constexpr(16384)  # the logits of one process's classes: store facts instead of losses
SAVE_ENTROPY = tl.constexpr(32768)

# A column index that no row has.
NOWHERE = tl.constexpr(0x7FFFFFFF)
MOST_PARTS = tl.constexpr(128)
BOUNDARY = tl.constexpr(128)  # in bytes; a warp that writes from a boundary on writes whole cache lines
MOST_SKEW = tl.constexpr(BOUNDARY.value // 2 - 1)
LOG2E_TAIL = tl.constexpr(1.925963033500011e-08)  # log2(e) - LOG2E
LN2 = tl.constexpr(0.6931471805599453)
# The maximum of no logits. Finite, because -inf - -inf is NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)
