"""Kernel packs: Python writes them, C++ reads them, and damaged files are rejected."""

import os
import random
import re
import shutil
import struct
import tempfile
import zlib
from dataclasses import replace

import pytest
import stub_cuda
from stub_cuda import ARCHS, PACKS, sample

import liger_ops.kernels as tables
from liger_ops.aot import pack

KERNEL = "column_sum"
STEMS = [f"sm_{arch}" for arch in ARCHS] + ["ptx"]
HASH = int(tables.find(KERNEL).source_hash, 16)


def variants(arch):
    return [v for k in tables.kernels() for v in sample(k, arch)]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The first three variants of one kernel, as a cubin pack and as PTX."""
    folder = tmp_path_factory.mktemp("small")
    for stem in ("sm_90", "ptx"):
        kind, arch, entries = pack.read(PACKS / f"{stem}.pack")
        pack.write(folder / f"{stem}.pack", kind, arch, [e for e in entries if e.kernel_hash == HASH][:3])
    return folder


# ---- Shipped packs.


@pytest.mark.parametrize("stem", STEMS)
def test_a_pack_holds_every_variant_it_was_built_from(stem):
    kind, arch, entries = pack.read(PACKS / f"{stem}.pack")
    assert (kind, arch) == ((pack.PTX, 80) if stem == "ptx" else (pack.CUBIN, int(stem[3:])))
    # PTX serves future architectures, so kernels for specific architectures are not included.
    held = variants(arch if kind == pack.CUBIN else 90)
    here = [v for v in held if (v.kernel.is_for(arch) if kind == pack.CUBIN else not v.kernel.archs)]
    expected = {(int(v.kernel.source_hash, 16), v.index): v.name for v in here}
    assert {(e.kernel_hash, e.variant): e.name for e in entries} == expected
    assert len(entries) == len(expected)
    magic = b"//" if kind == pack.PTX else b"\x7fELF"
    assert all(e.binary.lstrip().startswith(magic) for e in entries)


def read_all(path, wanted):
    listed = runtime.list_pack(path)
    out = []
    for kernel, indices in wanted:
        for variant in indices:
            code, num_warps, shared = runtime.read_entry(path, kernel, variant)
            out.append([kernel, variant, zlib.crc32(code), len(code), num_warps, shared])
    return [listed, out]


@pytest.mark.parametrize("stem", STEMS)
def test_python_and_cpp_read_the_same(stem):
    path = PACKS / f"{stem}.pack"
    kind, arch, entries = pack.read(path)
    names = {int(k.source_hash, 16): k.name for k in tables.kernels()}
    wanted = [(names[e.kernel_hash], [e.variant]) for e in entries]
    listed, found = stub_cuda.run(read_all, str(path), wanted).value
    assert listed == {"kind": ["cubin", "ptx"][kind], "arch": arch, "names": [e.name for e in entries]}
    expected = [
        [names[e.kernel_hash], e.variant, zlib.crc32(e.binary), len(e.binary), e.num_warps, e.shared] for e in entries
    ]  # fmt: skip
    assert sorted(found) == sorted(expected)


def registered():
    return {name: [runtime.hash(name), names] for name, names in runtime.kernels().items()}


def test_the_library_knows_the_variants_of_the_tables():
    expected = {k.name: [int(k.source_hash, 16), [v.name for v in k.variants()]] for k in tables.kernels()}
    assert stub_cuda.run(registered).value == expected


# ---- Damaged packs.


def open_each(path, folder, damages):
    """Applies each damage: (position, bytes), or (length, None) to truncate. Returns the errors of both C++ readers."""
    whole = Path(path).read_bytes()
    target = str(Path(folder) / "damaged.pack")
    out = []
    for position, changed in damages:
        bytes_ = (
            whole[:position]
            if changed is None
            else whole[:position] + bytes(changed) + whole[position + len(changed) :]
        )
        Path(target).write_bytes(bytes_)
        try:
            runtime.list_pack(target)
            listed = ""
        except ValueError as error:
            listed = str(error)
        entries = []
        for variant in range(3) if not listed else []:
            try:
                entries.append("" if runtime.read_entry(target, "column_sum", variant) else "absent")
            except ValueError as error:
                entries.append(str(error))
        out.append([listed, entries])
    return out


def damage(small, tmp_path, damages):
    path = small / "sm_90.pack"
    found = stub_cuda.run(open_each, str(path), str(tmp_path), damages).value
    return path.read_bytes(), [(listed, entries) for listed, entries in found]


def index_bytes(data):
    *_, count, _, names_bytes = pack.HEADER.unpack_from(data)
    return pack.HEADER.size + pack.CHECKSUM.size + count * pack.ENTRY.size + names_bytes


def python_refuses(data, tmp_path):
    path = tmp_path / "python.pack"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=str(path)):
        pack.read(path)


def test_truncation_at_any_length_is_detected(small, tmp_path):
    size = (small / "sm_90.pack").stat().st_size
    lengths = [*range(300), *range(300, size, 61), size - 1]
    data, found = damage(small, tmp_path, [(length, None) for length in lengths])
    for length, (listed, _) in zip(lengths, found):
        expected = (
            "empty file"
            if length == 0
            else rf"truncated at {length} bytes"
            if length < 40
            else f"truncated: {length} of {size} bytes"
        )
        assert listed == f"{tmp_path}/damaged.pack: {expected}"
        python_refuses(data[:length], tmp_path)


def test_a_flipped_bit_anywhere_in_the_index_is_detected(small, tmp_path):
    data = (small / "sm_90.pack").read_bytes()
    flips = [(at, [data[at] ^ mask]) for at in range(index_bytes(data)) for mask in (0x01, 0x80)]
    _, found = damage(small, tmp_path, flips)
    for (at, (value,)), (listed, _) in zip(flips, found):
        assert listed.startswith(f"{tmp_path}/damaged.pack: "), at
        python_refuses(data[:at] + bytes([value]) + data[at + 1 :], tmp_path)


def test_a_flipped_bit_in_a_kernel_affects_only_that_kernel(small, tmp_path):
    data = (small / "sm_90.pack").read_bytes()
    starts = [pack.ENTRY.unpack_from(data, 40 + i * pack.ENTRY.size)[3] for i in range(3)]
    random.seed(0)
    flips = [(at, [data[at] ^ 1 << random.randrange(8)]) for at in range(starts[0], len(data), 23)]
    _, found = damage(small, tmp_path, flips)
    for (at, _), (listed, entries) in zip(flips, found):
        hit = sum(at >= start for start in starts) - 1
        name = tables.find(KERNEL).variant(hit).name
        expected = ["", "", ""]
        expected[hit] = f"{tmp_path}/damaged.pack: corrupt entry {hit} ({name})"
        assert (listed, entries) == ("", expected)


def based(entries):
    """The same entries, compressed with the first one as dictionary (base)."""
    return [replace(e, base=entries[0].variant) for e in entries]


def test_a_flipped_bit_in_a_base_affects_all_dependent_entries(small, tmp_path):
    kind, arch, entries = pack.read(small / "sm_90.pack")
    pack.write(tmp_path / "based.pack", kind, arch, based(entries))
    data = (tmp_path / "based.pack").read_bytes()
    start = pack.ENTRY.unpack_from(data, 40)[3]
    flip = (start + 500, [data[start + 500] ^ 4])
    (found,) = stub_cuda.run(open_each, str(tmp_path / "based.pack"), str(tmp_path), [flip]).value
    assert found[0] == "" and all("corrupt entry" in entry for entry in found[1])
    python_refuses(data[: start + 500] + bytes([data[start + 500] ^ 4]) + data[start + 501 :], tmp_path)


def test_circular_bases(small, tmp_path):
    data = bytearray((small / "sm_90.pack").read_bytes())
    for i in range(3):
        fields = dict(zip(FIELDS, pack.ENTRY.unpack_from(data, 40 + i * pack.ENTRY.size))) | dict(base=(i + 1) % 3)
        pack.ENTRY.pack_into(data, 40 + i * pack.ENTRY.size, *fields.values())
    path = tmp_path / "circle.pack"
    path.write_bytes(checksummed(bytes(data)))
    ((listed, entries),) = stub_cuda.run(open_each, str(path), str(tmp_path), [(0, [])]).value
    assert listed == "" and all("corrupt entry" in entry for entry in entries)
    python_refuses(bytes(path.read_bytes()), tmp_path)


def test_a_base_makes_a_pack_smaller_and_changes_nothing_else(tmp_path):
    kind, arch, entries = pack.read(PACKS / "sm_90.pack")
    entries = [e for e in entries if e.kernel_hash == HASH]
    alone, together = tmp_path / "alone.pack", tmp_path / "together.pack"
    pack.write(alone, kind, arch, [replace(e, base=None) for e in entries])
    pack.write(together, kind, arch, entries)
    assert together.stat().st_size < 0.7 * alone.stat().st_size
    assert pack.read(together) == pack.read(alone) == (kind, arch, entries)
    # An entry whose base is not in the file is stored without one.
    pack.write(together, kind, arch, entries[len(tables.find(KERNEL).configs) :])
    assert pack.read(together)[2] == entries[len(tables.find(KERNEL).configs) :]


# Damaged fields with a valid checksum: nothing may be read outside the file.
WRONG_FIELDS = {
    "offset beyond the file": dict(offset=1 << 40),
    "more bytes than the file has": dict(stored=0xFFFFFFFF),
    "offset and bytes that wrap round": dict(offset=(1 << 64) - 8, stored=16),
    "a kernel of gigabytes": dict(raw=0xFFFFFFFF),
    "a name beyond the names": dict(name_offset=0xFFFFFFFF, name_bytes=0xFFFFFFFF),
    "a decoded size too small": dict(raw=100),
    "a decoded size too large": dict(raw=100_000),
    "a missing dictionary": dict(base=77),
}
FIELDS = "kernel_hash variant checksum offset stored raw shared num_warps name_offset name_bytes base".split()


def checksummed(data):
    crc = zlib.crc32(data[: pack.HEADER.size] + data[pack.HEADER.size + pack.CHECKSUM.size : index_bytes(data)])
    return data[: pack.HEADER.size] + pack.CHECKSUM.pack(crc) + data[pack.HEADER.size + pack.CHECKSUM.size :]


@pytest.mark.parametrize("case", WRONG_FIELDS)
def test_wrong_fields_with_a_valid_checksum(case, small, tmp_path):
    data = bytearray((small / "sm_90.pack").read_bytes())
    fields = dict(zip(FIELDS, pack.ENTRY.unpack_from(data, 40))) | WRONG_FIELDS[case]
    pack.ENTRY.pack_into(data, 40, *fields.values())
    path = tmp_path / "wrong.pack"
    path.write_bytes(checksummed(bytes(data)))
    ((listed, entries),) = stub_cuda.run(open_each, str(path), str(tmp_path), [(0, [])]).value
    decoded = "decoded size" in case or "dictionary" in case
    assert "corrupt" in (entries[0] if decoded else listed) and entries[1:] == (["", ""] if decoded else [])


@pytest.mark.parametrize("field,value", [(3, 0xFFFFFFFF), (3, 2), (4, 0), (5, 7)])
def test_wrong_counts_in_the_header(field, value, small, tmp_path):
    """Kind, number of entries, file size or size of names that does not match the file."""
    data = (small / "sm_90.pack").read_bytes()
    header = list(pack.HEADER.unpack_from(data))
    header[{3: 4, 4: 5, 5: 2}[field]] = value
    path = tmp_path / "wrong.pack"
    path.write_bytes(pack.HEADER.pack(*header) + data[pack.HEADER.size :])
    ((listed, _),) = stub_cuda.run(open_each, str(path), str(tmp_path), [(0, [])]).value
    assert "corrupt header" in listed or "truncated" in listed


# ---- Damage found by a launch: one log line, then the next source.


def wrong_version(path):
    data = path.read_bytes()
    path.write_bytes(checksummed(data[:8] + struct.pack("<I", 7) + data[12:]))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def dangling(path):
    path.unlink()
    path.symlink_to("nowhere")


def folder_instead(path):
    path.unlink()
    path.mkdir()


DAMAGES = {
    "truncated": (
        lambda p: p.write_bytes(p.read_bytes()[:5000]),
        r"kernel pack ignored: {path}: truncated: 5000 of \d+ bytes",
    ),
    "no header": (lambda p: p.write_bytes(b"LIGERPAK"), "kernel pack ignored: {path}: truncated at 8 bytes"),
    "empty": (lambda p: p.write_bytes(b""), "kernel pack ignored: {path}: empty file"),
    "something else": (lambda p: p.write_bytes(b"no pack " * 100), "kernel pack ignored: {path}: not a kernel pack"),
    "another version": (wrong_version, "kernel pack ignored: {path}: pack version 7, this build reads 2"),
    "another architecture by a flipped bit": (
        lambda p: flip(p, 16),
        "kernel pack ignored: {path}: corrupt header or index",
    ),
    "a damaged index": (lambda p: flip(p, 60), "kernel pack ignored: {path}: corrupt header or index"),
    "a damaged kernel": (lambda p: flip(p, 1000), r"kernel ignored: {path}: corrupt entry 0 \(column_sum\[.*\]\)"),
    "a dangling link": (dangling, "kernel pack ignored: {path}: No such file or directory"),
    "a folder": (folder_instead, "kernel pack ignored: {path}: .*"),
    "gone": (lambda p: p.unlink(), None),
}


def serve_twice():
    return [served_by(), served_by()]


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_pack_logs_one_line_and_the_next_source_serves(case, small, tmp_path):
    damage_file, expected = DAMAGES[case]
    folder = shutil.copytree(small, tmp_path / "packs")
    damage_file(folder / "sm_90.pack")
    by, log = stub_cuda.run(serve_twice, LIGER_OPS_PACK_DIR=folder)
    assert by == ["ptx", "ptx"]
    *lines, last = log
    assert last == "kernels for sm_90 are compiled by the driver from PTX"
    assert len(lines) == bool(expected)
    if expected:
        assert re.fullmatch(expected.format(path=re.escape(f"{folder}/sm_90.pack")), lines[0])


def serve_as_another_user(path):
    # Root can read everything, so switch to another user after loading the driver.
    runtime.device_count()
    os.chmod(path, 0)
    if os.geteuid() == 0:
        os.seteuid(65534)
    return [served_by(), served_by()]


def test_an_unreadable_pack(small):
    with tempfile.TemporaryDirectory() as home:
        folder = shutil.copytree(small, f"{home}/packs")
        for path in (home, folder):
            os.chmod(path, 0o755)
        by, log = stub_cuda.run(serve_as_another_user, f"{folder}/sm_90.pack", LIGER_OPS_PACK_DIR=folder)
    assert by == ["ptx", "ptx"] and f"kernel pack ignored: {folder}/sm_90.pack: Permission denied" in log


def refused_once():
    return [refusal(), refusal()]


@pytest.mark.parametrize("present", [True, False])
def test_a_folder_without_packs(present, tmp_path):
    folder = tmp_path / "packs"
    if present:
        folder.mkdir()
    (message, _), log = stub_cuda.run(refused_once, LIGER_OPS_PACK_DIR=folder)
    assert log == [f"no kernel packs in {folder}" + ("" if present else ": No such file or directory")]
    assert f"{folder}: no pack for sm_90" in message


def test_kernels_of_another_build_are_refused(small, tmp_path):
    """The source hash is part of a kernel's key, so a pack from other sources serves nothing."""
    for stem in ("sm_90", "ptx"):
        kind, arch, entries = pack.read(small / f"{stem}.pack")
        stale = [
            pack.Entry(e.kernel_hash ^ 1, *[getattr(e, f) for f in pack.Entry.__annotations__ if f != "kernel_hash"])
            for e in entries
        ]
        pack.write(tmp_path / f"{stem}.pack", kind, arch, stale)
    (message, _), log = stub_cuda.run(refused_once, LIGER_OPS_PACK_DIR=tmp_path)
    hash_ = tables.find(KERNEL).source_hash
    assert log == [
        f"kernel pack ignored: {tmp_path}/{s}.pack: holds no {KERNEL} of this build ({hash_})" for s in ("sm_90", "ptx")
    ]
    assert all(f"{s}.pack: holds no {KERNEL} of this build" in message for s in ("sm_90", "ptx"))


