"""Helpers that the cross-entropy tests share: the operators, their fp64 oracle and the checks."""

from functools import partial

import torch
import torch.nn.functional as F
from checks import HALF_TYPES, assert_no_worse, coarseness, gradients, like, path_taken, roundings
from torch import Tensor

cross_entropy = torch.ops.liger.cross_entropy


with_metrics = torch.ops.liger.cross_entropy_with_metrics


cross_entropy_ = torch.ops.liger.cross_entropy_


ONES, ZEROS = torch.ones(2, 8), torch.zeros(2, dtype=torch.long)


def overwriting(logits: Tensor, *args, **options) -> Tensor:
    """cross_entropy_ on a copy, so that the logits keep their values."""
    return cross_entropy_(logits.clone(), *args, **options)


def overwriting_wide_rows(logits: Tensor, *args, **options) -> Tensor:
    n = logits.shape[-1]
    return cross_entropy_(F.pad(logits, (0, -n % 64))[..., :n], *args, **options)


def reference_with_metrics(
    logits,
    target,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    lse_square_scale=0.0,
    softcap=None,
):
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(target.numel(), logits.shape[-1])
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    y = target.reshape(-1).long()
    weight = None if weight is None else weight.to(x.dtype)
    loss = F.cross_entropy(x, y, weight, None, ignore_index, None, reduction, label_smoothing)
    counted = y != ignore_index
    z_loss = torch.where(counted, lse_square_scale * torch.logsumexp(x, -1).square(), 0)
    best = x.argmax(-1) if x.numel() else torch.zeros_like(y)
    right = (counted & (best == y)).to(x.dtype)
    predicted = torch.where(counted, best, -1).view(target.shape)
    if reduction == "none":
        loss, z_loss, right = (t.view(target.shape) for t in (loss, z_loss, right))
    else:
        z_loss, right = ((t.sum() / counted.sum() if reduction == "mean" else t.sum()) for t in (z_loss, right))
    return loss + z_loss, z_loss, right, predicted


def reference(*args, **options):
    return reference_with_metrics(*args, **options)[0]


def make(shape, dtype, device, weight_dtype=None, target_dtype=torch.int64, ignored=0.25, scale=3.0):
    """logits: shape, target: shape[:-1], weight: (V,) or None. With ignored < 1, at least one target counts."""
    logits = (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_()
    target = torch.randint(max(shape[-1], 1), shape[:-1], device=device)
    target[torch.rand(shape[:-1], device=device) < ignored] = -100
    if ignored < 1:
        target.view(-1)[:1] = 0
    weight = None if weight_dtype is None else torch.rand(shape[-1], device=device).add(0.1).to(weight_dtype)
    return logits, target.to(target_dtype), weight


def check(inputs, device, op=cross_entropy, **options):
    """Compares loss and gradient of `op` with the oracle, for an upstream gradient other than 1."""
    call, expected = partial(op, **options), partial(reference, **options)
    with path_taken(device):
        loss = call(*[t.detach() if isinstance(t, Tensor) else t for t in inputs])
    grad = [torch.randn(loss.shape, device=device)]
    if op is not cross_entropy:
        # Forward already rounded this gradient; a power of two adds no second rounding.
        grad = [2 * grad[0].sign()]
    with path_taken(device):
        ours = gradients(call, [like(t) for t in inputs], grad)
    assert torch.equal(ours[0].detach(), loss) or loss.isnan().any()
    eager = gradients(expected, [like(t) for t in inputs], grad)
    oracle = gradients(expected, [like(t, torch.float64) for t in inputs], grad)
    bounds = roundings(expected, inputs, grad, oracle)
    for i, results in enumerate(zip(ours, eager, oracle)):
        assert_no_worse(("loss", "gradient")[i], *results, bounds=(bounds, i))
    if inputs[0].dtype in HALF_TYPES:
        check_other_classes(inputs[1], 1 if op is cross_entropy else 2, ours[1], eager[1], oracle[1])


def check_other_classes(target, upstream, *gradients):
    """Checks small gradients on their own.

    The target's gradient is near 1, so the general tolerance would accept zeros everywhere else. The same holds for
    rare classes among the others. upstream: factor applied after rounding to 16 bits; it scales the rounding error.
    """
    size = gradients[-1].abs()
    others = torch.ones_like(size, dtype=torch.bool)
    others.scatter_(-1, target.long().clamp(0, size.shape[-1] - 1)[..., None], False)
    rare = others & (size < size.where(others, 0).mean(-1, keepdim=True))
    for name, which in (("other", others), ("rare", rare)):
        apart = [g.where(which, 0) for g in gradients]
        assert_no_worse(f"gradient of {name} classes", *apart, noise=upstream * coarseness(apart[0].dtype, apart[-1]))


EXTRAS = {
    "plain": {},
    "smoothing": dict(label_smoothing=0.1),
    "smoothing alone": dict(label_smoothing=1.0),
    "z-loss": dict(lse_square_scale=1e-3),
    "softcap": dict(softcap=5.0),
    "all": dict(label_smoothing=0.2, lse_square_scale=1e-3, softcap=30.0),
}
