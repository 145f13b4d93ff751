"""Rules of operators under autocast other than one dtype for all of their arguments, which custom_op offers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# A Library unregisters what it holds when it dies.
_libraries: list[torch.library.Library] = []


def implement(op: str, devices: Iterable[str], rule: Callable[..., tuple]) -> None:
    """rule(autocast's dtype, *args): the positional arguments to go on with."""
    target = getattr(torch.ops.liger, op).default
    library = torch.library.Library("liger", "FRAGMENT")
    _libraries.append(library)
    for device in devices:

        def run(*args: Any, device: str = device, **named: Any) -> Any:
            dtype = torch.get_autocast_dtype(device)
            with torch.autocast(device, enabled=False):
                return target(*rule(dtype, *args), **named)

        library.impl(op, run, f"Autocast{device.upper()}")


def as_linear(dtype: torch.dtype, *args: Any) -> tuple:
    """What F.linear does to its arguments."""
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.dtype != torch.float64 else t for t in args)


def as_product(dtype: torch.dtype, a: Tensor, b: Tensor, *args: Any) -> tuple:
    """Promotes two operands as their product would."""
    wider = torch.promote_types(a.dtype, b.dtype)
    return a.to(wider), b.to(wider), *args
