"""`input`: R or S of tokens; `weight`: R -> as :func:`cross_entropy`; gradients: as `input`, of `weight` P where tokens
are sharded; communication: for a mean of sharded tokens, its divisor is reduced.

`input`: R; `weight`, `bias`: S(0) -> R; gradients: as the inputs; communication: facts of rows are gathered, and the
gradient of `input` is reduced.

`input`: S(d), a sequence of equal parts; `weight`, `bias`: S(0) -> R; gradients: as the inputs; communication: facts of
rows are gathered; `input` is gathered and its gradient scattered, chunk by chunk.

With an addend: `low_rank_input`: as `input`, but not sharded along a sequence beside a sharded head; `low_rank_weight`:
as `weight` -> as above; gradients: of `low_rank_input` as it, of `low_rank_weight` as that of `weight`.
"""

from functools import partial

from ...reference._wanted import WANT_LOG_PROBS, WANT_METRICS
from .._linear import GRADIENTS, LinearCall
from .._losses import divisors, loss_on_dtensors, of_loss, of_rows, of_statistics, replicated

loss_on_dtensors(
    "fused_linear_cross_entropy",
    LinearCall,
    results=(of_loss, of_loss, of_loss, of_rows, of_rows, of_rows, *GRADIENTS, of_statistics, replicated, replicated),
    gradients=GRADIENTS,
    forms={
        "_with_metrics": (dict(wanted=WANT_METRICS), range(4)),
        "_with_log_probs": (dict(wanted=WANT_LOG_PROBS), (0, 4, 5)),
        "": (dict(wanted=0), (0,)),
    },
    total=("totals", partial(divisors, logits="input", weight="ce_weight")),
)
