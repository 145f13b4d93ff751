"""Compiles a variant to cubins, and checks everything that C++ relies on.

Triton lowers a variant once, for compute capability 8.0. Kernels without tl.dot lower to the same PTX for every
capability, so each further architecture needs only another run of ptxas. The target is plain `sm_90`, whose cubin runs
on the whole major family; Triton's own `sm_90a` runs on one chip. Kernels whose table names an architecture, in Triton
or in PTX (hopper.py), use instructions of one chip and are compiled only for it.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import struct
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from ..kernels import hopper
from ..kernels.table import Kernel, Variant

PTX_CAPABILITY = 80
# Shared memory that any launch may use, and the largest amount that every architecture grants when the runtime opts in,
# which it does beyond DYNAMIC_SHARED_BYTES: some architectures reserve a kilobyte.
PLAIN_SHARED_BYTES = 48 * 1024
DYNAMIC_SHARED_BYTES = 47 * 1024
MAX_SHARED_BYTES = 99 * 1024

PTX_BYTES = {"u64": 8, "s64": 8, "b64": 8, "u32": 4, "s32": 4, "b32": 4, "f32": 4, "b8": 1}

# Triton's settings are per process: two threads that change them at once would restore each other's values.
KNOBS_LOCK = threading.Lock()


class BuildError(RuntimeError):
    """A compiled kernel does not match its table."""


@dataclass(frozen=True)
class Binary:
    """One variant, compiled: its PTX, its cubins by architecture, and how to launch them."""

    ptx: bytes
    cubins: dict[int, bytes]
    num_warps: int
    shared: int


def triton_version() -> str:
    return version("triton")


def demand(variant: Variant, condition: bool, message: str) -> None:
    if not condition:
        raise BuildError(f"{variant.name}: {message}")


def compile_variant(variant: Variant, archs: list[int]) -> Binary:
    """archs: compute capabilities as major * 10 + minor; those that the kernel does not support are skipped."""
    served = [arch for arch in archs if variant.kernel.is_for(arch)]
    demand(variant, bool(served), "is for " + ", ".join(f"sm_{arch}" for arch in variant.kernel.archs) + " alone")
    if isinstance(variant.kernel.function, hopper.Assembly):
        ptx, shared = variant.kernel.function.write(variant.kernel.layout, variant.constexprs, variant.config.num_warps)
        cubins = {arch: assemble(ptx, arch, f"sm_{arch}a") for arch in served}
        binary = Binary(ptx.encode(), cubins, variant.config.num_warps, shared)
        check(variant, binary, hopper.SHARED_BYTES)
    else:
        binary = compile_triton(variant, served)
        check(variant, binary, hopper.SHARED_BYTES if variant.kernel.archs else MAX_SHARED_BYTES)
    return binary


def compile_triton(variant: Variant, archs: list[int]) -> Binary:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.function.arg_names
    source = ASTSource(
        variant.kernel.function,
        variant.signature,
        {(names.index(k),): v for k, v in variant.constexprs.items()},
        {(names.index(k),): [["tt.divisibility", v]] for k, v in variant.divisibility.items()},
    )
    knobs = triton.knobs
    with KNOBS_LOCK, tempfile.TemporaryDirectory() as scratch, knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = scratch
        # Line information would contain the build machine's paths.
        knobs.compilation.disable_line_info = True
        # fp fusion is explicit: its default may change with a Triton release, and results with it.
        options = {"num_warps": variant.config.num_warps, "enable_fp_fusion": True, "maxnreg": variant.max_registers}
        capability = variant.kernel.archs[0] if variant.kernel.archs else min(PTX_CAPABILITY, *archs)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    metadata, ptx = compiled.metadata, compiled.asm["ptx"]
    ring = ring_bytes(ptx)
    # The ring follows Triton's own shared memory, at a 16-byte boundary.
    shared = metadata.shared if not ring else -(-metadata.shared // 16) * 16 + ring
    demand(variant, metadata.name == variant.kernel.symbol, f"Triton named the kernel {metadata.name}")
    demand(variant, not metadata.global_scratch_size and not metadata.profile_scratch_size, "needs scratch memory")
    demand(variant, not ring or one_layout(compiled.asm["ttgir"]), "a lane of a streamed row might change threads")
    # Triton's target for 9.0 has features that no later architecture has. ptxas refuses them if a kernel uses them.
    portable = ptx.replace(f".target sm_{capability}a", f".target sm_{capability}")
    cubins = {
        arch: compiled.asm["cubin"] if arch == capability else assemble(portable, arch, f"sm_{arch}") for arch in archs
    }
    return Binary(ptx.encode(), cubins, metadata.num_warps, shared)


def check(variant: Variant, binary: Binary, most_shared: int) -> None:
    """Checks what C++ relies on."""
    layout = variant.kernel.layout
    sizes = ptx_parameters(binary.ptx.decode())
    demand(variant, sizes == [size for *_, size in layout], "PTX parameters differ from the table")
    for arch, cubin in binary.cubins.items():
        expected, found = [(offset, size) for _, _, offset, size in layout], cubin_parameters(cubin)
        if variant.kernel.takes_maps and found:
            # ptxas shifts all parameters so that the maps are aligned in the constant bank; the driver puts them there.
            found = [(offset - found[0][0], size) for offset, size in found]
        demand(variant, found == expected, f"sm_{arch} parameters {found}, table {expected}")
        needed = binary.shared + reserved_shared(cubin)
        limit = most_shared if binary.shared > DYNAMIC_SHARED_BYTES else PLAIN_SHARED_BYTES
        demand(variant, needed <= limit, f"sm_{arch} needs {needed} bytes of shared memory, limit {limit}")
    for blob in (binary.ptx, *binary.cubins.values()):
        demand(variant, str(Path(__file__).parents[2]).encode() not in blob, "carries a build path")


def ptx_parameters(ptx: str) -> list[int]:
    """Sizes of a PTX entry's parameters, in order."""
    head = re.search(r"\.entry\s+\w+\((.*?)\)", ptx, re.S)
    form = r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,\[]*(?:\[(\d+)\])?"
    found = re.findall(form, head[1]) if head else []
    return [PTX_BYTES[kind] * int(count or 1) for kind, count in found]


def cubin_sections(cubin: bytes) -> list[tuple[str, int, int]]:
    """(name, offset, size) of an ELF file's sections."""
    table_offset, entry_size, count = struct.unpack_from("<40xQ10xHH", cubin)[0], *struct.unpack_from("<58xHH", cubin)
    sections = [struct.unpack_from("<II8x8xQQ", cubin, table_offset + i * entry_size) for i in range(count)]
    names = sections[struct.unpack_from("<62xH", cubin)[0]][2]
    text = lambda at: cubin[at : cubin.index(b"\0", at)].decode()  # noqa: E731
    return [(text(names + name), offset, size) for name, _, offset, size in sections]


def cubin_parameters(cubin: bytes) -> list[tuple[int, int]]:
    """(offset, size) of each kernel parameter, from the EIATTR_KPARAM_INFO records of the ELF's .nv.info section."""
    found = []
    for name, offset, size in cubin_sections(cubin):
        if not name.startswith(".nv.info."):
            continue
        at = offset
        while at < offset + size:
            form, attribute, length = struct.unpack_from("<BBH", cubin, at)
            # Form 4 is the only one followed by a payload; attribute 0x17 is KPARAM_INFO.
            if form == 4 and attribute == 0x17:
                ordinal, parameter_offset, bits = struct.unpack_from("<4xHHI", cubin, at + 4)
                found.append((ordinal, parameter_offset, bits >> 18))
            at += 4 + (length if form == 4 else 0)
    return [(offset, size) for _, offset, size in sorted(found)]


def ring_bytes(ptx: str) -> int:
    """Bytes of shared memory that rows stream through (streamed.py)."""
    return max(map(int, re.findall(r"/\* ring (\d+) \*/", ptx)), default=0)


def one_layout(ttgir: str) -> bool:
    """Whether all tensors are distributed over the threads in the same way."""
    return len(re.findall(r"^#\w+ = #ttg\.", ttgir, re.M)) == 1 and "ttg.convert_layout" not in ttgir


def reserved_shared(cubin: bytes) -> int:
    """Bytes of static shared memory of a kernel (kept.py), in addition to the dynamic memory of its launch."""
    return sum(size for name, _, size in cubin_sections(cubin) if name.startswith(".nv.shared."))


def assembler(arch: int) -> str:
    """Path of ptxas. Triton ships a second one for newer architectures."""
    import triton.backends.nvidia as nvidia

    folder = Path(nvidia.__file__).parent / "bin"
    newer = folder / "ptxas-blackwell"
    return os.environ.get("TRITON_PTXAS_PATH") or str(newer if arch >= 100 and newer.exists() else folder / "ptxas")


def assemble(ptx: str, arch: int, target: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [assembler(arch), f"--gpu-name={target}", "-O3", str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"ptxas for {target} failed: {done.stderr.strip()}")
        return cubin.read_bytes()


@cache
def compiler_facts() -> list[str]:
    """Everything that determines how variants are compiled and checked."""
    steps = [
        inspect.getsource(step) for step in (compile_variant, compile_triton, check, ring_bytes, assembler, assemble)
    ]
    return [
        *steps,
        str(PTX_CAPABILITY),
        str((PLAIN_SHARED_BYTES, DYNAMIC_SHARED_BYTES, MAX_SHARED_BYTES)),
        os.environ.get("TRITON_PTXAS_PATH", ""),
    ]


def code_key(kernel: Kernel, variant: Variant) -> str:
    """Cache key of a compiled variant: a hash of everything it depends on."""
    facts = [*kernel.sources, str(kernel.args), str(variant.signature), str(variant.constexprs)]
    facts += compiler_facts()
    facts += [
        str(variant.divisibility),
        str(variant.config.num_warps),
        str(variant.max_registers),
        str(kernel.archs),
        triton_version(),
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
