"""The kernels of kl_div, jsd and tvd, in Triton's interpreter on CPU tensors."""

import itertools

import torch
from checks import assert_as_the_formula
from interpreted import cases
from pairs import pairs_of

from liger_ops import functional as F

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.losses.divergence
from interpreter import find
nan = float("nan")

def run(path, kind, shape, reduced, labelled, dtype="fp32"):
    torch.manual_seed(0)
    rows, n, inner = shape
    logs = kind not in (0, 5)
    make = lambda: 2 * torch.randn(rows, n)
    x = make().log_softmax(-1) if kind != 5 else make().softmax(-1)
    t = make().log_softmax(-1) if logs else make().softmax(-1)
    x, t = (v.to(dict(fp32=torch.float32, fp16=torch.float16)[dtype]) for v in (x, t))
    # Without levels, contiguous; with two, the input's rows lie in wider ones.
    one_row = inner == 0
    wide = torch.cat([x, x], 1) if not one_row else x
    y = torch.randint(3, (rows,))
    y[::2] = -100
    words = (y if n % 2 else y.int()).view(torch.int32)
    labels = (words, 2 if n % 2 else 1) if labelled else (words, 0)
    aligned = n % 8 == 0 or one_row
    parameter = 0.25 if kind == 4 else 1e-10
    walk = (1, 0, rows * n, 0) if one_row else (rows, n, n, inner)
    sizes = (*walk, rows, n)
    flat, of_wide = ((0, 0), (0, 0)) if one_row else ((inner * n, n), (inner * 2 * n, 2 * n))
    choices = dict(X=dtype, REDUCED=int(reduced))
    def variant(name):
        return find(name).pick(choices, walk[2], aligned, walk[0])
    def grid(c):
        return -(-walk[0] // c["BLOCK_M"]) * -(-walk[2] // (c["BLOCK_N"] * c["BLOCKS"]))
    v = variant("divergence_fwd")
    count = grid(v.constexprs)
    losses = torch.full((rows, n), nan) if not reduced else torch.full((count,), nan)
    v.kernel.function[(count,)](losses, wide, t, labels[0], *sizes, *flat, *of_wide, *flat, labels[1], -100, kind, parameter,
                                **v.constexprs)
    loss, divisor = torch.full((), nan), torch.full((), nan)
    if reduced:
        s = find("divergence_sum").pick(dict(LABELLED=int(labelled)), 1, False, 7)
        s.kernel.function[(1,)](loss, divisor, losses, labels[0], count, rows, 3, labels[1] or 1, -100, 3,
                                **s.constexprs | dict(BLOCK=4))
    grad = torch.randn(()) if reduced else torch.randn(rows, n)
    v = variant("divergence_bwd")
    dx = t.clone()
    v.kernel.function[(grid(v.constexprs),)](dx, grad, divisor, wide, dx, labels[0], *sizes, *flat, *flat, *of_wide, *flat,
                                             labels[1], -100, kind, parameter, int(reduced), **v.constexprs)
    numpy.savez(path, x=x.float(), t=t.float(), y=y, loss=loss if reduced else losses, divisor=divisor, grad=grad, dx=dx.float())
"""
# (rows, columns, rows of the inner level); 0: contiguous. With labels, such rows are at least a tile long.
SHAPES = {
    "one row": (5, 2057, 0),
    "narrow rows": (7, 40, 4),
    "long rows": (3, 2056, 3),
    "rows of any alignment": (6, 1030, 2),
}
ALL = [range(6), SHAPES.values(), [True, False], [True, False]]
QUICK = [*pairs_of(*ALL), *itertools.product([1, 5], [SHAPES["one row"]], [True], [True], ["fp16"])]
THOROUGH = [*itertools.product(*ALL), *itertools.product([0, 2, 3, 4], [SHAPES["one row"]], [True], [True], ["fp16"])]


FUNCTIONS = {
    0: F.kl_div.reference,
    1: lambda *t, **o: F.kl_div.reference(*t, log_target=True, **o),
    2: lambda *t, **o: F.jsd.reference(*t, beta=0.0, **o),
    3: lambda *t, **o: F.jsd.reference(*t, beta=1.0, **o),
    4: lambda *t, **o: F.jsd.reference(*t, beta=0.25, **o),
    5: F.tvd.reference,
}


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    kind, _, reduced, labelled, *dtype = case
    got = interpreted
    y = got["y"] if labelled else None
    divisor = 3 * (int((y != -100).sum()) if labelled else 1) if reduced else 1
    if reduced:
        assert got["divisor"] == divisor

    def results(x, t, grad):
        losses = FUNCTIONS[kind](x, t, y, reduction="none")
        loss = losses.sum() / divisor if reduced else losses
        return dict(loss=loss, dx=torch.autograd.grad(loss, x, grad)[0])

    # NumPy's file has fp32.
    dx = got["dx"].half() if dtype else got["dx"]
    assert_as_the_formula([("loss", got["loss"]), ("dx", dx)], results, [got["x"], got["t"], got["grad"]])
