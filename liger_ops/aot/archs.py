"""The GPU architectures that kernels are compiled for. Compute capabilities are written as major * 10 + minor."""

from __future__ import annotations

import ctypes

# A cubin runs on devices of the same major version with the same or a higher minor version.
ALL = (80, 90, 100, 120)

MAJOR, MINOR, INTEGRATED = 75, 76, 18  # CUdevice_attribute


def asked_for(text: str) -> list[int]:
    """Parses LIGER_OPS_ARCHS: all, none, or a list such as 80,90."""
    if text in ("all", "none"):
        return [*ALL] if text == "all" else []
    names = text.replace(",", " ").replace(";", " ").split()
    if not names or not all(name.isdecimal() and int(name) >= ALL[0] for name in names):
        raise SystemExit(
            f"liger-ops: LIGER_OPS_ARCHS must be all, none or a list such as 80,90, from {ALL[0]} up (got {text!r})"
        )
    return sorted({*map(int, names)})


def serving(capability: int, integrated: bool) -> int:
    """The architecture to compile for a device. An integrated GPU needs cubins for its exact architecture."""
    family = [arch for arch in ALL if arch // 10 == capability // 10 and arch <= capability]
    return family[-1] if family and not integrated else capability


def present() -> list[int]:
    """The architectures of this machine's GPUs. Older GPUs use the JIT."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []

    def attribute(which: int, device: int) -> int:
        value = ctypes.c_int()
        return 0 if driver.cuDeviceGetAttribute(ctypes.byref(value), which, device) else value.value

    found = set()
    for ordinal in range(count.value):
        device = ctypes.c_int()
        if not driver.cuDeviceGet(ctypes.byref(device), ordinal):
            capability = 10 * attribute(MAJOR, device.value) + attribute(MINOR, device.value)
            found.add(serving(capability, bool(attribute(INTEGRATED, device.value))))
    return sorted(arch for arch in found if arch >= ALL[0])


def seconds(archs: list[int]) -> float:
    """What a core needs to compile all kernels: their PTX, and cubins from it."""
    return 560.0 + 160.0 * len(archs) if archs else 0.0
