"""Helpers for tests of patched tiny models."""

import copy
import io
import math
from collections import defaultdict

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_ops._accuracy import Roundings, rounded
from liger_ops.transformers import apply_liger_kernel, unpatch
from tests.support.models.language_models import clone, make, step, tokens

FUSED = "fused_linear_cross_entropy"
# Of roundings of all parameters.
DRAWS = 4


def patched(name, **options):
    model = make(name, **options)
    report = apply_liger_kernel(model)
    return model, report


def assert_as_exact(run, expected, model, found=None, dtype=torch.float32):
    """Results of two codes for one model: lists, whose tensors share a scale. Each may differ from the exact result by what
    roundings do, as in liger_ops/_accuracy.py, here of all parameters, and once by its own. run: computes the results.
    found: by another code."""
    before, parameters = run(), [*model.parameters()]
    saved, eps = [p.detach().clone() for p in parameters], torch.finfo(dtype).eps
    moved = [0.0] * len(expected)
    for draw in range(DRAWS):
        for p, value in zip(parameters, rounded(saved, dtype, draw)):
            p.data.copy_(value.detach())
        moved = [max(most, apart(*lists)) for most, *lists in zip(moved, before, run(), strict=True)]
    for p, value in zip(parameters, saved):
        p.data.copy_(value)
    for i, (ours, theirs, moves) in enumerate(zip(found or before, expected, moved, strict=True)):
        allowed = 2 * (Roundings.OPERATIONS * moves + eps * max(float(t.detach().abs().max()) for t in theirs))
        error = apart(ours, theirs)
        assert error <= allowed, f"list {i}: error {error:.3g}, allowed {allowed:.3g}"


@torch.no_grad()
def apart(ours, theirs):
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(ours, theirs, strict=True))


def own_names(gradients):
    """Without what torch.compile and its checkpointing add."""
    return {name.removeprefix("_orig_mod."): gradient for name, gradient in gradients.items()}


def assert_same_step(model, ids, expected, **arguments):
    """expected: what step() returned for the same model, with other code. Gradients are compared at the scale of the
    largest."""

    def run():
        loss, gradients = step(model, ids, **arguments)
        gradients = own_names(gradients)
        assert gradients.keys() == expected[1].keys()
        return [loss], [gradients[name] for name in expected[1]]

    assert_as_exact(run, ([expected[0]], [*expected[1].values()]), model)


def assert_as_found(found, plain, ids):
    """The results of step() on another model agree with those of the plain one."""

    loss, gradients = step(plain, ids)
    expected, own = ([loss], [*gradients.values()]), own_names(found[1])

    def run():
        loss, gradients = step(plain, ids)
        return [loss], [*gradients.values()]

    assert own.keys() == gradients.keys()
    assert_as_exact(run, expected, plain, ([found[0].detach()], [own[name] for name in gradients]))


def trained(model, steps=8):
    """The losses of a few steps of gradient descent, which amplifies rounding less than Adam."""
    model = copy.deepcopy(model).train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for i in range(steps):
        loss = model(input_ids=(ids := tokens(2, 12, seed=i % 4)), labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [[torch.stack(losses)]]


def assert_trains_and_generates(model, ids, check, **switches):
    """A patched model trains and generates as before, and is as before once it is no longer patched. check: is called with the
    report, and returns how many modules must be patched."""
    losses, plain = trained(model), step(model, ids)
    text = model.eval().generate(ids[:1], max_new_tokens=6, do_sample=False)
    patched = check(apply_liger_kernel(model.train(), **switches))
    assert_same_step(model, ids, plain)
    assert_as_exact(lambda: trained(model), losses, model)
    assert float(losses[0][0][-4:].mean()) < float(losses[0][0][:4].mean())
    assert torch.equal(model.eval().generate(ids[:1], max_new_tokens=6, do_sample=False), text)
    assert 0 < patched <= unpatch(model)
    assert torch.equal(step(model.train(), ids)[0], plain[0])


def assert_training_is_as_accurate(start, run, run_patched, dtype=torch.float32, trainings=2):
    """Compares the errors of patched and unpatched training, both relative to unpatched training in a wider dtype.

    Rounding errors grow exponentially, so a single training may have a large error: compare geometric means. The logarithm of
    the ratio of two errors has a standard deviation of up to 0.56. Five of them are allowed.

    start: makes a model by its seed. run: trains it, and returns tensors by their names. run_patched: patches it as well.
    Returns the exact results and ours of the last training."""
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    errors = {who: defaultdict(lambda: 1.0) for who in ("ours", "eager")}
    for seed in range(trainings):
        model = start(seed)
        exact, eager = run(clone(model, wide)), run(clone(model, dtype))
        ours = run_patched(clone(model, dtype))
        for who, result in (("ours", ours), ("eager", eager)):
            for key, wanted in exact.items():
                error = float((result[key] - wanted).pow(2).mean().sqrt()) / float(wanted.abs().max())
                errors[who][key] *= error ** (1 / trainings)
    factor = math.exp(5 * 0.56 / trainings**0.5)
    for key, error in errors["ours"].items():
        assert error <= factor * errors["eager"][key] + torch.finfo(dtype).eps, key
    return exact, ours


def assert_same_logits(found, expected, model, ids):
    assert_as_exact(lambda: [[logits_of(model, ids)]], [[expected]], model, [[found]])


@torch.no_grad()
def calls_of(operator, model, ids, **arguments):
    """How often a forward runs the operator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        model(ids, **arguments)
    # Less work than key_averages(). Each dispatch of one call is an event, inside of the one before.
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == f"liger::{operator}"]
    count = end = 0
    for event in sorted(events, key=lambda e: (e.start_ns(), -e.duration_ns())):
        count += event.start_ns() >= end
        end = max(end, event.start_ns() + event.duration_ns())
    return count


@torch.no_grad()
def logits_of(model, ids):
    return model(input_ids=ids).logits


def through_pickle(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# Of moe_experts, in the order of the bits in csrc/ops/moe/moe_experts.h.
GRADIENTS = (
    "x", "gate_up", "down", "weight", "gate_up_bias", "down_bias", "gate_up_a", "gate_up_b", "down_a", "down_b"
)  # fmt: skip


class Wanted(TorchDispatchMode):
    """Records which gradients the backward of moe_experts computes."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_moe_experts_bwd" in func.__name__:
            bits = args[[a.name for a in func._schema.arguments].index("wanted")]
            self.calls.append({name for i, name in enumerate(GRADIENTS) if bits >> i & 1})
        return func(*args, **(kwargs or {}))


def wanted_by(model):
    loss = model(input_ids=tokens(), labels=tokens()).loss
    with Wanted() as mode:
        loss.backward()
    return mode.calls
