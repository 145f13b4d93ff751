"""Helpers that the tests of liger_ops.losses share: models of random numbers, and log-probabilities by the formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.checks import assert_most_digits, gradients, like

B, S, WIDTH, CLASSES = 4, 7, 16, 37


class Model(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def model(*rows: int, bias: bool = True, width: int = WIDTH, classes: int = CLASSES, frozen: bool = False) -> Model:
    tensors = torch.randn(*rows, width), torch.randn(classes, width) * 0.5, torch.randn(classes) if bias else None
    return Model(*(None if t is None else t.double().requires_grad_(not frozen) for t in tensors))


def targets(*rows: int, ignored: float = 0.3, classes: int = CLASSES) -> Tensor:
    """The first of each sequence counts."""
    ids = torch.randint(classes, rows)
    drop = torch.rand(rows) < ignored
    drop[..., 0] = False
    return ids.masked_fill(drop, -100)


def all_log_probs(m: Model, temperature: float = 1.0, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    logits = scale * torch.nn.functional.linear(m.hidden, m.weight, m.bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1)


def of_ids(log_probs: Tensor, ids: Tensor) -> Tensor:
    """0 where the id is ignored."""
    chosen = log_probs.gather(-1, ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(ids == -100, 0, chosen)


def agree(ours: Callable[[Model], Tensor], formula: Callable[[Model], Tensor], m: Model) -> None:
    """Loss and gradients in fp64."""
    upstream = [torch.tensor(0.7, dtype=torch.float64)]
    codes = [lambda *t, f=f: f(Model(*t)) for f in (ours, formula)]
    found, exact = (gradients(code, [like(t) for t in m], upstream) for code in codes)
    assert_most_digits(found, exact)
