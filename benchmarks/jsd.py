"""jsd(input: (rows, classes) log-probabilities, target: the same), with beta 0.5"""

import math

import torch

from benchmarks.divergence import declare, log_probs, wide


def inputs(make, rows, classes):
    return {"input": log_probs(make, rows, classes), "target": log_probs(make, rows, classes)}


def formula(input, target):
    x, t = wide(input), wide(target)
    log_m = torch.logaddexp(x, t) - math.log(2)
    return 0.5 * (t.exp() * (t - log_m) + x.exp() * (x - log_m)).sum() / len(x)


def liger_kernel():
    from liger_kernel.ops import LigerJSDFunction

    return lambda input, target: LigerJSDFunction.apply(input, target)


OP = declare(
    targets_read_alone=False,
    inputs=inputs,
    formula=formula,
    providers={"liger-kernel": liger_kernel},
)
