"""causal_conv1d_split(x: (1, tokens, groups * 6 * 128), weight: (groups * 4 * 128, 4))

The projection of Qwen3-Next: for each key head [q, k, v, z], of 128, 128, 256 and 256 columns.
"""

import torch
import torch.nn.functional as F

from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Host, Op, Relative

WIDTH, HEAD = 4, 128
SIZES = [HEAD, HEAD, 2 * HEAD, 2 * HEAD]


def inputs(make, tokens, groups):
    return {"x": make.normal(1, tokens, groups * sum(SIZES)), "weight": make.normal(groups * sum(SIZES[:3]), WIDTH)}


def traffic(size, tokens, groups):
    convolved, rest = tokens * groups * sum(SIZES[:3]), tokens * groups * SIZES[3]
    return 2 * convolved * size, (3 * convolved + 2 * rest) * size


def formula(x, weight):
    groups = x.shape[2] // sum(SIZES)
    *parts, z = x.unflatten(2, (groups, sum(SIZES))).split(SIZES, 3)
    rows = F.pad(torch.cat([part.flatten(2) for part in parts], 2).transpose(1, 2), (WIDTH - 1, 0))
    y = F.silu(F.conv1d(rows, weight[:, None], groups=len(weight))).transpose(1, 2)
    q, k, v = (part.contiguous() for part in y.split([groups * size for size in SIZES[:3]], 2))
    return q, k, v, z


def ours():
    import liger_ops  # noqa: F401

    op = torch.ops.liger.causal_conv1d_split
    return lambda x, weight: op(x, weight, sizes=SIZES, groups=x.shape[2] // sum(SIZES))


NO_SLOWER = dict.fromkeys(("forward", "full"), Relative(1.0, ("torch.compile",)))
HOST = dict.fromkeys(("no-grad", "grad", "fwd+bwd"), Relative(1.1, ("hf",)))

OP = Op(
    dims=("tokens", "groups"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"ours": ours},
    shapes={
        "quick-cpu": [(1024, 1)],
        "quick": [(8192, 16)],
        "full": [(tokens, groups) for tokens in (32, 1024, 8192, 32_768) for groups in (1, 4, 16)],
    },
    anchors=(
        *(Anchor((tokens, 16), "bfloat16", NO_SLOWER) for tokens in (8192, 32_768)),
        *(Anchor((1024, 1), dtype, NO_SLOWER_THAN_EAGER, device="cpu") for dtype in ("float32", "bfloat16")),
    ),
    host={"cuda": Host((64, 1), "bfloat16", HOST)},
)
