"""rms_norm and fused_add_rms_norm without C++. Rows are made contiguous first; statistics are recomputed in backward."""

from __future__ import annotations

import torch
from torch import Tensor

from . import autocast, runtime
from .autograd import once_differentiable
from .swiglu import as_rows, compute_dtype, demand, demand_dtype, empty_contiguous

HAS_WEIGHT, ROUND_FIRST, SAVE_RSTD, NEEDS_DWEIGHT = 1, 2, 8, 16
OPTIONS = 'Tensor? weight=None, float eps=1e-6, float offset=0.0, str casting_mode="llama"'
SCHEMAS = {
    "rms_norm": f"(Tensor x, {OPTIONS}) -> Tensor",
    "fused_add_rms_norm": f"(Tensor x, Tensor residual, {OPTIONS}) -> (Tensor, Tensor)",
}
GRAD_SCHEMA = "(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, float eps, float offset, str casting_mode, bool needs_dweight) -> (Tensor, Tensor)"


def check(op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, casting_mode: str) -> None:
    allowed = [torch.float32, torch.float16, torch.bfloat16] + ([] if x.is_cuda else [torch.float64])
    demand(
        x.dtype in allowed and x.dim() >= 1,
        op,
        "x",
        "be a floating-point tensor of at least one dimension",
        (x.dtype, x.shape),
    )
    if residual is not None:
        same = residual.shape == x.shape and residual.dtype == x.dtype and residual.device == x.device
        demand(
            same,
            op,
            "residual",
            "match x in shape, dtype and device",
            (residual.shape, residual.dtype, residual.device),
        )
    if weight is not None:
        demand_dtype(op, "weight", weight, "x", x)
        fits = weight.shape == x.shape[-1:] and weight.device == x.device
        demand(fits, op, "weight", "have one value per column of x, on its device", (weight.shape, weight.device))
    demand(0 <= eps < float("inf"), op, "eps", "be finite and not negative", eps)
    demand(
        casting_mode in ("llama", "gemma", "none"), op, "casting_mode", "be 'llama', 'gemma' or 'none'", casting_mode
    )


def flags(weight: Tensor | None, casting_mode: str, other: int) -> int:
    return (
        other
        | (HAS_WEIGHT if weight is not None else 0)
        | (ROUND_FIRST if weight is not None and casting_mode == "llama" else 0)
    )


