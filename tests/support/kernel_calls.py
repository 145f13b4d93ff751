"""Calls with sizes, options and indices that rows of calls.py lack, and the kernels that they launch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.calls import Row, row_of

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
Change = Callable[[dict[str, Tensor]], Any]


class Case(NamedTuple):
    row: Row
    launches: str  # kernels that have to run
    sizes: tuple[int, int] = (2, 3)  # B and S of the row's shapes
    dtype: torch.dtype = FP32
    change: Change = lambda t: None  # of the tensors by name, in place; or a dict of others
    device: tuple[int, int] = (80, 1)  # capability and multiprocessors
    quick: bool = True


CASES: list[Case] = []


def add(row: Row, launches: str, *sizes: int, **options: Any) -> None:
    CASES.append(Case(row, launches, *([sizes] if sizes else []), **options))


# ---- Convolutions: all widths, columns of several blocks, fewer rows than the past, and more than a program has


def samples(t: dict[str, Tensor]) -> None:
    """Three in a row."""
    t["seq_idx"].copy_(torch.arange(t["seq_idx"].shape[1]) * 3 // t["seq_idx"].shape[1])


def wide_weights(t: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t[name].float() for name in ("weight", "bias")}


def conv(n: int, width: int, length: int, dilation: int = 1, **options: Any) -> None:
    row = row_of("causal_conv1d", "bias seq_idx initial_state", dict(dilation=dilation), dict(C=n, W=width))
    add(row, "causal_conv1d_fwd causal_conv1d_bwd", 2, length, change=samples, **options)


for width in range(2, 9):
    conv(24, width, 9, quick=width == 2)
conv(13, 7, 9, 2, quick=False)
conv(8, 4, 2)
conv(8, 4, 3, 5, quick=False)
conv(8, 4, 70, quick=False)
conv(8, 4, 600, quick=False)
for n, width in ((264, 3), (520, 7)):
    plain = row_of("causal_conv1d", "", dict(activation="none"), dict(C=n, W=width))
    add(plain, "causal_conv1d_fwd causal_conv1d_bwd", 2, 3, quick=False)
add(row_of("causal_conv1d", "bias"), "causal_conv1d_fwd causal_conv1d_bwd", 2, 5, dtype=BF16, change=wide_weights)
for parts, groups in (([2, 3, 4, 5], 3), ([136, 8, 272, 8], 1)):
    part = row_of("causal_conv1d_split", "bias", dict(sizes=parts, groups=groups), dict(W=3))
    add(part, "causal_conv1d_fwd causal_conv1d_bwd", 2, 5, quick=False)


def short(n: int, width: int, length: int, **options: Any) -> None:
    row = row_of("short_conv", "bias seq_idx", sizes=dict(C=n, W=width))
    add(row, "short_conv_fwd short_conv_bwd", 2, length, **dict(change=samples) | options)


for width in range(2, 9):
    short(24, width, 9, quick=width == 8)
for n, width, length in ((13, 7, 2), (264, 3, 5), (8, 3, 150)):
    short(n, width, length, quick=length == 150)
short(16, 7, 9, dtype=BF16, change=lambda t: samples(t) or wide_weights(t))

# ---- Losses: ignored rows, int32 targets, rows that several programs share, and that wait for each other


def some_ignored(t: dict[str, Tensor]) -> dict[str, Tensor]:
    t["target"].flatten()[::4] = -100
    classes = {"weight": t["weight"].float().abs()} if "weight" in t else {}
    return dict(target=t["target"].int()) | classes


def of_logits(op: str, n: int, names: str, dtype: torch.dtype = FP32, weight: str = "", **options: Any) -> None:
    own = {key: options.pop(key) for key in ("reduction", "label_smoothing", "softcap") if key in options}
    row = row_of(op, weight, dict(lse_square_scale=1e-3) | own, dict(V=n))
    add(row, names, 2, 3, **dict(dtype=dtype, change=some_ignored, device=(80, 8)) | options)


BOTH = "cross_entropy_fwd cross_entropy_bwd"
of_logits("cross_entropy", 40, BOTH + " cross_entropy_sum", BF16)
of_logits("cross_entropy", 40, BOTH + " cross_entropy_sum", weight="weight")
of_logits("cross_entropy", 5003, BOTH, reduction="none")
of_logits("cross_entropy", 5003, BOTH, FP16, reduction="none", label_smoothing=0.1, softcap=20.0)
of_logits("cross_entropy_with_metrics", 16392, BOTH, BF16)
of_logits("cross_entropy_", 2001, "cross_entropy_fwd_bwd cross_entropy_scale", BF16)
of_logits("cross_entropy_", 30_000, "cross_entropy_fwd_bwd")
of_logits("cross_entropy_", 70_001, "cross_entropy_fwd_bwd", BF16, quick=False)
# More rows than a program adds up at a time.
weighted = row_of("cross_entropy", "weight", sizes=dict(V=2))
some = dict(change=lambda t: t["target"].copy_(-100).flatten()[::500].fill_(1))
add(weighted, "cross_entropy_sum", 1, 4200, quick=False, **some)


def chosen(t: dict[str, Tensor]) -> dict[str, Tensor]:
    index = t["index"]
    index[..., -1] = index[..., 0]
    index[0, 0], index[1, 1, 0] = -100, -100
    return dict(index=index.int())


for n, options in ((40, {}), (5003, dict(softcap=5.0)), (8008, dict(temperature=0.7))):
    row = row_of("log_probs", "", dict(entropy=True) | options, dict(V=n, K=20), dict(index="(..., K)"))
    add(row, "log_probs_fwd log_probs_bwd" + " log_probs_combine" * (n > 100), change=chosen, device=(80, 8))

labelled = row_of("kl_div", "shift_labels", sizes=dict(V=40))
names = "divergence_fwd divergence_bwd divergence_sum"
add(labelled, names, change=lambda t: t["shift_labels"].flatten()[::4].fill_(-100), dtype=BF16)

for beta in (0.0, 1.0, 0.5):
    for n, softcap, dtype in ((24, 20.0, BF16), (5003, None, FP32), (5003, 20.0, FP16)):
        capped = dict(beta=beta, s_softcap=softcap, t_softcap=softcap)
        models = row_of("fused_linear_divergence", "", capped, dict(V=n, m=16))
        quick = n < 100 or dtype == FP32
        add(models, "fused_linear_divergence_rows", dtype=dtype, device=(80, 2), quick=quick)

TARGETS = " ".join(f"fused_linear_cross_entropy_{name}_targets" for name in ("take", "order", "add"))
for rows, n, columns, ignored in ((70, 40, 1032, 2), (33, 300, 300, -100), (1100, 24, 8, 2)):

    def ignore(t: dict[str, Tensor], ignored: int = ignored) -> dict[str, Tensor]:
        target = t["target"].flatten()
        target[::4] = ignored
        target[400:800] = ignored  # of many, because programs of rows are slow
        return dict(target=t["target"].int()) if ignored > 0 else {}

    options = dict(ignore_index=ignored, memory_budget=rows * (n + 60))
    row = row_of("fused_linear_cross_entropy", "", options, dict(V=n, n=columns))
    add(row, TARGETS, 1, rows, dtype=BF16, change=ignore, quick=rows < 1000)

# ---- Routers and experts: missing ones, groups, tiles of 128 rows, layouts and devices


def router(n: int, top_k: int, **options: Any) -> None:
    row = row_of("moe_router", "", dict(top_k=top_k, scale=1.5, statistics=True) | options, dict(n=n))
    add(row, "moe_router_fwd moe_router_bwd", 5, 7, device=(80, 8))


router(16, 3, groups=16, top_groups=5)
router(256, 8, groups=8, top_groups=4, score="sigmoid")
router(60, 4, score="sqrtsoftplus", normalize=False)


ROUTES = "moe_experts_count moe_experts_scan moe_experts_place"
HOPPER = "up_hopper rows_hopper rows_bwd_hopper act_bwd_hopper"
WEIGHTS = " weights_gate_up_hopper weights_down_hopper"  # PyTorch multiplies those in bf16
OF_ADAPTERS = " moe_adapters_pack moe_adapters_rows moe_adapters_columns"
GPT_OSS = dict(interleaved=True, limit=0.75, alpha=1.5, up_offset=0.25)


def experts(
    names: str,
    size: tuple,
    dtype: torch.dtype = FP32,
    bias: bool = False,
    ranks: tuple = (),
    counts: tuple = (),
    **options: Any,
) -> None:
    """size: tokens, columns, inner columns, experts, choices. counts: rows that are sorted already have so many."""
    tokens, _, _, count, choices = size
    case = {key: options.pop(key) for key in ("device", "quick") if key in options}
    given, shapes = "gate_up_bias down_bias " if bias else "", {}
    if ranks:
        given += "gate_up_a gate_up_b down_a down_b"
        shapes |= dict(gate_up_a="(E, r, H)", gate_up_b="(E, 2 I, r)", down_a="(E, q, I)", down_b="(E, H, q)")
        names += OF_ADAPTERS
    if options.get("transposed"):
        shapes |= dict(gate_up="(E, H, 2 I)", down="(E, I, H)")

    def route(t: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        if counts:
            found["tokens_per_expert"] = torch.tensor(counts)
        else:
            index = torch.randint(-1, count + 1, (tokens, choices))
            found["index"] = index.int() if tokens % 2 else index
        # Adapters in fp32.
        return found | ({k: t[k].float() for k in t if k[-2:] in ("_a", "_b")} if dtype != FP32 else {})

    sizes = dict(zip(("H", "I", "E", "K"), size[1:])) | dict(zip("rq", ranks))
    row = row_of("moe_experts_sorted" if counts else "moe_experts", given, options, sizes, shapes)
    names = " ".join(name if name.startswith("moe") else f"moe_experts_{name}" for name in names.split())
    add(row, names, tokens, 1, dtype=dtype, change=route, **case)


ON_HOPPER = dict(device=(90, 1))
experts(ROUTES + " up rows act_bwd weights combine route_bwd", (70, 16, 24, 3, 2))
experts(ROUTES + " up rows bias_bwd", (301, 16, 8, 2, 1), bias=True, activation="gelu", **GPT_OSS | dict(alpha=1.0))
experts("up rows", (70, 24, 40, 3, 3), activation="gelu_tanh", transposed=True, bias=True, quick=False)
experts("up rows", (33, 16, 8, 5, 2), transposed=True, bias=True, **GPT_OSS)
experts("up rows", (33, 7, 5, 3, 2), BF16, transposed=True, weight_before=True)
experts("moe_experts_scan up rows", (150, 16, 8, 4, 1), bias=True, counts=(131, 0, 7, 3))
experts(HOPPER + WEIGHTS, (70, 72, 136, 3, 2), FP16, interleaved=True, limit=0.75, **ON_HOPPER)
experts(HOPPER, (40, 72, 136, 3, 2), BF16, transposed=True, bias=True, activation="gelu", quick=False, **ON_HOPPER)
experts(HOPPER + WEIGHTS, (40, 72, 136, 3, 2), FP16, transposed=True, **GPT_OSS, quick=False, **ON_HOPPER)
# PyTorch multiplies rows of experts with so many, and columns if they are many too.
experts("gather act_rows_bwd", (1030, 8, 16, 1, 1), BF16, interleaved=True, **ON_HOPPER)
experts(
    "act_rows_bwd clear_rest",
    (2100, 8, 16, 2, 1),
    BF16,
    activation="gelu",
    counts=(1500, 400),
    quick=False,
    **ON_HOPPER,
)
experts("gather act act_rows_bwd", (1030, 8, 1032, 1, 1), BF16, interleaved=True, quick=False, **ON_HOPPER)
experts("act clear_rest", (1100, 8, 1032, 1, 1), BF16, activation="gelu", counts=(1030,), quick=False, **ON_HOPPER)
experts("up rows", (70, 16, 24, 3, 2), ranks=(8, 16))
experts("up rows", (33, 16, 8, 5, 2), BF16, transposed=True, bias=True, ranks=(3, 20), **GPT_OSS)
experts("up rows", (33, 7, 5, 3, 2), transposed=True, activation="gelu", weight_before=True, ranks=(1, 4))
experts("up rows", (150, 16, 8, 4, 1), bias=True, ranks=(8, 8), counts=(131, 0, 7, 3), quick=False)
experts("up_hopper", (70, 72, 136, 3, 2), BF16, interleaved=True, ranks=(16, 8), **ON_HOPPER)
experts("up_hopper", (40, 72, 136, 3, 2), FP16, transposed=True, ranks=(24, 40), quick=False, **ON_HOPPER)
experts("moe_adapters_add", (1030, 8, 16, 1, 1), BF16, ranks=(8, 4), **ON_HOPPER)

# ---- Others

add(row_of("xielu", "", dict(eps=-0.5)), "xielu_fwd xielu_bwd")
add(row_of("layer_norm", "weight bias", sizes=dict(n=5)), "column_sum", 2, 70, device=(80, 200))
hyper = row_of("hyper_pre", "", dict(norm_eps=1e-5, eps=1e-6, sinkhorn=3), dict(n=40))
for kernels, device in (("pieces fwd bwd bwd_logits", (80, 1)), ("fwd_hopper bwd_hopper", (90, 1))):
    add(hyper, " ".join(f"hyper_pre_{name}" for name in kernels.split()), dtype=BF16, device=device)
