"""layer_norm without C++. Rows are made contiguous first, and so are results; statistics are recomputed in backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import runtime
from .autograd import once_differentiable
from .swiglu import compute_dtype, demand, demand_dtype, empty_contiguous

HAS_WEIGHT, HAS_BIAS, NEEDS_DWEIGHT, NEEDS_DBIAS = 1, 2, 8, 16
SCHEMA = "(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> Tensor"
GRAD_SCHEMA = (
    "(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, float eps, bool needs_dweight, bool needs_dbias)"
    " -> (Tensor, Tensor, Tensor)"
)


def check(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    allowed = [torch.float32, torch.float16, torch.bfloat16] + ([] if x.is_cuda else [torch.float64])
    dense = x.dtype in allowed and x.dim() >= 1
    demand(dense, "layer_norm", "x", "be a floating-point tensor of at least one dimension", (x.dtype, x.shape))
    for name, p in (("weight", weight), ("bias", bias)):
        if p is None:
            continue
        demand_dtype("layer_norm", name, p, "x", x)
        fits = p.shape == x.shape[-1:] and p.device == x.device
        demand(fits, "layer_norm", name, "have one value per column of x, on its device", (p.shape, p.device))
    if weight is not None and bias is not None:
        demand(
            bias.dtype == weight.dtype, "layer_norm", "bias", f"have the dtype of weight, {weight.dtype}", bias.dtype
        )
    demand(0 <= eps < float("inf"), "layer_norm", "eps", "be finite and not negative", eps)


def contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def choices(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> dict[str, str]:
    parameter = next((p for p in (weight, bias) if p is not None), x)
    return {"X": runtime.dtype_name(x), "W": runtime.dtype_name(parameter)}


def present(weight: Tensor | None, bias: Tensor | None) -> int:
    return (HAS_WEIGHT if weight is not None else 0) | (HAS_BIAS if bias is not None else 0)


def forward(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    check(x, weight, bias, eps)
    n = x.shape[-1]
    if not x.is_cuda:
        runtime.count_cpu_call()
        c = compute_dtype(x)
        weight, bias = (None if p is None else p.to(c) for p in (weight, bias))
        return F.layer_norm(x.to(c), (n,), weight, bias, eps).to(x.dtype).contiguous()
    x, weight, bias = x.contiguous(), contiguous(weight), contiguous(bias)
    y = torch.empty_like(x)
    if x.numel():
        rows = x.numel() // n
        args = dict(
            y=y, statistics=None, x=x, weight=weight, bias=bias, rows=rows, n=n, inner_rows=rows,
            y_outer=0, y_inner=n, x_outer=0, x_inner=n, eps=eps, flags=present(weight, bias),
        )  # fmt: skip
        grid = lambda config: (-(-rows // config.constexprs["BLOCK_M"]), 1, 1)  # noqa: E731
        runtime.launch("layer_norm", "layer_norm_fwd", choices(x, weight, bias), n, grid, args, x.device)
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    needs_dweight: bool,
    needs_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    n, c = x.shape[-1], compute_dtype(x)
    dweight = torch.zeros_like(weight, memory_format=torch.contiguous_format) if needs_dweight else x.new_empty(0)
    dbias = torch.zeros_like(bias, memory_format=torch.contiguous_format) if needs_dbias else x.new_empty(0)
    if not x.is_cuda:
        runtime.count_cpu_call()
    if not x.numel():
        return empty_contiguous(x), dweight, dbias
    variance, mean = torch.var_mean(x.to(c), -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    if not x.is_cuda:
        normed, grad = (x.to(c) - mean) * rstd, dy.to(c)
        if needs_dweight:
            dweight.copy_((grad * normed).reshape(-1, n).sum(0))
        if needs_dbias:
            dbias.copy_(grad.reshape(-1, n).sum(0))
        grad = grad if weight is None else grad * weight.to(c)
        dx = (grad - grad.mean(-1, keepdim=True) - normed * (grad * normed).mean(-1, keepdim=True)) * rstd
        return dx.to(x.dtype).contiguous(), dweight, dbias
    from ..kernels import find

    statistics = torch.stack([mean.reshape(-1), rstd.reshape(-1)])
    x, dy, weight = x.contiguous(), dy.contiguous(), contiguous(weight)
    dx = torch.empty_like(x)
    rows, multiprocessors = x.numel() // n, runtime.multiprocessors(x)
    most = min(rows, multiprocessors * max(config.programs_per_sm for config in find("layer_norm_bwd").configs))
    partial = torch.empty((2 * most, n), dtype=c, device=x.device) if needs_dweight or needs_dbias else None
    programs = 0

    def grid(config):
        nonlocal programs
        programs = min(-(-rows // config.constexprs["BLOCK_M"]), multiprocessors * config.programs_per_sm)
        return programs, 1, 1

    args = dict(
        dx=dx, dweight=dweight, dbias=dbias, partial=partial, dy=dy, x=x, weight=weight, statistics=statistics,
        rows=rows, n=n, inner_rows=rows,
        dx_outer=0, dx_inner=n, dy_outer=0, dy_inner=n, x_outer=0, x_inner=n,
        flags=present(weight, None) | (NEEDS_DWEIGHT if needs_dweight else 0) | (NEEDS_DBIAS if needs_dbias else 0),
    )  # fmt: skip
    op = "layer_norm backward"
    runtime.launch(op, "layer_norm_bwd", choices(x, weight, bias), n, grid, args, x.device)
    # (shares of dweight, then of dbias) x programs rows
    for needed, out, start in ((needs_dweight, dweight, 0), (needs_dbias, dbias, programs)):
        if needed:
            runtime.column_sum(op, partial[start : start + programs].unsqueeze(0), out)
    return dx, dweight, dbias


def register() -> None:
    define = torch.library.custom_op
    grad = define("liger::_layer_norm_grad", backward, mutates_args=(), schema=GRAD_SCHEMA)

    @grad.register_fake
    def _(dy, x, weight, bias, eps, needs_dweight, needs_dbias):
        dweight, dbias = (
            empty_contiguous(p) if needed else x.new_empty(0)
            for p, needed in ((weight, needs_dweight), (bias, needs_dbias))
        )
        return empty_contiguous(x), dweight, dbias

    op = define("liger::layer_norm", forward, mutates_args=(), schema=SCHEMA)
    op.register_fake(lambda x, *_, **__: empty_contiguous(x))
    # PyTorch's policy for layer_norm.
    op.register_autocast("cuda", torch.float32)

    def save(ctx, inputs, output):
        x, weight, bias, ctx.eps = inputs
        # ctx.needs_input_grad knows nothing of arguments that the call left out.
        ctx.needs = [p is not None and p.requires_grad for p in (weight, bias)]
        ctx.save_for_backward(x, weight, bias)

    @once_differentiable("layer_norm")
    def differentiate(ctx, saved, dy):
        dx, *parameters = torch.ops.liger._layer_norm_grad(dy, *saved, ctx.eps, *ctx.needs)
        return dx, *(grad if needed else None for grad, needed in zip(parameters, ctx.needs)), None

    op.register_autograd(differentiate, setup_context=save)
