from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .. import functional as F


class loss_parallel(TorchFunctionMode):
    """Inside this context, `torch.nn.functional.cross_entropy` of logits that are a DTensor, and what calls it, is computed
    by :func:`liger_ops.functional.cross_entropy`: where classes are sharded, devices exchange facts about rows and never
    gather the logits. Backward may run inside or outside. The loss has the dtype of the logits, as in PyTorch.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is functional.cross_entropy:
            return cross_entropy(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    legacy = size_average is not None or reduce is not None
    # Other layouts have classes in the second dimension, or probabilities as targets.
    usual = input.dim() <= 2 and target.dim() == input.dim() - 1 and not target.is_floating_point()
    if not hasattr(input, "placements") or legacy or not usual:
        return functional.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    return F.cross_entropy(input, target, weight, reduction, ignore_index, label_smoothing).to(input.dtype)
