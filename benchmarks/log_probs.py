"""log_probs(logits: (rows, classes), index: (rows,)), with the entropy"""

import torch

from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Op


def inputs(make, rows, classes):
    return {"logits": make.normal(rows, classes), "index": make.integers(classes, rows)}


def traffic(size, rows, classes):
    return rows * classes * size, 2 * rows * classes * size  # logits in; logits in, their gradient out


def formula(logits, index):
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return logs.gather(-1, index[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def trl():
    from trl.kernels import selective_log_softmax_and_entropy

    return selective_log_softmax_and_entropy


def ours():
    import liger_ops  # noqa: F401

    op = torch.ops.liger.log_probs.default
    return lambda logits, index: op(logits, index, entropy=True)


OP = Op(
    dims=("rows", "classes"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"trl": trl, "ours": ours},
    shapes={
        "quick-cpu": [(16, 1000), (256, 32000)],
        "quick": [(16, 1024), (2048, 32000), (2048, 50257), (1024, 128256)],
        # Vocabularies of Llama 2 and 3, GPT-2 (odd) and Qwen2.
        "full": [(rows, classes) for rows in (16, 1024, 8192) for classes in (1000, 32000, 50257, 128256, 151936)],
    },
    constants=frozenset({"index"}),
    # A training step keeps only the results.
    transient=frozenset({"logits"}),
    anchors=(
        Anchor((8192, 32000), "bfloat16", NO_SLOWER_THAN_EAGER, {"full": 1}),
        Anchor((8192, 128256), "bfloat16", NO_SLOWER_THAN_EAGER, {"full": 1}),
        Anchor((1024, 32000), "float32", NO_SLOWER_THAN_EAGER, device="cpu"),
    ),
)
