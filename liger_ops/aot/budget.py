"""Limits of a wheel for all torch releases, in bytes. tests/packaging/test_budget.py compares them with the kernels."""

WHEEL = 60_000_000

# Kernels of a family, in the packs of all architectures and of PTX together.
PACKS = {
    "activations": 580_000,
    "conv": 3_300_000,
    "embedding": 90_000,
    "gated": 1_450_000,
    "gemm": 2_700_000,
    "losses": 10_400_000,
    "moe": 9_900_000,
    "norms": 13_900_000,
    "rope": 4_300_000,
}
