from __future__ import annotations

from torch import Tensor

from ._operator import demand, operator, widened


@operator(rows=4)
def hyper_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor | None = None, *, rounded: bool = True) -> Tensor:
    """The way out of a block with hyper-connections: ``out[j] = post[j] * y + sum over i of comb[i, j] * streams[i]``.

    y: (..., n), streams: (..., 4, n) in y's dtype, post: (..., 4) in fp32 or y's dtype, comb: (..., 4, 4) in fp32 or y's dtype
    -> (..., 4, n).

    There may be another number of streams. Without `comb`, each stream is added as it is. Arithmetic is fp32. With `rounded`, post, comb, both products and their
    sum are rounded, as by DeepSeek-V4's separate operations; without, the result alone is.

    Kernels serve 4 streams. For another number, CUDA tensors are computed by several operations of PyTorch.

    Cost: forward moves 2 |streams| + |y|, backward 3 |streams| + 2 |y|; without comb, backward moves 2 |streams| + 2 |y|.
    Backward needs the inputs.

    >>> hyper_post(torch.tensor([1.0]), torch.tensor([[2.0], [3.0]]), torch.tensor([10.0, 20.0]))
    tensor([[12.],
            [23.]])
    """
    shape = [*streams.shape[:-2], streams.shape[-1]]
    demand([*y.shape] == shape, "hyper_post", "y", f"have shape {shape}", [*y.shape])
    demand(post.shape == streams.shape[:-1], "hyper_post", "post", f"have shape {[*streams.shape[:-1]]}", [*post.shape])
    dtype, s = streams.dtype, widened(streams)

    def step(t: Tensor) -> Tensor:
        return (t.to(dtype) if rounded else t).to(s.dtype)

    plus = s if comb is None else step(step(comb).transpose(-1, -2) @ s)
    return (step(step(post).unsqueeze(-1) * widened(y).unsqueeze(-2)) + plus).to(dtype)
