"""For test_properties.py: calls of kl_div, jsd and tvd, and the errors of their terms."""

import math

import torch

from liger_ops.reference import operators


def noise(name, input, target, shift_labels=None, reduction="", ignore_index=-100, **options):
    """The rounding error of the terms, relative to the losses: terms of opposite sign cancel."""
    x, t = input.detach().double(), target.detach().double()
    losses = operators()[name].reference(x, t, shift_labels, reduction="none", ignore_index=ignore_index, **options)
    sizes = losses.abs()
    beta = options.get("beta", 0.5)
    if name == "jsd" and beta not in (0, 1):
        log_m = torch.logaddexp(t + math.log(beta), x + math.log(1 - beta))
        # log m has the rounding error of m.
        sizes = beta * t.exp() * ((t - log_m).abs() + 0.5) + (1 - beta) * x.exp() * ((x - log_m).abs() + 0.5)
    if sizes.numel() == 0:
        return 0.0
    if reduction == "none":
        ratio = sizes.max() / losses.abs().max().clamp(min=1e-30)
    else:
        ratio = sizes.sum() / losses.sum().abs().clamp(min=1e-30)
    return float(ratio) * torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps
