"""The pack: one file with every kernel of one architecture. csrc/runtime/pack.h reads the same format.

All numbers are little-endian. A pack contains a header, an index sorted by (kernel hash, variant), names, and binaries.
Each binary is deflated and checksummed separately, so that a process inflates only the kernels that it launches.
Variants of a kernel are similar: most are deflated with another variant, their base, as the dictionary. A base has no
base itself.
"""

from __future__ import annotations

import os
import struct
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAGIC, VERSION = b"LIGERPAK", 2
CUBIN, PTX = 0, 1
# magic, version, kind, arch, entries, file bytes, names bytes; then the checksum of the header, index and names
HEADER, CHECKSUM = struct.Struct("<8sIIIIQI"), struct.Struct("<I")
# kernel hash, variant, checksum, offset, stored bytes, raw bytes, shared bytes, warps, name offset, name bytes, base
ENTRY = struct.Struct("<QIIQIIIIIII")


@dataclass(frozen=True)
class Entry:
    kernel_hash: int
    variant: int
    name: str
    num_warps: int
    shared: int
    binary: bytes
    # A variant of the same kernel with a similar binary. Used if the pack contains it and it has no base itself.
    base: int | None = field(default=None, compare=False)


def deflate(data: bytes, dictionary: bytes) -> bytes:
    primed: dict[str, Any] = {"zdict": dictionary} if dictionary else {}
    stream = zlib.compressobj(9, zlib.DEFLATED, -15, **primed)
    return stream.compress(data) + stream.flush()


def inflate(data: bytes, dictionary: bytes) -> bytes:
    stream = zlib.decompressobj(-15, **({"zdict": dictionary} if dictionary else {}))
    return stream.decompress(data) + stream.flush()


def dumps(kind: int, arch: int, entries: list[Entry]) -> bytes:
    entries = sorted(entries, key=lambda e: (e.kernel_hash, e.variant))
    bases = {(e.kernel_hash, e.variant): e for e in entries if e.base in (None, e.variant)}
    names = b"".join(e.name.encode() for e in entries)
    at = HEADER.size + CHECKSUM.size + ENTRY.size * len(entries) + len(names)
    index, blobs, name_at = b"", [], 0
    for e in entries:
        base = e if e.base is None else bases.get((e.kernel_hash, e.base), e)
        blob = deflate(e.binary, b"" if base is e else base.binary)
        size = len(e.name.encode())
        index += ENTRY.pack(
            e.kernel_hash, e.variant, zlib.crc32(blob), at, len(blob), len(e.binary), e.shared, e.num_warps, name_at, size,
            base.variant,
        )  # fmt: skip
        blobs.append(blob)
        at, name_at = at + len(blob), name_at + size
    header = HEADER.pack(MAGIC, VERSION, kind, arch, len(entries), at, len(names))
    return b"".join([header, CHECKSUM.pack(zlib.crc32(header + index + names)), index, names, *blobs])


def write(path: Path, kind: int, arch: int, entries: list[Entry]) -> None:
    """Writes atomically: readers see either the old file or the complete new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "wb") as f:
        f.write(dumps(kind, arch, entries))
    os.chmod(name, 0o644)
    os.replace(name, path)


def index_of(path: Path, data: bytes) -> tuple[int, int, int, list[tuple]]:
    """(kind, arch, offset of the names, ENTRY fields of every entry). Raises ValueError if the file is damaged."""
    index_at = HEADER.size + CHECKSUM.size
    if len(data) < index_at:
        raise ValueError(f"{path}: truncated at {len(data)} bytes")
    magic, ver, kind, arch, count, size, names_size = HEADER.unpack_from(data)
    if magic != MAGIC or ver != VERSION:
        raise ValueError(f"{path}: not a version {VERSION} pack")
    names_at = index_at + count * ENTRY.size
    crc = zlib.crc32(data[: HEADER.size] + data[index_at : names_at + names_size])
    if len(data) != size or CHECKSUM.pack(crc) != data[HEADER.size : index_at]:
        raise ValueError(f"{path}: truncated or corrupt")
    return kind, arch, names_at, [ENTRY.unpack_from(data, index_at + i * ENTRY.size) for i in range(count)]


def stored_bytes(path: Path) -> dict[tuple[int, int], tuple[int, bool]]:
    """(kernel hash, variant) -> bytes that it takes in the pack, and whether it is deflated without a base."""
    index = index_of(path, path.read_bytes())[3]
    return {(kernel, variant): (ENTRY.size + names + stored, base == variant)
            for kernel, variant, _, _, stored, _, _, _, _, names, base in index}  # fmt: skip


def read(path: Path) -> tuple[int, int, list[Entry]]:
    """(kind, arch, entries). Raises ValueError if the file is damaged."""
    data = Path(path).read_bytes()
    kind, arch, names_at, index = index_of(path, data)
    count = len(index)
    found: dict[tuple[int, int], Entry] = {}
    # Bases first, because the others are inflated with them.
    for i in sorted(range(count), key=lambda i: index[i][-1] != index[i][1]):
        kernel_hash, variant, crc, offset, stored, _, shared, num_warps, name_at, name_size, base = index[i]
        blob = data[offset : offset + stored]
        if zlib.crc32(blob) != crc or base != variant and (kernel_hash, base) not in found:
            raise ValueError(f"{path}: entry {i} is corrupt")
        name = data[names_at + name_at : names_at + name_at + name_size].decode()
        binary = inflate(blob, b"" if base == variant else found[kernel_hash, base].binary)
        found[kernel_hash, variant] = Entry(kernel_hash, variant, name, num_warps, shared, binary, base)
    return kind, arch, [found[key] for key in sorted(found)]
