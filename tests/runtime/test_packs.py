"""Kernel packs: Python writes them, C++ reads them, and damaged files are rejected."""

import lzma
import os
import random
import re
import shutil
import struct
import tempfile
import zlib

import pytest

import liger_ops.kernels as tables
from liger_ops.aot import pack
from tests.support.host import stub_cuda
from tests.support.host.stub_cuda import ARCHS, PACKS, sample

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


def damage(small, tmp_path, damages, path=None):
    path = path or small / "sm_90.pack"
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


def test_a_flipped_bit_in_a_block_affects_only_its_kernels(small, tmp_path, monkeypatch):
    kind, arch, entries = pack.read(small / "sm_90.pack")
    # Two binaries in the first block, one in the second.
    monkeypatch.setattr(pack, "BLOCK", len(entries[0].binary) + len(entries[1].binary))
    path = tmp_path / "blocks.pack"
    pack.write(path, kind, arch, entries)
    assert pack.read(path)[2] == entries
    data = path.read_bytes()
    starts = [pack.ENTRY.unpack_from(data, 40 + i * pack.ENTRY.size)[3] for i in range(3)]
    assert starts[0] == starts[1] < starts[2]
    random.seed(0)
    flips = [(at, [data[at] ^ 1 << random.randrange(8)]) for at in range(starts[0], len(data), 23)]
    _, found = damage(small, tmp_path, flips, path)
    for (at, (value,)), (listed, said) in zip(flips, found):
        hit = (2,) if at >= starts[2] else (0, 1)
        corrupt = {i: f"corrupt entry {i} ({tables.find(KERNEL).variant(i).name})" for i in hit}
        expected = [f"{tmp_path}/damaged.pack: {corrupt[i]}" if i in hit else "" for i in range(3)]
        assert (listed, said) == ("", expected)
        python_refuses(data[:at] + bytes([value]) + data[at + 1 :], tmp_path)


def test_blocks_make_a_pack_smaller_and_change_nothing_else(tmp_path, monkeypatch):
    kind, arch, entries = pack.read(PACKS / "sm_90.pack")
    entries = [e for e in entries if e.kernel_hash == HASH]
    alone, together = tmp_path / "alone.pack", tmp_path / "together.pack"
    pack.write(together, kind, arch, entries)
    monkeypatch.setattr(pack, "BLOCK", 1)
    pack.write(alone, kind, arch, entries)
    assert together.stat().st_size < 0.7 * alone.stat().st_size
    assert pack.read(together) == pack.read(alone) == (kind, arch, entries)
    held = pack.stored_bytes(together)
    index = together.stat().st_size - sum(held.values())
    assert abs(index - pack.HEADER.size - pack.CHECKSUM.size) < 1e-3


# Damaged fields with a valid checksum: nothing may be read outside the file.
WRONG_FIELDS = {
    "offset beyond the file": dict(offset=1 << 40),
    "more bytes than the file has": dict(stored=0xFFFFFFFF),
    "offset and bytes that wrap round": dict(offset=(1 << 64) - 8, stored=16),
    "a kernel of gigabytes": dict(raw=0xFFFFFFFF),
    "a name beyond the names": dict(name_offset=0xFFFFFFFF, name_bytes=0xFFFFFFFF),
    "a decoded size too large": dict(raw=1_000_000),
    "a beginning beyond the block": dict(first=1_000_000),
    "a beginning after gigabytes": dict(first=0xFFFFFFFF),
}
FIELDS = "kernel_hash variant checksum offset stored raw shared num_warps name_offset name_bytes first".split()


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
    decoded = "decoded size" in case or "beyond the block" in case
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
    "another version": (wrong_version, "kernel pack ignored: {path}: pack version 7, this build reads 3"),
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


# ---- Decompression compared with liblzma.

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
# Bits of contexts, at most 4 of literals together.
CONTEXTS = [(3, 0, 2), (0, 4, 4), (3, 0, 0), (4, 0, 1), (0, 0, 0), (1, 3, 3), (2, 2, 4)]


def compressed(data, contexts, **options):
    lc, lp, pb = contexts
    chosen = {"id": lzma.FILTER_LZMA1, "dict_size": 1 << 21, "lc": lc, "lp": lp, "pb": pb, **options}
    return bytes([(pb * 5 + lp) * 9 + lc]) + lzma.compress(data, lzma.FORMAT_RAW, filters=[chosen])