# ---- Decompression compared with zlib.

random.seed(1)
PAYLOADS = {
    "one byte": b"x",
    "zeros": bytes(1 << 20),
    "random": random.randbytes(200_000),
    "all bytes": bytes(range(256)) * 40,
    "text": b"the quick brown fox, the lazy dog, " * 2000,
    "matches at the longest distance": random.randbytes(32768) * 3,
    "few symbols": bytes(random.choices(b"ab", [1, 99], k=100_000)),
    "skewed": bytes(min(255, int(random.expovariate(0.05))) for _ in range(100_000)),
    "runs": b"".join(bytes([random.randrange(256)]) * random.randrange(1, 600) for _ in range(500)),
}
STRATEGIES = {
    "default": zlib.Z_DEFAULT_STRATEGY, "fixed": zlib.Z_FIXED, "huffman": zlib.Z_HUFFMAN_ONLY, "rle": zlib.Z_RLE,
    "filtered": zlib.Z_FILTERED,
}  # fmt: skip


def deflate(data, level, strategy, flushes=0):
    stream = zlib.compressobj(level, zlib.DEFLATED, -15, 9, strategy)
    step = len(data) // (flushes + 1) + 1
    parts = [
        stream.compress(data[i : i + step]) + (stream.flush(zlib.Z_FULL_FLUSH) if flushes else b"")
        for i in range(0, len(data), step)
    ]
    return b"".join(parts) + stream.flush()


