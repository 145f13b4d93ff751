"""Kernels of the rotary position embedding."""
