from functools import partial

from ..._wanted import CE_BIAS, CE_LOG_PROBS, CE_METRICS, CE_WEIGHT
from .._linear import GRADIENTS, LinearCall
from .._losses import divisors, loss_on_dtensors, of_loss, of_rows, of_statistics, replicated


class Call(LinearCall):
    WANT_HEAD = CE_WEIGHT | CE_BIAS


loss_on_dtensors(
    "fused_linear_cross_entropy",
    Call,
    results=(of_loss, of_loss, of_loss, of_rows, of_rows, of_rows, *GRADIENTS, of_statistics, replicated, replicated),
    gradients=GRADIENTS,
    forms={
        "_with_metrics": (dict(wanted=CE_METRICS), range(4)),
        "_with_log_probs": (dict(wanted=CE_LOG_PROBS), (0, 4, 5)),
        "": (dict(wanted=0), (0,)),
    },
    total=("totals", partial(divisors, logits="input", weight="ce_weight")),
)
