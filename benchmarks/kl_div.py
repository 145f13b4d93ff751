"""kl_div(input: (rows, classes) log-probabilities, target: the same), the divergence of the target from the input"""

import torch
import torch.nn.functional as F

from benchmarks.divergence import declare, log_probs, wide


def inputs(make, rows, classes):
    return {"input": log_probs(make, rows, classes), "target": log_probs(make, rows, classes)}


def formula(input, target):
    return F.kl_div(wide(input), wide(target), reduction="batchmean", log_target=True)


def aten():
    return lambda input, target: F.kl_div(input, target, reduction="batchmean", log_target=True)


def liger_kernel():
    from liger_kernel.ops import LigerKLDivLossFunction

    return lambda input, target: LigerKLDivLossFunction.apply(input, target, "batchmean", True)


def ours():
    import liger_ops  # noqa: F401

    op = torch.ops.liger.kl_div.default
    return lambda input, target: op(input, target, None, -100, "batchmean", True)


OP = declare(
    targets_read_alone=True,
    inputs=inputs,
    formula=formula,
    providers={"torch": aten, "liger-kernel": liger_kernel, "ours": ours},
)
