"""The Markdown page of a run, with pictures where matplotlib is installed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.pages import grid, write_above
from benchmarks.plots import GRID_BYTES, draw
from benchmarks.providers import PARTS, PROVIDERS, is_ours
from benchmarks.records import Record, number, read, size
from benchmarks.records import write as write_records

MOST_ROWS = 200  # of a table on a page
GRID_SHARE = 0.9  # of the copy bandwidth: the bar for kernels that move more than GRID_BYTES
LEGEND = (
    "Each cell shows the median, the quartiles and the time over the floor (×). The floor is the time for the fewest "
    "bytes that the pass can move, at the copy bandwidth measured in the same run. For an op with GEMMs it is at least "
    "the time of their operations at the rate of a large GEMM, or, if they were measured, the time of the three GEMMs. "
    "The fastest provider is bold. Forward runs without grad; full is forward and backward."
)


def spread(record: Record) -> str:
    if record["samples"] == 1:
        return number(record["median"])
    return f"{number(record['median'])} ({number(record['q1'])}–{number(record['q3'])})"


def over_floor(record: Record) -> str:
    return f"{spread(record)} {record['median'] / record['floor']:.2f}×"


def row_key(record: Record) -> tuple[str, str, str, str]:
    return record["op"], size(record["shape"]), record["dtype"], record["pass"]


def limit_of(bar: Record) -> str:
    limit = "" if bar["must"] is None else f"≤ {number(bar['must'])}"
    return " = ".join(text for text in (limit, bar["from"]) if text)


def joined(bars: Sequence[Record], text: Callable[[Record], str]) -> str:
    """The text that all settings of ours share, or one text for each setting."""
    texts = {bar.get("provider", "ours"): text(bar) for bar in bars}
    if len(set(texts.values())) <= 1:
        return next(iter(texts.values()), "")
    return "; ".join(t if provider == "ours" else f"{provider}: {t}" for provider, t in texts.items())


def by_provider(records: Sequence[Record], bars: Sequence[Record], cell: Callable[[Record], str]) -> str:
    """One row for each case and pass, one column for each provider, and the bar for ours if there is one."""
    asked = [p for p in PROVIDERS if any(r["provider"] == p for r in records)]
    paths = sorted({path for r in records if (path := r.get("path"))})
    titles = [f"{p} ({', '.join(paths)})" if is_ours(p) and paths else p for p in asked]
    floored = any("floor" in r for r in records)
    rows: dict[tuple, dict[str, Record]] = {}
    for r in records:
        rows.setdefault(row_key(r), {})[r["provider"]] = r
    judged: dict[tuple, list[Record]] = {}
    for bar in bars:
        judged.setdefault(row_key(bar), []).append(bar)
    out = []
    for key, found in rows.items():
        whole = [r["median"] for p, r in found.items() if p not in PARTS]
        best = number(min(whole)) if whole else None
        marks = {p: "**" if number(r["median"]) == best else "" for p, r in found.items()}
        cells = [marks[p] + cell(found[p]) + marks[p] if p in found else "–" for p in asked]
        bar = [joined(judged.get(key, ()), limit_of), joined(judged.get(key, ()), lambda bar: bar["verdict"])]
        floor = [number(next(iter(found.values()))["floor"])] if floored else []
        out.append([*key, *floor, *cells, *(bar if bars else [])])
    header = ["op", "shape", "dtype", "pass", *(["floor"] if floored else []), *titles]
    return grid(header + (["ours must be", ""] if bars else []), out)


def machine_lines(records: Sequence[Record]) -> list[str]:
    machine = records[0]
    left_out = ("kind", "suite", "providers", "rounds", "device", "flushes", "command")
    facts = {k: v for k, v in machine.items() if k not in left_out}
    ceilings = [r for r in records if r["kind"] == "ceiling"]
    copies = " and ".join(number(r["copy_gb_s"]) for r in ceilings)
    lines = [", ".join(f"{k} {v}" for k, v in facts.items())]
    lines.append(f"Copy bandwidth at the start and end of the run: {copies} GB/s.")
    if ceilings and "matmul_tflop_s" in ceilings[0]:
        dtype = ceilings[0].get("matmul_dtype", "bfloat16")  # records of earlier releases do not say
        lines.append(f"{dtype} GEMM: {number(ceilings[0]['matmul_tflop_s'])} TFLOP/s.")
    if "command" in machine:
        lines.append(f"Made by `{machine['command']}`.")
    if machine["device"] == "cuda" and machine.get("flushes", 1) == 1:
        lines.append(
            "If the host needs longer than the write that evicts the L2 cache (about 60 µs), times include host time."
        )
    if machine["device"] == "cpu":
        lines.append("CPU caches are not flushed, so data that fits in them can run below the floor.")
    return lines


def remarks(records: Sequence[Record], kind: str) -> list[str]:
    """One line for each provider and reason, with its cases and their largest error."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for r in (r for r in records if r["kind"] == kind):
        groups.setdefault((r["provider"], r["reason"]), []).append(r)
    lines = []
    for (provider, why), found in groups.items():
        ops = ", ".join(dict.fromkeys(r["op"] for r in found))
        cases = ", ".join(f"{r['op']} {size(r['shape'])} {r['dtype']} ({r['of']})" for r in found)
        line = f"- {provider}: {why} — " + (cases if len(found) <= 3 else f"{len(found)} cases of {ops}")
        if "error" in found[0]:
            worst = max(found, key=lambda r: r["error"] / r["allowed"])
            line += f"; largest error {worst['error']:.1e} of the row's maximum (allowed {worst['allowed']:.1e})"
        lines.append(line)
    return lines


