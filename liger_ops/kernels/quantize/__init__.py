"""Kernels of FP8 training."""
