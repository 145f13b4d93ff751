"""cross_entropy(logits: (rows, classes), target: (rows,))"""

import torch
import torch.nn.functional as F

from benchmarks.norms import HOST, NO_SLOWER_THAN_EAGER
from benchmarks.op import Anchor, Op, Relative


def inputs(make, rows, classes):
    return {"logits": make.normal(rows, classes), "target": make.integers(classes, rows)}


def traffic(size, rows, classes):
    return rows * classes * size, 2 * rows * classes * size  # logits in; logits in, their gradient out


def formula(logits, target):
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)


def aten():
    return F.cross_entropy


def liger_kernel():
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy


def liger_sm90():
    from liger_kernel.ops.cutedsl.ops.cross_entropy import LigerCrossEntropyFunction

    return lambda logits, target: LigerCrossEntropyFunction.apply(logits, target, None)[0]


def quack():
    from quack.cross_entropy import cross_entropy

    return lambda logits, target: cross_entropy(logits, target, reduction="mean")


OP = Op(
    dims=("rows", "classes"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={
        "torch": aten,
        "liger-kernel": liger_kernel,
        "liger-sm90": liger_sm90,
        "quack": quack,
    },
    shapes={
        "quick-cpu": [(16, 1000), (256, 32000)],
        "quick": [(16, 1024), (2048, 32000), (2048, 50257), (1024, 128256)],
        # Vocabularies of Llama 2 and 3, GPT-2 (odd), Qwen2, DeepSeek and Gemma.
        "full": [
            (rows, classes)
            for rows in (16, 1024, 8192)
            for classes in (1000, 32000, 50257, 128256, 151936, 163840, 262144)
        ],
        "paper": [(8192, classes) for classes in (40960, 81920, 122880, 163840)],
    },
    constants=frozenset({"target"}),
    # A training step keeps only the loss.
    transient=frozenset({"logits"}),
    anchors=(
        Anchor((8192, 32000), "bfloat16", {"forward": 150, "full": 420}, {"full": 1}),
        Anchor((8192, 128256), "bfloat16", {"forward": 560, "full": 1650}, {"full": 1}),
        Anchor((1024, 32000), "float32", NO_SLOWER_THAN_EAGER, {"full": Relative(1 / 3, ("torch",))}, device="cpu"),
    ),
    host=HOST,
    cold_start=("torch", "liger-kernel", "ours", "ours JIT"),
    cold_start_must={"cuda": 0.15},
)
