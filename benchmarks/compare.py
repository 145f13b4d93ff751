"""python -m benchmarks compare BEFORE.jsonl AFTER.jsonl ...: list the cases that got slower or need more memory.

A difference counts if it exceeds the spread of the runs and 5 % (10 % for host time and cold start), by which two runs of
the same code differ. Of several pairs, run in turns on one machine, it must do so in each: what else the machine did, or
where memory lay, is in one of them alone.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import grid
from benchmarks.records import number, read, size
from benchmarks.report import spread

Record = dict[str, Any]
# Quartiles show the spread within one process. Clocks and memory layout also differ between processes.
DRIFT, DRIFT_OF_HOSTS = 1.05, 1.1
SAME_MACHINE = ("device", "gpu", "cpu", "driver", "torch", "triton")


def measured(records: Sequence[Record]) -> dict[tuple, Record]:
    return {
        (r["kind"], r["op"], size(r["shape"]), r["dtype"], r["pass"], r["provider"]): r
        for r in records
        if "median" in r
    }


def verdict(before: Record, after: Record) -> str:
    """A difference counts if the quartiles do not overlap and the medians differ by more than the drift of runs."""
    drift = DRIFT_OF_HOSTS if before["kind"] in ("host", "cold start") else DRIFT
    if after["q1"] > before["q3"] and after["median"] > drift * before["median"]:
        return "REGRESSION"
    return "better" if after["q3"] < before["q1"] and drift * after["median"] < before["median"] else ""


def ratio(before: Record, after: Record) -> float:
    """1 if there was nothing of it before or after, such as memory above the inputs."""
    return after["median"] / before["median"] if before["median"] and after["median"] else 1.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="BEFORE AFTER, then further such pairs")
    parser.add_argument("--provider", default="ours", help="whose regressions count (default: ours)")
    parser.add_argument("--all", action="store_true", help="show unchanged cases too")
    args = parser.parse_args(argv)
    if len(args.files) % 2:
        parser.error(f"files come in pairs, BEFORE and AFTER (got {len(args.files)})")
    records = [read(file) for file in args.files]
    for fact in SAME_MACHINE:
        found = list(dict.fromkeys(str(r[0].get(fact)) for r in records))
        if len(found) > 1:
            print(f"The machines differ in {fact}: {', then '.join(found)}.")
    runs = [measured(r) for r in records]
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    if args.provider not in (known := dict.fromkeys(k[-1] for k in runs[0])):
        parser.error(f"--provider must be a provider in {args.files[0]}: {', '.join(known)} (got {args.provider})")
    ours = [k for k in runs[0] if k[-1] == args.provider]
    gone = [k for k in ours if any(k not in run for run in runs)]
    rows, regressions = [], 0
    for key in (k for k in ours if k not in gone):
        words = {verdict(old[key], new[key]) for old, new in pairs}
        word = words.pop() if len(words) == 1 else ""
        regressions += word == "REGRESSION"
        if word or args.all:
            # The pair that differs least.
            old, new = min(((old[key], new[key]) for old, new in pairs), key=lambda pair: abs(math.log(ratio(*pair))))
            rows.append(
                [*key[:-1], spread(old), spread(new), f"{ratio(old, new):.3f}×" if old["median"] else "–", word]
            )
    if rows:
        print(grid(["kind", "op", "shape", "dtype", "pass", "before", "after", "ratio", ""], rows))
    for key in gone:
        print(
            f"Not in every file: {' '.join(key)} (was {number(runs[0][key]['median'])} {runs[0][key].get('unit', '')})"
        )
    print(f"{args.provider}: {len(ours) - len(gone)} compared, {regressions} regressions, {len(gone)} gone.")
    return int(bool(regressions or gone))
