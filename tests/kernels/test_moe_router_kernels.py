"""The moe_router kernels, in Triton's interpreter on CPU tensors."""

import itertools

import torch
from checks import assert_as_the_formula
from interpreted import cases

from liger_ops import functional as F

reference = F.moe_router.reference

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.moe.moe_router
from interpreter import find

def run(path, n, top_k, score, normalize, groups, top_groups, extras):
    torch.manual_seed(0)
    nan, rows, programs = float("nan"), 37, 2
    logits, bias, weight = 3 * torch.randn(rows, n), torch.randn(n), (torch.rand(rows) < 0.7) * 1.5
    scored = (0, 1, 512)[score]
    given = torch.randint(0, n, (rows, top_k))
    if extras == 3:
        given[3, 0], given[4, 1], given[5, 2], given[6] = -1, n, 2**32 + 1, -(2**63)
        weight[3:7] = 0
    # extras: a bias and weights of tokens, or experts, or experts that do not exist of tokens that do not count.
    flags = scored + 2 * normalize + 4 + (0, 128 + 256, 1024, 1024 + 256)[extras] + 8 * (groups == 1 and not extras and score != 2)
    tensors = [torch.full(s, nan) for s in ((rows, top_k), (programs, n), (programs, n), (programs,))]
    weights, counts, sums, squares = tensors
    index = torch.full((rows, top_k), -1)
    v = find("moe_router_fwd").pick(dict(X="fp32", GROUPED=int(groups > 1)), n, False)
    v.kernel.function[(programs,)](weights, index, counts, sums, squares, logits, bias, weight, given, rows, n, top_k, groups,
                                   n // groups, top_groups, 1.5, 1e-20, flags, **v.constexprs)
    grad, of_scores, of_z = torch.randn(rows, top_k), torch.randn(n), torch.randn(1)
    if extras == 3:
        grad[3:7] = 0
    v = find("moe_router_bwd").pick(dict(X="fp32"), n, False)
    dx = torch.full((rows, n), nan)
    flags = scored + 2 * normalize + 16 + 32 + 64 + 256 * (extras in (1, 3))
    v.kernel.function[(-(-rows // v.constexprs["ROWS"]),)](dx, grad, of_scores, of_z, logits, index, weight, rows, n, top_k, 1.5,
                                                           1e-20, flags, **v.constexprs)
    numpy.savez(path, logits=logits, bias=bias, weight=weight, weights=weights, index=index, given=given, tokens=counts.sum(0),
                scores=sums.sum(0), z=squares.sum(0), grad=grad, of_scores=of_scores, of_z=of_z, dx=dx)
"""
QUICK = [
    *itertools.product([32, 60], [4], [0, 1], [0, 1], [1], [1], [0, 1]),
    (256, 8, 1, 1, 8, 4, 1),
    (16, 3, 0, 1, 16, 5, 0),
    (6, 2, 0, 1, 2, 2, 1),
    *itertools.product([60], [4], [2], [0, 1], [1], [1], [0, 1, 2]),
    (32, 3, 2, 1, 8, 4, 1),
    (20, 4, 0, 1, 1, 1, 2),
    (20, 4, 1, 0, 1, 1, 2),
    (20, 4, 0, 1, 1, 1, 3),
]


@cases(QUICK)
def test_kernels_interpreted(case, interpreted):
    _, top_k, score, normalize, groups, top_groups, extras = case
    got = interpreted
    bias, weight = got["bias"] if extras == 1 else None, got["weight"] if extras in (1, 3) else None
    options = dict(normalize=bool(normalize), scale=1.5, groups=groups, top_groups=top_groups, statistics=True)
    exists = (got["given"] >= 0) & (got["given"] < got["logits"].shape[1])
    options["experts"] = got["given"].where(exists, 0) if extras >= 2 else None
    if extras == 3:
        assert not exists.all() and not got["weights"][~exists].any()
        assert torch.equal(got["index"], got["given"].where(exists, -1))
    names = ("weights", "tokens", "scores", "z")

    def results(x, *upstream):
        found = reference(x, top_k, bias, weight, ("softmax", "sigmoid", "sqrtsoftplus")[score], **options)
        assert extras == 3 or torch.equal(got["index"], found.experts)
        (dx,) = torch.autograd.grad((found.weights, found.scores, found.z), x, upstream)
        values = {name: getattr(found, name) for name in names} | dict(dx=dx)
        # The other weights of a token of which an expert does not exist have a smaller sum.
        return values | ({"weights": values["weights"].where(whole, got["weights"])} if extras == 3 else {})

    whole = exists.all(1, keepdim=True)
    inputs = [got["logits"], got["grad"], got["of_scores"], got["of_z"][0]]
    assert_as_the_formula([(name, got[name]) for name in (*names, "dx")], results, inputs)