def not_measured(records: Sequence[Record]) -> list[str]:
    left_out = [p for p in PROVIDERS if p not in records[0]["providers"]]
    lines = [f"- not selected in this run: {', '.join(left_out)}"] if left_out else []
    return [*remarks(records, "absent"), *lines]


def markdown(records: Sequence[Record], plots: Sequence[Path], plot_note: str) -> str:
    machine = records[0]
    name = machine.get("gpu") or machine["cpu"]
    pictures = [f"![{plot.stem}]({plot.name})" for plot in plots] or [plot_note]
    parts = [f"# {name}: {machine['suite']} suite", *pictures, "\n".join(machine_lines(records)), LEGEND]
    tables = (
        ("time", "Time, µs", over_floor),
        ("host", "Host, µs to enqueue one call", spread),
        ("cold start", "Cold start, s from import to first finished step", spread),
        ("memory", "Peak memory above the inputs, MiB", spread),
        ("error", "Error against fp64, |x - exact| / |exact|", spread),
    )
    for kind, title, cell in tables:
        if found := [r for r in records if r["kind"] == kind]:
            bars = [r for r in records if r["kind"] == "bar" and r["of"] == kind]
            rows = len({row_key(r) for r in found})
            many = f"{rows} cases; all of them are in the .jsonl next to this page."
            parts += [f"## {title}", by_provider(found, bars, cell) if rows <= MOST_ROWS else many]
    if machine["suite"] == "full" and any(r.get("bytes") for r in records):
        parts += ["## Slow cases", *exceptions(records)]
    for title, lines in (("Not measured", not_measured(records)),
                         ("Measured, but less accurate than eager code", remarks(records, "inaccurate"))):  # fmt: skip
        if lines:
            parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def copy_time(copies: Sequence[Sequence[float]], moved: float) -> float:
    """The time of a copy of `moved` bytes, interpolated between measured copies; above them, at the rate of the largest."""
    for (less, faster), (more, slower) in pairwise(copies):
        if moved <= more:
            return faster + (slower - faster) * (moved - less) / (more - less)
    return copies[-1][1] * moved / copies[-1][0]


