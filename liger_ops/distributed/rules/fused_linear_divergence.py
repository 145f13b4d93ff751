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
