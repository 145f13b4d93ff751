"""Kernels of gated activations."""
