"""geglu inside a compiled MLP"""

from benchmarks.geglu import formula, ours
from benchmarks.mlp import mlp_op

OP = mlp_op(formula, ours)
