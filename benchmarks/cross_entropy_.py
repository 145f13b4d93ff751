"""cross_entropy_(logits: (rows, classes), target: (rows,)): the loss; its gradient overwrites the logits"""

import torch.nn.functional as F

from benchmarks.cross_entropy import formula, inputs, liger_kernel
from benchmarks.op import Anchor, Op, Relative

LOGITS = 1 << 29
# Vocabularies of Llama 2 and 3, GPT-2 (odd), Qwen2 and Gemma; 65536.
SHAPES = [(LOGITS // classes, classes) for classes in (32000, 50257, 65536, 128256, 151936, 262144)]
FASTEST = Relative(1.0, ("torch", "torch.compile", "liger-kernel"))


def traffic(size, rows, classes):
    return rows * classes * size, rows * classes * size  # logits in; their gradient out


def aten():
    return F.cross_entropy


OP = Op(
    dims=("rows", "classes"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"torch": aten, "liger-kernel": liger_kernel},
    shapes={
        "quick-cpu": [(256, 32000)],
        "quick": [(1024, 32000), (1024, 50257)],
        "full": SHAPES,
    },
    # Forward computes the gradient, so the passes cannot be timed separately.
    passes=("full",),
    checked=lambda rows, classes: (min(rows, 1024), classes),
    constants=frozenset({"target"}),
    transient=frozenset({"logits"}),
    anchors=tuple(Anchor(shape, "bfloat16", {"full": FASTEST}, {"full": 1}) for shape in SHAPES),
    kernels_must={"cross_entropy_fwd_bwd": 0.85},
)
