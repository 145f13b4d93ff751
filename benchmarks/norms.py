"""Shared by the norms: sizes and limits of the host cost."""

from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Host, Relative

EPS = 1e-6

# 2560, 5120, 11008: hidden sizes that are no powers of two. 1 and 16 rows: decoding.
SHAPES = {
    "quick-cpu": [(16, 512), (512, 1024), (2048, 2048), (1024, 5120)],
    "quick": [(16, 1024), (2048, 2560), (8192, 4096), (4096, 16384)],
    "full": [
        (rows, n)
        for rows in (1, 16, 128, 1024, 4096, 16384)
        for n in (512, 1024, 2048, 2560, 4096, 5120, 8192, 11008, 16384)
    ],
    "paper": [(2048, n) for n in (1024, 2048, 4096, 8192, 16384, 32768)],
}
HOST = {
    "cuda": Host((16, 1024), "bfloat16", dict.fromkeys(("no-grad", "grad", "fwd+bwd"), Relative(1.1, ("torch",)))),
    "cpu": Host((4, 64), "float32", dict.fromkeys(("no-grad", "grad"), Relative(1.3, ("torch",)))),
}
CPU_ANCHORS = tuple(
    Anchor((4096, 4096), dtype, NO_SLOWER_THAN_EAGER, device="cpu") for dtype in ("float32", "bfloat16", "float16")
)
