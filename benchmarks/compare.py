"""python -m benchmarks compare BEFORE.jsonl AFTER.jsonl: list the cases that got slower or need more memory.

A difference counts if it exceeds the spread of the runs and 5 % (10 % for host time and cold start), by which two runs of
the same code differ.
"""

from __future__ import annotations

import argparse
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


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--provider", default="ours", help="whose regressions count (default: ours)")
    parser.add_argument("--all", action="store_true", help="show unchanged cases too")
    args = parser.parse_args(argv)
    befores, afters = read(args.before), read(args.after)
    for fact in SAME_MACHINE:
        old, new = befores[0].get(fact), afters[0].get(fact)
        if old != new:
            print(f"The machines differ in {fact}: {old}, then {new}.")
    old, new = measured(befores), measured(afters)
    if args.provider not in (known := dict.fromkeys(k[-1] for k in old)):
        parser.error(f"--provider must be a provider in {args.before}: {', '.join(known)} (got {args.provider})")
    rows, regressions = [], 0
    for key in (k for k in old if k[-1] == args.provider and k in new):
        word = verdict(old[key], new[key])
        regressions += word == "REGRESSION"
        if word or args.all:
            ratio = f"{new[key]['median'] / old[key]['median']:.3f}×" if old[key]["median"] else "–"
            rows.append([*key[:-1], spread(old[key]), spread(new[key]), ratio, word])
    if rows:
        print(grid(["kind", "op", "shape", "dtype", "pass", "before", "after", "ratio", ""], rows))
    gone = [k for k in old if k[-1] == args.provider and k not in new]
    for key in gone:
        print(f"No longer measured: {' '.join(key)} (was {number(old[key]['median'])} {old[key].get('unit', '')})")
    compared = sum(k[-1] == args.provider and k in new for k in old)
    print(f"{args.provider}: {compared} compared, {regressions} regressions, {len(gone)} gone.")
    return int(bool(regressions or gone))
