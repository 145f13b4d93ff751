"""Pictures of a run, drawn where matplotlib is installed. A provider has the same color in every picture."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.providers import PARTS, PROVIDERS, discover, is_ours
from benchmarks.records import Record, number, size

# Ours is red and its settings are tints of it; peers are muted.
COLORS = {
    "ours": "#d7191c", "ours JIT": "#8f1d14", "ours eager": "#b5532a", "ours linear": "#c2567f", "ours two": "#f08a8a",
    "ours compact": "#f58a52", "ours 16 chunks": "#f9b99a", "ours 64 MiB": "#e8b93c", "ours + torch.compile": "#f08080",
    "ours, FP8 by rows": "#7b1fa2", "ours, FP8 by rows, gradients of weights in bf16": "#b079c9",
    "ours, FP8 by tensors": "#4527a0", "ours, FP8 by blocks": "#7e57c2", "ours tensor": "#5c6bc0", "ours blocks": "#b39ddb",
    "ours without operators of hybrid models": "#f4a896", "ours 128x128": "#ef9a9a", "torchao tensor": "#5f7d2c",
    "torch": "#9aa3ad", "hf": "#cdb68a", "torch.compile": "#9186c9", "quack": "#6bb182", "cut-cross-entropy": "#bb83b3",
    "liger-kernel": "#6aa6d8", "liger-sm90": "#33709f", "trl": "#b08bc9", "liger-kernel + torch.compile": "#264f73",
    "HF + torchao's FP8 by rows, compiled": "#8fae4a", "HF + torchao's FP8 by tensors, compiled": "#4e6b1f",
    "torchao": "#7a9e3a", "torchao rows_hp": "#a3bf6f", "copy": "#888888", "ours rows_hp": "#e07b76", "ours one by one": "#b06fc4",
    "fla": "#4f9d8f", "causal_conv1d": "#4f6f9d", "ours with entropy": "#d9534f", "ours as a loss": "#a94442",
    "ours 320 MiB": "#d9a441", "ours JSD": "#a8324a", "ours per token": "#e8743b",
    "ours per token 1280 MiB": "#b9531e", "ours frozen": "#f2b5a7",
    "liger-kernel JSD": "#9cc4e6", "trl JSD": "#c9a9dd", "trl frozen": "#8d6aa8",
    "GEMMs": "#333333", "three GEMMs": "#222222", "GEMMs of ours": "#555555", "GEMMs of compact": "#777777",
    "four GEMMs": "#2b2b2b", "six GEMMs": "#444444", "GEMMs of a frozen head": "#666666",
    "frozen": "#4a4a4a", "frozen head": "#5a5a5a",
}  # fmt: skip
SAME_COLOR = {"HF eager": "hf", "HF + torch.compile": "torch.compile"}
LABELS = {"hf": "hf (eager)"}
PASSES = {"forward": "forward", "backward": "backward", "full": "forward + backward"}
LOWER, HIGHER = "lower is better", "higher is better"
OVER_FLOOR = "time over the floor"
OFF_SCALE = 8  # times the floor: larger values are drawn at the edge
TICKS = (0.25, 0.5, 1, 1.5, 2, 3, 5, 8, 12, 20)
WIDTH, DPI = 12.0, 100  # inches, dots per inch: fits a screen
LEGEND_COLUMNS = 9
LEGEND_LETTERS = 160  # in a line, with six for a mark
ABOVE_FLOOR = 17  # points: leaves room for the label of the floor below a title
LONGEST = 6  # times the longest bar of ours: longer bars are cut
GRID_SHAPES = 16  # more shapes than this are drawn as a heat map
GRID_BYTES = 64 << 20  # below, launches and caches decide more than bandwidth
STYLE = {
    "font.size": 10, "axes.titlesize": 11, "axes.titlepad": 8, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "#888888", "axes.axisbelow": True, "axes.grid": True, "grid.color": "#e4e4e4",
    "legend.frameon": False,
}  # fmt: skip


def color(provider: str) -> str:
    return COLORS[SAME_COLOR.get(provider, provider)]


@contextmanager
def figure_of(
    path: Path, title: str, rows: int, columns: int, height: float, providers: Sequence[str] = (), marker: str = "o",
    **options: Any,
) -> Iterator[Any]:  # fmt: skip
    """A grid of axes below a title and a legend, saved to `path` afterwards. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from PIL import Image

    longest = max((len(LABELS.get(p, p)) for p in providers), default=0)
    lines = -(-len(providers) // max(1, min(LEGEND_COLUMNS, LEGEND_LETTERS // (longest + 6))))
    header = 0.4 + 0.25 * lines
    height += header
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows, columns, figsize=(WIDTH, height), squeeze=False, layout="constrained", **options
        )
        figure.get_layout_engine().set(rect=(0, 0, 1, 1 - header / height))
        figure.text(0.5, 1 - 0.1 / height, title, ha="center", va="top", fontsize=13, fontweight="bold")
        if providers:
            style = {"ls": "-" if marker == "-" else "", "marker": "o" if marker == "-" else marker}
            handles = [Line2D([], [], color=color(p), label=LABELS.get(p, p), ms=10 if p == "ours" else 8, **style)
                       for p in providers]  # fmt: skip
            columns = -(-len(providers) // lines)
            figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1 - 0.32 / height), ncols=columns,
                          columnspacing=1.4, borderpad=0)  # fmt: skip
        yield figure, axes
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=DPI)
        plt.close(figure)
    # A palette makes the file a third as large; this method keeps colors that few pixels have.
    picture = Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)


