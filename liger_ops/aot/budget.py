"""Limits of a wheel for all torch releases, in bytes. tests/packaging/test_budget.py compares them with the kernels."""

WHEEL = 60_000_000

# Kernels of a family, in the packs of all architectures and of PTX together.
PACKS = {
    "activations": 560_000,
    "conv": 2_400_000,
    "embedding": 90_000,
    "fp8": 680_000,
    "gated": 2_180_000,
    "gemm": 1_500_000,
    "hyper": 1_800_000,
    "losses": 10_100_000,
    "moe": 9_700_000,
    "norms": 13_400_000,
    "rope": 4_200_000,
}
