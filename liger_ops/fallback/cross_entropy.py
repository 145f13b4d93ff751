"""cross_entropy and its other forms without C++. Rows are made contiguous first; backward reads the logits twice."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import runtime

# The kernels' flags.
HAS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP, _, SAVE_Z_LOSS, SAVE_METRICS, ADD_Z_LOSS, MEAN = (1 << i for i in range(8))
FROM_PARTIAL, TO_PARTIAL, SAVE_TOTALS, HAS_GRAD, COUNT_ONLY = (1 << i for i in range(8, 13))

OPTIONS = "str reduction{}, int ignore_index{}, float label_smoothing{}, float lse_square_scale{}, float? softcap{}"
PUBLIC = "Tensor target, Tensor? weight=None, " + OPTIONS.format('="mean"', "=-100", "=0.0", "=0.0", "=None")
PRIVATE = "Tensor target, Tensor? weight, " + OPTIONS.format(*[""] * 5)


class Options(NamedTuple):
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    lse_square_scale: float = 0.0
    softcap: float | None = None


def check(op: str, logits: Tensor, target: Tensor, weight: Tensor | None, o: Options) -> None:
    def demand(condition: bool, argument: str, rule: str, got: object) -> None:
        if not condition:
            raise RuntimeError(f"{op}: {argument} must {rule} (got {got})")

    allowed = [torch.float32, torch.float16, torch.bfloat16] + ([] if logits.is_cuda else [torch.float64])
    floating = logits.dtype in allowed and logits.dim() >= 1
    demand(floating, "logits", "be a floating-point tensor of at least one dimension", (logits.dtype, logits.shape))
    demand(target.dtype in (torch.int64, torch.int32), "target", "be int64 or int32 class indices", target.dtype)
    demand(target.shape == logits.shape[:-1], "target", f"have shape {list(logits.shape[:-1])}", target.shape)
    demand(target.device == logits.device, "target", f"be on {logits.device} like logits", target.device)
    if weight is not None:
        fits = weight.shape == logits.shape[-1:] and weight.dtype in (logits.dtype, torch.float32)
        fits = fits and weight.device == logits.device
        demand(fits, "weight", "have one value a class, in float32 or the logits' dtype", (weight.shape, weight.dtype))
        demand(not weight.requires_grad, "weight", "not require a gradient", "one that does")
    demand(o.reduction in ("mean", "sum", "none"), "reduction", "be 'mean', 'sum' or 'none'", repr(o.reduction))
    demand(0 <= o.label_smoothing <= 1, "label_smoothing", "be between 0 and 1", o.label_smoothing)
    demand(math.isfinite(o.lse_square_scale), "lse_square_scale", "be finite", o.lse_square_scale)
    positive = o.softcap is None or 0 < o.softcap < math.inf
    demand(positive, "softcap", "be positive and finite", o.softcap)


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Rows:
    """A call on CPU tensors, row by row; everything in the compute dtype."""

    def __init__(self, op: str, logits: Tensor, target: Tensor, weight: Tensor | None, o: Options) -> None:
        runtime.count_cpu_call()
        n = logits.shape[-1]
        self.o, self.x = o, logits.to(compute_dtype(logits)).reshape(target.numel(), n)
        y = target.reshape(-1).long()
        self.counted = y != o.ignore_index
        for wild in y[self.counted & ((y < 0) | (y >= n))][:1].tolist():
            raise RuntimeError(f"{op}: target must lie in [0, {n}) or be ignore_index, {o.ignore_index} (got {wild})")
        self.slope = None
        if o.softcap is not None:
            t = torch.tanh(self.x / o.softcap)
            self.x, self.slope = o.softcap * t, 1 - t * t
        self.y = torch.where(self.counted, y, 0)[:, None]
        self.weight = self.x.new_ones(n) if weight is None else weight.to(self.x.dtype)
        self.own_weight = self.weight[self.y[:, 0]] if n else self.x.new_zeros(len(y))
        self.log_p = torch.log_softmax(self.x, -1)
        self.lse = torch.logsumexp(self.x, -1)
        # The other classes against the true one: a confident prediction keeps its digits.
        if n:
            below_top = self.x - self.x.amax(-1, keepdim=True)
            others = torch.logsumexp(below_top.scatter(1, self.y, -math.inf), -1)
            self.odds = others - below_top.gather(1, self.y)[:, 0]

    def divisors(self) -> tuple[Tensor | float, Tensor | float]:
        if self.o.reduction != "mean":
            return 1.0, 1.0
        return torch.where(self.counted, self.own_weight, 0).sum(), self.counted.sum()

    def results(self, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        o = self.o
        if not self.x.numel():
            loss = z_loss = right = self.lse.new_zeros(len(self.x))
            predicted = torch.full_like(self.y[:, 0], -1)
        else:
            loss = F.softplus(self.odds) * self.own_weight
            if o.label_smoothing:
                smooth = -(self.log_p * self.weight).mean(-1)
                loss = (1 - o.label_smoothing) * loss + o.label_smoothing * smooth
            best = self.x.argmax(-1)
            predicted = torch.where(self.counted, best, -1)
            right = (self.counted & (best == self.y[:, 0])).to(loss.dtype)
            loss = torch.where(self.counted, loss, 0)
            z_loss = torch.where(self.counted, o.lse_square_scale * self.lse * self.lse, 0)
        if o.reduction == "none":
            loss, z_loss, right = ((t.clone().view(shape) for t in (loss + z_loss, z_loss, right)))
        else:
            by_weight, by_count = self.divisors()
            z_loss, right = z_loss.sum() / by_count, right.sum() / by_count
            loss = loss.sum() / by_weight + z_loss
        return loss, z_loss, right, predicted.view(shape)

    def gradient(self, grad: Tensor | None, like: Tensor) -> Tensor:
        """grad: what arrives for the loss; None: 1."""
        if not like.numel():
            return torch.empty_like(like, memory_format=torch.contiguous_format)
        o, g = self.o, self.lse.new_ones(()) if grad is None else grad.to(self.lse.dtype).reshape(-1)
        by_weight, by_count = self.divisors()
        pull = (g / by_weight * self.own_weight * (1 - o.label_smoothing))[:, None]
        tilt = (g / by_weight * o.label_smoothing / self.x.shape[1]).expand(len(self.x))[:, None]
        z_slope = (g / by_count * 2 * o.lse_square_scale * self.lse)[:, None]
        p = self.log_p.exp()
        dx = p * (pull + tilt * self.weight.sum() + z_slope) - tilt * self.weight
        own = -torch.sigmoid(self.odds)[:, None] * pull
        own += p.gather(1, self.y) * (tilt * self.weight.sum() + z_slope) - tilt * self.own_weight[:, None]
        dx = dx.scatter(1, self.y, own)
        dx = dx if self.slope is None else dx * self.slope
        return torch.where(self.counted[:, None], dx, 0).to(like.dtype).view(like.shape)


def launch_rows(
    op: str,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    o: Options,
    metrics: bool,
    dlogits: Tensor | None = None,
    grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward on a CUDA device, and the gradient too where there is a contiguous `dlogits` to hold it."""
    shape, rows, n, device = target.shape, target.numel(), logits.shape[-1], logits.device
    logits = logits.contiguous()
    target = target.contiguous()
    weight = None if weight is None else weight.float().contiguous()
    loss, z_loss, accuracy = (torch.empty(rows, device=device) for _ in range(3))
    predicted = torch.empty(rows, dtype=torch.int64, device=device)
    outs = [torch.empty((), device=device) for _ in range(3)]
    totals = torch.empty(2, device=device)
    words, mean = 2 if target.dtype == torch.int64 else 1, o.reduction == "mean"
    flags = (HAS_WEIGHT if weight is not None else 0) | (MEAN if mean else 0) | SAVE_Z_LOSS
    flags |= SAVE_METRICS if metrics else 0

    def add_up(flags: int) -> None:
        shares = 1 if rows <= 65536 else min(1024, -(-rows // 4096))
        partial = torch.empty(shares, 5, device=device)

        def launch(rows: int, programs: int, flags: int) -> None:
            args = dict(
                loss_out=outs[0], z_loss_out=outs[1], accuracy_out=outs[2], totals=totals, partial=partial, loss=loss,
                z_loss=z_loss, accuracy=accuracy, target=target, weight=weight, rows=rows, n=n, target_words=words,
                ignore_index=o.ignore_index, flags=flags,
            )  # fmt: skip
            runtime.launch(op, "cross_entropy_sum", {"W": "fp32"}, n, lambda _: (programs, 1, 1), args, device)

        if shares > 1:
            launch(rows, shares, flags | TO_PARTIAL)
            rows_left, flags = shares, flags | FROM_PARTIAL
        else:
            rows_left = rows
        launch(rows_left, 1, flags | SAVE_TOTALS)

    if rows:
        if dlogits is not None and mean:
            add_up(flags & ~(SAVE_Z_LOSS | SAVE_METRICS) | COUNT_ONLY)
        row_flags = flags | (HAS_SMOOTHING if o.label_smoothing > 0 else 0)
        row_flags |= HAS_SOFTCAP if o.softcap is not None else 0
        extras = int(row_flags & (HAS_WEIGHT | HAS_SMOOTHING | HAS_SOFTCAP) != 0)
        row_flags |= ADD_Z_LOSS if o.reduction == "none" else 0
        row_flags |= HAS_GRAD if grad is not None else 0
        args = dict(
            loss=loss, z_loss=z_loss, accuracy=accuracy, predicted=predicted, stats=None, logits=logits, target=target,
            weight=weight, weight_sum=None if weight is None else weight.sum(), rows=rows, n=n, inner_rows=rows,
            logits_outer=0, logits_inner=n, target_words=words, ignore_index=o.ignore_index,
            label_smoothing=o.label_smoothing, lse_square_scale=o.lse_square_scale, softcap=o.softcap or 1.0,
            flags=row_flags,
        )  # fmt: skip
        name = "cross_entropy_fwd"
        if dlogits is not None:
            name = "cross_entropy_fwd_bwd"
            grad = None if grad is None else grad.float().contiguous()
            stride = 1 if o.reduction == "none" and grad is not None else 0
            args |= dict(dlogits=dlogits, dlogits_outer=0, dlogits_inner=n, grad=grad, grad_stride=stride)
            args["totals"] = totals
        choices = {"X": runtime.dtype_name(logits), "EXTRAS": extras}
        runtime.launch(op, name, choices, n, lambda _: (rows, 1, 1), args, device)
    if o.reduction == "none":
        return loss.view(shape), z_loss.view(shape), accuracy.view(shape), predicted.view(shape)
    add_up(flags)
    return *outs, predicted.view(shape)


def forward(
    op: str, metrics: bool, logits: Tensor, target: Tensor, weight: Tensor | None, *options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    o = Options(*options)
    check(op, logits, target, weight, o)
    if logits.is_cuda:
        return launch_rows(op, logits, target, weight, o, metrics)
    return Rows(op, logits, target, weight, o).results(target.shape)


def gradient(grad: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, *options) -> Tensor:
    o = Options(*options)
    if logits.is_cuda:
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        launch_rows("cross_entropy", logits, target, weight, o, False, dlogits, grad)
        return dlogits
    return Rows("cross_entropy", logits, target, weight, o).gradient(grad, logits)


def fake_results(logits: Tensor, target: Tensor, reduction: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = target.shape if reduction == "none" else ()
    rows = [torch.empty(shape, dtype=compute_dtype(logits), device=logits.device) for _ in range(3)]
    return *rows, torch.empty(target.shape, dtype=torch.int64, device=logits.device)


def overwrite(logits: Tensor, target: Tensor, weight: Tensor | None = None, *options, **named) -> Tensor:
    op, o = "cross_entropy_", Options(*options, **named)
    check(op, logits, target, weight, o)
    if logits.is_cuda:
        dlogits = logits if logits.is_contiguous() else logits.contiguous()
        loss = launch_rows(op, logits, target, weight, o, False, dlogits)[0]
        if dlogits is not logits:
            logits.copy_(dlogits)
        return loss
    rows = Rows(op, logits, target, weight, o)
    loss = rows.results(target.shape)[0]
    logits.copy_(rows.gradient(None, logits))
    return loss


class Loss(torch.autograd.Function):
    """Of logits whose gradient is known already, but for what arrives for the loss."""

    @staticmethod
    def forward(ctx, logits, dlogits, loss):
        ctx.save_for_backward(dlogits)
        return loss.view_as(loss)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (dlogits,) = ctx.saved_tensors
        scaled = dlogits.to(grad.dtype) * (grad[..., None] if grad.dim() else grad)
        return scaled.to(dlogits.dtype), None, None


class Overwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, dlogits):
        ctx.mark_dirty(logits)
        return logits.copy_(dlogits)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("cross_entropy_: the logits hold their gradient now and have none")


def overwrite_autograd(logits: Tensor, *args, **named) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        dlogits = logits.clone() if logits.requires_grad else logits
        loss = torch.ops.liger.cross_entropy_(dlogits, *args, **named)
    if dlogits is logits:
        return loss
    loss = Loss.apply(logits, dlogits, loss)
    Overwritten.apply(logits, dlogits)
    return loss


def register() -> None:
    define = torch.library.custom_op
    schema = f"(Tensor grad, Tensor logits, {PRIVATE}) -> Tensor"
    grad = define("liger::_cross_entropy_grad", gradient, mutates_args=(), schema=schema)
    grad.register_fake(lambda grad, logits, *_, **__: torch.empty_like(logits, memory_format=torch.contiguous_format))

    def save(ctx, inputs, output):
        logits, target, weight, *ctx.options = inputs
        ctx.save_for_backward(logits, target, weight)
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[1:])

    def backward(ctx, grad, *_):
        dlogits = torch.ops.liger._cross_entropy_grad(grad, *ctx.saved_tensors, *ctx.options)
        return dlogits, None, None, *(None for _ in ctx.options)

    def cross_entropy(logits, target, weight=None, *options, **named):
        return forward("cross_entropy", False, logits, target, weight, *Options(*options, **named))[0]

    schema = f"(Tensor logits, {PUBLIC}) -> Tensor"
    plain = define("liger::cross_entropy", cross_entropy, mutates_args=(), schema=schema)
    plain.register_autograd(backward, setup_context=save)

    @plain.register_fake
    def _(logits, target, weight=None, reduction="mean", *_, **__):
        return fake_results(logits, target, reduction)[0]

    def cross_entropy_with_metrics(logits, target, weight=None, *options, **named):
        return forward("cross_entropy_with_metrics", True, logits, target, weight, *Options(*options, **named))

    schema = f"(Tensor logits, {PUBLIC}) -> (Tensor, Tensor, Tensor, Tensor)"
    metrics = define("liger::cross_entropy_with_metrics", cross_entropy_with_metrics, mutates_args=(), schema=schema)
    metrics.register_autograd(backward, setup_context=save)

    @metrics.register_fake
    def _(logits, target, weight=None, reduction="mean", *_, **__):
        return fake_results(logits, target, reduction)

    # custom_op gives no gradient to an operator that writes.
    library = register.library = torch.library.Library("liger", "FRAGMENT")
    library.define(f"cross_entropy_(Tensor(a!) logits, {PUBLIC}) -> Tensor")
    library.impl("cross_entropy_", overwrite, "CPU")
    library.impl("cross_entropy_", overwrite, "CUDA")

    def overwrite_fake(logits, target, weight=None, reduction="mean", *_, **__):
        return fake_results(logits, target, reduction)[0]

    library.impl("cross_entropy_", overwrite_fake, "Meta")
    library.impl("cross_entropy_", overwrite_autograd, "Autograd")
