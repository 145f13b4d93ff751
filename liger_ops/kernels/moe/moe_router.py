"""The choice of experts for each token. For a token with n logits:

    score_j  = softmax, sigmoid or sqrt(softplus) of the logits; the last is rounded after each step
    chosen   = the top_k largest score_j + bias_j, within the best groups
    weight_k = scale * score_k / sum of the chosen scores (without NORMALIZE: scale * score_k)

`least` is added to that sum, which may be zero.

A program processes ROWS tokens at a time, as a tile of ROWS x EXPERTS logits. It finds the largest element top_k times; of
equal ones it takes the first. NaN counts as the largest. With HAS_EXPERTS the choice is given, perhaps an expert twice.
Programs are persistent: with STATISTICS, each sums over its
tokens and writes one row of partial sums.

Backward recomputes the scores. With g_k the gradient of weight k, S the sum of the chosen scores and h_j the gradient of
the summed scores:

    d score_k = scale / S * (g_k - sum_i g_i score_i / S) + token_weight * h_k
"""

import triton
import triton.language as tl

from ..functions import log1p_of_fraction
from ..table import Config, Kernel

SIGMOID = tl.constexpr(1)
NORMALIZE = tl.constexpr(2)
STATISTICS = tl.constexpr(4)
BY_LOGITS = tl.constexpr(8)  # choose by the logits, which have the order of their scores
OF_WEIGHTS = tl.constexpr(16)
OF_SCORES = tl.constexpr(32)
OF_Z = tl.constexpr(64)
HAS_SCORE_BIAS = tl.constexpr(128)
HAS_TOKEN_WEIGHT = tl.constexpr(256)
SQRTSOFTPLUS = tl.constexpr(512)
HAS_EXPERTS = tl.constexpr(1024)
MOST_EXPERTS = tl.constexpr(1024)
MOST_CHOICES = tl.constexpr(32)


@triton.jit
def load_logits(logits, row, rows, n, EXPERTS: tl.constexpr):
    columns = tl.arange(0, EXPERTS)[None, :]
    at = row.to(tl.int64)[:, None] * n + columns
    inside = (row < rows)[:, None] & (columns < n)
    x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    # A row outside is as good as any.
    return tl.where((row < rows)[:, None], x, 0.0), columns, at, inside


@triton.jit
def scores_of(x, flags, ROUNDED: tl.constexpr):
    """(scores, powers, their sums, peaks). Columns outside have the score 0. ROUNDED: the dtype of the logits."""
    peak = tl.max(x, axis=1)
    powers = tl.exp(x - peak[:, None])
    total = tl.sum(powers, axis=1)
    scores = powers / total[:, None]
    if flags & SIGMOID:
        scores = 1 / (1 + tl.exp(-x))
    if flags & SQRTSOFTPLUS:
        softplus = tl.where(x > 0, x, 0.0) + log1p_of_fraction(tl.exp(-tl.abs(x)))
        softplus = softplus.to(ROUNDED).to(tl.float32)
        scores = tl.sqrt_rn(softplus).to(ROUNDED).to(tl.float32)
    return scores, powers, total, peak


@triton.jit
def first_of_largest(by, columns, eligible):
    """(the largest, its column) of each row."""
    best = tl.max(tl.where(eligible, by, float("-inf")), axis=1)
    first = tl.min(tl.where(eligible & (by == best[:, None]), columns, columns.shape[1]), axis=1)
    return best, first


@triton.jit
def counts_of(token_weight, row, rows, flags):
    """How often each row counts."""
    given = tl.load(token_weight + row, mask=(row < rows) & ((flags & HAS_TOKEN_WEIGHT) != 0), other=1.0)
    return tl.where(row < rows, given, 0.0)


