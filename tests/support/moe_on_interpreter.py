"""Runs the kernels of moe_experts in Triton's interpreter, launched as csrc/ops/moe/moe_experts_cuda.cpp does."""

import numpy
import torch
from interpreter import find

from liger_ops.kernels.linear.lora_products import RANK_STEP
from liger_ops.kernels.moe import _tiles as shared
from liger_ops.kernels.moe import moe_experts as m

GROUPED = "grouped GEMM"  # a kind of layer(): products as PyTorch's grouped GEMM computes them
ROWS, BLOCK = shared.TILE_ROWS.value, shared.ROUTE_BLOCK.value
DTYPES = {torch.float32: "fp32", torch.float16: "fp16"}


def blocks(a, b):
    return -(-a // b)


def launch(name, programs, arguments, n=1, aligned=False, kind="", family="moe_experts", pieces=None, **choices):
    kernel = find(f"{family}_{name}{kind}")
    constexprs = kernel.pick(choices, n, aligned).constexprs | ({"PIECES": pieces} if pieces else {})
    if programs(constexprs):
        kernel.function[(programs(constexprs),)](*arguments, **constexprs)


def routing(index, pairs, choices, experts):
    tiles = torch.full((1 + 2 * (pairs // ROWS + experts),), -7, dtype=torch.int32)
    offsets = torch.full((experts + 1,), -7, dtype=torch.int32)
    tokens, order, position = (torch.full((pairs,), -7, dtype=torch.int32) for _ in range(3))
    is_sorted = index.dim() == 1
    count = 0 if is_sorted else blocks(pairs, BLOCK)
    counts = torch.zeros(experts, max(count, 1), dtype=torch.int32)
    words = 2 if index.dtype == torch.int64 else 1
    ids = index.view(torch.int32)
    totals = ids if is_sorted else torch.zeros(experts, dtype=torch.int32)
    if not is_sorted:
        launch("count", lambda c: count, (counts, totals, ids, pairs, experts, count, words))
    launch(
        "scan",
        lambda c: experts,
        (offsets, tiles, counts, totals, pairs, experts, count, words if is_sorted else 1),
        n=experts,
    )
    place = (tokens, order, position, counts, offsets, ids, pairs, choices, experts, count, 0 if is_sorted else words)
    launch("place", lambda c: blocks(pairs, BLOCK), place)
    return offsets, tiles, tokens, order, position


NAMES = {torch.float32: "fp32", torch.float16: "fp16"}


def padded(ranks):
    return blocks(ranks, RANK_STEP.value) * RANK_STEP.value


class Adapters:
    """The adapters of a weight, in the kernels. a: (E, r, in), b: (E, out, r). in_pieces: adapters in fp32 beside fp16
    are multiplied as beside bf16, which the interpreter cannot multiply."""

    def __init__(self, a, b, scale, routes, in_pieces):
        self.a, self.b, self.scale, self.routes, self.in_pieces = a.transpose(1, 2), b, scale, routes, in_pieces

    def pack(self, adapter, dtype):
        experts, features, ranks = adapter.shape
        pieces = 1 if dtype == torch.float32 else shared.ADAPTER_PIECES.value
        out = torch.full((experts, features, pieces, padded(ranks)), float("nan"), dtype=dtype)
        launch(
            "pack",
            lambda c: blocks(features * padded(ranks), c["BLOCK_P"]) * blocks(experts, c["BLOCK_E"]),
            (out, adapter, experts, features, ranks, padded(ranks), *adapter.stride()),
            family="moe_adapters", P=NAMES[dtype], W=NAMES[adapter.dtype],
        )  # fmt: skip
        return out

    def rows(self, x, adapter, gathers):
        """scale x times an adapter: in fp32, and in pieces."""
        offsets, tiles, tokens, pairs, most = self.routes
        features, ranks = adapter.shape[1:]
        packed = self.pack(adapter, adapter.dtype if x.dtype == torch.float16 and not self.in_pieces else x.dtype)
        t = torch.full((pairs, ranks), float("nan"))
        v = torch.full((pairs, 1 if x.dtype == torch.float32 else 2, padded(ranks)), float("nan"), dtype=x.dtype)
        aligned = features % 8 == 0 and x.stride(0) % 8 == 0
        launch(
            "rows", lambda c: most * (ROWS // c["BLOCK_T"]) * blocks(padded(ranks), c["BLOCK_R"]),
            (t, v, x, packed, offsets, tiles, tokens, features, ranks, padded(ranks), x.stride(0), self.scale,
             shared.GATHERS.value * gathers),
            n=padded(ranks), aligned=aligned, family="moe_adapters", X=NAMES[x.dtype], P=NAMES[packed.dtype],
        )  # fmt: skip
        return t, v

    def step(self, v, adapter):
        return v, self.pack(adapter, v.dtype), v.shape[2]

    def gradient(self, adapter, x, v, gathers):
        """As the adapter lies in memory."""
        offsets, _, tokens, _, _ = self.routes
        experts, features, ranks = adapter.shape
        out = torch.empty_like(adapter).fill_(float("nan"))
        aligned = features % 8 == 0 and ranks % 8 == 0 and x.stride(0) % 8 == 0
        launch(
            "columns", lambda c: experts * blocks(features, c["BLOCK_C"]) * blocks(ranks, c["BLOCK_R"]),
            (out, x, v, offsets, tokens, features, ranks, x.stride(0), *out.stride(), shared.GATHERS.value * gathers),
            n=ranks, aligned=aligned, family="moe_adapters", pieces=3 if self.in_pieces else None, X=NAMES[x.dtype],
            W=NAMES[x.dtype if self.in_pieces else adapter.dtype],
        )  # fmt: skip
        return out

    def add(self, out, step):
        offsets, tiles, _, _, most = self.routes
        launch(
            "add", lambda c: most * blocks(out.shape[1], c["BLOCK_N"]),
            (out, *step[:2], offsets, tiles, most, out.shape[1], step[2]), aligned=True, family="moe_adapters", X="bf16",
        )  # fmt: skip


def layer(x, gate_up, down, index, weight, biases, dout, flags, gate, transposed, options, kind="", adapters=None):
    """Forward and backward: everything that they compute. weight: fp32, or None if rows are sorted. adapters: a, b and
    scale of both weights."""
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
    interleaved, before = bool(flags & shared.INTERLEAVED.value), bool(flags & shared.WEIGHT_FIRST.value)
    has_bias = shared.HAS_BIAS.value if biases else 0
    weighs = shared.HAS_WEIGHT.value if weight is not None else 0
    sum_first, columns_first = m.SUM_FIRST.value, m.COLUMNS_FIRST.value

    routes = offsets, tiles, tokens, pairs, most
    in_pieces, kind = kind == "pieces", "" if kind == "pieces" else kind
    first, second = (Adapters(*each, routes, in_pieces) for each in adapters) if adapters else (None, None)
    no_step = torch.zeros(1, 1, 1, dtype=x.dtype), torch.zeros(1, dtype=x.dtype), 0

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
    step, t = no_step, None
    if adapters:
        t, v = first.rows(x, first.a, True)
        step = first.step(v, first.b)
    if grouped:
        pre = group(gather(x), gate_up, transposed)
        if adapters:
            first.add(pre, step)
        launch_grouped(
            "act", parts,
            (act, pre, gate_up_bias, scale, offsets, tiles, order, inner, *options, flags | has_bias), GATE=gate,
        )  # fmt: skip
    else:
        launch(
            "up", lambda c: most * blocks(inner, c["BLOCK_N"] // 2),
            (act, pre, x, gate_up, gate_up_bias, scale, offsets, tiles, tokens, order, most, hidden, inner, x.stride(0),
             gate_up.stride(0), gate_up.stride(1), *options, flags | has_bias | shared.SAVES_PRE.value, *step),
            aligned=aligned, LAYOUT=layout, GATE=gate, n=step[2], kind=kind, **X,
        )  # fmt: skip
    product = pre.clone()

    def rows_product(out, a, w, bias, layout, flags, kind, step):
        if grouped and not flags:
            out[:] = group(a, w, layout == columns_first)
            if adapters:
                first.add(out, step)
            if weight is None:
                clear = (out, offsets, experts, pairs, hidden)
                launch_grouped("clear_rest", lambda c: blocks(pairs, c["BLOCK_M"]), clear)
            return
        launch(
            "rows", lambda c: most * blocks(out.shape[1], c["BLOCK_N"]),
            (out, a, w, bias, offsets, tiles, most, a.shape[1], out.shape[1], w.stride(0), w.stride(1), flags,
             *step),
            aligned=aligned, LAYOUT=layout, n=step[2], kind="" if grouped else kind, **X,
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

    if adapters:
        step = second.step(second.rows(act, second.a, False)[1], second.b)
    rows_product(y, act, down, down_bias, columns_first if transposed else sum_first, has_bias, kind, step)
    out = combine(y, weighs * (not before))

    weighted, width = of(pairs, inner), []
    shares = of(blocks(inner, 16), pairs, dtype=torch.float32)

    def act_programs(c):
        width.append(blocks(inner, c["BLOCK_N"]))
        return most * width[0]

    u = None
    if adapters:
        u, v = second.rows(dout, second.b, True)
        step = second.step(v, second.a)
    if grouped:
        weighted = group(gather(dout), down, not transposed)
        if adapters:
            second.add(weighted, step)

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
             flags | weighs | shared.SAVES_ACT.value | shared.WANTS_WEIGHT.value, *step),
            aligned=aligned, LAYOUT=sum_first if transposed else columns_first, GATE=gate, n=step[2], kind=kind, **X,
        )  # fmt: skip
    dweight = of(tokens_count, choices, dtype=torch.float32)
    words = 2 if index.dtype == torch.int64 else 1
    if weight is not None:
        with_bias = has_bias if not before else 0
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
    if adapters:
        results |= dict(
            ddown_a=second.gradient(second.a, weighted, u, False).transpose(1, 2),
            ddown_b=second.gradient(second.b, dout, second.rows(weighted, second.a, False)[0], True),
            dgate_up_b=first.gradient(first.b, pre, t, False),
        )  # fmt: skip
        u, v = first.rows(pre, first.b, False)
        results["dgate_up_a"] = first.gradient(first.a, x, u, True).transpose(1, 2)
        step = first.step(v, first.a)
    rows_product(
        dx, pre, gate_up, gate_up_bias, sum_first if transposed else columns_first, 0, other_kind("_bwd_hopper"), step
    )
    results |= dict(
        out=out, dx=combine(dx, 0), product=product, dweight=dweight,
        dgate_up=weights_product(gate_up, x, pre, transposed, other_kind("_gate_up_hopper")),
        ddown=weights_product(down, dout, weighted, not transposed, other_kind("_down_hopper")),
        dgate_up_bias=bias_gradient(pre, 0),
        ddown_bias=bias_gradient(dout, shared.GATHERS.value | weighs * (not before)),
    )  # fmt: skip
    return results


def save(path, results):
    numpy.savez(path, **{k: v.numpy() for k, v in results.items()})


def adapted_inputs(size, dtype, transposed, bias, counts, ranks, wide):
    """Tensors by name, with adapters that lie as peft's. wide: those are in fp32."""
    torch.manual_seed(0)
    tokens, hidden, inner, experts, choices = size
    dtype = getattr(torch, dtype)
    of_adapters = torch.float32 if wide else dtype

    def make(*shape, dtype=dtype):
        return (torch.randn(shape) / 2).to(dtype)

    def adapters(inputs, outputs, rank):
        a = make(rank * experts, inputs, dtype=of_adapters).view(experts, rank, inputs)
        return a, make(outputs, rank * experts, dtype=of_adapters).view(outputs, rank, experts).permute(2, 0, 1)

    found = dict(x=make(tokens, hidden + 8)[:, :hidden], given_dout=make(tokens, hidden))
    found |= dict(
        gate_up=make(experts, 2 * inner, hidden), down=make(experts, hidden, inner), index=torch.tensor(counts)
    )
    if transposed:
        found |= {name: found[name].transpose(1, 2).contiguous() for name in ("gate_up", "down")}
    if bias:
        found |= dict(gate_up_bias=make(experts, 2 * inner).float(), down_bias=make(experts, hidden).float())
    if not counts:
        found |= dict(index=torch.randint(-1, experts + 1, (tokens, choices)), weight=torch.rand(tokens, choices))
    found["gate_up_a"], found["gate_up_b"] = adapters(hidden, 2 * inner, ranks[0])
    found["down_a"], found["down_b"] = adapters(inner, hidden, ranks[1])
    return found


SCALES, LIMIT, UP_OFFSET = (0.75, 2.0), 0.75, 0.25


def alpha_of(activation):
    return 1.5 if activation == "silu" else 1.0


def run_adapted(path, size, dtype, activation, transposed, interleaved, bias, weight_before, counts, kind, ranks, wide):
    """layer() with adapters, saved at path together with its inputs."""
    given = adapted_inputs(size, dtype, transposed, bias, counts, ranks, wide)
    flags = shared.INTERLEAVED.value * interleaved | shared.WEIGHT_FIRST.value * weight_before
    gate = shared.SILU.value if activation == "silu" else shared.GELU.value
    biases = [given["gate_up_bias"], given["down_bias"]] if bias else []
    of_both = [(given[f"{name}_a"], given[f"{name}_b"], scale) for name, scale in zip(("gate_up", "down"), SCALES)]
    results = layer(
        given["x"], given["gate_up"], given["down"], given["index"], given.get("weight"), biases, given["given_dout"],
        flags, gate, transposed, (alpha_of(activation), LIMIT, UP_OFFSET), kind, of_both,
    )  # fmt: skip
    save(path, results | {f"in_{k}": v for k, v in given.items()})
