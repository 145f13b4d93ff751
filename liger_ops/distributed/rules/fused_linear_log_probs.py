"""As for :func:`fused_linear_cross_entropy` -> positions: as the rows, or R where the classes are sharded; gradients:
as there; communication: facts of rows and logits of ids; `input` and its gradient as there.

Several ids per token make a last dimension that is not sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from ...reference._wanted import WANT_LOG_SUM_EXP
from .._linear import GRADIENTS, LinearCall
from .._losses import Call, R, Result, loss_on_dtensors, of_rows, replicated, spread
from .._sharding import on_dtensors

OP = "fused_linear_log_probs"


def of_ids(call: Call, t: Tensor) -> Tensor:
    return spread(t, call.mesh, call.rows, call.given["target"].shape)


def if_asked(name: str, place: Result) -> Result:
    return lambda call, t: (place if call.given[name] else replicated)(call, t)


def of_sums(call: Call, t: Tensor) -> Tensor:
    return (of_rows if call.given["wanted"] & WANT_LOG_SUM_EXP else replicated)(call, t)


def of_statistics(call: Call, t: Tensor) -> Tensor:
    return spread(t, call.mesh, call.rows, (*call.shape, 3))


def of_input(call: LinearCall, t: Tensor) -> Tensor:
    """Sums over this device's classes."""
    sums = [Partial() if i == call.split else p for i, p in enumerate(call.rows)]
    return spread(t, call.mesh, sums, call.given["input"].shape)


FACTS = (
    *(if_asked(name, of_rows) for name in ("entropy", "mean_logits", "log_sum_sq_probs")),
    if_asked("is_top1", of_ids),
)
loss_on_dtensors(
    OP,
    LinearCall,
    results=(of_ids, *FACTS, of_sums, of_statistics, of_ids, of_input, of_input),
    gradients=GRADIENTS,
    forms={
        "_with_log_sum_exp": (dict(wanted=WANT_LOG_SUM_EXP), range(6)),
        "": (dict(wanted=0), range(5)),
    },
)


class ScaleCall(Call):
    """Of input gradients that forward computed, sums over this device's classes."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(OP, given)
        sums, weight = given["of_log_probs"].placements, given["weight"]
        split = next((i for i, p in enumerate(sums) if p.is_partial()), None)
        # Without weight, the number of classes is not read.
        classes = 1 if weight is None else weight.shape[0]
        self.lay_out([p if isinstance(p, Shard) else R for p in sums], given["target"].shape, classes, split)

    def argument(self, name: str) -> Any:
        if name == "weight":
            return self.part(name, [Shard(0) if i == self.split else R for i in range(self.mesh.ndim)])
        return super().argument(name)


@on_dtensors(f"_{OP}_scale")
def scale(**given: Any) -> Any:
    call, like = ScaleCall(given), given["of_log_probs"]
    found = torch.ops.liger._fused_linear_log_probs_scale(**call.arguments())
    return spread(found, call.mesh, like.placements if call.split is None else call.rows, like.shape)
