"""PyTorch's cross entropy with a z-loss, a softcap and metrics."""

import torch
import torch.nn.functional as F


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