def write_streams(path, streams, monkeypatch):
    """Writes a pack with the (decoded bytes, deflate stream) pairs as variants of KERNEL."""
    ready = dict(enumerate(stream for _, stream in streams))
    monkeypatch.setattr(pack, "deflate", lambda data, dictionary: ready.pop(min(ready)))
    pack.write(path, pack.CUBIN, 90, [pack.Entry(HASH, i, "stream", 1, 0, data) for i, (data, _) in enumerate(streams)])
    monkeypatch.undo()


def inflate_all(path, count):
    out = []
    for variant in range(count):
        try:
            out.append(zlib.crc32(runtime.read_entry(path, "column_sum", variant)[0]))
        except ValueError as error:
            out.append(str(error))
    return out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inflate_decodes_what_zlib_encodes(strategy, tmp_path, monkeypatch):
    streams = [
        (data, deflate(data, level, STRATEGIES[strategy], flushes))
        for data in PAYLOADS.values()
        for level in (0, 1, 6, 9)
        for flushes in (0, 3)
    ]
    write_streams(tmp_path / "streams.pack", streams, monkeypatch)
    found = stub_cuda.run(inflate_all, str(tmp_path / "streams.pack"), len(streams)).value
    assert found == [zlib.crc32(data) for data, _ in streams]


