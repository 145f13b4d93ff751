"""Packed samples of convolutions over time."""

import torch


def packed(lengths, x, cumulative=False):
    """The arguments that separate samples of these lengths."""
    if not lengths:
        return {}
    if cumulative:
        return dict(cu_seqlens=torch.tensor([0, *lengths], device=x.device).cumsum(0))
    samples = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(x.device)
    return dict(seq_idx=samples.expand(len(x), -1))
