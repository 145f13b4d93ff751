"""embedding without C++."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import runtime
from .autograd import once_differentiable
from .swiglu import demand

FEW = 3072


def check(input: Tensor, weight: Tensor, padding_idx: int | None) -> int:
    """padding_idx as the gradient takes it."""
    demand(input.dtype in (torch.int64, torch.int32), "embedding", "input", "be int64 or int32 indices", input.dtype)
    allowed = [torch.float32, torch.float16, torch.bfloat16] + ([] if weight.is_cuda else [torch.float64])
    demand(
        weight.dtype in allowed and weight.dim() == 2 and weight.device == input.device,
        "embedding",
        "weight",
        "be floating-point, of two dimensions, on the device of input",
        (weight.dtype, weight.shape, weight.device),
    )
    if padding_idx is None:
        return -1
    classes = weight.shape[0]
    demand(
        -classes <= padding_idx < classes, "embedding", "padding_idx", f"lie in [-{classes}, {classes})", padding_idx
    )
    return padding_idx % classes


def forward(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    check(input, weight, padding_idx)
    if not weight.is_cuda:
        runtime.count_cpu_call()
    return F.embedding(input, weight)


def backward(dout: Tensor, input: Tensor, classes: int, padding_idx: int) -> Tensor:
    rows, columns = input.numel(), dout.shape[-1]
    if dout.is_cuda and not dout.numel():
        return dout.new_zeros(classes, columns)
    if not dout.is_cuda or rows <= FEW:
        if not dout.is_cuda:
            runtime.count_cpu_call()
        return torch.ops.aten.embedding_dense_backward(dout, input, classes, padding_idx, False)
    dout = dout.reshape(rows, columns).contiguous()
    dweight = dout.new_zeros(classes, columns)
    indices, order = input.reshape(-1).int().sort(stable=True)
    args = dict(dweight=dweight, dout=dout, indices=indices, order=order)
    args |= dict(rows=rows, columns=columns, dout_row=columns, padding_idx=padding_idx)
    grid = lambda config: (rows * -(-columns // config.constexprs["BLOCK_N"]), 1, 1)  # noqa: E731
    runtime.launch("embedding", "embedding_bwd", {"X": runtime.dtype_name(dout)}, columns, grid, args, dout.device)
    return dweight


def register() -> None:
    grad = torch.library.custom_op(
        "liger::_embedding_grad",
        backward,
        mutates_args=(),
        schema="(Tensor dout, Tensor input, SymInt classes, int padding_idx) -> Tensor",
    )
    grad.register_fake(lambda dout, input, classes, padding_idx: dout.new_empty(classes, dout.shape[-1]))
    op = torch.library.custom_op(
        "liger::embedding",
        forward,
        mutates_args=(),
        schema="(Tensor input, Tensor weight, int? padding_idx=None) -> Tensor",
    )
    op.register_fake(lambda input, weight, padding_idx=None: F.embedding(input, weight))

    def save(ctx, inputs, output):
        input, weight, *padding = inputs
        ctx.save_for_backward(input)
        ctx.classes = weight.shape[0]
        ctx.padding_idx = check(input, weight, padding[0] if padding else None)
        ctx.options = len(padding)

    @once_differentiable("embedding")
    def gradient(ctx, saved, dout):
        (input,) = saved
        dweight = torch.ops.liger._embedding_grad(dout, input, ctx.classes, ctx.padding_idx)
        return None, dweight, *(None for _ in range(ctx.options))

    op.register_autograd(gradient, setup_context=save)
