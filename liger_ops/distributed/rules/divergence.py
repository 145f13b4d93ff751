"""Reduction "none": R or S of any dimension but the last, the same for all inputs -> as the inputs; gradient: the same.

Other reductions: inputs as above -> P, or R if the inputs are R; gradient: as the inputs; communication: the divisor of
a mean is reduced, in backward again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import Shard

from .._sharding import Layout, R, on_dtensors, row_placements, sharding, summed

OPS = ("kl_div", "jsd", "tvd")
# Parts have sums and divisors that add up; a mean is divided after that.
MEANS = ("mean", "batchmean")


@sharding(*(f"_{op}_fwd" for op in OPS))
def forward(input: Any, shift_labels: Any, reduction: str, divide: bool, **options: Any) -> Iterator[Layout]:
    # torch.nn.functional.kl_div divides by the first dimension, which other shards of a batch have too.
    first_only = "log_target" in options and reduction == "batchmean" and shift_labels is None
    for rows in row_placements(input):
        if reduction in MEANS and divide and rows != R:
            continue
        loss = rows if reduction == "none" else summed(rows)
        divisor = R if first_only and rows != Shard(0) else summed(rows)
        results = [loss, divisor if reduction in MEANS else None]
        yield results, dict(input=rows, target=rows, shift_labels=rows)


@sharding(*(f"_{op}_bwd" for op in OPS), reduced=("grad", "divisor"))
def backward(target: Any, reduction: str, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(target):
        grad = rows if reduction == "none" else R
        yield [rows], dict(grad=grad, divisor=R, input=rows, target=rows, shift_labels=rows)


def without_graph(op: str) -> None:
    @on_dtensors(op)
    def forward(input: Any, target: Any, shift_labels: Any, **options: Any) -> Any:
        dtype = torch.promote_types(input.dtype, target.dtype)
        total, divisor = getattr(torch.ops.liger, f"_{op}_fwd")(
            input.to(dtype), target.to(dtype), shift_labels, *options.values(), False
        )
        return total / divisor if options["reduction"] in MEANS else total


for op in OPS:
    without_graph(op)
