"""Fused kernels for LLM training as native PyTorch operators. Importing this package registers torch.ops.liger.*"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from ._runtime import jit as _jit
from ._runtime import vmap as _vmap
from ._runtime.loader import load as _load
from ._version import __version__
from .distributed._lazy import when_imported

__all__ = ["__version__", "functional", "launch_counts", "nn", "preload", "reset_launch_counts", "status"]


def _register_sharding() -> None:
    from .distributed import _sharding

    _sharding.register()


_loaded = _load()
if _loaded.library is not None:
    _jit.register()
    # Kept alive: a Library unregisters its operators when it is deleted.
    _library = torch.library.Library("liger", "FRAGMENT")
    _vmap.register(_library)
    when_imported("torch.distributed.tensor", _register_sharding)

from . import functional, nn  # noqa: E402  need the operators


def status() -> dict[str, Any]:
    """State of the runtime: devices, packs, JIT state, and the launches of each kernel by source."""
    return json.loads(torch.ops.liger._status())


def launch_counts() -> dict[str, int]:
    """Calls since the last reset, by the path that served them.

    `aot`: kernels from a pack. `jit`: kernels that Triton compiled on this machine, now or earlier. `ptx`: kernels that
    the driver compiled from PTX. `cpu`: calls on CPU tensors. All are 0 if the reference formulas run.
    """
    now = status()
    pack, cache, hook, ptx = (sum(k["launches"][i] for k in now["kernels"].values()) for i in range(4))
    return {"aot": pack, "jit": cache + hook, "ptx": ptx, "cpu": now["cpu_calls"]}


def reset_launch_counts() -> None:
    torch.ops.liger._reset_counts()


def preload(device: torch.device | str | int | None = None, ops: Sequence[str] = ()) -> int:
    """Loads every kernel an application may launch on `device`, before a CUDA graph capture or a timed region.

    `ops` limits loading to the kernels of these operators, e.g. ``["rms_norm"]``. Returns the number of kernels loaded.
    Kernels that no pack contains for this device are not loaded: the JIT compiles them at first use.
    """
    chosen = torch.device("cuda" if device is None else device)
    if chosen.type != "cuda":
        raise ValueError(f"preload: device must be a CUDA device (got {chosen})")
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    return torch.ops.liger._preload(index, list(ops))[0]
