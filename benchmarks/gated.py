"""Shared by swiglu and geglu: out = act(gate) * up, with gate and up: (rows, n)"""

from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Host, Op, Relative

# 2816, 5504, 11008, 14336, 18944: intermediate sizes of real models, which are no powers of two.
SHAPES = {
    "quick-cpu": [(16, 512), (512, 1376), (2048, 2816)],
    "quick": [(16, 1024), (2048, 5504), (8192, 14336)],
    "full": [
        (rows, n) for rows in (1, 16, 128, 1024, 4096, 16384) for n in (1024, 2816, 5504, 8192, 11008, 14336, 18944)
    ],
    "paper": [(4 * length, 11008) for length in (1024, 2048, 4096, 8192)],
}
HOST_PASSES = ("no-grad", "grad", "fwd+bwd")


def inputs(make, rows, n):
    return {"gate": make.normal(rows, n), "up": make.normal(rows, n)}


def traffic(size, rows, n):
    return 3 * rows * n * size, 5 * rows * n * size  # gate and up in, out out; dout, gate and up in, dgate and dup out


def gated_op(formula, providers, forward, full):
    """forward, full: limits in µs at 8192 x 14336."""
    return Op(
        dims=("rows", "n"),
        inputs=inputs,
        formula=formula,
        traffic=traffic,
        providers=providers,
        shapes=SHAPES,
        # A model drops both projections, so gradients may reuse their memory.
        transient=frozenset({"gate", "up"}),
        anchors=(
            Anchor((8192, 14336), "bfloat16", {"forward": forward, "full": full}),
            *(Anchor((2048, 4096), dtype, NO_SLOWER_THAN_EAGER, device="cpu") for dtype in ("float32", "bfloat16")),
        ),
        host={
            "cuda": Host((16, 1024), "bfloat16", dict.fromkeys(HOST_PASSES, Relative(1.1, ("hf",)))),
            "cpu": Host((4, 64), "float32", dict.fromkeys(HOST_PASSES, Relative(1.1, ("hf",)))),
        },
    )
