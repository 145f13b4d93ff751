"""geglu(gate: (rows, n), up: (rows, n)), with the tanh approximation"""

import torch
import torch.nn.functional as F

from benchmarks.gated import gated_op


def formula(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def liger_kernel():
    from liger_kernel.ops import LigerGELUMulFunction

    return LigerGELUMulFunction.apply


def ours():
    import liger_ops  # noqa: F401

    return torch.ops.liger.geglu.default


OP = gated_op(formula, {"liger-kernel": liger_kernel, "ours": ours}, forward=175, full=480)