def write_streams(path, streams, monkeypatch):
    """Writes a pack with the (decoded bytes, stream) pairs as variants of KERNEL, each in a block of its own."""
    ready = {i: stream for i, (_, stream) in enumerate(streams)}
    named = [pack.Entry(HASH, i, "stream", 1, 0, data) for i, (data, _) in enumerate(streams)]
    blocks = iter(named)
    monkeypatch.setattr(pack, "in_blocks", lambda entries: ([e] for e in entries))
    monkeypatch.setattr(pack.ThreadPoolExecutor, "map", lambda pool, f, of: [ready[next(blocks).variant] for _ in of])
    pack.write(path, pack.CUBIN, 90, named)
    monkeypatch.undo()


def decode_all(path, count):
    out = []
    for variant in range(count):
        try:
            code = runtime.read_entry(path, "column_sum", variant)[0]
            out.append([zlib.crc32(code), zlib.crc32(code[:-1000])])
        except ValueError as error:
            out.append(str(error))
    return out


@pytest.mark.parametrize(
    "contexts", [*CONTEXTS[:2], *(pytest.param(c, marks=pytest.mark.thorough) for c in CONTEXTS[2:])], ids=str
)
def test_cpp_decodes_what_liblzma_encodes(contexts, tmp_path, monkeypatch):
    streams = [
        (data, compressed(data, contexts, **options))
        for data in PAYLOADS.values()
        for options in ({"preset": 0}, {"preset": 6}, {"preset": 9 | lzma.PRESET_EXTREME}, {"mode": lzma.MODE_FAST})
    ]
    # A prefix of a stream is decoded too.
    streams += [(data[: len(data) // 3], compressed(data, contexts, preset=6)) for data in PAYLOADS.values()]
    write_streams(tmp_path / "streams.pack", streams, monkeypatch)
    found = stub_cuda.run(decode_all, str(tmp_path / "streams.pack"), len(streams)).value
    assert found == [[zlib.crc32(data), zlib.crc32(data[:-1000])] for data, _ in streams]


def test_malformed_streams(tmp_path, monkeypatch):
    """Checksums are valid. Noise, truncated streams and flipped bits cause no crash, and what liblzma refuses is refused."""
    text = PAYLOADS["text"][:5000] + PAYLOADS["skewed"][:5000]
    good = [compressed(text, contexts, preset=preset) for contexts in CONTEXTS[:3] for preset in (0, 6)]
    bad = [random.randbytes(random.randrange(300)) for _ in range(500)]
    bad += [bytes([random.randrange(225), 0]) + random.randbytes(random.randrange(300)) for _ in range(500)]
    for stream in good:
        bad += [stream[:length] for length in range(0, len(stream) - 8, 97)]
        for _ in range(300):
            at, bit = random.randrange(len(stream)), random.randrange(8)
            bad.append(stream[:at] + bytes([stream[at] ^ 1 << bit]) + stream[at + 1 :])
    write_streams(tmp_path / "streams.pack", [(text, stream) for stream in bad], monkeypatch)
    found = stub_cuda.run(decode_all, str(tmp_path / "streams.pack"), len(bad)).value
    refused = 0
    for stream, result in zip(bad, found):
        decoded = prefix_of(stream, len(text))
        # liblzma looks ahead, and so refuses what is wrong soon after the last wanted byte.
        start = decoded[:-1000] if decoded else prefix_of(stream, len(text) - 1000)
        if decoded or (start and isinstance(result, list)):
            assert result[1] == zlib.crc32(start) and (not decoded or result[0] == zlib.crc32(decoded))
        else:
            assert "corrupt entry" in str(result)
            refused += 1
    assert refused > 1000


def prefix_of(stream, size):
    """What liblzma decodes, or nothing if it refuses the stream or decodes less."""
    try:
        decoded = pack.decompress(stream, size)
    except (lzma.LZMAError, IndexError):
        return b""
    return decoded if len(decoded) == size else b""


def test_writing_a_pack_is_atomic_and_leaves_nothing_behind(small, tmp_path):
    kind, arch, entries = pack.read(small / "sm_90.pack")
    path = tmp_path / "deep" / "sm_90.pack"
    pack.write(path, kind, arch, entries)
    first = path.stat()
    pack.write(path, kind, arch, entries[:1])
    assert path.stat().st_ino != first.st_ino and path.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in path.parent.iterdir()] == ["sm_90.pack"]
    assert pack.read(path) == (kind, arch, entries[:1])