def exceptions(records: Sequence[Record]) -> list[str]:
    """The large cases of a grid in which ours is slow, and the cases in which a peer is faster."""
    copies = next((r["us"] for r in records if r["kind"] == "copies"), None)
    cells: dict[tuple, dict[str, Record]] = {}
    for r in records:
        if r["kind"] == "time" and r.get("bytes"):
            cells.setdefault(row_key(r), {})[r["provider"]] = r
    mine = {key: found for key, found in cells.items() if "ours" in found}
    big = {key: found["ours"] for key, found in mine.items() if found["ours"]["bytes"] > GRID_BYTES}
    slow = {key: r for key, r in big.items() if r["floor"] < GRID_SHARE * r["median"]}

    def of_copies(key: tuple) -> float:
        """The speed of ours relative to a copy of the same size; forward and backward count as two copies."""
        parts = [key[:-1] + (p,) for p in ("forward", "backward")] if key[-1] == "full" else [key]
        moved = [mine[part]["ours"]["bytes"] for part in parts if part in mine] or [big[key]["bytes"]]
        return sum(copy_time(copies, b) for b in moved) / big[key]["median"]

    text = (
        f"{len(big) - len(slow)} of the {len(big)} cases that move more than {GRID_BYTES >> 20} MiB reach "
        f"{100 * GRID_SHARE:g} % of the copy bandwidth."
    )
    header, rows = (
        ["op", "shape", "dtype", "pass", "%"],
        [[*k, f"{100 * r['floor'] / r['median']:.0f}"] for k, r in slow.items()],
    )
    if copies:
        (least, took), (most, longest) = copies[0], copies[-1]
        level = sum(of_copies(key) >= GRID_SHARE for key in big)
        text += (
            f" A copy that moves {int(least) >> 20} MiB takes {number(took)} µs and reaches only "
            f"{100 * longest * least / (took * most):.0f} % of the copy bandwidth. Compared with copies of the "
            f"same size, {level} cases reach {100 * GRID_SHARE:g} %."
        )
        header.append("% of a copy")
        rows = [[*row, f"{100 * of_copies(key):.0f}"] for row, key in zip(rows, slow)]
    lines = [f"{text} Below {100 * GRID_SHARE:g} % of the copy bandwidth:", grid(header, rows)] if slow else [text]
    compared = lost = 0
    rows = []
    for key, found in mine.items():
        peers = [r for p, r in found.items() if not is_ours(p) and p not in PARTS]
        if not peers:
            continue
        compared += 1
        best, ours = min(peers, key=lambda r: r["median"]), found["ours"]
        if ours["q1"] > best["q3"]:
            lost += 1
            rows.append([*key, number(ours["median"]), f"{best['provider']} {number(best['median'])}"])
    if compared:
        lines.append(f"In {compared - lost} of {compared} cases no peer is faster by more than the spread."
                     + (" The other cases, µs:" if lost else ""))  # fmt: skip
        lines.append(grid(["op", "shape", "dtype", "pass", "ours", "fastest"], rows) if rows else "")
    return [line for line in lines if line]


def write(records: Sequence[Record], stem: Path) -> str:
    """Writes STEM.md and the pictures next to it. Returns the page."""
    plots, note = draw(records, stem)
    page = markdown(records, plots, note)
    write_above(stem.with_name(f"{stem.name}.md"), page)
    return page


def added(records: Sequence[Record], more: Sequence[Record]) -> list[Record]:
    """Replaces and extends the cases of a run by those of another run. Records keep the floors of their own run."""

    def case(r: Record) -> tuple | None:
        on_host = r.get("of", r["kind"]) in ("host", "cold start")
        return (r["op"], size(r["shape"]), r["dtype"]) if "op" in r and not on_host else None

    new = {case(r) for r in more} - {None}
    machine = records[0] | {"providers": list(dict.fromkeys([*records[0]["providers"], *more[0]["providers"]]))}
    return [machine, *(r for r in records[1:] if case(r) not in new), *(r for r in more if case(r) in new)]


def main(argv: Sequence[str]) -> int:
    description = "Write the page and the pictures of a result again."
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=description)
    parser.add_argument("result", type=Path)
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="RESULT",
                        help="runs whose cases are added to the result, or replace those it has")  # fmt: skip
    args = parser.parse_args(argv)
    records = read(args.result)
    if any(r["kind"] == "training" for r in records):
        from benchmarks import training  # imported here: it needs torch

        print(training.write(records[0], records[1:], args.result.with_suffix("")))
        return 0
    for more in map(read, args.add):
        records = added(records, more)
    if args.add:
        write_records(records, args.result)
    print(write(records, args.result.with_suffix("")))
    return 0
