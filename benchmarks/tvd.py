"""tvd(input: (rows, classes) probabilities, target: the same)"""

from benchmarks.divergence import declare, log_probs, wide


def inputs(make, rows, classes):
    return {"input": log_probs(make, rows, classes).exp(), "target": log_probs(make, rows, classes).exp()}


def formula(input, target):
    return 0.5 * (wide(input) - wide(target)).abs().sum() / len(input)


def liger_kernel():
    from liger_kernel.ops import LigerTVDLossFunction

    return lambda input, target: LigerTVDLossFunction.apply(input, target)


OP = declare(
    targets_read_alone=False,
    inputs=inputs,
    formula=formula,
    providers={"liger-kernel": liger_kernel},
)
