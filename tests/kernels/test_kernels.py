"""Compiled kernels: registers and spills, shared memory, width of memory accesses, L2 prefetches."""

import math
import re
import struct
import subprocess
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import triton.language as tl

import liger_ops.kernels as tables
from liger_ops.aot import pack
from liger_ops.aot.compile import MAX_SHARED_BYTES, PLAIN_SHARED_BYTES, assembler, cubin_sections, reserved_shared
from liger_ops.kernels import hopper
from liger_ops.kernels import rows as rows_of_kernels
from tests.support.host import interpreter
from tests.support.host.stub_cuda import ARCHS, PACKS, sample

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
WIDEST = 16  # bytes per access of one thread
MOST_RING_BYTES = 96 * 1024


@cache
def entries(stem):
    return pack.read(PACKS / f"{stem}.pack")[2]


@cache
def by_name(stem):
    return {e.name: e.binary for e in entries(stem)}


def variants(kernel, arch=90):
    return sample(tables.find(kernel), arch)


KERNELS = [k.name for k in tables.kernels()]
COMPILED = [(k.name, arch) for k in tables.kernels() for arch in ARCHS if k.is_for(arch)]


def compiled_for(arch):
    return [v for name, its_arch in COMPILED if its_arch == arch for v in variants(name, arch)]


# ---- Registers.


def attributes(cubin):
    """EIATTR records of the ELF's .nv.info section: attribute -> value. Each starts with the kernel's symbol index."""
    found = {}
    for name, offset, size in cubin_sections(cubin):
        if name != ".nv.info":
            continue
        at = offset
        while at < offset + size:
            form, attribute, length = struct.unpack_from("<BBH", cubin, at)
            if form == 4 and length == 8:
                found[attribute] = struct.unpack_from("<4xI", cubin, at + 4)[0]
            at += 4 + (length if form == 4 else 0)
    return found


def registers(cubin):
    return attributes(cubin)[0x2F]


def spilled_bytes(cubin):
    """Size of the stack frame. No kernel has local arrays, so it holds spills only."""
    return attributes(cubin)[0x11]


def test_the_elf_reader_agrees_with_cuobjdump(tmp_path):
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    binaries = by_name("sm_90")
    spilling = max(binaries, key=lambda name: spilled_bytes(binaries[name]))
    for name in [variants(KERNELS[0])[0].name, variants("rms_norm_fwd")[3].name, spilling]:
        path = tmp_path / "kernel.cubin"
        path.write_bytes(binaries[name])
        output = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        expected = f"REG:{registers(binaries[name])} STACK:{spilled_bytes(binaries[name])} "
        assert expected in output and "LOCAL:0 " in output, name


# Allowed spills in bytes per thread. ptxas may spill two 8-byte addresses to reach the next step of occupancy.
SMALL_SPILL = 16
# Aligned configs with programs_per_sm limit registers to make room for resident programs, and may spill more; tuning
# measured these configs with their spills. Each limit is the kernel's current maximum on any architecture.
SPILLS_OF_LIMITED_REGISTERS = {
    "layer_norm_fwd": 192,
    "layer_norm_bwd": 368,
    "rms_norm_fwd": 80,
    "rms_norm_bwd": 80,
    "rms_norm_gated_bwd": 104,
}
# The last step of GEMMs with adapters, or with an activation (PARTS), needs a few more registers, once per tile.
SPILL_OF_LAST_STEPS = 64


@pytest.mark.parametrize("name, arch", COMPILED)
def test_spills(name, arch):
    binaries = by_name(f"sm_{arch}")
    worse = []
    for variant in variants(name, arch):
        limited = variant.max_registers and variant.config.aligned
        allowed = max(SMALL_SPILL, SPILLS_OF_LIMITED_REGISTERS.get(name, 0) if limited else 0)
        has_last_step = variant.constexprs.get("ADAPTS") or "PARTS" in variant.constexprs
        allowed = max(allowed, SPILL_OF_LAST_STEPS if has_last_step else 0)
        spilled = spilled_bytes(binaries[variant.name])
        if spilled > allowed:
            worse.append(f"{variant.name}: {spilled} bytes, allowed {allowed}")
    assert not worse, "\n".join(worse)


