"""The kernels of fused_linear_cross_entropy around its GEMMs, in Triton's interpreter on CPU tensors."""

import torch
from checks import assert_as_the_formula
from interpreted import cases

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.losses.fused_linear_cross_entropy
from interpreter import find

def run(path, rows, n, columns, words, ignored):
    torch.manual_seed(0)
    target = torch.randint(n, (rows,)) % 5
    # 3 + 2^40 reads as 3 if only the low word is read.
    target[::4], target[1], target[2], target[3] = ignored, n, -3, 3 + (1 << 40 if words == 2 else 0)
    packed = target.to(torch.int64 if words == 2 else torch.int32).view(torch.int32)
    dlogits, taken = torch.randn(rows, n + 3).half(), torch.full((rows,), float("nan"))
    x, dweight = torch.randn(rows, columns).half(), torch.randn(n, columns).half()
    before = dlogits.clone(), dweight.clone()
    classes, order = torch.full((2, rows), -7, dtype=torch.int32)

    def launch(name, choices, grid, aligned, *args):
        kernel = find("fused_linear_cross_entropy_" + name)
        variant = kernel.pick(choices, n, aligned)
        kernel.function[(grid(variant.constexprs),)](*args, **variant.constexprs)

    blocks, halves = lambda c: -(-rows // c["BLOCK"]), {"X": "fp16"}
    launch("take_targets", halves, blocks, False, dlogits, packed, taken, rows, n, n + 3, words, ignored, 0)
    launch("order_targets", {"WORDS": words}, blocks, False, packed, classes, order, rows, n, ignored, 0)
    launch("add_targets", halves, lambda c: rows * -(-columns // c["BLOCK_N"]), columns % 8 == 0, dweight, x, taken, classes,
           order, rows, columns, columns, 1, columns, 0.5)
    numpy.savez(path, dlogits=dlogits, taken=taken, dweight=dweight, target=target, x=x, dlogits_before=before[0],
                dweight_before=before[1], classes=classes, order=order)
"""


QUICK = [(9, 7, 8, 1, -100), (70, 300, 1032, 2, 2), (33, 40, 300, 1, 2), (1100, 20, 5, 2, -100)]
THOROUGH = [
    (*sizes, words, ignored)
    for sizes in ((9, 7, 8), (70, 300, 1032), (33, 40, 300), (1100, 20, 5))
    for words in (1, 2)
    for ignored in (-100, 2)
]


@cases(QUICK, THOROUGH)
def test_targets_in_order(case, interpreted):
    _, n, _, _, ignored = case
    got = interpreted
    target = got["target"]
    known = (target >= 0) & (target < n) & (target != ignored)
    classes, order = torch.where(known, target, -1).int().sort(stable=True)
    assert torch.equal(got["classes"], classes) and torch.equal(got["order"], order.int())


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    rows, n, _, _, ignored = case
    got = interpreted
    target, expected = got["target"], got["dlogits_before"].clone()
    known = ((target >= 0) & (target < n) & (target != ignored)).nonzero().flatten()
    taken = torch.zeros(rows)
    taken[known] = expected[known, target[known]].float()
    expected[known, target[known]] = 0
    assert torch.equal(got["taken"], taken) and torch.equal(got["dlogits"], expected)

    def results(weight, taken, x):
        return dict(dweight=weight.index_add(0, target[known], 0.5 * taken[known, None] * x[known]))

    assert_as_the_formula([("dweight", got["dweight"])], results, [got["dweight_before"], taken, got["x"]])
