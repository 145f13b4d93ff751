"""Runs the tests of numbers and memory as other CPUs, thread counts and random numbers would, and compares verdicts.

python tests/machines.py [--seeds N] [--tier quick|thorough|all] [--only NAME] ... [PATH ...]      (make test-machines)

A library chooses its code by the CPU: PyTorch by ATEN_CPU_CAPABILITY, oneDNN by ONEDNN_MAX_CPU_ISA, MKL by
MKL_ENABLE_INSTRUCTIONS, NumPy (Triton's interpreter) by NPY_DISABLE_CPU_FEATURES. A face of this machine sets these to what an
older CPU would choose. The result is a table of faces, and the tests whose verdicts differ or that fail.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import NamedTuple

import torch

TESTS = Path(__file__).resolve().parent
# Where a verdict depends on sums, roundings or allocations. The other folders compare text, files and launches.
PATHS = ("ops", "losses", "kernels", "transformers", "distributed", "compat")
AVX512 = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"


class Face(NamedTuple):
    name: str
    environment: dict[str, str]
    options: tuple[str, ...] = ()


def cpu(aten: str, onednn: str, mkl: str = "", numpy: str = "") -> dict[str, str]:
    chosen = dict(
        ATEN_CPU_CAPABILITY=aten, ONEDNN_MAX_CPU_ISA=onednn, MKL_ENABLE_INSTRUCTIONS=mkl, NPY_DISABLE_CPU_FEATURES=numpy
    )
    return {name: value for name, value in chosen.items() if value}


def numpy_features(wanted: str) -> str:
    """Those of `wanted` that this CPU has; NumPy warns about others."""
    from numpy._core import _multiarray_umath

    return " ".join(name for name in wanted.split() if _multiarray_umath.__cpu_features__.get(name))


def faces(seeds: int) -> list[Face]:
    avx512, avx2 = numpy_features(AVX512), numpy_features(f"{AVX512} AVX2 FMA3")
    flags = Path("/proc/cpuinfo").read_text().split()
    found = [
        Face("this machine", {}),
        Face("SSE4.1", cpu("default", "SSE41", "SSE4_2", avx2), ("--threads", "1")),
        Face("AVX", cpu("default", "AVX", "AVX", avx2), ("--threads", "2")),
        Face("AVX2", cpu("avx2", "AVX2", "AVX2", avx512), ("--threads", "4")),
        Face("AVX2 without oneDNN", cpu("avx2", "AVX2", "AVX2", avx512), ("--threads", "1", "--no-onednn")),
        Face("1 thread", {}, ("--threads", "1")),
        Face("2 threads", {}, ("--threads", "2")),
        Face("4 threads", {}, ("--threads", "4")),
    ]
    # From Skylake to Sapphire Rapids and Zen 5.
    for isa, flag in (
        ("AVX512_CORE", "avx512bw"), ("AVX512_CORE_VNNI", "avx512_vnni"), ("AVX512_CORE_BF16", "avx512_bf16"),
        ("AVX512_CORE_FP16", "avx512_fp16"), ("AVX512_CORE_AMX", "amx_bf16"),
    ):  # fmt: skip
        if flag in flags:
            found.append(Face(isa, cpu("avx512", isa)))
    return found + [Face(f"seed {seed}", {}, ("--seed", str(seed))) for seed in range(1, seeds)]


def verdicts(face: Face, tier: str, paths: list[str], jobs: int, folder: Path) -> dict[str, str]:
    """ "passed" or the end of the failure's text, by test."""
    report = folder / "report.xml"
    # Inductor's cache does not ask for the capability that its code was made for.
    compiled = folder / face.environment.get("ATEN_CPU_CAPABILITY", "own")
    chosen = {"TORCHINDUCTOR_CACHE_DIR": str(compiled), "OMP_WAIT_POLICY": "passive", **face.environment}
    report.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tier", tier, f"--junit-xml={report}",
        *(["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []), *face.options, *paths,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=TESTS.parent, env={**os.environ, **chosen}, capture_output=True, text=True)
    if not report.exists():
        raise SystemExit(f"{face.name}: pytest wrote no report\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = {}
    for case in xml.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        failures = [node.get("message") or node.tag for node in case if node.tag in ("failure", "error")]
        found[name] = failures[0].splitlines()[0] if failures else "passed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="how many random draws (default: 10)")
    parser.add_argument("--tier", choices=["quick", "thorough", "all"], default="quick")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="faces whose names begin so")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time (default: one per core)")
    parser.add_argument("paths", nargs="*", default=[str(TESTS / path) for path in PATHS])
    given = parser.parse_args()
    chosen = [face for face in faces(given.seeds) if not given.only or face.name.startswith(tuple(given.only))]
    found: dict[str, dict[str, str]] = {}
    print(f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        for number, face in enumerate(chosen):
            start = time.monotonic()
            now = found[face.name] = verdicts(face, given.tier, given.paths, given.jobs, Path(folder))
            failed = [name for name, verdict in now.items() if verdict != "passed"]
            seconds = time.monotonic() - start
            print(
                f"{number + 1:2}/{len(chosen)}  {face.name:22} {len(now) - len(failed):5} passed {len(failed):3} failed"
                f"  {seconds:4.0f} s",
                *(f"        {name}: {now[name][:200]}" for name in failed),
                sep="\n",
                flush=True,
            )
    failing = sorted({name for now in found.values() for name, verdict in now.items() if verdict != "passed"})
    for name in failing:
        here = {face: now[name] for face, now in found.items() if now.get(name, "passed") != "passed"}
        print(f"\n{name}\n    fails as {', '.join(here)}")
        print("    " + next(iter(here.values()))[:300])
    counts = {len(now) for now in found.values()}
    if len(counts) > 1:
        print(f"\nThe faces ran different numbers of tests: {sorted(counts)}")
    print(f"\n{len(failing)} of {max(counts)} tests fail or differ over {len(found)} faces")
    raise SystemExit(bool(failing) or len(counts) > 1)


if __name__ == "__main__":
    main()
