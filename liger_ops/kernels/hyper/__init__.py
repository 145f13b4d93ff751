"""Kernels of hyper-connections."""
