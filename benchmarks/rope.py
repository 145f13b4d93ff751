"""rope(q: (batch, q_heads, sequence, size), k: (batch, k_heads, sequence, size), cos, sin: (1, sequence, size))

q and k are views of (batch, sequence, heads, size), as projections return them.
"""

import torch

from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Host, Op, Relative


def inputs(make, batch, sequence, q_heads, k_heads, size):
    q, k = (make.normal(batch, sequence, heads, size).transpose(1, 2) for heads in (q_heads, k_heads))
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, device=make.device) / size)
    phase = torch.outer(torch.arange(sequence, device=make.device), frequencies).repeat(1, 2)[None]
    return {"q": q, "k": k, "cos": phase.cos().to(make.dtype), "sin": phase.sin().to(make.dtype)}


def traffic(size, batch, sequence, q_heads, k_heads, head_size):
    rotated = 2 * batch * sequence * (q_heads + k_heads) * head_size * size
    return rotated, rotated


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def formula(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def liger_kernel():
    from liger_kernel.ops import LigerRopeFunction

    # It rotates in place, so inputs that are used again must be copied.
    return lambda q, k, cos, sin: LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin)


def liger_sm90():
    from liger_kernel.ops.cutedsl.ops.rope import LigerRopeCuteDSLFunction

    return lambda q, k, cos, sin: LigerRopeCuteDSLFunction.apply(q.clone(), k.clone(), cos, sin)


OP = Op(
    dims=("batch", "sequence", "q_heads", "k_heads", "size"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"liger-kernel": liger_kernel, "liger-sm90": liger_sm90},
    shapes={
        "quick-cpu": [(1, 16, 8, 2, 64), (1, 512, 16, 4, 128)],
        "quick": [(1, 128, 32, 8, 128), (4, 2048, 32, 8, 128), (1, 4096, 16, 16, 80)],
        # Heads of Llama 3 8B and 70B, Qwen2 0.5B and 7B, Phi 2 and Gemma; one position is decoding.
        "full": [
            (batch, sequence, *heads)
            for batch, sequence in ((1, 1), (32, 1), (1, 512), (4, 2048), (1, 16384))
            for heads in ((32, 8, 128), (64, 8, 128), (14, 2, 64), (28, 4, 128), (32, 32, 80), (16, 16, 256))
        ],
        "paper": [(1, 2048, size // 128, size // 512, 128) for size in (2048, 4096, 8192, 16384)],
    },
    constants=frozenset({"cos", "sin"}),
    anchors=(
        Anchor((4, 2048, 32, 8, 128), "bfloat16", {"forward": 48, "full": 130}),
        Anchor((1, 16384, 64, 8, 128), "bfloat16", {"forward": 155, "full": 310}),
        Anchor((1, 2048, 32, 8, 128), "float32", NO_SLOWER_THAN_EAGER, device="cpu"),
        Anchor((1, 2048, 32, 8, 128), "bfloat16", NO_SLOWER_THAN_EAGER, device="cpu"),
    ),
    host={
        "cuda": Host(
            (1, 16, 4, 2, 64), "bfloat16", dict.fromkeys(("no-grad", "grad", "fwd+bwd"), Relative(1.1, ("hf",)))
        ),
        "cpu": Host((1, 4, 4, 2, 64), "float32", dict.fromkeys(("no-grad", "grad", "fwd+bwd"), Relative(1.1, ("hf",)))),
    },
)
