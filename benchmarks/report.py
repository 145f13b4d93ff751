"""From records to what people read: a Markdown page, and plots where matplotlib is installed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import records as files
from benchmarks.providers import PROVIDERS, is_ours
from benchmarks.records import Record, number, read, size

COLORS = {
    "three GEMMs": "#000000", "GEMMs of ours": "#444444", "GEMMs of compact": "#777777",
    "torch": "#888888", "hf": "#d0a060", "torch.compile": "#7b68c8",
    "liger-kernel": "#3a8fd0", "liger-sm90": "#1f5f90", "cut-cross-entropy": "#c060b0", "quack": "#40a060",
    "ours": "#d03030", "ours JIT": "#a05050", "ours compact": "#e07830", "ours 16 chunks": "#e8a070",
    "ours 64 MiB": "#f0b830", "ours eager": "#e07830", "ours linear": "#a03080",
}  # fmt: skip
PARTS = ("three GEMMs", "GEMMs of ours", "GEMMs of compact")  # only a part of the work
LINE_STYLES = ("-", "--", ":")
GRID_SHAPES = 16  # more shapes than this are drawn as a heat map
MOST_ROWS = 200  # of a table that somebody reads
# Above so many bytes, caches and launches do not decide, and a kernel should reach this share of the copy ceiling.
GRID_BYTES, GRID_SHARE = 64 << 20, 0.9
BY_HAND = "<!-- by hand from here on -->"
LEGEND = (
    "Median (quartiles). × is time over the floor: the fewest bytes the pass can move, at the copy ceiling measured in "
    "the same run, or the operations of its GEMMs at that of a large one, if longer; where three GEMMs were "
    "measured, their time. The fastest is bold. Forward runs without grad; full is forward and backward."
)


def spread(record: Record) -> str:
    if record["samples"] == 1:
        return number(record["median"])
    return f"{number(record['median'])} ({number(record['q1'])}–{number(record['q3'])})"


def over_floor(record: Record) -> str:
    return f"{spread(record)} {record['median'] / record['floor']:.2f}×"


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = [header, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def row_key(record: Record) -> tuple[str, str, str, str]:
    return record["op"], size(record["shape"]), record["dtype"], record["pass"]


def limit_of(bar: Record) -> str:
    limit = "" if bar["must"] is None else f"≤ {number(bar['must'])}"
    return " = ".join(text for text in (limit, bar["from"]) if text)


def joined(bars: Sequence[Record], text: Callable[[Record], str]) -> str:
    """What all settings of ours have in common, or what each has."""
    texts = {bar.get("provider", "ours"): text(bar) for bar in bars}
    if len(set(texts.values())) <= 1:
        return next(iter(texts.values()), "")
    return "; ".join(t if provider == "ours" else f"{provider}: {t}" for provider, t in texts.items())


def by_provider(records: Sequence[Record], bars: Sequence[Record], cell: Callable[[Record], str]) -> str:
    """One row for each case and pass, one column for each provider; what ours must be, where a bar was set."""
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
    facts = {k: v for k, v in machine.items() if k not in ("kind", "suite", "providers", "rounds", "device", "flushes")}
    ceilings = [r for r in records if r["kind"] == "ceiling"]
    copies = " and ".join(number(r["copy_gb_s"]) for r in ceilings)
    lines = [", ".join(f"{k} {v}" for k, v in facts.items())]
    lines.append(f"Copy ceiling at the start and end of the run: {copies} GB/s.")
    if ceilings and "matmul_tflop_s" in ceilings[0]:
        lines.append(f"bf16 GEMM: {number(ceilings[0]['matmul_tflop_s'])} TFLOP/s.")
    if machine["device"] == "cuda" and machine.get("flushes", 1) == 1:
        lines.append(
            "Where the host needs longer than the write that evicts the L2, some 60 µs, its time is in the device's."
        )
    if machine["device"] == "cpu":
        lines.append("On a CPU the caches are not flushed: data that fits them runs below its floor.")
    return lines


def remarks(records: Sequence[Record], kind: str) -> list[str]:
    """One line for each provider and reason, with the cases it holds for and the worst of their errors."""
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
            line += f"; at worst {worst['error']:.1e} of the row's maximum (allowed {worst['allowed']:.1e})"
        lines.append(line)
    return lines


def not_measured(records: Sequence[Record]) -> list[str]:
    asked = records[0]["providers"]
    lines = [f"- {p}: not asked in this run (--providers)" for p in PROVIDERS if p not in asked]
    return [*remarks(records, "absent"), *lines]


def markdown(records: Sequence[Record], plots: Sequence[Path], plot_note: str) -> str:
    machine = records[0]
    name = machine.get("gpu") or machine["cpu"]
    parts = [f"# {name}: {machine['suite']} suite", "\n".join(machine_lines(records)), LEGEND]
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
            many = f"{rows} cases, all of them in the .jsonl beside this page."
            parts += [f"## {title}", by_provider(found, bars, cell) if rows <= MOST_ROWS else many]
    if machine["suite"] == "full" and any(r.get("bytes") for r in records):
        parts += ["## Against the bars of the grid", *exceptions(records)]
    for title, lines in (("Not measured", not_measured(records)),
                         ("Measured, but less accurate than eager code", remarks(records, "inaccurate"))):  # fmt: skip
        if lines:
            parts += [f"## {title}", "\n".join(lines)]
    parts += [f"![{plot.stem}]({plot.name})" for plot in plots] or [plot_note]
    return "\n\n".join(parts) + "\n"


def copy_time(copies: Sequence[Sequence[float]], moved: float) -> float:
    """Of that many bytes, between the copies that were measured; beyond them, at the last one's rate."""
    for (less, faster), (more, slower) in pairwise(copies):
        if moved <= more:
            return faster + (slower - faster) * (moved - less) / (more - less)
    return copies[-1][1] * moved / copies[-1][0]


