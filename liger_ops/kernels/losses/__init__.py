"""Kernels of the losses."""
