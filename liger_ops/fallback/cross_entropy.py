"""cross_entropy and its other forms without C++. Rows are made contiguous first; backward reads the logits twice."""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import runtime
from .autograd import once_differentiable
from .swiglu import demand_dtype

# The kernels' flags.
HAS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP, SAVE_STATS = (1 << i for i in range(4))
SAVE_Z_LOSS, SAVE_METRICS, ADD_Z_LOSS, MEAN = (1 << i for i in range(4, 8))
FROM_PARTIAL, TO_PARTIAL, SAVE_TOTALS, HAS_GRAD, COUNT_ONLY = (1 << i for i in range(8, 13))
MOST_PARTS, MOST_SKEW = 128, 63

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
        demand_dtype(op, "weight", weight, "logits", logits)
        fits = weight.shape == logits.shape[-1:] and weight.device == logits.device
        demand(fits, "weight", "have one value a class, on the device of logits", (weight.shape, weight.device))
        demand(not weight.requires_grad, "weight", "not require a gradient", "one that does")
    demand(o.reduction in ("mean", "sum", "none"), "reduction", "be 'mean', 'sum' or 'none'", repr(o.reduction))
    demand(0 <= o.label_smoothing <= 1, "label_smoothing", "be between 0 and 1", o.label_smoothing)
    demand(math.isfinite(o.lse_square_scale), "lse_square_scale", "be finite", o.lse_square_scale)
    positive = o.softcap is None or 0 < o.softcap < math.inf
    demand(positive, "softcap", "be positive and finite", o.softcap)


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Results(NamedTuple):
    """Of every row."""

    loss: Tensor
    z_loss: Tensor
    accuracy: Tensor
    predicted: Tensor

    def narrow(self, first: int, rows: int) -> Results:
        return Results(*(t.narrow(0, first, rows) for t in self))


