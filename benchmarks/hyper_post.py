"""hyper_post(y: (tokens, n), streams: (tokens, 4, n), post: (tokens, 4), comb: (tokens, 4, 4))"""

from benchmarks.hyper_pre import NO_SLOWER, SHAPES
from benchmarks.op import Anchor, Op


def inputs(make, tokens, n):
    return {
        "y": make.normal(tokens, n),
        "streams": make.normal(tokens, 4, n),
        "post": make.normal(tokens, 4),
        "comb": make.normal(tokens, 4, 4),
    }


def traffic(size, tokens, n):
    return (
        9 * tokens * n * size,
        14 * tokens * n * size,
    )  # y and streams in, out; dout, y and streams in, dy and dstreams out


def formula(y, streams, post, comb):
    from liger_ops import functional as F

    return F.hyper_post.reference(y, streams, post, comb)


def liger():
    from liger_kernel.transformers.functional import liger_mhc_post_res

    return lambda y, streams, post, comb: liger_mhc_post_res(streams, y, post, comb.transpose(1, 2))


OP = Op(
    dims=("tokens", "n"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"liger-kernel": liger},
    shapes=SHAPES,
    anchors=(Anchor((8192, 4096), "bfloat16", NO_SLOWER),),
)
