"""rms_norm_gated(x: (rows, n), gate: (rows, n), weight: (n,))

A row of linear attention is one head. "fla" is FLA's norm, which rounds once.
"""

import torch
import torch.nn.functional as F

from benchmarks import rms_norm
from benchmarks.norms import EPS
from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Host, Op, Relative


def inputs(make, rows, n):
    return {"x": make.normal(rows, n), "gate": make.normal(rows, n), "weight": make.normal(n)}


def traffic(size, rows, n):
    return 3 * rows * n * size, 5 * rows * n * size  # x and gate in, y out; these and dy in, dx and dgate out


def formula(x, gate, weight):
    wide = torch.promote_types(x.dtype, torch.float32)
    return (rms_norm.formula(x, weight) * F.silu(gate.to(wide))).to(x.dtype)


def fla():
    from fla.modules.fused_norm_gate import rms_norm_gated

    return lambda x, gate, weight: rms_norm_gated(x, gate, weight, None, activation="swish", eps=EPS)


def ours():
    import liger_ops  # noqa: F401

    op = torch.ops.liger.rms_norm_gated
    return lambda x, gate, weight: op(x, gate, weight, EPS)


NO_SLOWER = dict.fromkeys(("forward", "full"), Relative(1.0, ("torch.compile", "fla")))
HOST = dict.fromkeys(("no-grad", "grad", "fwd+bwd"), Relative(1.1, ("hf",)))

OP = Op(
    dims=("rows", "n"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"fla": fla, "ours": ours},
    shapes={
        "quick-cpu": [(4096, 128), (1024, 1024)],
        "quick": [(262_144, 128), (8192, 4096)],
        # Heads of 64 to 256 columns, and the inner rows of Mamba-2; 32 rows are decoding.
        "full": [
            *((rows, n) for rows in (32, 16_384, 262_144, 1_048_576) for n in (64, 128, 256)),
            *((rows, n) for rows in (1, 1024, 8192) for n in (512, 1024, 2048, 4096, 5120, 8192, 12_288, 16_384)),
        ],
    },
    anchors=(
        *(Anchor(shape, "bfloat16", NO_SLOWER) for shape in ((262_144, 128), (131_072, 256), (8192, 4096))),
        *(Anchor((8192, n), "bfloat16", NO_SLOWER) for n in (1024, 8192)),
        *(Anchor((16_384, 128), dtype, NO_SLOWER_THAN_EAGER, device="cpu") for dtype in ("float32", "bfloat16")),
    ),
    host={"cuda": Host((64, 128), "bfloat16", HOST)},
)
