"""The pack: one file with every kernel of one architecture. csrc/runtime/pack.h is its other reader.

Little-endian. Header, index sorted by (kernel hash, variant), names, then the binaries, each deflated and
checksummed on its own so that a process pays for what it launches.
"""

from __future__ import annotations

import os
import struct
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

MAGIC, VERSION = b"LIGERPAK", 1
CUBIN, PTX = 0, 1
# magic, version, kind, arch, entries, file bytes, names bytes; then the checksum of these, the index and the names
HEADER, CHECKSUM = struct.Struct("<8sIIIIQI"), struct.Struct("<I")
# kernel hash, variant, checksum, offset, stored bytes, raw bytes, shared bytes, warps, name offset, name bytes
ENTRY = struct.Struct("<QIIQIIIIII")


@dataclass(frozen=True)
class Entry:
    kernel_hash: int
    variant: int
    name: str
    num_warps: int
    shared: int
    binary: bytes


def dumps(kind: int, arch: int, entries: list[Entry]) -> bytes:
    entries = sorted(entries, key=lambda e: (e.kernel_hash, e.variant))
    names = b"".join(e.name.encode() for e in entries)
    at = HEADER.size + CHECKSUM.size + ENTRY.size * len(entries) + len(names)
    index, blobs, name_at = b"", [], 0
    for e in entries:
        blob = zlib.compress(e.binary, 9, wbits=-15)
        size = len(e.name.encode())
        index += ENTRY.pack(
            e.kernel_hash, e.variant, zlib.crc32(blob), at, len(blob), len(e.binary), e.shared, e.num_warps, name_at, size
        )  # fmt: skip
        blobs.append(blob)
        at, name_at = at + len(blob), name_at + size
    header = HEADER.pack(MAGIC, VERSION, kind, arch, len(entries), at, len(names))
    return b"".join([header, CHECKSUM.pack(zlib.crc32(header + index + names)), index, names, *blobs])


def write(path: Path, kind: int, arch: int, entries: list[Entry]) -> None:
    """Atomic: readers see the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "wb") as f:
        f.write(dumps(kind, arch, entries))
    os.chmod(name, 0o644)
    os.replace(name, path)


def read(path: Path) -> tuple[int, int, list[Entry]]:
    """(kind, arch, entries); ValueError says what is wrong with a damaged file."""
    data = Path(path).read_bytes()
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
    entries = []
    for i in range(count):
        fields = ENTRY.unpack_from(data, index_at + i * ENTRY.size)
        kernel_hash, variant, crc, offset, stored, _, shared, num_warps, name_at, name_size = fields
        blob = data[offset : offset + stored]
        if zlib.crc32(blob) != crc:
            raise ValueError(f"{path}: entry {i} is corrupt")
        name = data[names_at + name_at : names_at + name_at + name_size].decode()
        entries.append(Entry(kernel_hash, variant, name, num_warps, shared, zlib.decompress(blob, wbits=-15)))
    return kind, arch, entries
