"""The pack: one file with every kernel of one architecture. csrc/runtime/pack.h reads the same format.

All numbers are little-endian. A pack contains a header, an index sorted by (kernel hash, variant), names, and blocks.
Variants of a kernel are similar: a block holds several, compressed by LZMA as one stream, and is checksummed. A process
decodes a block up to the binary that it launches.
"""

from __future__ import annotations

import lzma
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC, VERSION = b"LIGERPAK", 3
CUBIN, PTX = 0, 1
# magic, version, kind, arch, entries, file bytes, names bytes; then the checksum of the header, index and names
HEADER, CHECKSUM = struct.Struct("<8sIIIIQI"), struct.Struct("<I")
# kernel hash, variant, checksum, offset and stored bytes of the block, raw bytes, shared bytes, warps, name offset, name
# bytes, where the binary begins in the decoded block
ENTRY = struct.Struct("<QIIQIIIIIII")

# Decoded bytes of a block, unless one binary has more. Larger ones compress better, and take longer to decode.
BLOCK = 1 << 17
# Bits of context of a literal (lc), of its position (lp) and of any symbol's position (pb). Instructions have 16 bytes.
CONTEXTS = {CUBIN: (0, 4, 4), PTX: (3, 0, 0)}


@dataclass(frozen=True)
class Entry:
    kernel_hash: int
    variant: int
    name: str
    num_warps: int
    shared: int
    binary: bytes


def filters(contexts: tuple[int, int, int]) -> list[dict[str, Any]]:
    lc, lp, pb = contexts
    return [{"id": lzma.FILTER_LZMA1, "preset": 6, "dict_size": 1 << 20, "lc": lc, "lp": lp, "pb": pb}]


def compress(data: bytes, contexts: tuple[int, int, int]) -> bytes:
    lc, lp, pb = contexts
    return bytes([(pb * 5 + lp) * 9 + lc]) + lzma.compress(data, lzma.FORMAT_RAW, filters=filters(contexts))


def decompress(data: bytes, most: int = -1) -> bytes:
    properties = data[0]
    contexts = properties % 9, properties // 9 % 5, properties // 45
    return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters(contexts)).decompress(data[1:], most)


def in_blocks(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Neighbouring variants of one kernel."""
    block: list[Entry] = []
    size = 0
    for e in entries:
        if block and (e.kernel_hash != block[0].kernel_hash or size + len(e.binary) > BLOCK):
            yield block
            block, size = [], 0
        block.append(e)
        size += len(e.binary)
    if block:
        yield block


def dumps(kind: int, arch: int, entries: list[Entry]) -> bytes:
    entries = sorted(entries, key=lambda e: (e.kernel_hash, e.variant))
    names = b"".join(e.name.encode() for e in entries)
    at = HEADER.size + CHECKSUM.size + ENTRY.size * len(entries) + len(names)
    blocks = list(in_blocks(entries))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        stored = list(pool.map(lambda b: compress(b"".join(e.binary for e in b), CONTEXTS[kind]), blocks))
    index, name_at = b"", 0
    for block, blob in zip(blocks, stored):
        first, checksum = 0, zlib.crc32(blob)
        for e in block:
            size = len(e.name.encode())
            index += ENTRY.pack(
                e.kernel_hash, e.variant, checksum, at, len(blob), len(e.binary), e.shared, e.num_warps, name_at, size, first
            )  # fmt: skip
            first, name_at = first + len(e.binary), name_at + size
        at += len(blob)
    header = HEADER.pack(MAGIC, VERSION, kind, arch, len(entries), at, len(names))
    return b"".join([header, CHECKSUM.pack(zlib.crc32(header + index + names)), index, names, *stored])


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


def stored_bytes(path: Path) -> dict[tuple[int, int], float]:
    """(kernel hash, variant) -> bytes that it takes in the pack: of a block, in proportion to the decoded bytes."""
    index = index_of(path, path.read_bytes())[3]
    decoded: dict[int, int] = {}
    for _, _, _, offset, _, raw, *_ in index:
        decoded[offset] = decoded.get(offset, 0) + raw
    return {(kernel, variant): ENTRY.size + names + stored * raw / decoded[offset]
            for kernel, variant, _, offset, stored, raw, _, _, _, names, _ in index}  # fmt: skip


def read(path: Path) -> tuple[int, int, list[Entry]]:
    """(kind, arch, entries). Raises ValueError if the file is damaged."""
    data = Path(path).read_bytes()
    kind, arch, names_at, index = index_of(path, data)
    found: list[Entry] = []
    block, whole = -1, b""
    for i, (kernel_hash, variant, crc, offset, stored, raw, shared, warps, name_at, name_size, first) in enumerate(
        index
    ):
        if offset != block:
            blob = data[offset : offset + stored]
            try:
                block, whole = offset, decompress(blob) if zlib.crc32(blob) == crc else b""
            except (lzma.LZMAError, IndexError):
                whole = b""
        binary = whole[first : first + raw]
        if len(binary) != raw or not whole:
            raise ValueError(f"{path}: entry {i} is corrupt")
        name = data[names_at + name_at : names_at + name_at + name_size].decode()
        found.append(Entry(kernel_hash, variant, name, warps, shared, binary))
    return kind, arch, found
