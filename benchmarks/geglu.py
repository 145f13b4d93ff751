"""geglu(gate: (rows, n), up: (rows, n)), with the tanh approximation"""

import torch.nn.functional as F

from benchmarks.gated import gated_op


def formula(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def liger_kernel():
    from liger_kernel.ops import LigerGELUMulFunction

    return LigerGELUMulFunction.apply


OP = gated_op(formula, {"liger-kernel": liger_kernel}, forward=175, full=480)
