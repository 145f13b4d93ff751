"""fused_linear_cross_entropy(input: (tokens, hidden), weight: (classes, hidden), target: (tokens,))"""

from functools import cache

import torch
import torch.nn.functional as F

from benchmarks.op import Anchor, Op, Relative

MIB = 1 << 20
CPU_SHAPE = (512, 1024, 32000)
CHECKED_LOGITS = 1 << 30  # elements; the fp64 reference keeps several such tensors
CHECKED_TOKENS = 128  # some peers need multiples of this
GRADIENTS_WANTED = 1 | 2  # input, weight
# A call of the sweep can take seconds, so it only measures providers with bounded memory.
SWEPT = ("three GEMMs", "liger-kernel", "ours", "ours compact", "ours 64 MiB")
COMPACT = 256 * MIB


def inputs(make, tokens, hidden, classes):
    return {
        "input": make.normal(tokens, hidden),
        # Gives logits a standard deviation of 1.
        "weight": make.normal(classes, hidden).mul_(hidden**-0.5),
        "target": make.integers(classes, tokens),
    }


def traffic(size, tokens, hidden, classes):
    read = (tokens + classes) * hidden * size
    return read, 2 * read  # inputs in; inputs in, their gradients out


def flops(tokens, hidden, classes):
    gemm = 2 * tokens * hidden * classes
    return gemm, 2 * gemm


def gradients(size, tokens, hidden, classes):
    return (tokens + classes) * hidden * size


def checked(tokens, hidden, classes):
    return min(tokens, CHECKED_LOGITS // classes // CHECKED_TOKENS * CHECKED_TOKENS), hidden, classes


def formula(input, weight, target):
    logits = F.linear(input, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)


class ThreeGemms(torch.autograd.Function):
    """The GEMMs alone, all tokens at once. The logits replace their gradient, which has the same size."""

    @staticmethod
    def forward(ctx, input, weight):
        logits = input @ weight.t()
        ctx.save_for_backward(input, weight, logits)
        return torch.empty((), device=input.device)

    @staticmethod
    def backward(ctx, grad):
        input, weight, logits = ctx.saved_tensors
        return logits @ weight, logits.t() @ input


class ChunkedGemms(torch.autograd.Function):
    """The GEMMs alone in the chunks of ours, with the gradient of the weight accumulated."""

    @staticmethod
    def forward(ctx, input, weight, chunk, with_gradients):
        buffer = input.new_empty(min(chunk, len(input)), len(weight))
        if with_gradients:
            ctx.gradients = torch.empty_like(input), torch.empty_like(weight)
        for first in range(0, len(input), chunk):
            part = input[first : first + chunk]
            logits = torch.mm(part, weight.t(), out=buffer[: len(part)])
            if with_gradients:
                into, added = ctx.gradients
                torch.mm(logits, weight, out=into[first : first + chunk])
                torch.addmm(added, logits.t(), part, beta=int(first > 0), out=added)
        return torch.empty((), device=input.device)

    @staticmethod
    def backward(ctx, grad):
        return *ctx.gradients, None, None


def three_gemms():
    return lambda input, weight, target: ThreeGemms.apply(input, weight)


def gemms_in_chunks_of(budget):
    def load():
        ours()

        def call(input, weight, target):
            plan = torch.ops.liger._fused_linear_cross_entropy_plan
            wanted = GRADIENTS_WANTED if torch.is_grad_enabled() else 0
            chunk = plan(*input.shape, weight.shape[0], input.dtype, wanted, budget)[0]
            return ChunkedGemms.apply(input, weight, chunk, bool(wanted))

        return call

    return load


def eager():
    return lambda input, weight, target: F.cross_entropy(F.linear(input, weight), target)


def liger_kernel():
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy


def liger_sm90():
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

    return liger_fused_linear_cross_entropy_sm90


def quack():
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy


def cut_cross_entropy():
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy


def ours():
    import liger_ops  # noqa: F401

    return torch.ops.liger.fused_linear_cross_entropy.default


def ours_within(budget):
    def load():
        op = ours()
        return lambda input, weight, target: op(input, weight, target, memory_budget=budget)

    return load


@cache
def budget_for_chunks(most, tokens, hidden, classes, dtype):
    """The smallest memory budget that needs at most `most` chunks."""
    plan = torch.ops.liger._fused_linear_cross_entropy_plan
    low, high = 0, 1 << 45
    while high - low > 1:
        middle = (low + high) // 2
        try:
            enough = plan(tokens, hidden, classes, dtype, GRADIENTS_WANTED, middle)[1] <= most
        except RuntimeError:  # too small for one token
            enough = False
        low, high = (low, middle) if enough else (middle, high)
    return high


def ours_in_16_chunks():
    op = ours()

    def call(input, weight, target):
        budget = budget_for_chunks(16, *input.shape, weight.shape[0], input.dtype)
        return op(input, weight, target, memory_budget=budget)

    return call


def anchors(shape, default_ms, default_mib, compact_ms, compact_mib):
    return (
        Anchor(shape, "bfloat16", {"full": 1e3 * default_ms}, {"full": default_mib}),
        Anchor(shape, "bfloat16", {"full": 1e3 * compact_ms}, {"full": compact_mib}, provider="ours compact"),
    )


OP = Op(
    dims=("tokens", "hidden", "classes"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    flops=flops,
    floor="three GEMMs",
    unchecked=frozenset({"GEMMs of ours", "GEMMs of compact"}),
    gradients=gradients,
    providers={
        "three GEMMs": three_gemms,
        "GEMMs of ours": gemms_in_chunks_of(None),
        "GEMMs of compact": gemms_in_chunks_of(COMPACT),
        "torch": eager,
        "liger-kernel": liger_kernel,
        "liger-sm90": liger_sm90,
        "cut-cross-entropy": cut_cross_entropy,
        "quack": quack,
        "ours": ours,
        "ours compact": ours_within(COMPACT),
        "ours 16 chunks": ours_in_16_chunks,
        "ours 64 MiB": ours_within(64 * MIB),
    },
    shapes={
        "quick-cpu": [(256, 512, 16000)],
        "quick": [(2048, 2048, 32000), (2048, 2048, 50257)],
        "paper": [(rows, 4096, 128256) for rows in (4096, 8192, 16384)],
        "full": [(tokens << 10, 4096, classes << 10) for classes in (32, 64, 128, 256) for tokens in (1, 4, 16, 64)],
    },
    passes=("forward", "full"),
    checked=checked,
    averaged=lambda tokens, hidden, classes: tokens,
    must_error=dict.fromkeys(("d input", "d weight"), Relative(1.5, ("torch",))),
    asked={"full": SWEPT},
    dtypes={"full": ("bfloat16",)},
    constants=frozenset({"target"}),
    anchors=(
        *anchors((4096, 4096, 128256), 19.0, 2050, 20.0, 1300),
        *anchors((16384, 4096, 128256), 77.5, 2200, 81.0, 1400),
        *anchors((8192, 2048, 128256), 19.2, 1650, 20.3, 850),
        *anchors((8192, 3584, 151936), 41.2, 2350, 44.0, 1450),
        Anchor(CPU_SHAPE, "float32", {"full": Relative(1.0, ("torch", "hf"))}, device="cpu"),
        Anchor(CPU_SHAPE, "float32", {}, {"full": gradients(4, *CPU_SHAPE) / MIB + 64}, "cpu", "ours 64 MiB"),
    ),
)
