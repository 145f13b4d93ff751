"""fused_linear_cross_entropy and its other forms without C++: the same chunks of tokens and rows of cross_entropy.
Forward keeps nothing; backward makes the logits again, once more than C++ does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import autocast, runtime
from .autograd import once_differentiable
from .cross_entropy import HAS_SOFTCAP, Launches, Options, Results, Rows, compute_dtype

NAME = "fused_linear_cross_entropy"
FORMS = {  # name -> results
    NAME: "Tensor",
    f"{NAME}_with_metrics": "(Tensor, Tensor, Tensor, Tensor)",
    f"{NAME}_with_log_probs": "(Tensor, Tensor, Tensor)",
}
TENSORS = "Tensor input, Tensor weight, Tensor target, "
OPTIONS = (
    'Tensor? bias=None, Tensor? ce_weight=None, str reduction="mean", int ignore_index=-100, '
    "float label_smoothing=0.0, float lse_square_scale=0.0, float? softcap=None, *, float logits_scale=1.0, "
    "Tensor? token_weight=None, int? memory_budget=None"
)
PRIVATE = (
    "Tensor? bias, Tensor? ce_weight, str reduction, int ignore_index, float label_smoothing, float lse_square_scale, "
    "float? softcap, float logits_scale, Tensor? token_weight, int? memory_budget"
)
INPUT, WEIGHT, BIAS = 4, 8, 16  # bits of what is wanted
HALVES = (torch.float16, torch.bfloat16)
MOST_COMPARED = 16384  # see csrc/core/linear_cross_entropy.h
CLASSES_OF_A_SUM = 192  # TILE_N of the kernel that makes exponentials


class Call(NamedTuple):
    """The arguments, as the schemas order them."""

    input: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None
    ce_weight: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    lse_square_scale: float = 0.0
    softcap: float | None = None
    logits_scale: float = 1.0
    token_weight: Tensor | None = None
    memory_budget: int | None = None

    @property
    def options(self) -> Options:
        return Options(*self[5:10])

    @property
    def rows(self) -> Tensor:
        x = self.input.reshape(-1, self.input.shape[-1])
        return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def check(op: str, c: Call) -> None:
    def demand(condition: bool, argument: str, rule: str, got: object) -> None:
        if not condition:
            raise RuntimeError(f"{op}: {argument} must {rule} (got {got})")

    x, w, o = c.input, c.weight, c.options
    allowed = [torch.float32, torch.float16, torch.bfloat16] + ([] if x.is_cuda else [torch.float64])
    floating = x.dtype in allowed and x.dim() >= 1
    demand(floating, "input", "be a floating-point tensor of at least one dimension", (x.dtype, x.shape))
    demand(w.device == x.device, "weight", f"be on {x.device} like input", w.device)
    demand(w.dtype == x.dtype, "weight", f"have the dtype of input, {x.dtype}", w.dtype)
    fits = w.dim() == 2 and w.shape[1] == x.shape[-1]
    demand(fits, "weight", f"have shape [classes, {x.shape[-1]}], the last dimension of input", w.shape)
    demand(c.target.device == x.device, "target", f"be on {x.device} like input", c.target.device)
    indices = c.target.dtype in (torch.int64, torch.int32)
    demand(indices, "target", "be int64 or int32 class indices", c.target.dtype)
    tokens = f"have shape {list(x.shape[:-1])}, that of input without its last dimension"
    demand(c.target.shape == x.shape[:-1], "target", tokens, c.target.shape)
    for name, t, float_too in (("bias", c.bias, False), ("ce_weight", c.ce_weight, True)):
        if t is None:
            continue
        demand(t.device == x.device, name, f"be on {x.device} like input", t.device)
        fits = t.dtype == x.dtype or (float_too and t.dtype == torch.float32 and x.dtype != torch.float64)
        demand(fits, name, f"{'be float32 or ' * float_too}have the dtype of input, {x.dtype}", t.dtype)
        demand(t.shape == w.shape[:1], name, f"have shape [{w.shape[0]}], one value a class", t.shape)
    if c.token_weight is not None:
        t = c.token_weight
        demand(t.device == x.device, "token_weight", f"be on {x.device} like input", t.device)
        demand(t.is_floating_point(), "token_weight", "be floating point", t.dtype)
        demand(t.shape == x.shape[:-1], "token_weight", tokens, t.shape)
    for name, t in (("ce_weight", c.ce_weight), ("token_weight", c.token_weight)):
        demand(t is None or not t.requires_grad, name, "not require a gradient", "one that does")
    demand(math.isfinite(c.logits_scale), "logits_scale", "be finite", c.logits_scale)
    positive = c.memory_budget is None or c.memory_budget > 0
    demand(positive, "memory_budget", "be a positive number of bytes", c.memory_budget)
    demand(o.reduction in ("mean", "sum", "none"), "reduction", "be 'mean', 'sum' or 'none'", repr(o.reduction))
    demand(0 <= o.label_smoothing <= 1, "label_smoothing", "be between 0 and 1", o.label_smoothing)
    demand(math.isfinite(o.lse_square_scale), "lse_square_scale", "be finite", o.lse_square_scale)
    positive = o.softcap is None or 0 < o.softcap < math.inf
    demand(positive, "softcap", "be positive and finite", o.softcap)


class Plan(NamedTuple):
    chunk: int  # tokens
    chunks: int
    row: int  # elements from one row of logits to the next
    bytes: int


def takes_targets(dtype: torch.dtype, chunks: int, wanted: int) -> bool:
    return bool(wanted & WEIGHT) and chunks > 1 and dtype in HALVES


def make_plan(op: str, tokens: int, classes: int, dtype: torch.dtype, wanted: int, budget: int | None) -> Plan:
    """That of csrc/core/linear_cross_entropy.h."""
    whole_tile, line = 256, 128 // dtype.itemsize
    row = -(-classes // line) * line
    gradients = wanted & (INPUT | WEIGHT | BIAS)
    sums = 0 if gradients or dtype != torch.bfloat16 else 4 * -(-classes // CLASSES_OF_A_SUM)
    per_row = row * dtype.itemsize + 16 + -(-classes // 1024) + sums
    per_token = 16 + (40 if takes_targets(dtype, 2, wanted) else 0)
    if budget is None:
        usual = (1280 if gradients else 320) << 20
        budget = max(usual, per_row * whole_tile // 2) + tokens * per_token
    least = tokens * per_token + per_row
    if tokens and budget < least:
        rule = f"be at least {least} bytes for the logits of one of {tokens} tokens"
        raise RuntimeError(f"{op}: memory_budget must {rule} (got {budget})")
    most = min((budget - tokens * per_token) // per_row, 8192)
    tile = whole_tile // 4 if most < 2 * whole_tile else whole_tile
    most = most // tile * tile if most > tile else most
    chunk, chunks = 1, 0
    if tokens:
        chunks = -(-tokens // most)
        chunk = -(-tokens // chunks)
        if chunks > 1:
            chunk = min(most, -(-chunk // tile) * tile)
        chunks = -(-tokens // chunk)
    workspace = min(chunk, tokens) * per_row + tokens * (16 + (40 if takes_targets(dtype, chunks, wanted) else 0))
    return Plan(chunk, chunks, row, workspace)


class CpuRows:
    def __init__(self, op: str, c: Call, metrics: bool) -> None:
        self.op, self.c, self.o = op, c, c.options
        self.target = c.target.reshape(-1)
        n, ignored = c.weight.shape[0], c.ignore_index
        counted = self.target != ignored
        for wild in self.target[counted & ((self.target < 0) | (self.target >= n))][:1].tolist():
            raise RuntimeError(f"{op}: target must lie in [0, {n}) or be ignore_index, {ignored} (got {wild})")
        chosen = self.target[counted].long()
        by_weight = len(chosen) if c.ce_weight is None else c.ce_weight.double()[chosen].sum().item()
        self.totals = torch.tensor([by_weight, len(chosen)], dtype=torch.float64).to(compute_dtype(c.input))
        self.parts: list[Results] = []

    def of(self, logits: Tensor, first: int) -> Rows:
        return Rows(self.op, logits, self.target[first : first + len(logits)], self.c.ce_weight, self.o)

    def forward(self, logits: Tensor, first: int, describe: bool) -> tuple[Tensor, Tensor] | None:
        rows = self.of(logits, first)
        self.parts.append(rows.of_rows())
        if not describe:
            return None
        away = rows.x - rows.x.amax(-1, keepdim=True)
        e = away.exp()
        total = e.sum(-1)
        entropy = total.log() - torch.where(e == 0, 0, e * away).sum(-1) / total
        return tuple(torch.where(rows.counted, t, 0) for t in (-F.softplus(rows.odds), entropy))

    def found(self) -> Results:
        if not self.parts:
            rows = self.totals.new_empty(0)
            return Results(rows, rows.clone(), rows.clone(), self.target.new_empty(0, dtype=torch.int64))
        loss, z_loss, right, predicted = map(torch.cat, zip(*self.parts))
        return Results(loss if self.o.reduction != "none" else loss + z_loss, z_loss, right, predicted)

    def sum(self, found: Results) -> tuple[Tensor, Tensor, Tensor]:
        by_weight, by_count = self.totals if self.o.reduction == "mean" else (1, 1)
        z_loss, right = (t.double().sum() / by_count for t in found[1:3])
        loss = found.loss.double().sum() / by_weight + z_loss
        return tuple(t.to(self.totals.dtype) for t in (loss, z_loss, right))

    def gradient(self, logits: Tensor, first: int, grad: Tensor | None, totals: Tensor) -> None:
        rows = self.of(logits, first)
        rows.totals = tuple(totals)
        logits.copy_(rows.gradient(grad, logits))

    def take_targets(self, dlogits: Tensor, first: int, taken: Tensor) -> None:
        y = self.target[first : first + len(dlogits)].long()
        counted = y != self.o.ignore_index
        at = torch.where(counted, y, 0)[:, None]
        taken[first : first + len(y)] = torch.where(counted, dlogits.gather(1, at)[:, 0].float(), 0)
        dlogits.scatter_(1, at, torch.where(counted[:, None], 0, dlogits.gather(1, at)))

    def add_targets(self, dweight: Tensor, x: Tensor, taken: Tensor, scale: float) -> None:
        counted = self.target != self.o.ignore_index
        classes, which = self.target[counted].long().unique(return_inverse=True)
        sums = x.new_zeros(len(classes), x.shape[1], dtype=torch.float32)
        sums.index_add_(0, which, taken[counted, None] * x[counted].float())
        dweight[classes] = (dweight[classes].float() + scale * sums).to(dweight.dtype)


def classes_of(target: Tensor, n: int, ignore_index: int) -> Tensor:
    """Targets as classes, int32; -1 where there is none."""
    y = target.long()
    return y.masked_fill((y < 0) | (y >= n) | (y == ignore_index), -1).int()


def sort_targets(target: Tensor, n: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """(classes in ascending order, the row that each belongs to), as order_targets of the kernels finds them."""
    classes, order = classes_of(target, n, ignore_index).sort(stable=True)
    return classes, order.int()


class CudaRows:
    def __init__(self, op: str, c: Call, metrics: bool) -> None:
        self.op, self.c = op, c
        self.target = c.target.reshape(-1).contiguous()
        self.call = Launches(op, c.weight.shape[0], self.target, c.ce_weight, c.options, metrics)
        self.all = self.call.empty_rows()
        self.totals = self.call.sum(None)[-1]

    def common(self, tensor: Tensor, first: int) -> dict:
        rows = len(tensor)
        return dict(
            target=self.target.narrow(0, first, rows), rows=rows, n=self.call.n, stride=tensor.stride(0),
            target_words=self.call.words, ignore_index=self.c.ignore_index,
        )  # fmt: skip

    def launch(self, name: str, dtype: Tensor, width: int, grid, args: dict) -> None:
        runtime.launch(self.op, name, {"X": runtime.dtype_name(dtype)}, width, grid, args, self.target.device)

    def forward(self, logits: Tensor, first: int, describe: bool) -> tuple[Tensor, Tensor] | None:
        stats = torch.empty(3, len(logits), device=logits.device) if describe else None
        self.call.rows(logits, first, self.all, stats)
        if not describe:
            return None
        log_prob, entropy = (torch.empty(len(logits), device=logits.device) for _ in range(2))
        cap = self.c.softcap
        flags = self.call.flags | (HAS_SOFTCAP if cap is not None else 0)
        args = self.common(logits, first)
        args |= dict(log_prob=log_prob, entropy=entropy, logits=logits, stats=stats, softcap=cap or 1.0, flags=flags)
        self.launch("cross_entropy_describe", logits, self.call.n, lambda _: (len(logits), 1, 1), args)
        return log_prob, entropy

    def found(self) -> Results:
        return self.all

    def sum(self, found: Results) -> tuple[Tensor, Tensor, Tensor]:
        return self.call.sum(found)[:3]

    def gradient(self, logits: Tensor, first: int, grad: Tensor | None, totals: Tensor) -> None:
        self.call.rows(logits, first, self.all, None, logits, grad, totals)

    def take_targets(self, dlogits: Tensor, first: int, taken: Tensor) -> None:
        args = self.common(dlogits, first) | dict(dlogits=dlogits, taken=taken.narrow(0, first, len(dlogits)))
        grid = lambda config: (-(-len(dlogits) // config.constexprs["BLOCK"]), 1, 1)  # noqa: E731
        self.launch(f"{NAME}_take_targets", dlogits, self.call.n, grid, args)

    def order_targets(self) -> tuple[Tensor, Tensor]:
        rows, n, ignored = len(self.target), self.call.n, self.c.ignore_index
        if rows > MOST_COMPARED:
            return sort_targets(self.target, n, ignored)
        classes, order = (torch.empty(rows, dtype=torch.int32, device=self.target.device) for _ in range(2))
        args = dict(target=self.target, classes=classes, order=order, rows=rows, n=n, ignore_index=ignored)
        grid = lambda config: (-(-rows // config.constexprs["BLOCK"]), 1, 1)  # noqa: E731
        choices = {"WORDS": self.call.words}
        runtime.launch(self.op, f"{NAME}_order_targets", choices, n, grid, args, self.target.device)
        return classes, order

    def add_targets(self, dweight: Tensor, x: Tensor, taken: Tensor, scale: float) -> None:
        classes, order = self.order_targets()
        rows, columns = len(classes), dweight.shape[1]
        args = dict(
            dweight=dweight, x=x, taken=taken, classes=classes, order=order, rows=rows, columns=columns,
            dweight_row=dweight.stride(0), dweight_column=dweight.stride(1), x_row=x.stride(0), scale=scale,
        )  # fmt: skip
        grid = lambda config: (rows * -(-columns // config.constexprs["BLOCK_N"]), 1, 1)  # noqa: E731
        choices = {"X": runtime.dtype_name(dweight)}
        runtime.launch(
            self.op, f"{NAME}_add_targets", choices, columns, grid, args, self.target.device,
            may_be_aligned=dweight.stride(1) == 1,
        )  # fmt: skip


def rows_of(op: str, c: Call, metrics: bool = False) -> CpuRows | CudaRows:
    return (CudaRows if c.input.is_cuda else CpuRows)(op, c, metrics)


def chunks_of_logits(op: str, c: Call, wanted: int) -> Iterator[tuple[int, Tensor]]:
    """(first token, logits) of every chunk, all in one buffer."""
    x, w = c.rows, c.weight
    plan = make_plan(op, len(x), len(w), x.dtype, wanted, c.memory_budget)
    # As in C++, rows on CPU have no gaps that a product could read.
    buffer = x.new_empty(min(plan.chunk, len(x)), plan.row if x.is_cuda else len(w))
    for first in range(0, len(x), plan.chunk):
        part = x[first : first + plan.chunk]
        logits = buffer[: len(part), : len(w)]
        like = logits if c.bias is None else c.bias
        beta = 0 if c.bias is None else c.logits_scale
        torch.addmm(like, part, w.t(), beta=beta, alpha=c.logits_scale, out=logits)
        yield first, logits


def forward(op: str, *args, **named) -> Tensor | tuple[Tensor, ...]:
    c = Call(*args, **named)
    check(op, c)
    metrics, describe = op.endswith("metrics"), op.endswith("log_probs")
    rows, described = rows_of(op, c, metrics), []
    with torch.no_grad():
        for first, logits in chunks_of_logits(op, c, 0):
            described.append(rows.forward(logits, first, describe))
        found = rows.found()
        if c.token_weight is not None:
            each = c.token_weight.reshape(-1).to(found.loss.dtype)
            found = found._replace(loss=found.loss * each, z_loss=found.z_loss * each)
        shape = c.target.shape
        if c.reduction == "none":
            loss, z_loss, right = (t.view(shape) for t in found[:3])
        else:
            loss, z_loss, right = rows.sum(found)
        if metrics:
            return loss, z_loss, right, found.predicted.view(shape)
        if describe:
            empty = (found.loss.new_empty(0),) * 2
            log_prob, entropy = (torch.cat(t).view(shape) for t in (zip(*described) if described else zip(empty)))
            return loss, log_prob, entropy
        return loss


def gradients(grad: Tensor, *args) -> list[Tensor]:
    *arguments, wanted = args
    c = Call(*arguments)
    rows, x, w = rows_of(NAME, c), c.rows, c.weight
    floats = compute_dtype(x)
    reduced, mean = c.reduction != "none", c.reduction == "mean"
    dx = torch.empty_like(c.input, memory_format=torch.contiguous_format) if wanted & INPUT else None
    dw = torch.empty_like(w) if wanted & WEIGHT else None
    db = w.new_zeros(len(w), dtype=floats) if wanted & BIAS else None
    plan = make_plan(NAME, len(x), len(w), x.dtype, wanted, c.memory_budget)
    if dw is not None and not plan.chunks:
        dw.zero_()
    takes = takes_targets(x.dtype, plan.chunks, wanted)
    taken = x.new_empty(len(x), dtype=torch.float32) if takes else None
    arrives, totals, late, shrink = grad.to(floats), rows.totals, None, 1.0
    if reduced and x.dtype == torch.float16:
        # fp16 has no small numbers: what divides and what arrives come last.
        shrink = 0.5 ** (((max(1, len(x)) - 1).bit_length() + 1) // 2)
        late, arrives = arrives, None
        if mean:
            inverse = torch.where(totals[0] == 0, 0, totals[0].reciprocal())
            late, totals = late * inverse, totals * inverse
    if not reduced:
        arrives = arrives.reshape(-1)
    if c.token_weight is not None:
        each = c.token_weight.reshape(-1).to(floats)
        arrives = each if arrives is None else arrives * each
    for first, logits in chunks_of_logits(NAME, c, wanted):
        count = len(logits)
        part = arrives if arrives is None or not arrives.dim() else arrives[first : first + count]
        rows.gradient(logits, first, part, totals)
        if dx is not None:
            out = dx.view(len(x), x.shape[1])[first : first + count]
            torch.addmm(out, logits, w, beta=0, alpha=c.logits_scale, out=out)
        if db is not None:
            db += logits.sum(0, dtype=floats) * (c.logits_scale * shrink)
        if dw is not None:
            if takes:
                rows.take_targets(logits, first, taken)
            scale = c.logits_scale * shrink
            torch.addmm(dw, logits.t(), x[first : first + count], beta=int(first > 0), alpha=scale, out=dw)
    if takes:
        rows.add_targets(dw, x, taken, c.logits_scale * shrink)
    if late is not None:
        dx = None if dx is None else (dx.float() * late).to(dx.dtype)
        dw = None if dw is None else (dw.float() * (late / shrink)).to(dw.dtype)
        db = None if db is None else db * (late / shrink)
    db = None if db is None else db.to(w.dtype)
    return [t for t in (dx, dw, db) if t is not None]


def fake(op: str, *args, **named) -> Tensor | tuple[Tensor, ...]:
    c = Call(*args, **named)
    check(op, c)
    numbers = dict(dtype=compute_dtype(c.input), device=c.input.device)
    sum_of = lambda: torch.empty(c.target.shape if c.reduction == "none" else (), **numbers)  # noqa: E731
    if op.endswith("metrics"):
        predicted = torch.empty(c.target.shape, dtype=torch.int64, device=c.input.device)
        return sum_of(), sum_of(), sum_of(), predicted
    if op.endswith("log_probs"):
        return sum_of(), torch.empty(c.target.shape, **numbers), torch.empty(c.target.shape, **numbers)
    return sum_of()


def fake_gradients(grad: Tensor, *args) -> list[Tensor]:
    c, wanted = Call(*args[:-1]), args[-1]
    dx = torch.empty_like(c.input, memory_format=torch.contiguous_format)
    everything = {INPUT: dx, WEIGHT: torch.empty_like(c.weight), BIAS: c.weight.new_empty(c.weight.shape[0])}
    return [t for bit, t in everything.items() if wanted & bit]


class Autograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, input, weight, bias, c):
        with torch._C._AutoDispatchBelowAutograd():
            out = op(*c[:10], logits_scale=c.logits_scale, token_weight=c.token_weight, memory_budget=c.memory_budget)
        tensors = {i: t for i, t in enumerate(c) if isinstance(t, Tensor)}
        ctx.save_for_backward(*tensors.values())
        ctx.at, ctx.others = list(tensors), [None if i in tensors else value for i, value in enumerate(c)]
        if isinstance(out, tuple):
            ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @once_differentiable(NAME)
    def backward(ctx, saved, grad, *_):
        arguments = list(ctx.others)
        for i, t in zip(ctx.at, saved):
            arguments[i] = t
        needed = ctx.needs_input_grad[1:4]
        wanted = sum(bit for bit, need in zip((INPUT, WEIGHT, BIAS), needed) if need)
        made = iter(torch.ops.liger._fused_linear_cross_entropy_grad(grad, *arguments, wanted))
        return None, *(next(made) if need else None for need in needed), None


def register() -> None:
    library = register.library = torch.library.Library("liger", "FRAGMENT")
    tags = torch.Tag.pt2_compliant_tag

    def register_form(name: str, results: str) -> None:
        library.define(f"{name}({TENSORS}{OPTIONS}) -> {results}", tags=tags)
        op = getattr(torch.ops.liger, name).default
        run = lambda *args, **named: forward(name, *args, **named)  # noqa: E731
        library.impl(name, run, "CPU")
        library.impl(name, run, "CUDA")
        library.impl(name, lambda *args, **named: fake(name, *args, **named), "Meta")

        def autograd(*args, **named):
            c = Call(*args, **named)
            check(name, c)
            learned = {INPUT: c.input, WEIGHT: c.weight, BIAS: c.bias}
            wanted = sum(bit for bit, t in learned.items() if t is not None and t.requires_grad)
            if torch.is_grad_enabled() and wanted:
                if c.memory_budget is not None:  # to be refused now rather than in backward
                    make_plan(name, c.target.numel(), len(c.weight), c.input.dtype, wanted, c.memory_budget)
                return Autograd.apply(op, c.input, c.weight, c.bias, c)
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args, **named)

        library.impl(name, autograd, "Autograd")

        def as_linear(dtype, input, weight, target, bias=None, *rest):
            input, weight, bias = autocast.as_linear(dtype, input, weight, bias)
            return input, weight, target, bias, *rest

        autocast.implement(name, ["cpu", "cuda"], as_linear)

    for name, results in FORMS.items():
        register_form(name, results)

    private = f"(Tensor grad, {TENSORS}{PRIVATE}, int wanted) -> Tensor[]"
    library.define(f"_{NAME}_grad{private}", tags=tags)
    library.impl(f"_{NAME}_grad", gradients, "CPU")
    library.impl(f"_{NAME}_grad", gradients, "CUDA")
    library.impl(f"_{NAME}_grad", fake_gradients, "Meta")

    def plan(tokens, hidden, vocabulary, dtype, wanted, memory_budget):
        op = f"{NAME}_plan"
        if tokens < 0 or hidden <= 0 or vocabulary <= 0:
            sizes = f"{tokens} tokens, {hidden} hidden, {vocabulary} classes"
            raise RuntimeError(f"{op}: the sizes must be positive (got {sizes})")
        if not dtype.is_floating_point:
            raise RuntimeError(f"{op}: dtype must be floating point (got {dtype})")
        made = make_plan(op, tokens, vocabulary, dtype, wanted, memory_budget)
        elements = {INPUT: tokens * hidden, WEIGHT: vocabulary * hidden, BIAS: vocabulary}
        kept = sum(count for bit, count in elements.items() if wanted & bit)
        return made.chunk, made.chunks, made.bytes, kept * dtype.itemsize

    sizes = "int tokens, int hidden, int vocabulary, ScalarType dtype, int wanted, int? memory_budget"
    library.define(f"_{NAME}_plan({sizes}) -> (int, int, int, int)")
    library.impl(f"_{NAME}_plan", plan, "CompositeExplicitAutograd")
