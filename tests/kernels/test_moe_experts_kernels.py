"""The moe_experts kernels, in Triton's interpreter on CPU tensors."""

import torch
from checks import assert_no_worse
from interpreted import cases

from liger_ops import functional as F

INTERPRETED = """
import torch
import liger_ops.kernels.moe.moe_rows
from moe_on_interpreter import layer, save, shared
from liger_ops.kernels.gated.geglu import TANH

def run(path, size, dtype, activation, transposed, interleaved, bias, weight_before, counts, kind, limit):
    torch.manual_seed(0)
    tokens, hidden, inner, experts, choices = size
    def make(*shape):
        return (torch.randn(shape) / 2).to(getattr(torch, dtype))
    x, dout = make(tokens, hidden + 8)[:, :hidden], make(tokens, hidden)
    gate_up = make(experts, hidden, 2 * inner) if transposed else make(experts, 2 * inner, hidden)
    down = make(experts, inner, hidden) if transposed else make(experts, hidden, inner)
    biases = [make(experts, 2 * inner).float(), make(experts, hidden).float()] if bias else []
    index, weight = torch.tensor(counts), None
    if tokens % 2:
        index = index.int()
    if not counts:
        index = torch.randint(-1, experts + 1, (tokens, choices))
        weight = torch.rand(tokens, choices)
        if tokens % 2:
            index = index.int()
    tanh = activation == "gelu_tanh"
    flags = shared.INTERLEAVED.value * interleaved | shared.WEIGHT_FIRST.value * weight_before | TANH.value * tanh
    gate = shared.SILU.value if activation == "silu" else shared.GELU.value
    options = (1.5 if activation == "silu" else 1.0, limit or float("inf"), 0.25)
    results = layer(x, gate_up, down, index, weight, biases, dout, flags, gate, transposed, options, kind)
    given = dict(x=x, gate_up=gate_up, down=down, index=index, given_dout=dout)
    given |= {} if weight is None else {"weight": weight}
    given |= dict(zip(("gate_up_bias", "down_bias"), biases))
    save(path, results | {f"in_{k}": v for k, v in given.items()})
"""
# size, dtype, activation, transposed, interleaved, bias, weight_before, counts, kind, limit
QUICK = [
    ((70, 16, 24, 3, 2), "float32", "silu", False, False, False, False, (), "", None),
    ((301, 16, 8, 2, 1), "float32", "gelu", False, True, True, False, (), "", 0.75),
    ((70, 24, 40, 3, 3), "float32", "gelu_tanh", True, False, True, False, (), "", None),
    ((33, 16, 8, 5, 2), "float32", "silu", True, True, True, False, (), "", 0.5),
    ((33, 7, 5, 3, 2), "float32", "silu", True, False, False, True, (), "", None),
    ((150, 16, 8, 4, 1), "float32", "silu", False, False, True, False, (131, 0, 7, 3), "", None),
    ((33, 7, 5, 3, 1), "float32", "silu", False, False, False, False, (-5, 31, 2**31 - 1), "", None),
    ((34, 7, 5, 3, 1), "float32", "silu", False, False, False, False, (2**62, -(2**62), 2**62), "", None),
    ((70, 72, 136, 3, 2), "float16", "silu", False, True, False, False, (), "_hopper", 0.75),
    ((40, 72, 136, 3, 2), "float16", "gelu", True, False, True, False, (), "_hopper", None),
    ((40, 72, 136, 3, 2), "float16", "gelu_tanh", True, True, False, True, (), "_hopper", None),
    ((70, 16, 24, 3, 2), "float32", "silu", False, False, False, False, (), "grouped GEMM", None),
    ((40, 16, 8, 3, 1), "float32", "silu", False, True, False, True, (), "grouped GEMM", 0.75),
    ((40, 16, 8, 3, 1), "float32", "silu", True, True, False, False, (0, 30, 1), "grouped GEMM", None),
]
THOROUGH = [
    ((20, 7, 5, 3, 2), "float32", "gelu", False, False, True, False, (), "", None),
    ((40, 16, 8, 3, 1), "float32", "silu", False, True, False, True, (), "", 0.75),
    ((20, 16, 8, 3, 1), "float32", "silu", True, True, False, False, (0, 30, 1), "", None),
    ((70, 72, 136, 3, 2), "float16", "silu", False, False, True, False, (), "", None),
    ((20, 7, 5, 3, 2), "float16", "silu", False, False, True, False, (), "_hopper", None),
    ((301, 16, 8, 2, 1), "float32", "gelu", False, True, True, False, (), "grouped GEMM", 0.75),
    ((33, 16, 264, 5, 2), "float32", "silu", True, True, True, False, (), "grouped GEMM", 0.5),
    ((70, 1032, 8, 3, 2), "float32", "gelu_tanh", True, False, False, False, (), "grouped GEMM", None),
    ((170, 16, 8, 4, 1), "float32", "silu", False, False, True, False, (131, 0, 7, 3), "grouped GEMM", None),
]


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    _, _, activation, transposed, interleaved, bias, weight_before, counts, _, limit = case
    got = interpreted
    options = dict(
        activation=activation, transposed=transposed, interleaved=interleaved,
        limit=limit, alpha=1.5 if activation == "silu" else 1.0, up_offset=0.25,
    )  # fmt: skip
    names = ["x", "gate_up", "down"] + ([] if counts else ["weight"]) + (["gate_up_bias", "down_bias"] if bias else [])
    formula = (F.moe_experts_sorted if counts else F.moe_experts).reference
    options |= {} if counts else dict(weight_before=weight_before)
    dtype = got["in_x"].dtype
    index = got["in_index"]
    if counts:  # they may be wrong
        rows = len(got["in_x"])
        ends = index.long().clamp(0, rows).cumsum(0).clamp(max=rows)
        index = ends.diff(prepend=torch.zeros(1, dtype=ends.dtype))

    def run(wide):
        tensors = {n: got[f"in_{n}"].to(wide or dtype).requires_grad_() for n in names}
        tensors |= {"tokens_per_expert" if counts else "index": index}
        out = formula(**tensors, **options)
        found = torch.autograd.grad(out, [tensors[n] for n in names], got["in_given_dout"].to(out.dtype))
        return {"out": out} | {f"d{n}": g for n, g in zip(names, found)}

    eager, oracle = run(None), run(torch.float64)
    for name in oracle:
        assert_no_worse(name, got[name].to(dtype), eager[name], oracle[name])


@cases(*([case for case in tier if not case[7]] for tier in (QUICK, THOROUGH)))
def test_routing_data_interpreted(case, interpreted):
    size, got = case[0], interpreted
    experts, choices = size[3], size[4]
    ids = got["in_index"].reshape(-1).long()
    known = (ids >= 0) & (ids < experts)
    order = torch.where(known, ids, experts).argsort(stable=True)[: int(known.sum())]
    count = len(order)
    assert torch.equal(got["order"][:count].long(), order)
    assert torch.equal(got["tokens"][:count].long(), order // choices)
    position = torch.full_like(ids, -1)
    position[order] = torch.arange(count)
    assert torch.equal(got["position"].long(), position)
    counts = ids[known].bincount(minlength=experts)
    assert got["offsets"].tolist() == [0, *counts.cumsum(0).tolist()]
    starts = [0, *counts.cumsum(0).tolist()]
    tiles = [(e, at) for e, n in enumerate(counts.tolist()) for at in range(starts[e], starts[e] + n, 128)]
    assert got["tiles"][0] == len(tiles)
    assert got["tiles"][1 : 1 + 2 * len(tiles)].view(-1, 2).tolist() == [list(t) for t in tiles]
