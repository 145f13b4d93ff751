"""Runs the kernels of moe_experts in Triton's interpreter, launched as csrc/ops/moe/moe_experts_cuda.cpp does."""

import numpy
import torch
from interpreter import find

from liger_ops.kernels.moe import _tiles as shared
from liger_ops.kernels.moe import moe_experts as m

GROUPED = "grouped GEMM"  # a kind of layer(): products as PyTorch's grouped GEMM computes them
ROWS, BLOCK = shared.TILE_ROWS.value, shared.ROUTE_BLOCK.value
DTYPES = {torch.float32: "fp32", torch.float16: "fp16"}


def blocks(a, b):
    return -(-a // b)


def launch(name, programs, arguments, n=1, aligned=False, kind="", **choices):
    kernel = find(f"moe_experts_{name}{kind}")
    variant = kernel.pick(choices, n, aligned)
    if programs(variant.constexprs):
        kernel.function[(programs(variant.constexprs),)](*arguments, **variant.constexprs)


def routing(index, pairs, choices, experts):
    tiles = torch.full((1 + 2 * (pairs // ROWS + experts),), -7, dtype=torch.int32)
    offsets = torch.full((experts + 1,), -7, dtype=torch.int32)
    tokens, order, position = (torch.full((pairs,), -7, dtype=torch.int32) for _ in range(3))
    is_sorted = index.dim() == 1
    count = 0 if is_sorted else blocks(pairs, BLOCK)
    totals = index.int() if is_sorted else torch.zeros(experts, dtype=torch.int32)
    counts = torch.zeros(experts, max(count, 1), dtype=torch.int32)
    words = 2 if index.dtype == torch.int64 else 1
    ids = index.view(torch.int32)
    if not is_sorted:
        launch("count", lambda c: count, (counts, totals, ids, pairs, experts, count, words))
    launch("scan", lambda c: experts, (offsets, tiles, counts, totals, pairs, experts, count), n=experts)
    place = (tokens, order, position, counts, offsets, ids, pairs, choices, experts, count, 0 if is_sorted else words)
    launch("place", lambda c: blocks(pairs, BLOCK), place)
    return offsets, tiles, tokens, order, position


def layer(x, gate_up, down, index, weight, biases, dout, flags, gate, transposed, options, kind=""):
    """Forward and backward: everything that they compute. weight: fp32, or None if rows are sorted."""
    (tokens_count, hidden), experts = x.shape, gate_up.shape[0]
    inner = down.shape[1 if transposed else 2]
    choices = index.shape[1] if weight is not None else 1
    pairs = tokens_count * choices
    found = routing(index, pairs, choices, experts)
    offsets, tiles, tokens, order, position = found
    most = min(pairs, pairs // ROWS + experts)
    aligned = hidden % 8 == 0 and inner % 8 == 0
    X = {"X": DTYPES[x.dtype]}
    scale = torch.ones(pairs) if weight is None else weight
    gate_up_bias, down_bias = biases if biases else (torch.zeros(1), torch.zeros(1))
    interleaved, first = bool(flags & shared.INTERLEAVED.value), bool(flags & shared.WEIGHT_FIRST.value)
    has_bias = shared.HAS_BIAS.value if biases else 0
    weighs = shared.HAS_WEIGHT.value if weight is not None else 0
    sum_first, columns_first = m.SUM_FIRST.value, m.COLUMNS_FIRST.value

    def of(*shape, dtype=x.dtype):
        return torch.full(shape, float("nan"), dtype=dtype)

    grouped = kind == GROUPED
    spans = [slice(*span) for span in zip(offsets[:-1], offsets[1:])]

    def group(a, w, columns_second):
        out = of(pairs, w.shape[2 if columns_second else 1])
        for span, matrix in zip(spans, w):
            out[span] = a[span] @ (matrix if columns_second else matrix.t())
        return out

    def launch_grouped(name, programs, arguments, **choices):
        launch(name, programs, arguments, aligned=True, X="bf16", **choices)

    def gather(rows):
        if weight is None:
            return rows
        out = of(pairs, hidden)
        launch_grouped(
            "gather", lambda c: blocks(pairs, c["BLOCK_M"]) * blocks(hidden, c["BLOCK_N"]),
            (out, rows, tokens, offsets, experts, hidden, rows.stride(0)),
        )  # fmt: skip
        return out

    def parts(c):
        return most * (ROWS // c["BLOCK_M"]) * blocks(inner, c["BLOCK_N"])

    def other_kind(name):
        return name if kind == "_hopper" else ""

    act, pre, y, dx = of(pairs, inner), of(pairs, 2 * inner), of(pairs, hidden), of(pairs, hidden)
    if weight is None:
        y.zero_()
        dx.zero_()
    layout = sum_first if not transposed else columns_first if interleaved else m.HALVES_APART.value
    if grouped:
        pre = group(gather(x), gate_up, transposed)
        launch_grouped(
            "act", parts,
            (act, pre, gate_up_bias, scale, offsets, tiles, order, inner, *options, flags | has_bias), GATE=gate,
        )  # fmt: skip
    else:
        launch(
            "up", lambda c: most * blocks(inner, c["BLOCK_N"] // 2),
            (act, pre, x, gate_up, gate_up_bias, scale, offsets, tiles, tokens, order, most, hidden, inner, x.stride(0),
             gate_up.stride(0), gate_up.stride(1), *options, flags | has_bias | shared.SAVES_PRE.value),
            aligned=aligned, LAYOUT=layout, GATE=gate, kind=kind, **X,
        )  # fmt: skip
    product = pre.clone()

    def rows_product(out, a, w, bias, layout, flags, kind):
        if grouped and not flags:
            out[:] = group(a, w, layout == columns_first)
            if weight is None:
                clear = (out, offsets, experts, pairs, hidden)
                launch_grouped("clear_rest", lambda c: blocks(pairs, c["BLOCK_M"]), clear)
            return
        launch(
            "rows", lambda c: most * blocks(out.shape[1], c["BLOCK_N"]),
            (out, a, w, bias, offsets, tiles, most, a.shape[1], out.shape[1], w.stride(0), w.stride(1), flags),
            aligned=aligned, LAYOUT=layout, kind="" if grouped else kind, **X,
        )  # fmt: skip

    def combine(rows, flags):
        if weight is None:
            return rows
        out = of(tokens_count, hidden)
        launch(
            "combine", lambda c: tokens_count * blocks(hidden, c["BLOCK_N"]),
            (out, rows, position, scale, choices, hidden, flags), n=hidden, aligned=aligned, **X,
        )  # fmt: skip
        return out

    rows_product(y, act, down, down_bias, columns_first if transposed else sum_first, has_bias, kind)
    out = combine(y, weighs * (not first))

    weighted, width = of(pairs, inner), []
    shares = of(blocks(inner, 16), pairs, dtype=torch.float32)

    def act_programs(c):
        width.append(blocks(inner, c["BLOCK_N"]))
        return most * width[0]

    if grouped:
        weighted = group(gather(dout), down, not transposed)

        def all_parts(c):
            width.append(blocks(inner, c["BLOCK_N"]))
            return parts(c)

        launch_grouped(
            "act_rows_bwd", all_parts,
            (pre, weighted, shares, pre, weighted, scale, offsets, tiles, order, pairs, inner, *options,
             flags | weighs | shared.SAVES_ACT.value | shared.WANTS_WEIGHT.value), GATE=gate,
        )  # fmt: skip
    else:
        launch(
            "act_bwd", act_programs,
            (pre, weighted, shares, pre, dout, down, scale, offsets, tiles, tokens, order, most, pairs, hidden, inner,
             dout.stride(0), down.stride(0), down.stride(1), *options,
             flags | weighs | shared.SAVES_ACT.value | shared.WANTS_WEIGHT.value),
            aligned=aligned, LAYOUT=sum_first if transposed else columns_first, GATE=gate, kind=kind, **X,
        )  # fmt: skip
    dweight = of(tokens_count, choices, dtype=torch.float32)
    words = 2 if index.dtype == torch.int64 else 1
    if weight is not None:
        with_bias = has_bias if not first else 0
        launch(
            "route_bwd", lambda c: blocks(pairs, c["BLOCK_P"]),
            (dweight, shares, position, dout, down_bias, index.view(torch.int32), pairs, choices, hidden,
             dout.stride(0), width[0], experts, words, with_bias), **X,
        )  # fmt: skip

    def weights_product(like, by_token, by_row, token_left, kind):
        out = of(*like.shape)
        if grouped:
            rows = gather(by_token)
            for i, span in enumerate(spans):
                left, right = (rows[span], by_row[span]) if token_left else (by_row[span], rows[span])
                out[i] = left.t() @ right
            return out
        left, right = (by_token, by_row) if token_left else (by_row, by_token)
        launch(
            "weights",
            lambda c: experts * blocks(out.shape[1], c["BLOCK_M"]) * blocks(out.shape[2], c["BLOCK_N"]),
            (out, left, right, offsets, tokens, out.shape[1], out.shape[2], left.stride(0), right.stride(0)),
            aligned=aligned, GATHER_LEFT=int(token_left), kind=kind, **X,
        )  # fmt: skip
        return out

    def bias_gradient(rows, flags):
        out = of(experts, rows.shape[1], dtype=torch.float32)
        launch(
            "bias_bwd", lambda c: experts * blocks(rows.shape[1], c["BLOCK_N"]),
            (out, rows, offsets, tokens, order, scale, rows.shape[1], rows.stride(0), flags), n=rows.shape[1], **X,
        )  # fmt: skip
        return out

    results = dict(zip(("offsets", "tiles", "tokens", "order", "position"), found))
    rows_product(
        dx, pre, gate_up, gate_up_bias, sum_first if transposed else columns_first, 0, other_kind("_bwd_hopper")
    )
    results |= dict(
        out=out, dx=combine(dx, 0), product=product, dweight=dweight,
        dgate_up=weights_product(gate_up, x, pre, transposed, other_kind("_gate_up_hopper")),
        ddown=weights_product(down, dout, weighted, not transposed, other_kind("_down_hopper")),
        dgate_up_bias=bias_gradient(pre, 0),
        ddown_bias=bias_gradient(dout, shared.GATHERS.value | weighs * (not first)),
    )  # fmt: skip
    return results


def save(path, results):
    numpy.savez(path, **{k: v.numpy() for k, v in results.items()})
