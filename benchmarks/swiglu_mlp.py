"""swiglu inside a compiled MLP"""

from benchmarks.mlp import mlp_op
from benchmarks.swiglu import formula, ours

OP = mlp_op(formula, ours)
