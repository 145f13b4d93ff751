"""geglu inside a compiled MLP"""

import torch

from benchmarks.geglu import formula, ours
from benchmarks.mlp import mlp_op


def linear():
    import liger_ops  # noqa: F401

    return torch.ops.liger.geglu_linear.default


OP = mlp_op(formula, ours, linear)