def test_inflate_refuses_malformed_streams(tmp_path, monkeypatch):
    """Checksums are valid. Noise, truncated streams and flipped bits cause neither a crash nor a wrong result."""
    text = PAYLOADS["text"][:5000] + PAYLOADS["skewed"][:5000]
    good = [deflate(text, level, strategy) for level in (0, 6) for strategy in (zlib.Z_DEFAULT_STRATEGY, zlib.Z_FIXED)]
    bad = [random.randbytes(random.randrange(1, 300)) for _ in range(500)]
    for stream in good:
        bad += [stream[:length] for length in range(0, len(stream), 211)]
        for _ in range(300):
            at, bit = random.randrange(len(stream)), random.randrange(8)
            bad.append(stream[:at] + bytes([stream[at] ^ 1 << bit]) + stream[at + 1 :])
    write_streams(tmp_path / "streams.pack", [(text, stream) for stream in bad], monkeypatch)
    found = stub_cuda.run(inflate_all, str(tmp_path / "streams.pack"), len(bad)).value
    for stream, result in zip(bad, found):
        decoder = zlib.decompressobj(-15)
        try:
            decoded = decoder.decompress(stream)
        except zlib.error:
            decoded = None
        # Some flips only change the text. zlib decides which streams are complete.
        if decoded is not None and decoder.eof and len(decoded) == len(text):
            assert result == zlib.crc32(decoded)
        elif decoded is None or not decoder.eof:
            assert "corrupt entry" in str(result)


def test_writing_a_pack_is_atomic_and_leaves_nothing_behind(small, tmp_path):
    kind, arch, entries = pack.read(small / "sm_90.pack")
    path = tmp_path / "deep" / "sm_90.pack"
    pack.write(path, kind, arch, entries)
    first = path.stat()
    pack.write(path, kind, arch, entries[:1])
    assert path.stat().st_ino != first.st_ino and path.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in path.parent.iterdir()] == ["sm_90.pack"]
    assert pack.read(path) == (kind, arch, entries[:1])
