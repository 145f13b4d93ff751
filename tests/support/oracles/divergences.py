"""Losses of all classes, in another way than the formulas of kl_div, jsd and tvd compute them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def jsd(input: Tensor, target: Tensor, beta: float = 0.5) -> Tensor:
    q, p = input.exp(), target.exp()
    if beta in (0, 1):
        return p * (p / q).log() if beta == 0 else q * (q / p).log()
    m = beta * p + (1 - beta) * q
    return beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()


PLAIN: dict[str, Callable[..., Tensor]] = {
    "kl_div": partial(torch.nn.functional.kl_div, reduction="none"),
    "jsd": jsd,
    "tvd": lambda input, target: torch.maximum(input, target) - (input + target) / 2,
}
