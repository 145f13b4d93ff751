"""The log_probs kernels, in Triton's interpreter on CPU tensors."""

import itertools

import torch
from checks import assert_as_the_formula
from interpreted import cases
from pairs import pairs_of

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.losses.log_probs
from interpreter import find
from liger_ops.kernels.losses._flags import MOST_SKEW
nan, SKEW = float("nan"), MOST_SKEW.value

def run(path, n, count, capped, split, dtype="fp32", extras=0, first=0):
    # The columns are classes from `first` on; one class more precedes and follows them if there are more.
    torch.manual_seed(0)
    rows, inner, aligned, words = 5, 3, n % 8 == 0, 2 if n % 3 else 1
    logits = (torch.randn(rows, n) * 3).to(dict(fp32=torch.float32, fp16=torch.float16)[dtype])
    index = torch.randint(n, (rows, count))
    index[:, -1] = index[:, 0]
    index += first
    if first:
        index[3, 0], index[4, -1] = 0, first + n
    logits[0, ::3] = logits[0].max()  # several maxima
    index[1] = index[2, 0] = -100
    wide = torch.cat([logits, logits], 1) if aligned else logits
    ids = index.to(torch.int64 if words == 2 else torch.int32).view(torch.int32)
    temperature, cap = 0.7, 5.0 if capped else 1.0
    classes = first + n + (1 if first else 0)
    options = (first, classes, words, -100, 1.4426950408889634 / temperature, 1 / temperature, cap)
    strides = (inner * wide.shape[1], wide.shape[1])
    outs = [torch.full(shape, nan) for shape in ((rows, count), (rows,), (rows, 3), (rows, count), (rows,), (rows,))]
    outs.append(torch.full((rows, count), 7, dtype=torch.int8))
    choices = dict(X=dtype, CAPPED=capped, EXTRAS=extras)
    shares = torch.full((rows, 128, 6), nan)
    flags = 3 + 32 * 7

    v = find("log_probs_fwd").pick(choices, n, aligned)
    c = v.constexprs
    end = n + SKEW * c["SKEWED"]
    part = -(-end // 2 // 8) * 8 if split else 0
    parts = -(-end // part) if split else 1
    v.kernel.function[(rows * parts,)](*outs, shares, wide, ids, n, part, inner, count, *strides, *options, flags, **c)
    if split:
        v = find("log_probs_combine").pick(choices, n, False)
        v.kernel.function[(rows,)](*outs, shares, wide, ids, n, parts, inner, count, *strides, *options, flags, **v.constexprs)
    grad, grad_entropy = torch.randn(rows, count), torch.randn(rows)
    found = dict(logits=logits.float(), index=index, grad=grad, grad_entropy=grad_entropy, log_probs=outs[0], entropy=outs[1],
                 mean_logits=outs[4], log_squares=outs[5], is_top1=outs[6])
    choices = dict(X=dtype, CAPPED=capped)
    for name, flags in (("both", 12), ("first", 4), ("second", 8), ("others", 16)):
        v = find("log_probs_bwd").pick(choices, n, aligned)
        c = v.constexprs
        dx = wide.clone()
        spans = -(-(n + SKEW * c["SKEWED"]) // (c["BLOCK_N"] * c["BLOCKS"]))
        v.kernel.function[(rows * spans,)](dx, dx, ids, outs[2], outs[3], grad, grad_entropy, n, inner, count, *strides, *strides,
                                           *options, flags, **c)
        assert torch.equal(dx[:, n:], wide[:, n:])
        found[name] = dx[:, :n].float()
    numpy.savez(path, **found)
"""
# Classes, ids, softcap, whether several programs share a row, dtype, extra results, and the first class.
PLAIN = [[40, 2056, 4104, 1003, 5003], [1, 20], [0, 1], [False, True]]
EXTRAS = [[40, 4104, 5003], [3], [0, 1], [False, True], ["fp32"], [1], [0]]
PARTS = [[40, 5003], [3], [0, 1], [True], ["fp32"], [1], [300]]
QUICK = [
    *[*pairs_of(*PLAIN), *pairs_of(*EXTRAS), *pairs_of(*PARTS)],
    *[(5003, 3, 0, False, "fp16"), (2560, 3, 0, True, "fp16"), (4104, 20, 0, True, "fp16", 1, 0)],
]
THOROUGH = [case for axes in (PLAIN, EXTRAS, PARTS) for case in itertools.product(*axes)]


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    n, _, capped, _, *rest = case
    dtype, extras, first = [*rest, *("fp32", 0, 0)[len(rest) :]]
    got = interpreted
    index = torch.where(got["index"] == -100, -100, got["index"] - first)
    counted, here = index != -100, (index >= 0) & (index < n)
    rows, columns = counted.any(-1), torch.where(here, index, n)
    parts = {"both": (1, 1), "first": (1, 0), "second": (0, 1)}

    def results(x, grad, grad_entropy):
        z = (5 * torch.tanh(x / 5) if capped else x) / 0.7
        logs, lse = z.log_softmax(-1), z.logsumexp(-1)
        chosen = logs.gather(-1, index.clamp(0, n - 1))
        entropy = torch.where(rows, -(logs.exp() * logs).sum(-1), 0)
        found = dict(log_probs=chosen[here], entropy=entropy, mean_logits=torch.where(rows, z.mean(-1), 0))
        found["log_squares"] = torch.where(rows, (2 * z).logsumexp(-1) - 2 * lse, 0)
        # An id of another part of the classes only pulls on the sum of exponentials.
        taken = torch.where(here, chosen, -lse[:, None])
        for name, (f, h) in parts.items():
            upstream = f * torch.where(counted, grad, 0), h * grad_entropy
            (found[name],) = torch.autograd.grad((taken, entropy), x, upstream, retain_graph=True)
        (others,) = torch.autograd.grad(-torch.where(rows, lse, 0).sum(), x)
        found["others"] = torch.cat([others, others[:, :1]], 1).scatter(1, columns, 0.0)[:, :n]
        return found

    ours = [("log_probs", got["log_probs"][here]), ("entropy", got["entropy"])]
    assert not got["log_probs"][~counted].any()
    if extras:
        ours += [(name, got[name]) for name in ("mean_logits", "log_squares")]
        largest = got["logits"].argmax(-1, keepdim=True)
        assert torch.equal(got["is_top1"].bool(), here & (index == largest))
    # NumPy's file has fp32.
    ours += [(name, got[name].half() if dtype == "fp16" else got[name]) for name in (*parts, "others")]
    assert_as_the_formula(ours, results, [got["logits"], got["grad"], got["grad_entropy"]])
