"""The kernels of adapters' products, in Triton's interpreter on CPU tensors."""

import torch
from interpreted import cases
from lora_dropout import dropped

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.linear.lora_products
from interpreter import find

def run(path, tokens, features, rank, adapters, rate, adapter="fp32", dtype="bf16"):
    torch.manual_seed(0)
    # The interpreter multiplies no bf16.
    x, of = torch.randn(tokens, features).half(), torch.float if adapter == "fp32" else torch.half
    ranks = adapters * rank
    a, b = torch.randn(ranks, features).to(of), torch.randn(rank, features).to(of)
    seeds = torch.arange(1, adapters + 1) * 12345678901
    drops, aligned = int(rate > 0), features % 8 == 0
    threshold = min(round(rate * 2**32) - 2**31, 2**31 - 1)

    def kernel(name, n, **choices):
        found = find(name)
        constexprs = found.pick(choices, n, aligned).constexprs
        return found.function, {k: v for k, v in constexprs.items()}

    def blocks(size, block):
        return -(-size // block)

    def of_x(w):
        # w as the kernels take it, and the distance of its pieces
        if adapter != "fp32":
            return w, 0
        high = w.half()
        middle = (w - high.float()).half()
        low = (w - high.float() - middle.float()).half()
        return torch.stack([low, high, middle])[1], w.numel()

    block, pieces = rank & -rank if drops else ranks, 3 if adapter == "fp32" else 1
    (w, piece), (of_b, b_piece) = of_x(a), of_x(b)
    function, c = kernel("lora_rows", block, X=dtype, PIECES=pieces, DROPS=drops)
    splits, t = 2, torch.full((2, tokens, ranks), torch.nan)
    grid = (blocks(tokens, c["BLOCK_T"]) * blocks(ranks, c["BLOCK_R"]) * splits,)
    function[grid](t, x, w, seeds, tokens, features, ranks, rank, splits, features, features, piece, ranks, tokens * ranks,
                   2.0, threshold, **c)
    t = t.sum(0)
    function, c = kernel("lora_columns", block, X=dtype, PIECES=max(pieces, 2), DROPS=drops)
    da = torch.full((2, ranks, features), torch.nan)
    grid = (blocks(features, c["BLOCK_C"]) * blocks(ranks, c["BLOCK_R"]) * splits,)
    function[grid](da, x, t, seeds, tokens, features, ranks, rank, splits, features, ranks, ranks * features, features, 1,
                   0.5, threshold, **c)
    function, c = kernel("lora_expand", block, X=dtype, PIECES=pieces, DROPS=drops)
    dx = torch.full_like(x, torch.nan)
    grid = (blocks(tokens, c["BLOCK_T"]) * blocks(features, c["BLOCK_C"]),)
    function[grid](dx, t, w, x, seeds, tokens, features, ranks, ranks, rank, ranks, features, piece, features, features,
                   0.5, threshold, 1, **c)
    function, c = kernel("lora_expand", rank, X=dtype, PIECES=pieces, DROPS=0)
    y = torch.full_like(x, torch.nan)
    grid = (blocks(tokens, c["BLOCK_T"]) * blocks(features, c["BLOCK_C"]),)
    function[grid](y, t, of_b, y, seeds, tokens, features, rank, rank, rank, ranks, features, b_piece, features, 0, 1.0, 0,
                   0, **c)
    found = dict(x=x, a=a, b=b, t=t, da=da.sum(0), dx=dx, y=y)
    if rank == 16 and aligned:
        function, c = kernel("lora_rows_columns", rank, X=dtype, PIECES=pieces)
        parts, share = blocks(features, c["BLOCK_C"]), c["BLOCK_T"]
        u = torch.full((parts, tokens, rank), torch.nan)
        db = torch.full((blocks(tokens, share), features, rank), torch.nan)
        function[(parts * len(db),)](u, db, x, of_b, t, tokens, features, rank, share, features, features, b_piece, ranks,
                                     tokens * rank, features * rank, 2.0, 0.5, **c)
        found |= dict(u=u.sum(0), db=db.sum(0))
    numpy.savez(path, **{k: v.float() for k, v in found.items()})
"""
# tokens, features, rank, adapters, rate of dropout
QUICK = [
    (70, 264, 16, 3, 0.0),
    (40, 72, 16, 2, 0.25),
    (33, 50, 16, 1, 0.5, "bf16"),
    (20, 136, 32, 1, 0.0, "fp16", "fp16"),
]


@cases(QUICK)
def test_kernels_interpreted(case, interpreted):
    (_, _, rank, adapters, rate, *types), got = case, {k: v.double() for k, v in interpreted.items()}
    x, t, a = got["x"], got["t"], got["a"]
    of_pieces = 2**-20 if not types else 2**-18
    parts = [slice(j * rank, (j + 1) * rank) for j in range(adapters)]
    seeds = [(j + 1) * 12345678901 for j in range(adapters)]

    def masked(tensor, seed):
        return dropped(tensor, seed, rate) * (1 - rate)

    def near(name, truth, bound):
        assert float((got[name] - truth).abs().max()) <= bound * float(truth.abs().max()), name

    near("t", torch.cat([masked(x, seed) @ a[part].t() for part, seed in zip(parts, seeds)], 1) * 2, of_pieces)
    near("da", torch.cat([t[:, part].t() @ masked(x, s) for part, s in zip(parts, seeds)]) * 0.5, of_pieces)
    truth = x + 0.5 * sum(masked(t[:, part] @ a[part], seed) for part, seed in zip(parts, seeds))
    near("dx", truth, 2**-10)
    near("y", t[:, :rank] @ got["b"], 2**-10)
    if "u" in got:
        near("u", x @ got["b"].t() * 2, of_pieces)
        near("db", x.t() @ t[:, :rank] * 0.5, of_pieces)