@triton.jit
def moe_router_fwd_kernel(
    weights, index, tokens, sums, squares, logits, bias, token_weight, given,
    rows, n, top_k, groups, group_size, top_groups, scale, least, flags,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    count = tl.zeros([EXPERTS], tl.float32)
    summed = tl.zeros([EXPERTS], tl.float32)
    squared = tl.zeros([ROWS], tl.float32)
    slots = tl.arange(0, CHOICES)[None, :]
    # Of these rows: 32-bit offsets leave registers to the scores.
    given += program.to(tl.int64) * ROWS * top_k
    for block in range(program, tl.cdiv(rows, ROWS), programs):
        row = block * ROWS + tl.arange(0, ROWS)
        x, columns, places, inside = load_logits(logits, row, rows, n, EXPERTS)
        scores, powers, total, peak = scores_of(x, flags, logits.dtype.element_ty)
        real = tl.broadcast_to(columns < n, [ROWS, EXPERTS])
        scores = tl.where(real, scores, 0.0)
        by = scores
        if flags & BY_LOGITS:
            by = x
        by += tl.load(bias + columns, mask=(columns < n) & ((flags & HAS_SCORE_BIAS) != 0), other=0.0)
        by = tl.where(by != by, float("inf"), by)
        eligible = real
        if GROUPED:
            group = columns // group_size
            best_of_groups = tl.full([ROWS, EXPERTS], float("-inf"), tl.float32)
            for g in range(0, groups):
                own = real & (group == g)
                first, best_expert = first_of_largest(by, columns, own)
                second, other = first_of_largest(by, columns, own & (columns != best_expert[:, None]))
                # A group of one expert has no second.
                both = first + tl.where(group_size > 1, second, 0.0)
                both = tl.where(both != both, float("inf"), both)
                best_of_groups = tl.where(columns == g, both[:, None], best_of_groups)
            open_groups = tl.broadcast_to(columns < groups, [ROWS, EXPERTS])
            eligible = tl.full([ROWS, EXPERTS], 0, tl.int1)
            for _i in range(0, top_groups):
                sum_of_best, best_group = first_of_largest(best_of_groups, columns, open_groups)
                open_groups = open_groups & (columns != best_group[:, None])
                eligible = eligible | (real & (group == best_group[:, None]))
        taken = tl.zeros([ROWS, EXPERTS], tl.int32)
        found = tl.zeros([ROWS, CHOICES], tl.int32)
        weight = tl.zeros([ROWS, CHOICES], tl.float32)
        for k in range(0, top_k):
            if flags & HAS_EXPERTS:
                chosen = tl.load(given + tl.arange(0, ROWS) * top_k + k, mask=row < rows, other=0)
                # None of these, before it loses its upper half.
                expert = tl.where((chosen >= 0) & (chosen < n), chosen, -1).to(tl.int32)
            else:
                score, expert = first_of_largest(by, columns, eligible & (taken == 0))
            hit = columns == expert[:, None]
            taken = tl.where(hit, taken + 1, taken)
            found = tl.where(slots == k, expert[:, None], found)
            weight = tl.where(slots == k, tl.sum(tl.where(hit, scores, 0.0), axis=1)[:, None], weight)
        if flags & NORMALIZE:
            weight = weight / (tl.sum(weight, axis=1) + least)[:, None]
        out = row.to(tl.int64)[:, None] * top_k + slots
        kept = (row < rows)[:, None] & (slots < top_k)
        tl.store(weights + out, weight * scale, mask=kept)
        tl.store(index + out, found.to(tl.int64), mask=kept)
        if flags & STATISTICS:
            counted = counts_of(token_weight, row, rows, flags)
            count += tl.sum(taken * counted[:, None], axis=0)
            # A row that does not count may hold anything.
            summed += tl.sum(tl.where(counted[:, None] != 0, scores * counted[:, None], 0.0), axis=0)
            lse = peak + tl.log(total)
            squared += tl.where(counted != 0, lse * lse * counted, 0.0)
        given += programs.to(tl.int64) * ROWS * top_k
    if flags & STATISTICS:
        experts = tl.arange(0, EXPERTS)
        at = program.to(tl.int64) * n + experts
        tl.store(tokens + at, count, mask=experts < n)
        tl.store(sums + at, summed, mask=experts < n)
        tl.store(squares + program, tl.sum(squared, axis=0))


@triton.jit
def moe_router_bwd_kernel(
    dlogits, grad, grad_scores, grad_z, logits, index, token_weight,
    rows, n, top_k, scale, least, flags,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x, columns, at, inside = load_logits(logits, row, rows, n, EXPERTS)
    scores, powers, total, peak = scores_of(x, flags, logits.dtype.element_ty)
    soft = powers / total[:, None]
    d = tl.zeros([ROWS, EXPERTS], tl.float32)
    if flags & OF_WEIGHTS:
        taken = tl.zeros([ROWS, EXPERTS], tl.int32)
        first = row.to(tl.int64) * top_k
        for k in range(0, top_k):
            expert = tl.load(index + first + k, mask=row < rows, other=-1)
            g = tl.load(grad + first + k, mask=row < rows, other=0.0)
            hit = columns == expert[:, None]
            taken = tl.where(hit, taken + 1, taken)
            d = tl.where(hit, d + g[:, None], d)
        d *= scale
        if flags & NORMALIZE:
            own = tl.where(taken != 0, scores, 0.0)
            chosen = tl.sum(own * taken, axis=1) + least
            mean = tl.sum(d * own, axis=1) / chosen
            d = tl.where(taken != 0, (d - taken * mean[:, None]) / chosen[:, None], 0.0)
    counted = counts_of(token_weight, row, rows, flags)
    if flags & OF_SCORES:
        h = tl.load(grad_scores + columns, mask=columns < n, other=0.0)
        d += tl.where(counted[:, None] != 0, h * counted[:, None], 0.0)
    if flags & SIGMOID:
        slope = 1 / (1 + tl.exp(x))
        dx = d * scores * slope
    elif flags & SQRTSOFTPLUS:
        # Far below 0, the logarithm of the score has the slope 1 / 2.
        dx = d * tl.where((x < -40) | (scores == 0), 0.5 * scores, tl.sigmoid(x) / (2 * scores))
    else:
        dx = scores * (d - tl.sum(d * scores, axis=1)[:, None])
    # Without an upstream gradient, a row may hold anything.
    wanted = ((flags & OF_WEIGHTS) != 0) | (((flags & OF_SCORES) != 0) & (counted != 0))
    dx = tl.where(wanted[:, None], dx, 0.0)
    if flags & OF_Z:
        lse = peak + tl.log(total)
        z = 2 * lse * counted * tl.load(grad_z)
        dx += tl.where(counted[:, None] != 0, z[:, None] * soft, 0.0)
    tl.store(dlogits + at, dx.to(dlogits.dtype.element_ty), mask=inside)


def config(max_n, rows, programs_per_sm=0, **constexprs):
    constexprs |= dict(ROWS=rows, EXPERTS=max_n or MOST_EXPERTS.value)
    return Config(max_n, False, 4, programs_per_sm, constexprs)


DTYPES = [{"X": "bf16"}, {"X": "fp16"}, {"X": "fp32"}]

KERNELS = [
    Kernel(
        function=moe_router_fwd_kernel,
        args={
            "weights": "*fp32", "index": "*i64", "tokens": "*fp32", "sums": "*fp32", "squares": "*fp32", "logits": "*X",
            "bias": "*fp32", "token_weight": "*fp32", "given": "*i64",
            **dict.fromkeys(("rows", "n", "top_k", "groups", "group_size", "top_groups"), "i32"),
            "scale": "fp32", "least": "fp32", "flags": "i32",
        },
        aligned=[],
        axes={"dtype": DTYPES, "grouped": [{"GROUPED": 0}, {"GROUPED": 1}]},
        configs=[config(n, rows, 4, CHOICES=32) for n, rows in ((32, 32), (128, 8), (None, 1))],
    ),
    Kernel(
        function=moe_router_bwd_kernel,
        args={
            "dlogits": "*X", "grad": "*fp32", "grad_scores": "*fp32", "grad_z": "*fp32", "logits": "*X", "index": "*i64",
            "token_weight": "*fp32", "rows": "i32", "n": "i32", "top_k": "i32", "scale": "fp32",
            "least": "fp32", "flags": "i32",
        },
        aligned=[],
        axes={"dtype": DTYPES},
        configs=[config(32, 32), config(128, 8), config(None, 1)],
    ),
]  # fmt: skip