def exceptions(records: Sequence[Record]) -> list[str]:
    """Of a grid of sizes: where ours moves much, but slowly, and where somebody else is faster."""
    copies = next((r["us"] for r in records if r["kind"] == "copies"), None)
    cells: dict[tuple, dict[str, Record]] = {}
    for r in records:
        if r["kind"] == "time" and r.get("bytes"):
            cells.setdefault(row_key(r), {})[r["provider"]] = r
    mine = {key: found for key, found in cells.items() if "ours" in found}
    big = {key: found["ours"] for key, found in mine.items() if found["ours"]["bytes"] > GRID_BYTES}
    slow = {key: r for key, r in big.items() if r["floor"] < GRID_SHARE * r["median"]}

    def of_copies(key: tuple) -> float:
        """Ours against copies of as many bytes; forward and backward are two."""
        parts = [key[:-1] + (p,) for p in ("forward", "backward")] if key[-1] == "full" else [key]
        moved = [mine[part]["ours"]["bytes"] for part in parts if part in mine] or [big[key]["bytes"]]
        return sum(copy_time(copies, b) for b in moved) / big[key]["median"]

    text = (
        f"{len(big) - len(slow)} of the {len(big)} cells that move more than {GRID_BYTES >> 20} MiB reach "
        f"{100 * GRID_SHARE:g} % of the copy ceiling."
    )
    header, rows = (
        ["op", "shape", "dtype", "pass", "%"],
        [[*k, f"{100 * r['floor'] / r['median']:.0f}"] for k, r in slow.items()],
    )
    if copies:
        (least, took), (most, longest) = copies[0], copies[-1]
        level = sum(of_copies(key) >= GRID_SHARE for key in big)
        text += (
            f" A copy that moves {int(least) >> 20} MiB takes {number(took)} µs, {100 * longest * least / (took * most):.0f} % "
            f"of it: beside copies of as many bytes, {level} reach {100 * GRID_SHARE:g} %."
        )
        header.append("% of a copy")
        rows = [[*row, f"{100 * of_copies(key):.0f}"] for row, key in zip(rows, slow)]
    lines = [text + " Below it:", grid(header, rows)] if slow else [text]
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
        lines.append(f"In {compared - lost} of {compared} cells no peer is faster by more than the spread."
                     + (" The others, µs:" if lost else ""))  # fmt: skip
        lines.append(grid(["op", "shape", "dtype", "pass", "ours", "fastest"], rows) if rows else "")
    return [line for line in lines if line]


def draw(records: Sequence[Record], stem: Path) -> tuple[list[Path], str]:
    """Plots, or one sentence on why there are none."""
    times = [r for r in records if r["kind"] == "time"]
    if not times:
        return [], "No plots: nothing was timed by size."
    try:
        import matplotlib
    except ImportError:
        return [], "No plots: matplotlib is not installed."
    matplotlib.use("Agg")
    memory = [r for r in records if r["kind"] == "memory"]
    plots = []
    swept = sweeps(memory)
    plots += [draw_sweep(op, records, stem) for op in swept]
    times, memory = ([r for r in found if r["op"] not in swept] for found in (times, memory))
    grid_of_sizes = len({tuple(r["shape"]) for r in times}) > GRID_SHAPES
    if grid_of_sizes and records[0].get("suite") not in ("paper", "anchors"):
        plots.append(draw_heat_map(times, stem))
    elif times:
        lines = [("time", times, lambda r: r["median"] / r["floor"], "time over floor"),
                 ("memory", memory, lambda r: r["median"], "peak MiB above the inputs")]  # fmt: skip
        plots += [draw_lines(found, value, label, stem, what) for what, found, value, label in lines]
    return plots, ""


def panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained")


def save(figure: Any, stem: Path, what: str) -> Path:
    import matplotlib.pyplot as plt

    path = stem.with_name(f"{stem.name}-{what}.png")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def sweeps(memory: Sequence[Record]) -> list[str]:
    """Ops of which a whole grid of tokens and classes was measured, and whose least memory is known."""
    grids: dict[str, set] = {}
    for r in memory:
        if "least" in r:
            grids.setdefault(r["op"], set()).add((r["shape"][0], r["shape"][-1]))
    return [op for op, at in grids.items() if all(len({p[axis] for p in at}) > 2 for axis in (0, 1))]


def draw_sweep(op: str, records: Sequence[Record], stem: Path) -> Path:
    """One column for each number of classes: time over floor and memory over gradients by the number of tokens."""
    full = [r for r in records if r.get("op") == op and r.get("pass") == "full" and "median" in r]
    times = [r for r in full if r["kind"] == "time"]
    memory = [r for r in full if r["kind"] == "memory"]
    classes = sorted({r["shape"][-1] for r in times})
    providers = [p for p in PROVIDERS if p not in PARTS and any(r["provider"] == p for r in times)]
    figure, axes = panels(2, len(classes), 3.6, 3.0)
    rows = ((times, "floor", "time over three GEMMs"), (memory, "least", "peak memory over gradients"))
    for line, (found, unit, label) in zip(axes, rows):
        for axis, n in zip(line, classes):
            for p in providers:
                points = sorted((r["shape"][0], r["median"] / r[unit]) for r in found
                                if r["provider"] == p and r["shape"][-1] == n)  # fmt: skip
                axis.plot(*zip(*points) if points else ((), ()), marker="o", ms=4, label=p, color=COLORS[p],
                          lw=2.2 if p == "ours" else 1.3)  # fmt: skip
            tokens = sorted({r["shape"][0] for r in found})
            axis.set_xscale("log", base=2)
            axis.set_xticks(tokens, [f"{t // 1024}k" if t >= 1024 else t for t in tokens], fontsize=8)
            axis.set_xticks([], minor=True)
            axis.axhline(1, color="black", lw=0.8)
            top = max((r["median"] / r[unit] for r in found), default=1)
            axis.set_ylim(0.9, max(1.2, min(4.0, math.ceil(10 * top + 0.5) / 10)))
            axis.set_title(f"{n} classes", fontsize=9)
            axis.set_ylabel(label, fontsize=8)
            axis.set_xlabel("tokens", fontsize=8)
            axis.tick_params(axis="y", labelsize=8)
            axis.grid(alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=6, fontsize=8)
    return save(figure, stem, f"{op}-sweep".replace("_", "-"))


def draw_lines(records: list[Record], value: Callable[[Record], float], label: str, stem: Path, what: str) -> Path:
    from matplotlib.ticker import LogLocator, NullLocator

    ops = list(dict.fromkeys(r["op"] for r in records))
    figure, axes = panels(len(ops), 2, 6.0, 3.4)
    for row, op in zip(axes, ops):
        for axis, pass_name in zip(row, ("forward", "full")):
            here = [r for r in records if r["op"] == op and r["pass"] == pass_name]
            if not here:
                axis.set_axis_off()
                continue
            shapes = list(dict.fromkeys(size(r["shape"]) for r in here))
            dtypes = list(dict.fromkeys(r["dtype"] for r in here))
            for provider in (p for p in PROVIDERS if any(r["provider"] == p for r in here)):
                for style, dtype in zip(LINE_STYLES, dtypes):
                    line = [r for r in here if (r["provider"], r["dtype"]) == (provider, dtype)]
                    found = {size(r["shape"]): value(r) for r in line}
                    xs = [i for i, shape in enumerate(shapes) if shape in found]
                    name = provider if len(dtypes) == 1 else f"{provider} {dtype}"
                    axis.plot(xs, [found[shapes[i]] for i in xs], style, marker="o", ms=4, label=name,
                              color=COLORS[provider], lw=2.2 if provider == "ours" else 1.3)  # fmt: skip
            axis.set_title(f"{op} {pass_name}", fontsize=10)
            axis.set_xticks(range(len(shapes)), shapes, rotation=20, fontsize=8)
            axis.set_ylabel(label, fontsize=9)
            if what == "time":
                axis.axhline(1, color="black", lw=0.8)
                axis.set_yscale("log")
                axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
                axis.yaxis.set_major_formatter(lambda v, _: f"{v:g}×")
                axis.yaxis.set_minor_locator(NullLocator())
            else:
                axis.set_ylim(bottom=0)
            axis.tick_params(axis="y", labelsize=8)
            axis.grid(alpha=0.3)
    named = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(named.values(), named, loc="outside upper center", ncols=6, fontsize=8)
    return save(figure, stem, what)


