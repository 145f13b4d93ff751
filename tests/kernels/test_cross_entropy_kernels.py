"""The cross_entropy kernels, in Triton's interpreter on CPU tensors."""

import torch
from checks import assert_as_the_formula
from cross_entropies import reference_with_metrics
from interpreted import cases

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.losses.cross_entropy, liger_ops.kernels.losses.cross_entropy_results
from interpreter import find
from liger_ops.kernels.losses._flags import MOST_SKEW
SKEW = MOST_SKEW.value
BOTH = find("cross_entropy_fwd_bwd")
HAS_WEIGHT, SMOOTH, CAP, STATS, Z, METRICS, ADD_Z, MEAN, FROM, TO, TOTALS, GRAD, COUNT, KNOWN = (2**i for i in range(14))
LOCAL = 2**14
nan = float("nan")

def run(path, n, mean, extras, x="fp32"):
    rows, aligned, words = 3, n % 8 == 0, 2 if mean else 1
    torch.manual_seed(0)
    dtype = dict(fp32=torch.float32, fp16=torch.float16)[x]
    logits, w = (torch.randn(rows, n) * 3).to(dtype), torch.rand(n) + 0.1
    target = torch.randint(n, (rows,))
    target[::4] = -100
    packed = target.to(torch.int64 if words == 2 else torch.int32).view(torch.int32)
    grad = torch.randn(1 if mean else rows)
    options = (0.1, 1e-3, 20.0) if extras else (0.0, 1e-3, 1.0)
    flags = (HAS_WEIGHT | SMOOTH | CAP if extras else 0) | (MEAN if mean else ADD_Z) | Z | METRICS

    halves = 2 if x == "fp32" else 1  # configs count columns in 16-bit units

    def is_split_into_one_part(v):
        matches = v.choices == {"X": x, "EXTRAS": extras} and v.config.aligned == aligned
        return matches and v.config.constexprs["SHARE"] >= (n + SKEW) * halves

    def launch(name, grid, *args, split_rows=False, **choices):
        kernel, choices = find(name), choices or {"X": x, "EXTRAS": extras}
        width = n * halves if name == BOTH.name else n
        variant = kernel.pick(choices, width, aligned)
        if 0 < variant.config.constexprs.get("SHARE", 0) < width:
            variant = kernel.pick(choices, 2**40, False)
        if split_rows:
            variant = next(filter(is_split_into_one_part, kernel.variants()))
        grid = grid(variant.config.constexprs) if callable(grid) else grid
        # Small blocks, so that a few rows fill several.
        small = {"BLOCK": 2} if name == "cross_entropy_sum" else {}
        kernel.function[(grid,)](*args, **variant.constexprs | small)

    def spans(c, columns=n):
        return rows * -(-(columns + SKEW * c.get("SKEWED", 0)) // (c["BLOCK_N"] * c["BLOCKS"]))

    def results(gradient):
        totals, outs = torch.full((2,), nan), [torch.full((), nan) for _ in range(3)]
        loss, z, accuracy, predicted = *(torch.full((rows,), nan) for _ in range(3)), torch.full((rows,), -7)
        partial = torch.full((2, 5), nan)
        def add(flags, known=0):
            head = (*outs, totals, partial, loss, z, accuracy, packed, w)
            launch("cross_entropy_sum", 2, *head, rows, n, -100, flags | known | TO, WORDS=words)
            launch("cross_entropy_sum", 1, *head, 2, n, -100, flags | FROM | (known or TOTALS), WORDS=words)
        gradient(loss, z, accuracy, predicted, totals, add)
        if mean:
            loss, z, accuracy = outs
        return dict(loss=loss, z=z, accuracy=accuracy, predicted=predicted)

    both, shared, scaled = (logits.clone() for _ in range(3))
    # Unaligned rows of the gradient may start at another offset from a 16-byte boundary than their logits.
    offset = 0 if aligned or extras else 1
    dx = torch.full((rows * n + offset,), nan, dtype=dtype)[offset:].view(rows, n)
    def two(loss, z, accuracy, predicted, totals, add):
        stats = torch.full((3, rows), nan)
        shape = (rows, n, rows, 0, n)
        # The loss of each row is stored, as if several programs shared a row.
        launch("cross_entropy_fwd", rows, loss, z, accuracy, predicted, stats, stats, logits, packed, w, w.sum(),
               torch.full((rows, 4), nan), torch.zeros(1 + rows, dtype=torch.int32), rows, n, -(-(n + SKEW) // 8) * 8, *shape[2:],
               words, -100, 0, *options, flags | STATS, X=x, EXTRAS=extras, SHARED=int(not mean and not extras))
        add(flags)
        launch("cross_entropy_bwd", spans, dx, logits, packed, stats, grad, totals, w, w.sum(), *shape, 0, n, words,
               0 if mean else 1, -100, 0, n, *options, flags)
    split = torch.full((rows, n), nan, dtype=dtype)
    def ranks(loss, z, accuracy, predicted, totals, add):
        # The classes are split over two ranks, the second of which has fewer.
        stats, middle, facts = torch.full((3, rows), nan), n * 3 // 4 // 8 * 8, []
        parts = [(0, middle), (middle, n)]
        for first, end in parts:
            c, x_of, w_of = end - first, logits[:, first:end].contiguous(), w[first:end].contiguous()
            facts.append(torch.full((6 if extras else 5, rows), nan))
            launch("cross_entropy_fwd", rows, loss, z, accuracy, predicted, stats, facts[-1], x_of, packed, w_of,
                   w_of.sum(), torch.full((rows, 4), nan), torch.zeros(1 + rows, dtype=torch.int32), rows, c,
                   -(-(c + SKEW) // 8) * 8, rows, 0, c, words, -100, first, *options, flags | LOCAL,
                   X=x, EXTRAS=extras, SHARED=0)
        assert loss.isnan().all()
        weights = torch.stack([w[first:end].sum() for first, end in parts])
        launch("cross_entropy_combine", 2, loss, z, accuracy, predicted, stats, stats, stats, torch.stack(facts), packed,
               w, weights, rows, 2, n, -100, *options[:2], flags | STATS, WORDS=words)
        add(flags)
        for first, end in parts:
            c, x_of, w_of = end - first, logits[:, first:end].contiguous(), w[first:].contiguous()
            out = torch.full((rows, c), nan, dtype=dtype)
            # w_of is the weight from this rank's first class on; classes of other ranks lie before and after it.
            whole = torch.cat([w[:first], w_of])
            launch("cross_entropy_bwd", lambda config: spans(config, c), out, x_of, packed, stats, grad, totals, whole[first:], w.sum(), rows, c,
                   rows, 0, c, 0, c, words, 0 if mean else 1, -100, first, n, *options, flags)
            split[:, first:end] = out
    def one(loss, z, accuracy, predicted, totals, add, x=both, split_rows=False):
        add(flags & ~(Z | METRICS) | COUNT)
        launch("cross_entropy_fwd_bwd", rows, loss, z, accuracy, predicted, x, x, packed, grad, totals, w, w.sum(),
               torch.full((rows, 4), nan), torch.zeros(1 + rows, dtype=torch.int32), rows, n, rows, 0, n, 0, n, words,
               0 if mean else 1, -100, *options, flags | GRAD, split_rows=split_rows)
        add(flags, KNOWN)
    first, second = results(two), results(one)
    # The interpreter runs programs one after another, so none may wait for another: one part per row.
    fourth = results(ranks)
    some = any(map(is_split_into_one_part, BOTH.variants()))
    third = results(lambda *a: one(*a, x=shared, split_rows=True)) if some else second
    launch("cross_entropy_scale", spans, scaled, grad, n, rows, 0, n, 0 if mean else 1, X=x)
    logits, dx, both, scaled, shared, split = (t.float() for t in (logits, dx, both, scaled, shared, split))
    numpy.savez(path, logits=logits, target=target, weight=w, grad=grad, dx=dx, both=both, scaled=scaled,
                shared=shared if some else both, split=split, **{"fourth_" + k: v for k, v in fourth.items()},
                **{"first_" + k: v for k, v in first.items()},
                **{"second_" + k: v for k, v in second.items()}, **{"third_" + k: v for k, v in third.items()})
"""


# Narrow rows, and rows of several tiles. 16-bit logits are stored two per word; fp16 stands in for bf16, for which the
# interpreter has no constants. The last case is too wide for one program to keep.
QUICK = [
    *[(40, True, 0), (40, False, 1), (60, True, 1), (60, False, 0), (5003, False, 1), (9000, True, 0)],
    *[(2560, True, 0, "fp16"), (16392, True, 0, "fp16")],
]
THOROUGH = [
    *[(40, True, 1), (40, False, 0), (2560, True, 1), (2560, False, 0), (9000, False, 1)],
    *[(2001, True, 1), (2001, False, 0), (5003, True, 0), (5003, False, 0, "fp16")],
]


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    n, mean, extras, *x = case
    got = interpreted
    options = dict(label_smoothing=0.1, softcap=20.0) if extras else {}
    weight, names = got["weight"].double() if extras else None, ("loss", "z", "accuracy", "predicted")

    def results(logits, upstream):
        reduction = "mean" if mean else "none"
        found = reference_with_metrics(logits, got["target"], weight, reduction, lse_square_scale=1e-3, **options)
        (dx,) = torch.autograd.grad(found[0], logits, upstream.view(found[0].shape))
        return dict(zip(names, found)) | dict(dx=dx, scaled=logits * upstream.reshape(-1, 1))

    # NumPy's file has fp32.
    made = {name: got[name].half() if x else got[name] for name in ("dx", "both", "shared", "split", "scaled")}
    ours = [("scaled" if name == "scaled" else "dx", t) for name, t in made.items()]
    exact = results(got["logits"].double().requires_grad_(), got["grad"].double())
    for form in ("first", "second", "third", "fourth"):
        ours += [(name, got[f"{form}_{name}"]) for name in ("loss", "z", "accuracy")]
        assert torch.equal(got[f"{form}_predicted"].to(exact["predicted"].dtype), exact["predicted"])
    assert_as_the_formula(ours, results, [got["logits"], got["grad"]])
