"""The fused_linear_divergence kernels, in Triton's interpreter on CPU tensors."""

import itertools

import torch
from checks import assert_as_the_formula
from interpreted import cases
from pairs import pairs_of

from liger_ops import functional as F

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.losses.fused_linear_divergence
from interpreter import find
from liger_ops.kernels.losses import fused_linear_divergence as module
nan, flag = float("nan"), {k: v.value for k, v in vars(module).items() if type(v).__name__ == "constexpr"}

def run(path, n, kind, capped, split, dtype="fp32", distance=1.0):
    torch.manual_seed(0)
    rows, row = 4, (n + 63) // 64 * 64
    s, t = torch.full((rows, row), nan), torch.full((rows, row), nan)
    s[:, :n] = torch.randn(rows, n) * 3
    t[:, :n] = torch.randn(rows, n) * 3 if distance == 1 else s[:, :n] + distance * torch.randn(rows, n)
    s_bias, t_bias, grad = torch.randn(n), torch.randn(n), torch.randn(rows)
    if distance != 1: t_bias = s_bias
    mask = torch.tensor([1, 0, 1, 1], dtype=torch.uint8)
    entropy, stats = torch.full((rows,), nan), torch.full((5, rows), nan)
    v = find("fused_linear_divergence_rows").pick(dict(X=dtype, KIND=kind, CAPPED=capped), n, True)
    part = 1024 if split else row
    parts = -(-n // part)
    values, shares = torch.full((rows, parts, 2), nan), torch.full((rows, parts, flag["SHARES"]), nan)
    arrived, dlogits = torch.zeros(1 + rows, dtype=torch.int32), torch.full((rows, row), nan, dtype=dict(fp32=torch.float32, fp16=torch.float16)[dtype])
    names = ("HAS_MASK", "HAS_UPSTREAM", "S_BIAS", "T_BIAS") + (("S_CAP", "T_CAP") if capped else ())
    common = sum(flag[name] for name in names)
    options = (1.4426950408889634 / 0.7, 1 / 0.7, 0.3, 1.3, 1.3, 4.0, 4.0)

    def launch(flags, teacher, into):
        v.kernel.function[(rows * parts,)](into, s, teacher, s_bias, t_bias, mask, grad, entropy, stats, values, shares, arrived,
                                           n, part, row, row, into.stride(0), rows, *options, flags | common, **v.constexprs)

    # The parts of a row cannot wait for each other here: one launch per phase.
    keeps, given = flag["KEEPS"] if kind == flag["MIXTURE"] else 0, t.clone()
    phases = flag["SCANS"], flag["VALUES"] | flag["SAVES"], flag["WRITES"]
    for flags in phases if split else [sum(phases)]:
        launch(flags | keeps, t, dlogits)
    if keeps: stats[4] = values[:, :, 1].sum(1)
    again = torch.full_like(dlogits, nan)
    launch(flag["WRITES"] | flag["KNOWN"], given, again)
    assert torch.equal(again[:, :n], dlogits[:, :n]) or keeps
    assert all(t[:, n:].isnan().all() for t in (s, t, dlogits, again))
    in_place = s.clone()
    if dtype == "fp32":
        s, before = in_place, s
        launch(flag["WRITES"] | flag["KNOWN"], given, s)
        assert torch.equal(s[:, :n], again[:, :n])
        s = before
    numpy.savez(path, s=s[:, :n], t=given[:, :n], s_bias=s_bias, t_bias=t_bias, grad=grad, mask=mask, entropy=entropy,
                divergence=values[:, :, 0].sum(1), dlogits=dlogits[:, :n].float(), again=again[:, :n].float())
"""
ALL = [[40, 1024, 5003], [0, 1, 2], [0, 1], [False, True]]
QUICK = [
    *pairs_of(*ALL),
    *((2056, kind, 0, False, "fp16") for kind in range(3)),
    *((2056, kind, 0, True, "fp32", 1e-2) for kind in range(3)),
]
THOROUGH = [*itertools.product(*ALL)]


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    _, kind, capped, _, *dtype = case
    got = interpreted
    mask = got["mask"].double()

    def results(logits, teacher, upstream):
        s, t = (4 * torch.tanh(1.3 * z / 4) if capped else 1.3 * z for z in (logits, teacher))
        s, t = (s / 0.7).log_softmax(-1), (t / 0.7).log_softmax(-1)
        found = F.jsd.reference(s, t, beta=(0.0, 1.0, 0.3)[kind], reduction="none").sum(-1)
        (slope,) = torch.autograd.grad((found * mask * upstream).sum(), logits)
        return dict(divergence=found * mask, entropy=-(s.exp() * s).sum(-1) * mask, dlogits=slope / 1.3)

    # NumPy's file has fp32.
    ours = [("dlogits", got[name].half() if dtype[:1] == ["fp16"] else got[name]) for name in ("dlogits", "again")]
    ours += [(name, got[name]) for name in ("divergence", "entropy")]
    inputs = [got["s"] + got["s_bias"], got["t"] + got["t_bias"], got["grad"]]
    # A slope is a difference of probabilities, or of their products with distances, times the upstream gradient.
    distance = float((inputs[0] - inputs[1]).abs().max()) * 1.3 / 0.7
    scale = float(got["grad"].abs().max()) * (max(1.0, distance) if kind else 1.0)
    assert_as_the_formula(ours, results, inputs, scales=dict(dlogits=scale))