def mark_floor(axis: Any, label: str = "floor") -> None:
    axis.axvline(1, color="black", lw=1.2, zorder=2)
    axis.annotate(label, (1, 1), (0, 2), xycoords=("data", "axes fraction"), textcoords="offset points", ha="center",
                  va="bottom", fontsize=9)  # fmt: skip


def ours_first(records: Sequence[Record]) -> list[str]:
    there = {r["provider"] for r in records} - set(PARTS)
    return sorted(there, key=lambda p: (not is_ours(p), PROVIDERS.index(p)))


def machine_name(records: Sequence[Record]) -> str:
    return records[0].get("gpu") or f"CPU {records[0]['cpu']}"


# ---- Many operators: one row for each shape, one dot for each provider


def draw_dots(records: Sequence[Record], stem: Path) -> Path:
    times = [r for r in records if r["kind"] == "time" and r["pass"] != "backward"]
    passes = [p for p in PASSES if any(r["pass"] == p for r in times)]
    rows: list[tuple[str, str, str]] = []  # (op, shape, dtype); a row without a shape is a heading
    several = len({r["dtype"] for r in times}) > 1
    for r in times:
        row = (r["op"], size(r["shape"]), r["dtype"])
        if (r["op"], "", "") not in rows:
            rows.append((r["op"], "", ""))
        if row not in rows:
            rows.insert(max(i for i, (op, *_) in enumerate(rows) if op == r["op"]) + 1, row)
    providers = ours_first(times)
    path = stem.with_name(f"{stem.name}-time.png")
    title = f"{machine_name(records)}: {OVER_FLOOR} ({LOWER})"
    height = 0.75 + 0.21 * len(rows)
    with figure_of(path, title, 1, len(passes), height, providers, sharey=True) as (figure, axes):
        for axis, name in zip(axes[0], passes):
            here = [r for r in times if r["pass"] == name]
            dot_panel(axis, here, rows, providers)
            axis.set_title(PASSES[name], pad=ABOVE_FLOOR)
        labels = [f"{shape} {dtype}" if several else shape for _, shape, dtype in rows]
        axes[0][0].set_yticks(range(len(rows)), [label if shape else op for label, (op, shape, _) in zip(labels, rows)])
        for text, (_, shape, _) in zip(axes[0][0].get_yticklabels(), rows):
            text.set(fontsize=9, fontweight="normal" if shape else "bold")
        axes[0][0].set_ylim(len(rows) - 0.4, -0.9)
    return path


