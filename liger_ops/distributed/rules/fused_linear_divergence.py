"""`s_input`, `t_input`, `mask`, `token_weight`: R or S of tokens, the same for all; weights and biases: R ->
divergence: as :func:`cross_entropy`, entropy: as `s_input`; gradients: of `s_input` as it, of `s_weight` and `s_bias` P
where tokens are sharded; communication: for a mean of sharded tokens, its divisor is reduced.

`s_input`, `t_input`: R, or S(d), a sequence of equal parts; weights and biases of both: S(0) -> R; gradients: as the
inputs; communication: facts and sums of rows; the gradient of `s_input` is reduced, or both inputs are gathered and it
is scattered.
"""

from typing import Any

import torch
from torch import Tensor

from .._linear import GRADIENTS, LinearCall
from .._losses import loss_on_dtensors, of_loss, of_rows, of_statistics, replicated


def total(call: LinearCall, arguments: dict[str, Any]) -> Tensor:
    x, mask, weight = (arguments[name] for name in ("s_input", "mask", "token_weight"))
    dtype = torch.promote_types(x.dtype, torch.float32)
    tokens = list(x.shape[:-1])
    if call.sequence_dim is not None:
        tokens[call.sequence_dim] *= call.mesh.size(call.split)
    weights = x.new_ones(tokens, dtype=dtype) if weight is None else weight.to(dtype)
    return (weights if mask is None else weights.masked_fill(~mask, 0)).sum()


class Call(LinearCall):
    WHOLE = (*LinearCall.WHOLE, "vocab_map")


loss_on_dtensors(
    "fused_linear_divergence",
    Call,
    results=(of_loss, of_rows, *GRADIENTS, of_statistics, replicated),
    gradients=GRADIENTS,
    forms={"": (dict(wanted=0), range(2))},
    total=("total", total),
)
