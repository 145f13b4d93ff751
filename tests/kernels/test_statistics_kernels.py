"""The kernels around the GEMM that keeps statistics of logits, in Triton's interpreter on CPU tensors. No operator launches them
there, because the GEMM needs a GPU."""

import pytest
import torch

import liger_ops.kernels as tables
from liger_ops.kernels.losses import log_probs as flags
from liger_ops.kernels.losses._flags import MOST_SKEW
from liger_ops.kernels.losses.linear_statistics import SHARE, TILE_N
from tests.support.pairs import pairs_of

SHARES = SHARE.value
LOG2E = 1.4426950408889634


def shares_of(logits, factor):
    """What the GEMM keeps of each tile."""
    tiles = logits.split(TILE_N, 1)
    out = torch.full((len(logits), len(tiles), SHARES), float("nan"))
    for i, v in enumerate(tiles):
        peak, first = v.max(1)
        exponent = (v - peak[:, None]) * factor
        e = exponent.exp2()
        kept = [peak, e.sum(1), (e * exponent).sum(1), (e * e).sum(1), v.sum(1)]
        out[:, i, :5] = torch.stack(kept, 1)
        out[:, i, 5] = (first + i * TILE_N).int().view(torch.float32)
    return out


@pytest.mark.parametrize("device", ["interpreted"])
@pytest.mark.parametrize("n, ids, extras, part", pairs_of([5, 193, 600], [1, 3], [0, 1], [False, True]))
def test_results(n, ids, extras, part, device):
    """Of all classes, or of a part of them."""
    torch.manual_seed(0)
    rows, columns, temperature, scale = 4, 40, 0.7, 0.5
    x, weight = torch.randn(rows, columns).bfloat16(), torch.randn(n, columns).bfloat16()
    first, classes = (3, n + 7) if part else (0, n)
    index = torch.randint(first, first + n, (rows, ids))
    index[1], index[2, 0] = -100, classes + 4
    if part:
        index[3, 0] = 1  # on another rank
    logits = scale * x.double() @ weight.double().T
    best = logits.argmax(1)
    index[0, 0] = best[0] + first
    factor = LOG2E / temperature
    given = torch.full((rows, ids), float("nan"))
    place = (first, classes, 2, -100)
    chosen_of = tables.find("linear_chosen").pick({"X": "bf16"}, columns, True)
    words = index.view(torch.int32)
    chosen_of.kernel.function[(rows * ids,)](
        given, x, weight, words, n, columns, ids, columns, columns, *place, scale, **chosen_of.constexprs
    )
    log_probs, chosen = torch.full((2, rows, ids), float("nan"))
    entropy, mean, squares = torch.full((3, rows), float("nan"))
    stats, top1 = torch.full((rows, 3), float("nan")), torch.full((rows, ids), 7, dtype=torch.int8)
    shares = shares_of(logits.float(), factor)
    wanted = flags.WITH_ENTROPY.value | flags.WITH_GRAPH.value
    if extras:
        wanted |= flags.WITH_MEAN_LOGITS.value | flags.WITH_SQUARES.value | flags.WITH_TOP1.value
    combine = next(v for v in tables.find("linear_statistics_combine").variants() if v.constexprs["EXTRAS"] == extras)
    combine.kernel.function[(rows,)](
        log_probs, entropy, stats, chosen, mean, squares, top1, shares, words, given, n, shares.shape[1], ids, *place, factor,
        1 / temperature, 1.0, wanted, **combine.constexprs,
    )  # fmt: skip
    z = logits / temperature
    column, ignored, stray = index - first, index == -100, index >= classes
    here = (column >= 0) & (column < n) & ~ignored & ~stray
    of_ids = logits.gather(1, column.where(here, 0)).where(here, 0)
    expected = (of_ids / temperature - z.logsumexp(1, True)).masked_fill(ignored, 0).masked_fill(stray, torch.nan)
    skipped = ignored.all(1)
    p = z.softmax(1)
    found = {
        "log_probs": (log_probs, expected),
        "chosen": (chosen, of_ids.masked_fill(stray, torch.nan).masked_fill(skipped[:, None], 0)),
        "entropy": (entropy, -(p * z.log_softmax(1)).sum(1).masked_fill(skipped, 0)),
        "peak": (stats[:, 0], logits.amax(1).masked_fill(skipped, 0)),
        "total": (stats[:, 1], (z - z.amax(1, True)).exp().sum(1).masked_fill(skipped, 0)),
    }
    if extras:
        found["mean_logits"] = mean, z.mean(1).masked_fill(skipped, 0)
        found["log_sum_sq_probs"] = squares, p.square().sum(1).log().masked_fill(skipped, 0)
        assert torch.equal(top1 != 0, (column == best[:, None]) & here)
    # Sums of n terms in fp32.
    for name, (mine, truth) in found.items():
        torch.testing.assert_close(mine.double(), truth, rtol=1e-5, atol=1e-5, equal_nan=True, msg=name)


