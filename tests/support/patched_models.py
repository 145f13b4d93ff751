"""Helpers for tests of patched tiny models."""

import torch
from language_models import make, step

from liger_ops._accuracy import Roundings, rounded
from liger_ops.transformers import apply_liger_kernel

FUSED = "fused_linear_cross_entropy"


def patched(name, **options):
    model = make(name, **options)
    report = apply_liger_kernel(model)
    return model, report


def assert_as_exact(found, expected, model, run, dtype=torch.float32):
    """Results of two codes for one model, as lists. Each may differ from the exact result by what roundings do, as in
    liger_ops/_accuracy.py, here of all parameters, and once by its own. run: computes the results."""
    before, parameters = run(), [*model.parameters()]
    saved, eps = [p.detach().clone() for p in parameters], torch.finfo(dtype).eps
    for p, value in zip(parameters, rounded(saved, dtype)):
        p.data.copy_(value.detach())
    after = run()
    for p, value in zip(parameters, saved):
        p.data.copy_(value)
    moved = max(
        float((a.detach().double() - b.detach().double()).abs().max()) for a, b in zip(before, after, strict=True)
    )
    allowed = 2 * (Roundings.OPERATIONS * moved + eps * max(float(t.detach().abs().max()) for t in expected))
    error = max(
        float((a.detach().double() - b.detach().double()).abs().max()) for a, b in zip(found, expected, strict=True)
    )
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def own_names(gradients):
    """Without what torch.compile and its checkpointing add."""
    return {name.removeprefix("_orig_mod."): gradient for name, gradient in gradients.items()}


def assert_same_step(model, ids, expected, **arguments):
    """expected: what step() returned for the same model, with other code. Gradients are compared at the scale of the
    largest."""

    def run():
        loss, gradients = step(model, ids, **arguments)
        return loss, own_names(gradients)

    ours = run()
    assert ours[1].keys() == expected[1].keys()
    assert_as_exact([ours[0]], [expected[0]], model, lambda: [run()[0]])
    assert_as_exact(
        [ours[1][name] for name in expected[1]], [*expected[1].values()], model, lambda: [*run()[1].values()]
    )


def assert_same_logits(found, expected, model, ids):
    assert_as_exact([found], [expected], model, lambda: [logits_of(model, ids)])


@torch.no_grad()
def logits_of(model, ids):
    return model(input_ids=ids).logits
