"""swiglu(gate: (rows, n), up: (rows, n))"""

import torch.nn.functional as F

from benchmarks.gated import gated_op


def formula(gate, up):
    return F.silu(gate) * up


def liger_kernel():
    from liger_kernel.ops import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply


def liger_sm90():
    from liger_kernel.ops.cutedsl.ops.swiglu import LigerSiLUMulCuteDSLFunction

    return LigerSiLUMulCuteDSLFunction.apply


OP = gated_op(formula, {"liger-kernel": liger_kernel, "liger-sm90": liger_sm90}, forward=170, full=465)
