"""The machines that wheels are for. A wheel can be built on one machine for another, by that machine's cross compiler."""

from __future__ import annotations

import platform
from typing import NamedTuple


class Machine(NamedTuple):
    name: str  # as in the tags of wheels and in platform.machine()
    elf: int  # the number of the machine in the header of its libraries
    linker: str  # the dynamic linker, which libraries may need
    glibc: tuple[int, int] = (2, 28)  # the oldest that its wheels run with, as those of torch

    @property
    def tag(self) -> str:
        return "manylinux_{}_{}_{}".format(*self.glibc, self.name)

    @property
    def native(self) -> bool:
        return self.name == platform.machine()

    @property
    def compiler(self) -> str:
        return "g++" if self.native else f"{self.name}-linux-gnu-g++"

    @property
    def cmake(self) -> dict[str, str]:
        """What CMake needs to know to compile for another machine."""
        return {} if self.native else {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": self.name}


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("x86_64", 62, "ld-linux-x86-64.so.2"),
        Machine("aarch64", 183, "ld-linux-aarch64.so.1"),
    )
}


def asked_for(name: str) -> Machine:
    """Parses LIGER_OPS_MACHINE: by default this machine."""
    name = name or platform.machine()
    if name not in MACHINES:
        raise SystemExit(f"liger-ops: LIGER_OPS_MACHINE must be among {', '.join(MACHINES)} (got {name})")
    return MACHINES[name]