def draw_heat_map(records: list[Record], stem: Path) -> Path:
    """Share of the copy ceiling that ours (else the first provider) reaches, rows by width."""
    there = {r["provider"] for r in records}
    provider = "ours" if "ours" in there else max(there, key=PROVIDERS.index)
    records = [r for r in records if r["provider"] == provider and r.get("bytes", True)]
    groups = list(dict.fromkeys((r["op"], r["dtype"]) for r in records))

    def place(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What of a shape tells the row, and what the column."""
        split = 1 if len(shape) == 2 else 2
        return tuple(shape[:split]), tuple(shape[split:])

    widths = {op: len({place(r["shape"])[1] for r in records if r["op"] == op}) for op, _ in groups}
    figure, axes = panels(len(groups), 2, 1.5 + 0.6 * max(widths.values()), 2.6)
    for row, (op, dtype) in zip(axes, groups):
        for axis, pass_name in zip(row, ("forward", "full")):
            here = [r for r in records if (r["op"], r["dtype"], r["pass"]) == (op, dtype, pass_name)]
            if not here:  # an op may have one of the passes alone
                axis.set_visible(False)
                continue
            found = {place(r["shape"]): r for r in here}
            ys, xs = (sorted({at[i] for at in found}) for i in (0, 1))
            share = {at: 100 * r["floor"] / r["median"] for at, r in found.items()}
            axis.imshow([[share.get((y, x), math.nan) for x in xs] for y in ys], cmap="RdYlGn", vmin=0, vmax=100,
                        aspect="auto")  # fmt: skip
            for (y, x), percent in share.items():
                # What moves little is decided by launches and caches.
                small = (found[y, x].get("bytes") or math.inf) <= GRID_BYTES
                axis.text(xs.index(x), ys.index(y), f"{percent:.0f}", ha="center", va="center", fontsize=7,
                          fontweight="normal" if small else "bold")  # fmt: skip
            axis.set_xticks(range(len(xs)), map(size, xs), rotation=30, ha="right", fontsize=7)
            axis.set_yticks(range(len(ys)), map(size, ys), fontsize=7)
            axis.set_title(f"{provider}: {op} {pass_name} {dtype}, % of the copy ceiling", fontsize=8)
    figure.supxlabel(f"bold: more than {GRID_BYTES >> 20} MiB are moved", fontsize=8)
    return save(figure, stem, "bandwidth")


def write_above(path: Path, page: str) -> None:
    """Writes a page above what is written there by hand."""
    _, mark, words = path.read_text().partition(BY_HAND) if path.exists() else ("", "", "")
    path.write_text(page + (f"\n{mark}{words}" if mark else ""))


def write(records: Sequence[Record], stem: Path) -> str:
    """Writes STEM.md and the plots beside it; returns the page."""
    plots, note = draw(records, stem)
    page = markdown(records, plots, note)
    write_above(stem.with_name(f"{stem.name}.md"), page)
    return page


def added(records: Sequence[Record], more: Sequence[Record]) -> list[Record]:
    """Another run's cases among these, in the place of what was there of them. Records keep the floors of their own run."""

    def case(r: Record) -> tuple | None:
        on_host = r.get("of", r["kind"]) in ("host", "cold start")
        return (r["op"], size(r["shape"]), r["dtype"]) if "op" in r and not on_host else None

    new = {case(r) for r in more} - {None}
    machine = records[0] | {"providers": list(dict.fromkeys([*records[0]["providers"], *more[0]["providers"]]))}
    return [machine, *(r for r in records[1:] if case(r) not in new), *(r for r in more if case(r) in new)]


def main(argv: Sequence[str]) -> int:
    description = "Redraw the page and the plots of a result."
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=description)
    parser.add_argument("result", type=Path)
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="RESULT",
                        help="runs whose cases the first result is to hold as well, in the place of its own")  # fmt: skip
    args = parser.parse_args(argv)
    records = read(args.result)
    for more in map(read, args.add):
        records = added(records, more)
    if args.add:
        files.write(records, args.result)
    print(write(records, args.result.with_suffix("")))
    return 0