def forward(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    """y, s and the reciprocal root mean square of s's rows."""
    check(op, x, residual, weight, eps, mode)
    n = x.shape[-1]
    c = compute_dtype(x)
    if not x.is_cuda:
        runtime.count_cpu_call()
        s = x if residual is None else (x + residual).contiguous()
        rstd = torch.rsqrt(s.to(c).square().mean(-1, keepdim=True) + eps)
        y = s.to(c) * rstd
        if weight is not None:
            y = (y.to(x.dtype).to(c) if mode == "llama" else y) * (weight.to(c) + offset)
        return y.to(x.dtype).contiguous(), s, rstd.squeeze(-1)
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    weight = None if weight is None else weight.contiguous()
    y, s = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    rstd = torch.empty(x.shape[:-1], dtype=c, device=x.device)
    if x.numel():
        rows = x.numel() // n
        args = dict(
            y=y, s=s, rstd=rstd, x=x, residual=residual, weight=weight, rows=rows, n=n, inner_rows=rows,
            y_outer=0, y_inner=n, x_outer=0, x_inner=n, residual_outer=0, residual_inner=n if residual is not None else 0,
            eps=eps, offset=offset if weight is not None else 0.0,
            flags=flags(weight, mode, SAVE_RSTD),
        )  # fmt: skip
        choices = {"X": runtime.dtype_name(x), "W": runtime.dtype_name(x if weight is None else weight)}
        choices["RESIDUAL"] = int(residual is not None)
        grid = lambda config: (-(-rows // config.constexprs["BLOCK_M"]), 1, 1)  # noqa: E731
        runtime.launch(op, "rms_norm_fwd", choices, n, grid, args, x.device)
    return y, s, rstd


def backward(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    mode: str,
    needs_dweight: bool,
) -> tuple[Tensor, Tensor]:
    n, c = s.shape[-1], compute_dtype(s)
    rstd = torch.rsqrt(s.to(c).square().mean(-1) + eps)
    if not s.is_cuda:
        runtime.count_cpu_call()
        normed = s.to(c) * rstd[..., None]
        w = torch.ones(n, dtype=c) if weight is None else weight.to(c) + offset
        grad = dy.to(c) * w
        dx = (grad - normed * (grad * normed).mean(-1, keepdim=True)) * rstd[..., None]
        dx = (dx if ds is None else dx + ds.to(c)).to(s.dtype).contiguous()
        kept = normed.to(s.dtype).to(c) if mode == "llama" else normed
        return dx, as_rows(dy.to(c) * kept).sum(0).to(weight.dtype) if needs_dweight else s.new_empty(0)
    s, dy = s.contiguous(), dy.contiguous()
    ds = None if ds is None else ds.contiguous()
    weight = None if weight is None else weight.contiguous()
    dx = torch.empty_like(s)
    dweight = torch.zeros_like(weight) if needs_dweight else s.new_empty(0)
    if s.numel():
        rows, most = s.numel() // n, runtime.multiprocessors(s) * 8
        # Rows of the partial sum that no program fills stay zero.
        partial = torch.zeros((1, min(rows, most), n), dtype=c, device=s.device) if needs_dweight else None
        args = dict(
            dx=dx, dweight=dweight, partial=partial, dy=dy, ds=ds, x=s, weight=weight, rstd=rstd,
            rows=rows, n=n, inner_rows=rows,
            dx_outer=0, dx_inner=n, dy_outer=0, dy_inner=n, ds_outer=0, ds_inner=n, x_outer=0, x_inner=n,
            offset=offset if weight is not None else 0.0,
            flags=flags(weight, mode, NEEDS_DWEIGHT if needs_dweight else 0),
        )  # fmt: skip
        choices = {"X": runtime.dtype_name(s), "W": runtime.dtype_name(s if weight is None else weight)}
        choices["RESIDUAL"] = int(ds is not None)

        def grid(config):
            blocks = -(-rows // config.constexprs["BLOCK_M"])
            return min(blocks, runtime.multiprocessors(s) * config.programs_per_sm), 1, 1

        runtime.launch("rms_norm backward", "rms_norm_bwd", choices, n, grid, args, s.device)
        if needs_dweight:
            runtime.column_sum("rms_norm backward", partial, dweight)
    return dx, dweight


def register() -> None:
    define = torch.library.custom_op
    grad = define("liger::_rms_norm_grad", backward, mutates_args=(), schema=GRAD_SCHEMA)

    @grad.register_fake
    def _(dy, ds, s, weight, eps, offset, mode, needs_dweight):
        return empty_contiguous(s), empty_contiguous(weight) if needs_dweight else s.new_empty(0)

    def rms_norm(x, weight=None, eps=1e-6, offset=0.0, casting_mode="llama"):
        return forward("rms_norm", x, None, weight, eps, offset, casting_mode)[0]

    plain = define("liger::rms_norm", rms_norm, mutates_args=(), schema=SCHEMAS["rms_norm"])
    plain.register_fake(lambda x, *_, **__: empty_contiguous(x))

    # ctx.needs_input_grad knows nothing of arguments that a call left out.
    def save_plain(ctx, inputs, output):
        x, weight, *ctx.options = inputs
        ctx.needs_dweight = weight is not None and weight.requires_grad
        ctx.save_for_backward(x, weight)

    @once_differentiable("rms_norm")
    def plain_backward(ctx, saved, dy):
        x, weight = saved
        dx, dweight = torch.ops.liger._rms_norm_grad(dy, None, x, weight, *ctx.options, ctx.needs_dweight)
        return dx, dweight if ctx.needs_dweight else None, None, None, None

    plain.register_autograd(plain_backward, setup_context=save_plain)

    def fused_add_rms_norm(x, residual, weight=None, eps=1e-6, offset=0.0, casting_mode="llama"):
        return forward("fused_add_rms_norm", x, residual, weight, eps, offset, casting_mode)[:2]

    fused = define(
        "liger::fused_add_rms_norm", fused_add_rms_norm, mutates_args=(), schema=SCHEMAS["fused_add_rms_norm"]
    )
    fused.register_fake(lambda x, *_, **__: (empty_contiguous(x), empty_contiguous(x)))

    def save_fused(ctx, inputs, output):
        _, _, weight, *ctx.options = inputs
        ctx.needs_dweight = weight is not None and weight.requires_grad
        ctx.save_for_backward(output[1], weight)

    @once_differentiable("fused_add_rms_norm")
    def fused_backward(ctx, saved, dy, ds):
        s, weight = saved
        dx, dweight = torch.ops.liger._rms_norm_grad(dy, ds, s, weight, *ctx.options, ctx.needs_dweight)
        return dx, dx.clone(), dweight if ctx.needs_dweight else None, None, None, None

    fused.register_autograd(fused_backward, setup_context=save_fused)

    def added(dtype, x, residual, weight=None, *options):
        x, residual = autocast.as_product(dtype, x, residual)
        if weight is not None and weight.dtype != torch.float32:
            weight = weight.to(x.dtype)
        return x, residual, weight, *options

    # PyTorch's policy for its own rms_norm: float32 from the release on that registers it.
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA"):
        plain.register_autocast("cuda", torch.float32)
        fused.register_autocast("cuda", torch.float32)
        autocast.implement("fused_add_rms_norm", ["cpu"], added)
    else:
        autocast.implement("fused_add_rms_norm", ["cpu", "cuda"], added)
