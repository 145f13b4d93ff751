"""Helpers for tests of patched tiny models."""

import torch
from language_models import make

from liger_ops.transformers import apply_liger_kernel

FUSED = "fused_linear_cross_entropy"


def patched(name, **options):
    model = make(name, **options)
    report = apply_liger_kernel(model)
    return model, report


def assert_same_step(a, b, tolerance=1e-4):
    torch.testing.assert_close(a[0], b[0], rtol=1e-5, atol=1e-6)
    assert a[1].keys() == b[1].keys()
    largest = max(float(g.abs().max()) for g in b[1].values())
    for name, gradient in a[1].items():
        assert float((gradient - b[1][name]).abs().max()) <= tolerance * largest, name
