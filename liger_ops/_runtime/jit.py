"""The JIT hook: compiles a kernel that no pack contains, from the same source and variant table as the packs.

The runtime calls `liger::_compile_kernel` with a kernel's name, its variant and the device's compute capability,
and receives a pack with one entry.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

_library: torch.library.Library | None = None


def compiler() -> str | None:
    """Name and version of the installed compiler, without importing it."""
    try:
        return f"triton-{version('triton')}"
    except PackageNotFoundError:
        return None


def compile_pack(kernel: str, variant: int, capability: int) -> bytes:
    from ..aot import pack
    from ..aot.compile import compile_variant
    from ..kernels import find

    chosen = find(kernel).variant(variant)
    binary = compile_variant(chosen, [capability])
    facts = (int(chosen.kernel.source_hash, 16), chosen.index, chosen.name, binary.num_warps, binary.shared)
    return pack.dumps(pack.CUBIN, capability, [pack.Entry(*facts, binary.cubins[capability])])


def _compile_kernel(kernel: str, variant: int, capability: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(compile_pack(kernel, variant, capability)), dtype=torch.uint8)


def register() -> None:
    global _library
    name = compiler()
    if name is None:
        return
    _library = torch.library.Library("liger", "FRAGMENT")
    _library.impl("_compile_kernel", _compile_kernel, "CompositeImplicitAutograd")
    torch.ops.liger._enable_jit(name)
