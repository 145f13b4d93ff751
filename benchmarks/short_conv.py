"""short_conv(bcx: (1, tokens, 3 * n), weight: (n, 3))

"causal_conv1d" is the wheel of that name for the convolution, and torch for the products around it, as in Lfm2's model.
"""

import torch.nn.functional as F

from benchmarks import causal_conv1d
from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Host, Op

WIDTH = 3


def inputs(make, tokens, n):
    return {"bcx": make.normal(1, tokens, 3 * n), "weight": make.normal(n, WIDTH)}


def traffic(size, tokens, n):
    return 4 * tokens * n * size, 7 * tokens * n * size  # bcx in, y out; bcx and dy in, dbcx out


def convolved(x, weight):
    return F.conv1d(F.pad(x, (WIDTH - 1, 0)), weight[:, None], groups=x.shape[1])


def gated(bcx, weight, convolution):
    b, c, x = bcx.transpose(-1, -2).chunk(3, dim=-2)
    return (c * convolution(b * x, weight)).transpose(-1, -2).contiguous()


def formula(bcx, weight):
    return gated(bcx, weight, convolved)


def wheel():
    from causal_conv1d import causal_conv1d_fn

    return lambda bcx, weight: gated(bcx, weight, causal_conv1d_fn)


OP = Op(
    dims=("tokens", "n"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"causal_conv1d": wheel},
    shapes={
        "quick-cpu": [(1024, 256), (256, 1024)],
        "quick": [(8192, 2048), (65_536, 1024)],
        "full": [(tokens, n) for tokens in (32, 1024, 8192, 32_768) for n in (512, 1024, 2048, 4096)],
    },
    anchors=(
        *(Anchor((tokens, 2048), "bfloat16", causal_conv1d.NO_SLOWER) for tokens in (8192, 32_768)),
        *(Anchor((1024, 256), dtype, NO_SLOWER_THAN_EAGER, device="cpu") for dtype in ("float32", "bfloat16")),
    ),
    host={"cuda": Host((64, 128), "bfloat16", causal_conv1d.HOST)},
)
