"""Budgets of a wheel for all torch releases: its packs, by family of kernels, and everything that is shipped beside them."""

import subprocess
import zlib
from pathlib import Path
from typing import NamedTuple

import pytest

import liger_ops.kernels as tables
from liger_ops.aot import pack, torch_release
from tests.support.host.stub_cuda import ARCHS, LIBRARIES, PACKS, ROOT, scratch

FAMILIES = {path.stem: path.parent.name for path in (ROOT / "liger_ops/kernels").glob("*/[!_]*.py")}
STEMS = [f"sm_{arch}" for arch in ARCHS] + ["ptx"]
# The test pack with the most variants.
FULLEST = "sm_90"


class Budget(NamedTuple):
    # Of the family's kernels, in the packs of all architectures and of PTX together.
    bytes: int
    # Bytes of the variants that no test pack holds, relative to the held ones of the same kernel. Measured in a whole wheel.
    others: float


BUDGETS = {
    "activations": Budget(700_000, 0.65),
    "conv": Budget(2_300_000, 0.93),
    "embedding": Budget(80_000, 0.5),
    "gated": Budget(1_720_000, 0.82),
    "hyper": Budget(990_000, 0.86),
    "linear": Budget(1_260_000, 1.04),
    "losses": Budget(9_950_000, 0.96),
    "moe": Budget(9_720_000, 1.0),
    "norms": Budget(12_060_000, 0.97),
    "quantize": Budget(1_010_000, 0.75),
    "rope": Budget(3_600_000, 0.83),
}
# Bytes of packs in a wheel, which deflates them once more. Measured: 0.977.
DEFLATED = 0.98


def mean(numbers):
    return sum(numbers) / len(numbers) if numbers else 0


def bytes_of(kernel, family, pack_of):
    """Bytes of all variants of a kernel of a family: exact for those that the test packs hold, and estimated for the others from
    FULLEST. In another pack they are as much larger as the variants that both packs hold."""
    key = int(kernel.source_hash, 16)
    held = {stem: {v.index: sizes[key, v.index] for v in kernel.variants() if (key, v.index) in sizes}
            for stem, sizes in pack_of.items()}  # fmt: skip
    found = {}
    for stem, own in held.items():
        fullest = held[FULLEST]
        common = own.keys() & fullest.keys()
        ratio = mean([own[i] for i in common]) / mean([fullest[i] for i in common]) if common else 0
        missing = len(list(kernel.variants())) - len(own)
        found[stem] = sum(own.values()) + ratio * missing * BUDGETS[family].others * mean([*fullest.values()])
    return found


@pytest.mark.thorough
def test_no_family_of_kernels_outgrows_its_budget():
    """An estimate from the test packs; LIGER_OPS_TEST_PACKS=all makes it exact."""
    pack_of = {stem: pack.stored_bytes(PACKS / f"{stem}.pack") for stem in STEMS}
    total = {family: dict.fromkeys(STEMS, 0.0) for family in FAMILIES.values()}
    for stem, kernels in tables.modules().items():
        for kernel in kernels:
            for name, size in bytes_of(kernel, FAMILIES[stem], pack_of).items():
                total[FAMILIES[stem]][name] += size
    table = [f"{'family':12}" + "".join(f"{name:>8}" for name in (*STEMS, "all", "budget")) + "   (MB)"]
    for family, sizes in sorted(total.items()):
        columns = (*sizes.values(), sum(sizes.values()), BUDGETS[family].bytes)
        table.append(f"{family:12}" + "".join(f"{size / 1e6:8.2f}" for size in columns))
    print("\n".join(table))
    assert total.keys() == BUDGETS.keys()
    over = [family for family, sizes in total.items() if sum(sizes.values()) > BUDGETS[family].bytes]
    assert over == [], "\n".join([*table, f"{over}: fewer variants, or more bytes in BUDGETS"])


def stripped(library: Path) -> Path:
    """As a release has it."""
    copy = scratch() / library.name
    subprocess.run(["strip", "--strip-all", "-o", copy, library], check=True)
    return copy


def deflated(paths: list[Path]) -> int:
    return sum(len(zlib.compress(path.read_bytes(), 6)) + 200 for path in paths)


@pytest.mark.thorough
def test_the_budgets_fit_into_a_wheel():
    """Beside the packs it ships a library for each torch release, the runtime, the Python files and the sources."""
    (library,) = LIBRARIES.glob("libliger_ops_torch?.??.so")
    sources = [path for path in (ROOT / "liger_ops").rglob("*.*") if path.suffix in (".py", ".h", ".cmake")]
    sources += [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in (".cpp", ".h")]
    beside = len(torch_release.RELEASES) * deflated([stripped(library)]) + deflated(
        [LIBRARIES / "libliger_runtime.so", *sources]
    )
    assert beside > 5_000_000
    assert DEFLATED * sum(b.bytes for b in BUDGETS.values()) + beside <= torch_release.MOST_BYTES, beside