def dot_panel(axis: Any, times: Sequence[Record], rows: Sequence[tuple], providers: Sequence[str]) -> None:
    ratios = {(r["op"], size(r["shape"]), r["dtype"], r["provider"]): r["median"] / r["floor"] for r in times}
    low = min(0.9, 0.9 * min(ratios.values()))
    ours = [value for (*_, p), value in ratios.items() if is_ours(p)]
    high = min(max(OFF_SCALE, 1.1 * max(ours, default=0)), 1.1 * max(ratios.values()))
    for y, row in enumerate(rows):
        found = [ratios[(*row, p)] for p in providers if (*row, p) in ratios]
        if found:
            axis.plot([min(found), min(high, max(found))], [y, y], color="#d8d8d8", lw=2.5, zorder=1)
    for order, provider in enumerate(providers):  # ours is large and lies below, so that it hides no peer
        mine = provider == "ours"
        for off in (False, True):
            points = [(min(high, x), y) for y, row in enumerate(rows)
                      if (x := ratios.get((*row, provider))) is not None and (x > high) == off]  # fmt: skip
            axis.scatter(*zip(*points) if points else ((), ()), s=110 if mine else 36, marker=">" if off else "o",
                         color=color(provider), edgecolor="white", lw=0.6, zorder=3 + order, clip_on=False)  # fmt: skip
    mark_floor(axis)
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    ticks = [t for t in TICKS if low <= t <= high]
    axis.set_xticks(ticks, [f"{t:g}×" for t in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlabel(f"{OVER_FLOOR}; ▸ beyond {high:.0f}×" if max(ratios.values()) > high else OVER_FLOOR)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", visible=False)


# ---- Few cases: grouped bars


def bar_panel(axis: Any, groups: Sequence[str], providers: Sequence[str], values: Any, text: Callable) -> None:
    """values: (group, provider) -> the length of a bar; a bar far longer than ours is cut."""
    height = 0.84 / len(providers)
    ours = [v for (_, p), v in values.items() if is_ours(p)]
    limit = LONGEST * max(ours) if ours else math.inf
    longest = min(limit, max(values.values()))
    for i, provider in enumerate(providers):
        for y, group in enumerate(groups):
            if (value := values.get((group, provider))) is None:
                continue
            place = y + (i - (len(providers) - 1) / 2) * height
            axis.barh(place, min(value, longest), 0.92 * height, color=color(provider))
            axis.text(min(value, longest) + 0.01 * longest, place, "▸ " * (value > longest) + text(value), va="center", fontsize=8,
                      fontweight="bold" if provider == "ours" else "normal", color="#222222")  # fmt: skip
    axis.set_yticks(range(len(groups)), groups)
    axis.set_ylim(len(groups) - 0.5, -0.5)
    axis.set_xlim(0, 1.12 * longest)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", visible=False)


def draw_bars(records: Sequence[Record], stem: Path) -> Path:
    """One op at a few shapes: time over the floor and peak memory."""
    times, memory = ([r for r in records if r["kind"] == kind] for kind in ("time", "memory"))
    last = max((r["pass"] for r in times), key=list(PASSES).index)
    times, memory = ([r for r in found if r["pass"] == last] for found in (times, memory))
    dtypes = {r["dtype"] for r in times}

    def group(r: Record) -> str:
        return size(r["shape"]) + (f"\n{r['dtype']}" if len(dtypes) > 1 else "")

    groups, providers = list(dict.fromkeys(map(group, times))), ours_first(times)
    path = stem.with_name(f"{stem.name}-time-memory.png")
    unit = 1024 if memory and max(r["median"] for r in memory) >= 4096 else 1
    height = 0.6 + 0.16 * (len(providers) + 0.8) * len(groups)
    title = f"{machine_name(records)}: {times[0]['op']}, {PASSES[last]} ({LOWER})"
    with figure_of(path, title, 1, 2, height, providers, "s", sharey=True) as (figure, (axes,)):
        ratios = {(group(r), r["provider"]): r["median"] / r["floor"] for r in times if r["provider"] in providers}
        bar_panel(axes[0], groups, providers, ratios, lambda value: f"{value:.2f}×")
        gemms = any(r["provider"] == "three GEMMs" for r in times)
        mark_floor(axes[0], "GEMMs" if gemms else "floor")
        axes[0].set_title("time over the three GEMMs" if gemms else OVER_FLOOR, pad=ABOVE_FLOOR)
        peaks = {(group(r), r["provider"]): r["median"] / unit for r in memory if r["provider"] in providers}
        bar_panel(axes[1], groups, providers, peaks, number)
        axes[1].set_title(f"peak memory above the inputs, {'GiB' if unit > 1 else 'MiB'}", pad=ABOVE_FLOOR)
    return path


# ---- Sizes on an axis: lines


def line(axis: Any, provider: str, points: Sequence[tuple[float, float]]) -> None:
    mine = provider == "ours"
    axis.plot(*zip(*points) if points else ((), ()), marker="o", ms=6 if mine else 4, color=color(provider),
              lw=2.6 if mine else 1.4, zorder=4 if mine else 3)  # fmt: skip


def times_axis(axis: Any, high: float, label: str) -> None:
    axis.axhline(1, color="black", lw=1.2, zorder=2)
    axis.annotate(label, (0, 1), (3, -3), xycoords=("axes fraction", "data"), textcoords="offset points", ha="left",
                  va="top", fontsize=9)  # fmt: skip
    axis.set_yscale("log")
    axis.set_ylim(0.78, high)
    ticks = [t for t in TICKS if 1 <= t <= high]
    axis.set_yticks(ticks, [f"{t:g}×" for t in ticks])
    axis.set_yticks([], minor=True)


def varied(op: str, shapes: Sequence[Sequence[int]]) -> list[int]:
    return [i for i in range(len(shapes[0])) if len({s[i] for s in shapes}) > 1] or [len(shapes[0]) - 1]


def draw_lines(records: Sequence[Record], stem: Path) -> Path:
    """Time and memory of every op by its size, forward and backward together."""
    found = [r for r in records if r.get("pass") == "full" and r["kind"] in ("time", "memory")]
    ops, providers = list(dict.fromkeys(r["op"] for r in found)), ours_first(found)
    columns = min(4, len(ops))
    bands = -(-len(ops) // columns)
    path = stem.with_name(f"{stem.name}-time-memory.png")
    title = f"{machine_name(records)}: {PASSES['full']} ({LOWER}; beyond {OFF_SCALE}× not shown)"
    with figure_of(path, title, 2 * bands, columns, 3.6 * bands, providers, "-") as (figure, axes):
        for i, op in enumerate(ops):
            time_axis, memory_axis = axes[2 * (i // columns)][i % columns], axes[2 * (i // columns) + 1][i % columns]
            here = [r for r in found if r["op"] == op]
            shapes = list(dict.fromkeys(tuple(r["shape"]) for r in here))
            along = varied(op, shapes)
            for axis, kind in ((time_axis, "time"), (memory_axis, "memory")):
                for provider in reversed(providers):
                    one = {tuple(r["shape"]): r for r in here if (r["kind"], r["provider"]) == (kind, provider)}
                    value = (lambda r: r["median"] / r["floor"]) if kind == "time" else memory_gib
                    line(axis, provider, [(x, value(one[shape])) for x, shape in enumerate(shapes) if shape in one])
                axis.set_xticks(range(len(shapes)), [short([s[k] for k in along]) for s in shapes], fontsize=8)
                axis.tick_params(axis="y", labelsize=8)
            time_axis.set_title(op, fontweight="bold")
            time_axis.set_xticklabels([])
            time_axis.tick_params(axis="x", length=0)
            times_axis(time_axis, OFF_SCALE, "floor")
            memory_axis.set_ylim(bottom=0)
            memory_axis.set_xlabel("×".join(dims_of(op, len(shapes[0]))[k] for k in along), fontsize=9)
            if i % columns:
                time_axis.set_yticklabels([])
            else:
                time_axis.set_ylabel(OVER_FLOOR, fontsize=9)
                memory_axis.set_ylabel("peak GiB", fontsize=9)
        for i in range(len(ops), bands * columns):
            for axis in (axes[2 * (i // columns)][i % columns], axes[2 * (i // columns) + 1][i % columns]):
                axis.set_axis_off()
    return path


def short(shape: Sequence[int]) -> str:
    return "×".join(f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in shape)


def memory_gib(record: Record) -> float:
    return record["median"] / 1024


def dims_of(op: str, count: int) -> Sequence[str]:
    known = discover().get(op)
    return known.dims if known else [f"dim {i}" for i in range(count)]


def swept_ops(memory: Sequence[Record]) -> list[str]:
    """Ops measured over a grid of tokens and classes, with the size of their gradients in the record."""
    grids: dict[str, set] = {}
    for r in memory:
        if "least" in r:
            grids.setdefault(r["op"], set()).add((r["shape"][0], r["shape"][-1]))
    return [op for op, at in grids.items() if all(len({p[axis] for p in at}) > 2 for axis in (0, 1))]


def draw_sweep(op: str, records: Sequence[Record], path: Path) -> Path:
    """One column for each number of classes: time and memory by the number of tokens."""
    full = [r for r in records if r.get("op") == op and r.get("pass") == "full" and "median" in r]
    times, memory = ([r for r in full if r["kind"] == kind] for kind in ("time", "memory"))
    classes, providers = sorted({r["shape"][-1] for r in times}), ours_first(times)
    high = 5.3
    title = f"{machine_name(records)}: {op}, {PASSES['full']} ({LOWER}; beyond {high:.0f}× not shown)"
    rows = ((times, "floor", "time over the GEMMs", "GEMMs"),
            (memory, "least", "peak memory over the gradients", "gradients"))  # fmt: skip
    with figure_of(path, title, 2, len(classes), 6.2, providers, "-", sharex=True, sharey="row") as (figure, axes):
        for axis_row, (found, unit, label, one) in zip(axes, rows):
            for axis, n in zip(axis_row, classes):
                for provider in reversed(providers):
                    line(axis, provider, sorted((r["shape"][0], r["median"] / r[unit]) for r in found
                                                if (r["provider"], r["shape"][-1]) == (provider, n)))  # fmt: skip
                tokens = sorted({r["shape"][0] for r in found})
                axis.set_xscale("log", base=2)
                axis.set_xticks(tokens, [short([t]) for t in tokens])
                axis.set_xticks([], minor=True)
                times_axis(axis, high, one)
            axis_row[0].set_ylabel(label)
        for axis, n in zip(axes[0], classes):
            axis.set_title(f"{short([n])} classes")
        for axis in axes[1]:
            axis.set_xlabel("tokens")
    return path


# ---- A grid of sizes: a heat map


def draw_heat_map(records: Sequence[Record], stem: Path) -> Path:
    """Share of the copy ceiling that ours (else the last provider) reaches: one panel for each op and dtype."""
    times = [r for r in records if r["kind"] == "time" and r.get("bytes", True)]
    there = {r["provider"] for r in times}
    provider = "ours" if "ours" in there else max(there, key=PROVIDERS.index)
    mine = [r for r in times if r["provider"] == provider]
    groups = list(dict.fromkeys((r["op"], r["dtype"]) for r in mine))
    columns = min(4, len(groups))
    path = stem.with_name(f"{stem.name}-bandwidth.png")
    several = len({dtype for _, dtype in groups}) > 1
    dtypes = "" if several else f", {groups[0][1]}"
    title = f"{machine_name(records)}: {provider}, % of copy bandwidth, {PASSES['full']}{dtypes} ({HIGHER})"
    bands = -(-len(groups) // columns)
    with figure_of(path, title, bands, columns, 0.3 + 2.7 * bands) as (figure, axes):
        for axis, (op, dtype) in zip(axes.flat, groups):
            found = [r for r in mine if (r["op"], r["dtype"]) == (op, dtype)]
            last = max((r["pass"] for r in found), key=list(PASSES).index)
            heat_panel(axis, [r for r in found if r["pass"] == last])
            axis.set_title(f"{op} {dtype}" if several else op, fontweight="bold")
        for axis in list(axes.flat)[len(groups) :]:
            axis.set_axis_off()
        figure.supxlabel(f"rows: tokens; columns: width. Bold: moves more than {GRID_BYTES >> 20} MiB; "
                         "below that, launches and caches decide.", fontsize=9)  # fmt: skip
    return path


def heat_panel(axis: Any, records: Sequence[Record]) -> None:
    def place(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        split = 1 if len(shape) == 2 else 2
        return tuple(shape[:split]), tuple(shape[split:])

    found = {place(r["shape"]): r for r in records}
    ys, xs = (sorted({at[i] for at in found}) for i in (0, 1))
    share = {at: 100 * r["floor"] / r["median"] for at, r in found.items()}
    axis.imshow([[share.get((y, x), math.nan) for x in xs] for y in ys], cmap="YlGn", vmin=0, vmax=130, aspect="auto")
    for (y, x), percent in share.items():
        small = (found[y, x].get("bytes") or math.inf) <= GRID_BYTES
        axis.text(xs.index(x), ys.index(y), f"{percent:.0f}", ha="center", va="center", fontsize=8,
                  color="white" if percent > 85 else "black", fontweight="normal" if small else "bold")  # fmt: skip
    axis.set_xticks(range(len(xs)), map(size, xs), rotation=35, ha="right", rotation_mode="anchor", fontsize=8)
    axis.set_yticks(range(len(ys)), map(size, ys), fontsize=8)
    axis.tick_params(length=0)
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)


def draw(records: Sequence[Record], stem: Path) -> tuple[list[Path], str]:
    """The pictures of a run, or one sentence on why there are none."""
    times = [r for r in records if r["kind"] == "time"]
    if not ours_first(times):
        return [], "No plots: nothing but GEMMs was timed by size."
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return [], "No plots: matplotlib is not installed."
    swept = swept_ops([r for r in records if r["kind"] == "memory"])
    names = {op: f"{stem.name}-{op}" if len(swept) > 1 else stem.name for op in swept}
    plots = [draw_sweep(op, records, stem.with_name(f"{names[op]}-time-memory.png")) for op in swept]
    rest = [r for r in records if r.get("op") not in swept]
    times = [r for r in rest if r["kind"] == "time"]
    suite = records[0].get("suite")
    if not times:
        return plots, ""
    if suite == "paper":
        chosen = draw_lines
    elif suite == "full" and len({tuple(r["shape"]) for r in times}) > GRID_SHAPES:
        chosen = draw_heat_map
    else:
        chosen = draw_bars if len({r["op"] for r in times}) == 1 else draw_dots
    return [*plots, chosen(rest, stem)], ""
