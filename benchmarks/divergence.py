"""What the benchmarks of kl_div, jsd and tvd share: shapes, bytes, rows that are distributions."""

import torch

from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Op

# Vocabularies of Llama 2 and 3, GPT-2 (odd) and Qwen2.
SHAPES = {
    "quick-cpu": [(16, 1000), (256, 32000)],
    "quick": [(16, 1024), (2048, 32000), (1024, 50257), (1024, 128256)],
    "full": [(rows, classes) for rows in (16, 1024, 8192) for classes in (1000, 32000, 50257, 128256, 151936)],
}


def log_probs(make, rows, classes):
    return make.normal(rows, classes).float().log_softmax(-1).to(make.dtype)


def declare(*, targets_read_alone, **more) -> Op:
    """targets_read_alone: backward does not read the input."""

    def traffic(size, rows, classes):
        # Forward reads both; backward writes the gradient.
        return 2 * rows * classes * size, (2 if targets_read_alone else 3) * rows * classes * size

    return Op(
        dims=("rows", "classes"),
        traffic=traffic,
        shapes=SHAPES,
        constants=frozenset({"target"}),
        # A training step keeps only the loss.
        transient=frozenset({"target"}),
        averaged=lambda rows, classes: rows,
        anchors=(
            Anchor((8192, 32000), "bfloat16", NO_SLOWER_THAN_EAGER, {"full": 1}),
            Anchor((4096, 128256), "bfloat16", NO_SLOWER_THAN_EAGER, {"full": 1}),
            Anchor((1024, 32000), "float32", NO_SLOWER_THAN_EAGER, device="cpu"),
        ),
        **more,
    )


def wide(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))
