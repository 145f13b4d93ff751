"""qk_norm_rope(q: (batch, q_heads, sequence, size), k: (batch, k_heads, sequence, size), q_weight, k_weight: (size,),
cos, sin: (1, sequence, size))

q and k are views of (batch, sequence, heads, size), as projections return them. "ours two" is rms_norm, then rope.
"""

import torch

from benchmarks import rms_norm, rope
from benchmarks.norms import EPS
from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Host, Op, Relative


def inputs(make, batch, sequence, q_heads, k_heads, size):
    heads = rope.inputs(make, batch, sequence, q_heads, k_heads, size)
    weights = {name: make.normal(size) for name in ("q_weight", "k_weight")}
    return {"q": heads["q"], "k": heads["k"], **weights, "cos": heads["cos"], "sin": heads["sin"]}


def traffic(size, batch, sequence, q_heads, k_heads, head_size):
    heads = batch * sequence * (q_heads + k_heads) * head_size * size
    return 2 * heads, 3 * heads  # q and k in and out; them and their results' gradients in, their gradients out


def formula(q, k, q_weight, k_weight, cos, sin):
    return rope.formula(rms_norm.formula(q, q_weight), rms_norm.formula(k, k_weight), cos, sin)


def ours():
    import liger_ops  # noqa: F401

    op = torch.ops.liger.qk_norm_rope
    return lambda q, k, q_weight, k_weight, cos, sin: op(q, k, q_weight, k_weight, cos, sin, EPS)


def two():
    import liger_ops  # noqa: F401

    norm, rotate = torch.ops.liger.rms_norm, torch.ops.liger.rope
    return lambda q, k, q_weight, k_weight, cos, sin: rotate(norm(q, q_weight, EPS), norm(k, k_weight, EPS), cos, sin)


FASTER_THAN_TWO = dict.fromkeys(("forward", "backward", "full"), Relative(0.7, ("ours two",)))
HOST = dict.fromkeys(("no-grad", "grad", "fwd+bwd"), Relative(1.1, ("hf",)))

OP = Op(
    dims=("batch", "sequence", "q_heads", "k_heads", "size"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"ours two": two, "ours": ours},
    shapes={
        "quick-cpu": [(1, 16, 8, 2, 64), (1, 512, 16, 4, 128)],
        "quick": [(1, 128, 32, 8, 128), (4, 2048, 32, 8, 128), (1, 4096, 16, 8, 256)],
        # Heads of Qwen3 8B, 30B-A3B and 0.6B, GLM 4.5, Gemma 3 12B and 1B; one position is decoding.
        "full": [
            (batch, sequence, *heads)
            for batch, sequence in ((1, 1), (32, 1), (1, 512), (4, 2048), (1, 16384))
            for heads in ((32, 8, 128), (32, 4, 128), (16, 8, 128), (96, 8, 128), (16, 8, 256), (4, 1, 256))
        ],
        "paper": [(1, 2048, size // 128, size // 512, 128) for size in (2048, 4096, 8192, 16384)],
    },
    constants=frozenset({"cos", "sin"}),
    anchors=(
        Anchor((4, 2048, 32, 8, 128), "bfloat16", FASTER_THAN_TWO),
        Anchor((1, 16384, 64, 8, 128), "bfloat16", FASTER_THAN_TWO),
        Anchor((1, 2048, 32, 8, 128), "float32", NO_SLOWER_THAN_EAGER, device="cpu"),
        Anchor((1, 2048, 32, 8, 128), "bfloat16", NO_SLOWER_THAN_EAGER, device="cpu"),
    ),
    host={
        "cuda": Host((1, 16, 4, 2, 64), "bfloat16", HOST),
        "cpu": Host((1, 4, 4, 2, 64), "float32", HOST),
    },
)  # fmt: skip
