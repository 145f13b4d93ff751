"""Kernels of the norms."""
