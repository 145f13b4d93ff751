"""swiglu without C++, and what geglu shares with it. Inputs are made contiguous first, and so are results."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import autocast, runtime
from .autograd import once_differentiable

# act(x), and act'(x), of fp32 or fp64 values.
Activation = Callable[..., Tensor]


def demand(condition: bool, op: str, argument: str, rule: str, got: object) -> None:
    if not condition:
        raise RuntimeError(f"{op}: {argument} must {rule} (got {got})")


def demand_dtype(op: str, argument: str, parameter: Tensor, owner: str, x: Tensor) -> None:
    """fp32 beside halves, never beside fp64."""
    fits = parameter.dtype == x.dtype or (parameter.dtype == torch.float32 and x.dtype != torch.float64)
    demand(fits, op, argument, f"be float32 or have the dtype of {owner}, {x.dtype}", parameter.dtype)


def check(op: str, argument: str, gate: Tensor, up: Tensor | None = None) -> None:
    allowed = [torch.float32, torch.float16, torch.bfloat16] + ([] if gate.is_cuda else [torch.float64])
    demand(
        gate.dtype in allowed and gate.dim() >= 1, op, argument, "be a floating-point tensor of at least one dimension",
        (gate.dtype, gate.shape),
    )  # fmt: skip
    if up is None:
        demand(gate.shape[-1] % 2 == 0, op, argument, "have an even last dimension", gate.shape[-1])
    else:
        same = up.shape == gate.shape and up.dtype == gate.dtype and up.device == gate.device
        demand(same, op, "up", "match gate in shape, dtype and device", (up.shape, up.dtype, up.device))


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def as_rows(t: Tensor) -> Tensor:
    """(rows, columns). Of no columns at all reshape could not tell the rows."""
    return torch.atleast_2d(t).flatten(0, -2)


def empty_contiguous(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def launch(kernel: str, tensors: dict[str, Tensor | None], flags: dict[str, int]) -> None:
    """All tensors are contiguous and of one shape: one row."""
    first = next(iter(tensors.values()))
    n = first.numel()
    if not n:
        return
    strides = {f"{name}_{level}": 0 for name in tensors if name != "product" for level in ("outer", "inner")}
    args = dict(**tensors, rows=1, n=n, inner_rows=1, **strides, **flags)
    grid = lambda config: (-(-n // config.constexprs["BLOCK_N"]), 1, 1)  # noqa: E731
    runtime.launch(kernel, kernel, {"X": runtime.dtype_name(first)}, n, grid, args, first.device)


def register_gated(
    op: str, schema: str, value: Activation, slope: Activation, flags: Callable[..., dict[str, int]]
) -> None:
    """Defines `op`, its packed and linear forms and their gradients. `schema`: what follows the tensors; value(x, *options),
    slope(x, *options) and flags(*options) give the activation and the kernel's flags."""
    define = torch.library.custom_op

    def forward(gate: Tensor, up: Tensor, *options) -> Tensor:
        chosen = flags(*options)
        if gate.is_cuda:
            out = empty_contiguous(gate)
            launch(f"{op}_fwd", dict(out=out, gate=gate.contiguous(), up=up.contiguous()), chosen)
            return out
        runtime.count_cpu_call()
        c = compute_dtype(gate)
        return (value(gate.to(c), *options) * up.to(c)).to(gate.dtype).contiguous()

    def backward(dout: Tensor, gate: Tensor, up: Tensor, *options) -> tuple[Tensor, Tensor]:
        if gate.is_cuda:
            dgate, dup = empty_contiguous(gate), empty_contiguous(gate)
            inputs = dict(dout=dout.contiguous(), gate=gate.contiguous(), up=up.contiguous())
            launch(f"{op}_bwd", dict(dgate=dgate, dup=dup, product=None, **inputs), {"flags": 0} | flags(*options))
            return dgate, dup
        runtime.count_cpu_call()
        c = compute_dtype(gate)
        x, d = gate.to(c), dout.to(c)
        grads = d * up.to(c) * slope(x, *options), d * value(x, *options)
        return tuple(g.to(gate.dtype).contiguous() for g in grads)

    def plain(gate, up, *options, **named):
        check(op, "gate", gate, up)
        return forward(gate, up, *options, *named.values())

    def packed(gate_up, *options, **named):
        check(f"{op}_packed", "gate_up", gate_up)
        return forward(*gate_up.chunk(2, -1), *options, *named.values())

    def linear(gate, up, weight, bias=None, *options, **named):
        name = f"{op}_linear"
        check(name, "gate", gate, up)
        for argument, t, shape in (
            ("weight", weight, (weight.shape[0], gate.shape[-1])),
            ("bias", bias, weight.shape[:1]),
        ):
            if t is not None:
                fits = t.shape == torch.Size(shape) and t.dtype == gate.dtype and t.device == gate.device
                rule = f"have shape {list(shape)} and the dtype and device of gate"
                demand(fits, name, argument, rule, (t.shape, t.dtype, t.device))
        return F.linear(forward(gate, up, *options, *named.values()), weight, bias)

    arguments = f", {schema}" if schema else ""
    grad = define(
        f"liger::_{op}_grad",
        backward,
        mutates_args=(),
        schema=f"(Tensor dout, Tensor gate, Tensor up{arguments}) -> (Tensor, Tensor)",
    )
    grad.register_fake(lambda dout, gate, up, *_, **__: (empty_contiguous(gate), empty_contiguous(gate)))

    def save(ctx, inputs, output):
        tensors = [t for t in inputs if isinstance(t, Tensor)]
        ctx.options = inputs[len(tensors) :]
        ctx.save_for_backward(*tensors)

    @once_differentiable(op)
    def plain_backward(ctx, saved, dout):
        return (
            *getattr(torch.ops.liger, f"_{op}_grad")(dout, *saved, *ctx.options),
            *(None for _ in ctx.options),
        )

    @once_differentiable(f"{op}_packed")
    def packed_backward(ctx, saved, dout):
        gate, up = saved[0].chunk(2, -1)
        grads = getattr(torch.ops.liger, f"_{op}_grad")(dout, gate, up, *ctx.options)
        return torch.cat(grads, -1), *(None for _ in ctx.options)

    def save_linear(ctx, inputs, output):
        ctx.options = inputs[4:]
        ctx.save_for_backward(*inputs[:3])

    @once_differentiable(f"{op}_linear")
    def linear_backward(ctx, saved, dout):
        gate, up, weight = saved
        # A bias that is left out is not counted.
        wants_gate, wants_up, wants_weight, wants_bias = (*ctx.needs_input_grad, False)[:4]
        dgate = dup = dweight = None
        rows = as_rows(dout)
        if wants_gate or wants_up:
            dgate, dup = getattr(torch.ops.liger, f"_{op}_grad")(dout @ weight, gate, up, *ctx.options)
        if wants_weight:
            dweight = rows.t() @ as_rows(getattr(torch.ops.liger, op)(gate, up, *ctx.options))
        dbias = rows.sum(0) if wants_bias else None
        return dgate, dup, dweight, dbias, *(None for _ in ctx.options)

    single = define(f"liger::{op}", plain, mutates_args=(), schema=f"(Tensor gate, Tensor up{arguments}) -> Tensor")
    single.register_fake(lambda gate, *_, **__: empty_contiguous(gate))
    single.register_autograd(plain_backward, setup_context=save)
    both = define(f"liger::{op}_packed", packed, mutates_args=(), schema=f"(Tensor gate_up{arguments}) -> Tensor")
    both.register_fake(lambda gate_up, *_, **__: empty_contiguous(gate_up.chunk(2, -1)[0]))
    both.register_autograd(packed_backward, setup_context=save)
    projected = define(
        f"liger::{op}_linear",
        linear,
        mutates_args=(),
        schema=f"(Tensor gate, Tensor up, Tensor weight, Tensor? bias=None{arguments}) -> Tensor",
    )
    projected.register_fake(
        lambda gate, up, weight, bias=None, *_, **__: F.linear(empty_contiguous(gate), weight, bias)
    )
    projected.register_autograd(linear_backward, setup_context=save_linear)
    autocast.implement(op, ["cpu", "cuda"], autocast.as_product)
    autocast.implement(f"{op}_linear", ["cpu", "cuda"], autocast.as_linear)


def silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s + x * s * torch.sigmoid(-x)


def register() -> None:
    register_gated("swiglu", "", F.silu, silu_slope, lambda: {})