@pytest.mark.parametrize("device", ["interpreted"])
@pytest.mark.parametrize("n, ids, of_others, in_place", pairs_of([5, 193, 600], [1, 3], [False, True], [False, True]))
def test_gradients(n, ids, of_others, in_place, device):
    """From 16-bit logits that are relative to their tile's largest: near the largest, nothing is rounded."""
    torch.manual_seed(0)
    rows, temperature = 4, 0.7
    wide = -(-n // 64) * 64
    logits = 40 * torch.randn(rows, n)
    index = torch.randint(n, (rows, ids))
    index[0] = logits[0].argmax()
    index[1] = -100
    shares = shares_of(logits, LOG2E / temperature)
    stored = torch.full((rows, wide), float("nan"), dtype=torch.bfloat16)
    stored[:, :n] = logits - shares[:, :, 0].repeat_interleave(TILE_N, 1)[:, :n]
    exact = (logits / temperature).double().requires_grad_()
    logs, counted = exact.log_softmax(1), index != -100
    g, (h, s) = torch.randn(rows, ids) * counted, torch.randn(2, rows) * counted.any(1)
    chosen = logits.gather(1, index.clamp_min(0)) * counted
    p = exact.detach().softmax(1)
    if of_others:
        truth = -p.scatter(1, index.clamp_min(0), 0.0) * counted.any(1, True) / temperature
    else:
        entropy = -(logs.exp() * logs).sum(1)
        (logs.gather(1, index.clamp_min(0)) * g).sum().add((entropy * h + exact.logsumexp(1) * s).sum()).backward()
        truth = exact.grad / temperature
    away = exact.detach() - exact.detach().amax(1, True)
    stats = torch.stack([logits.amax(1), away.exp().sum(1).float(), (p * away).sum(1).float()], 1)
    of_results = flags.OF_LOG_PROBS.value | flags.OF_ENTROPY.value | flags.OF_LOG_SUM_EXP.value
    wanted = flags.OF_OTHERS.value if of_others else of_results
    out = stored if in_place else torch.full_like(stored, float("nan"))
    variant = tables.find("linear_gradients").pick({"X": "bf16"}, n, n % 8 == 0)
    variant.kernel.function[(rows * -(-(n + MOST_SKEW.value) // 4096),)](
        out, stored, shares, index.view(torch.int32), stats, chosen, g, h, s, n, shares.shape[1], ids, wide, wide, 0, n, 2, -100,
        LOG2E / temperature, 1 / temperature, 1.0, wanted, **variant.constexprs,
    )  # fmt: skip
    # Half an ulp of the gradient, and of a logit at the distance where exp(-d) d is largest.
    torch.testing.assert_close(out[:, :n].double(), truth, rtol=2**-8, atol=2**-9 * 0.4 * float(truth.abs().max()))
    assert torch.equal(out[:, n:].isnan(), torch.ones(rows, wide - n, dtype=torch.bool))
