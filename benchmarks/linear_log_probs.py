"""What the benchmarks of fused_linear_log_probs share, with a trained and with a frozen head. Shapes (tokens, hidden,
classes); the result is the log-probability of each target."""

import torch
import torch.nn.functional as F

from benchmarks.op import Anchor, Op, Relative

CHECKED_LOGITS = 1 << 30  # elements; the fp64 reference keeps several such tensors
MIB = 1 << 20
SWEEP = [(tokens << 10, 4096, classes << 10) for classes in (32, 64, 128, 256) for tokens in (1, 8, 32)]


def inputs(make, tokens, hidden, classes):
    return {
        "input": make.normal(tokens, hidden),
        # Gives logits a standard deviation of 1.
        "weight": make.normal(classes, hidden).mul_(hidden**-0.5),
        "target": make.integers(classes, tokens),
    }


def formula(input, weight, target):
    logits = F.linear(input, weight)
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return logs.gather(-1, target[:, None])[:, 0]


class Gemms(torch.autograd.Function):
    """The GEMMs alone, all tokens at once. With a trained head, the logits are computed again."""

    @staticmethod
    def forward(ctx, input, weight, target, with_gradients):
        logits = input @ weight.t()
        ctx.frozen = not weight.requires_grad
        kept = (logits @ weight,) if ctx.frozen and with_gradients else (input, weight)
        ctx.save_for_backward(*kept)
        return torch.empty(len(target), device=input.device)

    @staticmethod
    def backward(ctx, grad):
        if ctx.frozen:
            return ctx.saved_tensors[0], None, None, None
        input, weight = ctx.saved_tensors
        logits = input @ weight.t()
        return logits @ weight, logits.t() @ input, None, None


def gemms():
    return lambda input, weight, target: Gemms.apply(input, weight, target, torch.is_grad_enabled())


def trl():
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    return lambda input, weight, target: ChunkedLogProbFunction.apply(
        input, weight, None, target, 1.0, 8192, None, 1.0, ()
    )[0]


def liger_kernel():
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    return lambda input, weight, target: -LigerFusedLinearScaledCrossEntropyFunction.apply(input, weight, target)


def ours(**options):
    def load():
        import liger_ops  # noqa: F401

        op = torch.ops.liger.fused_linear_log_probs.default
        return lambda input, weight, target: op(input, weight, target, **options)[0]

    return load


def ours_as_loss():
    """The loss that also returns log-probabilities. Its gradient is that of the loss alone."""
    import liger_ops  # noqa: F401

    op = torch.ops.liger.fused_linear_cross_entropy_with_log_probs.default
    return lambda input, weight, target: -op(input, weight, target, reduction="none")[0]


def declare(*, frozen: bool, products: int, mib: int) -> Op:
    """products: GEMMs of a step, with the logits as the first. mib: peak above the gradients."""

    def traffic(size, tokens, hidden, classes):
        read = (tokens + classes) * hidden * size
        return read, read + (tokens + (0 if frozen else classes)) * hidden * size

    def flops(tokens, hidden, classes):
        gemm = 2 * tokens * hidden * classes
        return gemm, (products - 1) * gemm

    def gradients(size, tokens, hidden, classes):
        return (tokens + (0 if frozen else classes)) * hidden * size

    def anchor(*shape):
        peak = gradients(2, *shape) / MIB + mib
        full = Relative(1.06 if frozen else 1.0, ("GEMMs",))
        return Anchor(shape, "bfloat16", {"forward": Relative(1.08, ("GEMMs",)), "full": full}, {"full": peak})

    return Op(
        dims=("tokens", "hidden", "classes"),
        inputs=inputs,
        formula=formula,
        traffic=traffic,
        flops=flops,
        floor="GEMMs",
        unchecked=frozenset({"GEMMs"}),
        gradients=gradients,
        providers={
            "GEMMs": gemms,
            "torch": lambda: formula,
            "liger-kernel": liger_kernel,
            "trl": trl,
            "ours": ours(),
            "ours with entropy": ours(entropy=True),
            "ours as a loss": ours_as_loss,
        },
        shapes={
            "quick-cpu": [(256, 512, 16000)],
            "quick": [(2048, 2048, 32000), (2048, 2048, 50257)],
            "full": SWEEP,
        },
        passes=("forward", "full"),
        asked={"full": ("GEMMs", "trl", "ours")},
        checked=lambda tokens, hidden, classes: (min(tokens, CHECKED_LOGITS // classes // 128 * 128), hidden, classes),
        must_error=dict.fromkeys(("d input",) if frozen else ("d input", "d weight"), Relative(1.5, ("torch",))),
        dtypes={"full": ("bfloat16",)},
        constants=frozenset({"target", "weight"} if frozen else {"target"}),
        anchors=(anchor(8192, 4096, 151936), anchor(16384, 2048, 151936)),
    )
