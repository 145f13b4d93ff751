"""swiglu inside a compiled MLP"""

from benchmarks.mlp import mlp_op
from benchmarks.providers import operator_of
from benchmarks.swiglu import formula

OP = mlp_op(formula, operator_of("swiglu"), operator_of("swiglu_linear"))
