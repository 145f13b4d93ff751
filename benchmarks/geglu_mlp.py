"""geglu inside a compiled MLP"""

from benchmarks.geglu import formula
from benchmarks.mlp import mlp_op
from benchmarks.providers import operator_of

OP = mlp_op(formula, operator_of("geglu"), operator_of("geglu_linear"))
