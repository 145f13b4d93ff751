"""Kernels of the embedding."""
