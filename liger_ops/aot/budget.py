"""Limits of a wheel for all torch releases, in bytes. tests/packaging/test_budget.py compares them with the kernels."""

WHEEL = 60_000_000

# Kernels of a family, in the packs of all architectures and of PTX together.
PACKS = {
    "activations": 400_000,
    "conv": 2_400_000,
    "embedding": 80_000,
    "gated": 1_720_000,
    "hyper": 990_000,
    "linear": 1_260_000,
    "losses": 9_550_000,
    "moe": 9_720_000,
    "norms": 12_400_000,
    "quantize": 1_010_000,
    "rope": 3_600_000,
}
