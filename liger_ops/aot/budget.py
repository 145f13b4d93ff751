"""Limits of a wheel for all torch releases, in bytes. tests/packaging/test_budget.py compares them with the kernels."""

WHEEL = 60_000_000

# Kernels of a family, in the packs of all architectures and of PTX together.
PACKS = {
    "activations": 520_000,
    "conv": 2_430_000,
    "embedding": 90_000,
    "fp8": 670_000,
    "gated": 2_120_000,
    "gemm": 1_260_000,
    "hyper": 950_000,
    "losses": 9_600_000,
    "moe": 9_660_000,
    "norms": 12_760_000,
    "rope": 4_140_000,
}
