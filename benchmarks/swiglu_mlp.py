"""swiglu inside a compiled MLP"""

import torch

from benchmarks.mlp import mlp_op
from benchmarks.swiglu import formula, ours


def linear():
    import liger_ops  # noqa: F401

    return torch.ops.liger.swiglu_linear.default


OP = mlp_op(formula, ours, linear)