class Rows:
    """A call on CPU tensors, row by row; everything in the compute dtype. totals: the divisors of a mean over more
    rows than these."""

    def __init__(
        self, op: str, logits: Tensor, target: Tensor, weight: Tensor | None, o: Options, totals: tuple | None = None
    ) -> None:
        runtime.count_cpu_call()
        n = logits.shape[-1]
        self.totals = totals
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
        if self.totals is not None:
            return self.totals
        return torch.where(self.counted, self.own_weight, 0).sum(), self.counted.sum()

    def of_rows(self) -> Results:
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
        return Results(loss, z_loss, right, predicted)

    def results(self, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        o, (loss, z_loss, right, predicted) = self.o, self.of_rows()
        if o.reduction == "none":
            loss, z_loss, right = (t.clone().view(shape) for t in (loss + z_loss, z_loss, right))
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


class Launches:
    """The kernels' part in one call on a CUDA device. target: (rows,), contiguous; logits come as contiguous rows."""

    def __init__(self, op: str, n: int, target: Tensor, weight: Tensor | None, o: Options, metrics: bool) -> None:
        self.op, self.n, self.o, self.target, self.device = op, n, o, target, target.device
        self.weight = None if weight is None else weight.float().contiguous()
        self.weight_sum = None if weight is None else self.weight.sum()
        self.words = 2 if target.dtype == torch.int64 else 1
        self.flags = (HAS_WEIGHT if weight is not None else 0) | (MEAN if o.reduction == "mean" else 0) | SAVE_Z_LOSS
        self.flags |= SAVE_METRICS if metrics else 0

    def empty_rows(self) -> Results:
        rows = len(self.target)
        loss, z_loss, accuracy = (torch.empty(rows, device=self.device) for _ in range(3))
        return Results(loss, z_loss, accuracy, torch.empty(rows, dtype=torch.int64, device=self.device))

    def sum(self, found: Results | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(loss, z-loss, accuracy, divisors of a mean) of all rows; without results: the last alone."""
        found = found or Results(None, None, None, None)
        flags = self.flags if found.loss is not None else self.flags & ~(SAVE_Z_LOSS | SAVE_METRICS) | COUNT_ONLY
        rows = len(self.target)
        outs, totals = [torch.empty((), device=self.device) for _ in range(3)], torch.empty(2, device=self.device)
        shares = 1 if rows <= 32768 else min(1024, -(-rows // 4096))
        partial = torch.empty(shares, 5, device=self.device)

        def launch(rows: int, programs: int, flags: int) -> None:
            args = dict(
                loss_out=outs[0], z_loss_out=outs[1], accuracy_out=outs[2], totals=totals, partial=partial,
                loss=found.loss, z_loss=found.z_loss, accuracy=found.accuracy, target=self.target, weight=self.weight,
                rows=rows, n=self.n, ignore_index=self.o.ignore_index, flags=flags,
            )  # fmt: skip
            grid = lambda _: (programs, 1, 1)  # noqa: E731
            runtime.launch(self.op, "cross_entropy_sum", {"WORDS": self.words}, self.n, grid, args, self.device)

        if shares > 1:
            launch(rows, shares, flags | TO_PARTIAL)
            launch(shares, 1, flags | FROM_PARTIAL | SAVE_TOTALS)
        else:
            launch(rows, 1, flags | SAVE_TOTALS)
        return *outs, totals

    def rows(
        self,
        logits: Tensor,
        first: int,
        found: Results,
        stats: Tensor | None = None,
        dlogits: Tensor | None = None,
        grad: Tensor | None = None,
        totals: Tensor | None = None,
    ) -> None:
        """Of the call's rows from `first` on. grad: what arrives, one number for all rows or one each; None: 1."""
        if not len(logits):
            return
        (rows, n), o = logits.shape, self.o
        flags = self.flags | (HAS_SMOOTHING if o.label_smoothing > 0 else 0)
        flags |= HAS_SOFTCAP if o.softcap is not None else 0
        extras = int(flags & (HAS_WEIGHT | HAS_SMOOTHING | HAS_SOFTCAP) != 0)
        choices = {"X": runtime.dtype_name(logits), "EXTRAS": extras}
        flags |= ADD_Z_LOSS if o.reduction == "none" else 0
        flags |= HAS_GRAD if grad is not None else 0
        flags |= SAVE_STATS if stats is not None else 0
        args = dict(
            **found.narrow(first, rows)._asdict(), stats=stats, logits=logits,
            target=self.target.narrow(0, first, rows), weight=self.weight, weight_sum=self.weight_sum,
            rows=rows, n=n, inner_rows=rows, logits_outer=0,
            logits_inner=logits.stride(0), target_words=self.words, ignore_index=o.ignore_index,
            label_smoothing=o.label_smoothing, lse_square_scale=o.lse_square_scale, softcap=o.softcap or 1.0,
            flags=flags,
        )  # fmt: skip
        if dlogits is None:
            # Whole rows: sharing them out, where they are few, is worth less than what this way costs the host.
            args |= dict(shares=None, arrived=None, part=0)
            choices |= {"SHARED": 0}
            grid = lambda _: (rows, 1, 1)  # noqa: E731
            runtime.launch(self.op, "cross_entropy_fwd", choices, n, grid, args, self.device)
            return
        grad = None if grad is None else grad.float().contiguous()

        counted = logits.element_size() // 2  # configs count 16-bit logits

        def parts_of(config) -> int:
            c = config.constexprs
            part = c["SHARE"] // counted
            return -(-(n + MOST_SKEW * c["SKEWED"]) // part) if part else 1

        most = max(map(parts_of, runtime.configs("cross_entropy_fwd_bwd")))
        # The programs of a row wait for one another: all must run at a time.
        fits = most <= min(MOST_PARTS, runtime.multiprocessors(logits))
        args |= dict(
            dlogits=dlogits, dlogits_outer=0, dlogits_inner=dlogits.stride(0), grad=grad,
            grad_stride=1 if grad is not None and grad.dim() else 0, totals=totals,
            shares=torch.empty(rows, most, 4, device=self.device),
            arrived=torch.zeros(rows, dtype=torch.int32, device=self.device),
        )  # fmt: skip
        grid = lambda config: (rows * parts_of(config), 1, 1)  # noqa: E731
        # What takes any width shares no row out.
        width = n * counted if fits else sys.maxsize
        runtime.launch(self.op, "cross_entropy_fwd_bwd", choices, width, grid, args, self.device, may_be_aligned=fits)


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
    n = logits.shape[-1]
    call = Launches(op, n, target.reshape(-1).contiguous(), weight, o, metrics)
    found = call.empty_rows()
    totals = call.sum(None)[-1] if dlogits is not None and o.reduction == "mean" else None
    as_rows = lambda t: t.view(target.numel(), n)  # noqa: E731
    grad = grad if grad is None or o.reduction != "none" else grad.reshape(-1)
    call.rows(as_rows(logits.contiguous()), 0, found, None, None if dlogits is None else as_rows(dlogits), grad, totals)
    if o.reduction == "none":
        return tuple(t.view(target.shape) for t in found)
    return *call.sum(found)[:3], found.predicted.view(target.shape)


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
    def forward(ctx, dlogits, loss):
        ctx.save_for_backward(dlogits)
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable("cross_entropy_")
    def backward(ctx, saved, grad):
        (dlogits,) = saved
        scaled = dlogits.to(grad.dtype) * (grad[..., None] if grad.dim() else grad)
        return scaled.to(dlogits.dtype), None


class Overwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, dlogits):
        ctx.mark_dirty(logits)
        return logits.copy_(dlogits)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("cross_entropy_: the logits hold their gradient now and have none")


def overwrite_autograd(logits: Tensor, *args, **named) -> Tensor:
    # The copy, which becomes the gradient, leads autograd back to the logits.
    dlogits = logits.clone() if logits.requires_grad else logits
    with torch._C._AutoDispatchBelowAutograd():
        loss = torch.ops.liger.cross_entropy_(dlogits, *args, **named)
    if dlogits is logits:
        return loss
    loss = Loss.apply(dlogits, loss)
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

    @once_differentiable("cross_entropy")
    def backward(ctx, saved, grad, *_):
        dlogits = torch.ops.liger._cross_entropy_grad(grad, *saved, *ctx.options)
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
