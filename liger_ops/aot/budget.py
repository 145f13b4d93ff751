"""Limits of a wheel for all torch releases, in bytes. tests/packaging/test_budget.py compares them with the kernels."""

WHEEL = 60_000_000

# Kernels of a family, in the packs of all architectures and of PTX together.
PACKS = {
    "activations": 350_000,
    "embedding": 110_000,
    "gated": 1_460_000,
    "gemm": 60_000,
    "losses": 15_100_000,
    "moe": 10_550_000,
    "norms": 12_900_000,
    "rope": 5_350_000,
}
