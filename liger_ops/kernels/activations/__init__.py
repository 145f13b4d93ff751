"""Kernels of activations without a gate."""
