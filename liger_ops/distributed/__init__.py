"""Many devices: sharding rules of the operators for DTensor, and losses over split vocabularies."""

from typing import Any

from ._loss_parallel import loss_parallel

__all__ = ["LossHeadParallel", "loss_parallel"]


def __getattr__(name: str) -> Any:
    # Imports DTensor, which takes half a second.
    if name == "LossHeadParallel":
        from ._styles import LossHeadParallel

        return LossHeadParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
