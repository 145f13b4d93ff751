"""fused_linear_divergence(s_input: (tokens, hidden), s_weight: (classes, hidden), t_input, t_weight alike), the sum of
KL(teacher || student). Providers with "JSD" in their name compute the Jensen-Shannon divergence, and those of "per token"
one number per token, whose gradient another product may follow."""

import torch
import torch.nn.functional as F

from benchmarks.linear_log_probs import SWEEP
from benchmarks.op import Anchor, Op, Relative

MIB = 1 << 20
COMPACT = 320 * MIB
CHECKED_LOGITS = 1 << 28  # elements of each model; the fp64 reference keeps several such tensors
CHECKED_TOKENS = 128
FOUR, SIX, THREE = "four GEMMs", "six GEMMs", "GEMMs of a frozen head"


def inputs(make, tokens, hidden, classes):
    def head():
        # Gives logits a standard deviation of 1.
        return make.normal(classes, hidden).mul_(hidden**-0.5)

    s_input, s_weight = make.normal(tokens, hidden), head()
    # A teacher that the student has begun to follow.
    return {
        "s_input": s_input,
        "s_weight": s_weight,
        "t_input": s_input + 0.3 * make.normal(tokens, hidden),
        "t_weight": s_weight.clone(),
    }


def traffic(size, tokens, hidden, classes):
    read = 2 * (tokens + classes) * hidden * size
    return read, read + (tokens + classes) * hidden * size  # inputs in; inputs in, the student's gradients out


def flops(tokens, hidden, classes):
    gemm = 2 * tokens * hidden * classes
    return 2 * gemm, 2 * gemm


def gradients(size, tokens, hidden, classes):
    return (tokens + classes) * hidden * size


def checked(tokens, hidden, classes):
    return min(tokens, CHECKED_LOGITS // classes // CHECKED_TOKENS * CHECKED_TOKENS), hidden, classes


def formula(s_input, s_weight, t_input, t_weight):
    def logs(x, weight):
        logits = F.linear(x, weight)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    return F.kl_div(logs(s_input, s_weight), logs(t_input, t_weight), log_target=True, reduction="sum")


def nothing(like):
    """A gradient that takes no memory, for the head that a provider does not train."""
    return like.new_zeros(()).expand_as(like)


class Frozen(torch.autograd.Function):
    """Passes a result through. The harness asks for the head's gradient."""

    @staticmethod
    def forward(ctx, found, head):
        ctx.save_for_backward(head)
        return found.view_as(found)

    @staticmethod
    def backward(ctx, grad):
        return grad, nothing(*ctx.saved_tensors)


def with_head(call, frozen):
    """call(s_input, s_weight, t_input, t_weight), with the head detached if it is frozen."""
    if not frozen:
        return call
    return lambda x, head, *teacher: Frozen.apply(call(x, head.detach(), *teacher), head)


class Gemms(torch.autograd.Function):
    """The GEMMs alone, all tokens at once. again: backward computes both models' logits too. d weight: optional."""

    @staticmethod
    def forward(ctx, s_input, s_weight, t_input, t_weight, again, trains_head):
        logits = s_input @ s_weight.t()
        t_input @ t_weight.t()
        ctx.again, ctx.trains_head = again, trains_head
        ctx.save_for_backward(s_input, s_weight, t_input, t_weight, logits)
        return torch.empty((), device=s_input.device)

    @staticmethod
    def backward(ctx, grad):
        s_input, s_weight, t_input, t_weight, logits = ctx.saved_tensors
        if ctx.again:
            t_input @ t_weight.t()
            logits = s_input @ s_weight.t()
        dweight = logits.t() @ s_input if ctx.trains_head else nothing(s_weight)
        return logits @ s_weight, dweight, None, None, None, None


def gemms(again, trains_head):
    return lambda: lambda *given: Gemms.apply(*given, again, trains_head)


def eager():
    return formula


def trl(beta, frozen=False):
    def load():
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

        def call(s_input, s_weight, t_input, t_weight):
            return ChunkedDivergenceFunction.apply(s_input, s_weight, None, t_input, t_weight, None, beta)[0].sum()

        return with_head(call, frozen)

    return load


def liger_kernel(beta):
    def load():
        from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction

        def call(s_input, s_weight, t_input, t_weight):
            mean = LigerFusedLinearJSDFunction.apply(s_input, s_weight, t_input, t_weight, None, beta, -100, 1.0)
            return mean * len(s_input)

        return call

    return load


def ours(beta=0.0, reduction="sum", frozen=False, budget=None):
    def load():
        import liger_ops  # noqa: F401

        op = torch.ops.liger.fused_linear_divergence.default

        def call(s_input, s_weight, t_input, t_weight):
            found = op(s_input, s_weight, t_input, t_weight, beta=beta, reduction=reduction, memory_budget=budget)[0]
            return found if reduction == "sum" else found.sum()

        return with_head(call, frozen)

    return load


def anchor(shape, must, provider):
    return Anchor(shape, "bfloat16", {"full": must}, provider=provider)


OP = Op(
    dims=("tokens", "hidden", "classes"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    flops=flops,
    floor=FOUR,
    # Another function, or without the head's gradient.
    unchecked=frozenset({SIX, THREE, "trl JSD", "trl frozen", "liger-kernel JSD", "ours JSD", "ours frozen"}),
    gradients=gradients,
    providers={
        FOUR: gemms(False, True),
        SIX: gemms(True, True),
        THREE: gemms(False, False),
        "torch": eager,
        "trl": trl(0.0),
        "trl JSD": trl(0.5),
        "trl frozen": trl(0.0, frozen=True),
        "liger-kernel": liger_kernel(0.0),
        "liger-kernel JSD": liger_kernel(0.5),
        "ours": ours(),
        "ours JSD": ours(0.5),
        "ours per token": ours(reduction="none"),
        "ours per token 1280 MiB": ours(reduction="none", budget=4 * COMPACT),
        "ours frozen": ours(reduction="none", frozen=True),
        "ours 320 MiB": ours(budget=COMPACT),
    },
    shapes={
        "quick-cpu": [(256, 256, 8000)],
        "quick": [(2048, 2048, 32000), (2048, 2048, 50257)],
        "full": SWEEP,
    },
    passes=("forward", "full"),
    asked={"full": (FOUR, "trl", "ours")},
    checked=checked,
    averaged=lambda tokens, hidden, classes: tokens,
    must_error=dict.fromkeys(("d s_input", "d s_weight"), Relative(1.5, ("torch",))),
    dtypes={"full": ("bfloat16",)},
    constants=frozenset({"t_input", "t_weight"}),
    anchors=tuple(
        anchor(shape, Relative(factor, (floor,)), provider)
        for shape in ((8192, 4096, 151936), (16384, 2048, 151936))
        for provider, factor, floor in (
            ("ours", 1.05, FOUR),
            ("ours JSD", 1.05, FOUR),
            ("ours per token", 1.08, SIX),
            ("ours frozen", 1.06, THREE),
        )
    ),
)
