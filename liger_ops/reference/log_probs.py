from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._operator import capped, demand, demand_positive, operator


class LogProbs(NamedTuple):
    """The log-probabilities of ids and the entropies of rows; these are (..., 0) if they were not requested. Both have
    gradients."""

    log_probs: Tensor
    entropy: Tensor


@operator()
def log_probs(
    logits: Tensor,
    index: Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    softcap: float | None = None,
    *,
    entropy: bool = False,
) -> LogProbs:
    """Log-probabilities of one id or K ids per row, and the entropy, under the softmax of ``logits / temperature``.

    logits: (..., V), index: (...) or (..., K) indices -> log_probs of the shape of index and entropy (...), both in
    fp32.

    `index` has the name that it has in ``torch.gather``. `temperature` and `softcap` are positive and finite. With
    `softcap`, the logits are first replaced by ``softcap * tanh(logits / softcap)``. An id that is `ignore_index` has
    the log-probability 0. A row whose ids are all ignored is not read: its entropy is 0 too.

    Cost: forward moves |logits|, backward 2 |logits|. Backward needs the logits, the ids, and three fp32 numbers per
    row and one per id. It overwrites the logits with their gradient.

    >>> log_probs(torch.zeros(2, 4), torch.tensor([0, -100]), entropy=True)
    LogProbs(log_probs=tensor([-1.3863,  0.0000]), entropy=tensor([1.3863, 0.0000]))
    """
    rows = logits.shape[:-1]
    demand_positive("log_probs", "temperature", temperature)
    demand_positive("log_probs", "softcap", softcap)
    rule = f"have shape {list(rows)}, or that with one dimension more"
    fits = index.dim() - len(rows) in (0, 1) and index.shape[: len(rows)] == rows
    demand(fits, "log_probs", "index", rule, list(index.shape))
    x = capped(logits, softcap)
    ids = index.unsqueeze(-1) if index.dim() == len(rows) else index
    ignored = ids == ignore_index
    # Rows that do not count are not differentiated, whatever their logits are.
    x = torch.where(ignored.all(-1, keepdim=True), 0, x)
    logs = (x / temperature).log_softmax(-1)
    chosen = logs.gather(-1, ids.masked_fill(ignored, 0).long()).masked_fill(ignored, 0).view(index.shape)
    if not entropy:
        return LogProbs(chosen, chosen.new_empty(*rows, 0))
    # -inf contributes 0.
    entropies = -(logs.exp() * torch.where(logs.isneginf(), 0, logs)).sum(-1)
    return LogProbs(chosen, entropies.masked_fill(ignored.all(-1), 0))
