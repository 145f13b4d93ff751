"""Kernels of convolutions."""
