"""causal_conv1d(x: (1, tokens, n), weight: (n, 4))

"causal_conv1d" is the wheel of that name, which takes x as (1, n, tokens) of channel-last memory.
"""

import torch.nn.functional as F

from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Host, Op, Relative

WIDTH = 4


def inputs(make, tokens, n):
    return {"x": make.normal(1, tokens, n), "weight": make.normal(n, WIDTH)}


def traffic(size, tokens, n):
    return 2 * tokens * n * size, 3 * tokens * n * size  # x in, y out; x and dy in, dx out


def formula(x, weight):
    rows = F.pad(x.transpose(1, 2), (WIDTH - 1, 0))
    return F.silu(F.conv1d(rows, weight[:, None], groups=x.shape[2])).transpose(1, 2)


def wheel():
    from causal_conv1d import causal_conv1d_fn

    return lambda x, weight: causal_conv1d_fn(x.transpose(1, 2), weight, activation="silu").transpose(1, 2)


NO_SLOWER = dict.fromkeys(("forward", "full"), Relative(1.0, ("torch.compile", "causal_conv1d")))
HOST = dict.fromkeys(("no-grad", "grad", "fwd+bwd"), Relative(1.1, ("hf",)))

OP = Op(
    dims=("tokens", "n"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"causal_conv1d": wheel},
    shapes={
        "quick-cpu": [(1024, 256), (256, 1024)],
        "quick": [(8192, 8192), (65_536, 1024)],
        "full": [(tokens, n) for tokens in (32, 1024, 8192, 32_768) for n in (128, 1024, 4096, 8192, 12_288)],
    },
    anchors=(
        *(Anchor((8192, n), "bfloat16", NO_SLOWER) for n in (4096, 8192)),
        *(Anchor((1024, 256), dtype, NO_SLOWER_THAN_EAGER, device="cpu") for dtype in ("float32", "bfloat16")),
    ),
    host={"cuda": Host((64, 128), "bfloat16", HOST)},
)
