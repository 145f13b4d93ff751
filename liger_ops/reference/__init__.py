"""The operators, each declared by one function: its signature is the schema, its docstring the documentation, its body
the reference formula. Tests compare the kernels with the formulas, which also run if no operator library fits.

Each function of :mod:`liger_ops.functional` below calls the operator ``torch.ops.liger.<name>``. A name that ends in an
underscore overwrites its first argument; the others write to no argument.

Letters: B batch, H heads (of experts: hidden columns), S sequence, D head size, R rotated columns of a head, n and m
columns of a row, V classes, T tokens, K ids or choices per row, E experts, I inner columns of an expert, r and q ranks of
adapters; "..." any leading dimensions.

Tensors are fp32, fp16 or bf16, or fp64 on CPU, of any strides. Those of a call have the same dtype unless a note says
otherwise; "or fp32" is meant beside fp16 and bf16. Indices are int64 or int32. Results that are called fp32 are fp64 for fp64 tensors. A result has a gradient
for each tensor marked "yes"; where only some results have one, the text says which. A tensor marked "no" must not require
a gradient.

Cost counts GEMMs, and the least bytes that must move on CUDA: each tensor is read or written once. ``|x|`` stands for
the bytes of x. Parameters and numbers per row are left out. "Backward needs" lists what the autograd graph keeps.
Backward overwrites a buffer only if nothing else can reach it, and allocates a new one otherwise.
"""

from ._operator import Operator, operators, public_names

__all__ = ["Operator", "operators", "public_names"]