@pytest.mark.parametrize("arch", ARCHS)
def test_register_bounds_hold(arch):
    binaries = by_name(f"sm_{arch}")
    for variant in compiled_for(arch):
        used = registers(binaries[variant.name])
        # A multiprocessor has 65536 registers, so this is the most with which a program can launch.
        bound = min(255, 65536 // (32 * variant.config.num_warps))
        assert used <= min(bound, variant.max_registers or bound), variant.name


@pytest.mark.parametrize("name", [k.name for k in tables.kernels() if isinstance(k.function, hopper.Assembly)])
def test_wgmma_instructions_in_ptx_overlap(name, tmp_path):
    """ptxas warns if it serializes wgmma instructions because other instructions touch their accumulators."""
    *_, text = tables.find(name).sources
    # The same text with an instruction that writes an accumulator between two wgmma instructions.
    touched = re.sub(r"(\twgmma\.mma_async\S* \{(%f\d+),.*\n)", r"\1\tadd.f32 \2, \2, \2;\n", text, count=1)
    warnings = []
    for i, ptx in enumerate((text, touched)):
        path = tmp_path / f"{i}.ptx"
        path.write_text(ptx)
        command = [
            assembler(hopper.ARCH),
            f"--gpu-name=sm_{hopper.ARCH}a",
            "-O3",
            path,
            "-o",
            path.with_suffix(".cubin"),
        ]
        warnings.append(subprocess.run(command, capture_output=True, text=True, check=True).stderr)
    waits = re.compile("wgmma.mma_async instructions are serialized|warpgroup.wait is injected")
    assert not waits.search(warnings[0]) and waits.search(warnings[1])


# ---- Shared memory.

# Shared memory per multiprocessor: the smallest in the family that a pack serves. Each program takes 1 KB more.
SHARED_KB = {80: 100, 90: 227, 100: 227, 120: 100}
SYSTEM_BYTES = 2048  # upper bound on the driver's share per program


@pytest.mark.parametrize("arch", ARCHS)
def test_shared_memory_leaves_room_for_resident_programs(arch):
    found = {e.name: e for e in entries(f"sm_{arch}")}
    for variant in compiled_for(arch):
        own = reserved_shared(found[variant.name].binary)
        used = found[variant.name].shared + own
        assert used <= (hopper.SHARED_BYTES if variant.kernel.archs else MAX_SHARED_BYTES), variant.name
        # Kernels are tuned on the architecture with the most shared memory. On the others, two resident programs are
        # enough, or one if it streams rows through shared memory.
        enough = 1 if variant.constexprs.get("SLOTS") else 2 if own > SYSTEM_BYTES else 32
        resident = min(variant.config.programs_per_sm, enough if SHARED_KB[arch] < SHARED_KB[90] else 32)
        assert (used + 1024) * max(1, resident) <= SHARED_KB[arch] * 1024, variant.name


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_of_losses_are_kept_in_shared_memory(arch):
    found = {e.name: e.binary for e in entries(f"sm_{arch}")}
    for variant in variants("cross_entropy_fwd_bwd", arch):
        # KEEP counts 16-bit logits; it keeps half as many 32-bit ones.
        kept = 0 if variant.choices["EXTRAS"] else 2 * variant.constexprs["KEEP"]
        assert kept <= reserved_shared(found[variant.name]) <= kept + SYSTEM_BYTES, variant.name


def ring_bytes(variant):
    """Size of the slots that pieces of two rows stream through; 0 if not even one row fits."""
    c = variant.constexprs
    rows = 2 * c["TILES"] * c["BLOCK_N"] * BYTES[variant.choices["X"]]
    slots = min(c["SLOTS"], MOST_RING_BYTES * c["PIECES"] // rows) if c["SLOTS"] else 0
    return slots * rows // c["PIECES"] if slots and slots >= c["PIECES"] else 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["layer_norm_bwd", "rms_norm_bwd"])
def test_rows_stream_through_shared_memory(name, arch):
    found = {e.name: e for e in entries(f"sm_{arch}")}
    rings = {variant.name: ring_bytes(variant) for variant in variants(name, arch)}
    for variant, ring in rings.items():
        assert ring <= found[variant].shared <= ring + (1024 if ring else PLAIN_SHARED_BYTES), variant
    # Only the pack of 9.0 holds every config.
    assert min(rings.values()) == 0 and 0 < max(rings.values()) <= MOST_RING_BYTES
    assert arch != 90 or max(rings.values()) == MOST_RING_BYTES


# ---- Memory accesses.


def accesses(ptx, pointers):
    """(ld or st, names of the pointer arguments that the address derives from, bytes) of every global access.

    A register derives from the same arguments as the 64-bit registers from which it is computed.
    """
    origin = {}
    statements = [line.strip() for line in ptx.splitlines() if line.strip().endswith(";")]
    changed = True
    while changed:
        changed = False
        for line in statements:
            target = re.match(r"(?:@!?%p\d+ )?[\w.:]+\s+(%rd\d+),(.*)", line)
            if not target or line.startswith(("st.", "ld.global")):
                continue
            parameter = re.search(r"_param_(\d+)\]", target[2])
            sources = {pointers[int(parameter[1])]} - {None} if parameter else set()
            sources |= {o for register in re.findall(r"%rd\d+", target[2]) for o in origin.get(register, ())}
            if not sources <= origin.get(target[1], set()):
                origin[target[1]] = origin.get(target[1], set()) | sources
                changed = True
    found = []
    for line in statements:
        access = re.match(r"(?:@!?%p\d+ )?(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[a-z](\d+)\s.*?\[\s*(%rd\d+)", line)
        if access:
            found.append((access[1], origin.get(access[4], set()), int(access[2] or 1) * int(access[3]) // 8))
        copy = re.match(r"@\w+ cp\.async\.cg\.shared\.global \[%r\d+\], \[(%rd\d+)\], (\d+)", line)
        if copy:
            found.append(("ld", origin.get(copy[1], set()), int(copy[2])))
        pipelined = re.match(
            r"(?:@!?%p\d+ )?cp\.async\.c[ag]\.shared\.global \[.*?\], \[ (%rd\d+) .*?\], 0x(\w+)", line
        )
        if pipelined:  # by Triton, for tl.dot
            found.append(("ld", origin.get(pipelined[1], set()), int(pipelined[2], 16)))
    return found


def is_wide_enough(variant, size):
    """Whether a tile gives each thread a full access. Tuning may choose a narrower one: 5 × 512 for n = 2560."""
    blocks = [v for name, v in variant.constexprs.items() if name.startswith("BLOCK_")]
    return not blocks or math.prod(blocks) * size >= variant.config.num_warps * 32 * WIDEST


def has_aligned_rows(kernel) -> bool:
    """Kernels that move single elements have no aligned config, and those of one architecture no portable PTX. Threads of some
    convolutions have two or four columns."""
    narrow = ("causal_conv1d_bwd", "short_conv_fwd", "short_conv_bwd")
    if kernel.archs or "*X" not in kernel.args.values() or kernel.name in narrow:
        return False
    return any(config.aligned for config in kernel.configs)


# Tiles of adapters have as many columns as ranks: a thread may have less than a full access.
FEW_COLUMNS = ("v", "packed", "pieces")
# Heads have one number each, beside their channels.
OF_HEADS = {"delta_gates_fwd": ("b", "beta"), "delta_gates_bwd": ("b", "dbeta", "db")}


@pytest.mark.parametrize("name", [k.name for k in tables.kernels() if has_aligned_rows(k)])
def test_aligned_variants_use_16_byte_accesses(name):
    """Every tensor with the dtype of the activations, in every variant with wide enough tiles."""
    texts = by_name("ptx")
    kernel = tables.find(name)
    pointers = [argument if kind == "*X" else None for argument, kind, *_ in kernel.layout]
    few, checked, seen = FEW_COLUMNS + OF_HEADS.get(name, ()), 0, set()
    for variant in sample(kernel):
        size = BYTES[variant.choices["X"]]
        if not variant.config.aligned or not is_wide_enough(variant, size):
            continue
        widths: dict[tuple[str, str], int] = {}
        for what, sources, width in accesses(texts[variant.name].decode(), pointers):
            for source in sources:
                widths[what, source] = max(width, widths.get((what, source), 0))
        narrow = {k: w for k, w in widths.items() if w < WIDEST and k[1] not in few}
        assert not narrow, f"{variant.name}: {narrow}"
        seen |= {source for _, source in widths}
        checked += 1
    assert checked and seen == set(pointers) - {None}


# ---- L2 prefetches: programs request rows that later programs read.


def program_bytes(variant):
    c = variant.constexprs
    return (
        2 * c["KEEP"]
        if "KEEP" in c
        else c["TILES"] * c["BLOCK_N"] * BYTES[variant.choices["X"]] * (1 + c.get("RESIDUAL", 0))
    )


def prefetches(name, choices, n, ahead, programs, arguments):
    variant = tables.find(name).pick(choices, n, n % 8 == 0)
    interpreter.prefetched.clear()
    with patch.object(rows_of_kernels, "BYTES_AHEAD", tl.constexpr(ahead * program_bytes(variant))):
        variant.kernel.function[(programs,)](*arguments, **variant.constexprs)
    return list(interpreter.prefetched)


def ranges(found, base, stride):
    return [[(start - base) // stride, (start - base) % stride, end - start] for start, end in found]


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["interpreted"])
def test_programs_prefetch_for_later_ones(device):
    rows, n, out = 6, 1600, {}
    x, r, y, s, stats = *(torch.randn(rows, n) for _ in range(4)), torch.zeros(2, rows)
    w = torch.ones(n)
    W = {"X": "fp32", "W": "fp32"}
    for residual in (0, 1):
        found = prefetches(
            "rms_norm_fwd",
            W | {"RESIDUAL": residual},
            n,
            4,
            rows,
            (y, s, stats, x, r, w, rows, n, 0, 0, n, 0, n, 0, n, 1e-6, 0.0, 1),
        )
        out[f"rms_norm {residual}"] = ranges(found[:: 1 + residual], x.data_ptr(), 4 * n)
        out[f"residual {residual}"] = ranges(found[1::2] if residual else [], r.data_ptr(), 4 * n)
    found = prefetches("layer_norm_fwd", W, n, 4, rows, (y, stats, x, w, w, rows, n, 0, 0, n, 0, n, 1e-6, 3))
    out["layer_norm"] = ranges(found, x.data_ptr(), 4 * n)

    target = torch.tensor([1, 2, -100, 3, -100, 4], dtype=torch.int32)
    zeros = torch.zeros(rows)

    def loss(n, programs, ahead, shares, arrived):
        logits = torch.randn(rows, n)
        found = prefetches(
            "cross_entropy_fwd_bwd",
            {"X": "fp32", "EXTRAS": 0},
            2 * n,
            ahead,
            programs,
            (
                zeros,
                zeros,
                zeros,
                zeros.long(),
                logits,
                logits,
                target,
                zeros,
                zeros,
                w,
                w,
                shares,
                arrived,
                rows,
                n,
                0,
                0,
                n,
                0,
                n,
                1,
                0,
                -100,
                0.0,
                0.0,
                0.0,
                0,
            ),
        )
        return ranges(found, logits.data_ptr(), 4 * n)

    out["cross_entropy"] = loss(1000, rows, 2, zeros, zeros.int())
    # No program has started. Pretends that the other parts of each row have arrived, for which programs would wait.
    out["parts"] = loss(30_000, 3 * rows, 4, torch.zeros(rows, 3, 4), torch.tensor([0] + rows * [9], dtype=torch.int32))
    row = 4 * 1600
    assert out["rms_norm 0"] == out["layer_norm"] == [[4, 0, row], [5, 0, row]]
    assert out["rms_norm 1"] == out["residual 1"] == [[4, 0, row], [5, 0, row]]
    # Rows 2 and 4 have no target: their programs prefetch nothing, and no program prefetches these rows.
    assert out["cross_entropy"] == [[3, 0, 4000], [5, 0, 4000]]
    # Three parts per row. Each program prefetches the part four programs ahead, if both rows have targets.
    part = 4 * 11264
    later = [(at // 3, at % 3) for at in range(4, 18) if (at - 4) // 3 not in (2, 4) and at // 3 not in (2, 4)]
    assert out["parts"] == [[at, i * part, min(part, 120_000 - i * part)] for at, i in later]
