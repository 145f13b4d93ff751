"""Numbers in code that torch.compile traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def static(*numbers: Any) -> Sequence[Any]:
    """The numbers, as constants of the graph. Other values stay as they are.

    torch.compile makes a float symbolic once it has seen two values of it, for example in two models. It traces forward and
    backward of a Python autograd function as graphs of their own, and a symbol that the one creates is unknown in the other.
    So what such a function takes must go through here.
    """
    if not torch.compiler.is_compiling():
        return numbers
    guard = torch.fx.experimental.symbolic_shapes.guard_scalar
    return [guard(number) if isinstance(number, (int, float)) else number for number in numbers]
