"""torch.ops.liger.* registered from Python, for a torch that no operator library was built for.

The kernels, their packs and the runtime that launches them are the same; only the way from torch to the runtime is
longer. One file an operator: a schema, the forward on CPU and CUDA tensors, the fake, the backward.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch

from . import runtime

HELPERS = {"__init__", "autocast", "autograd", "runtime"}


def modules() -> list:
    stems = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in HELPERS)
    return [import_module(f".{stem}", __package__) for stem in stems]


def register() -> None:
    """Defines every operator and the runtime's private ones, under the names and schemas that C++ gives them."""
    library = torch.library.Library("liger", "FRAGMENT")
    private = {
        "_status() -> str": runtime.status,
        "_reset_counts() -> ()": runtime.reset_counts,
        "_preload(int device, str[] ops) -> (int, int)": runtime.preload,
        "_enable_jit(str compiler) -> ()": runtime.enable_jit,
        "_compile_kernel(str kernel, int variant, int capability) -> Tensor": None,
    }
    for schema, function in private.items():
        library.define(schema)
        if function is not None:
            library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
    # A Library unregisters what it holds when it dies.
    register.library = library
    for module in modules():
        module.register()
