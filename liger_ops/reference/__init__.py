"""The operators as Python declares them, each in one function: the signature is the schema, the docstring the
documentation, the body the formula. The formulas are the tests' oracle, and run where no operator library fits.

Letters: B batch, H heads, S sequence, D head size, n columns of a row, V vocabulary; "..." any leading dimensions.
"""

from ._operator import Operator, operators, public_names

__all__ = ["Operator", "operators", "public_names"]
