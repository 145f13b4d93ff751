"""The operators, each declared by one function: its signature is the schema, its docstring the documentation, its body
the reference formula. Tests compare the kernels with the formulas, which also run if no operator library fits.

Letters: B batch, H heads, S sequence, D head size, n columns of a row, V vocabulary; "..." any leading dimensions.
"""

from ._operator import Operator, operators, public_names

__all__ = ["Operator", "operators", "public_names"]
