"""python -m benchmarks gemm: time the algorithms that cuBLAS proposes for large 16-bit GEMMs, and fit the rates of tiles
for the table in csrc/gemm/plan.cpp.

The GEMMs are those of linear layers x @ w.T: the output, the gradient of x, and the gradient of w, written and
accumulated. The proposals and torch alternate without a pause, so that the GPU is at its power limit, as in training.
Turns are short, so that all run at the same clock. With --sustained they are long, so that the clock settles at the power
of one GEMM. With --fit FILE nothing is measured: the rates are fitted to the records in FILE.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import add_out
from benchmarks.harness import in_turn
from benchmarks.machine import describe, slug
from benchmarks.pages import grid, write_above
from benchmarks.records import read, size

TABLE = Path(__file__).parent.parent / "csrc" / "gemm" / "plan.cpp"
TORCH = "torch"
PROPOSALS, WORKSPACE = 40, 32 << 20
WARM_SECONDS = 2.0
EPILOGUES = (0, 32, 64, 128, 200, 300)


@dataclass(frozen=True)
class Turns:
    rounds: int
    seconds: float
    most: int  # calls per turn
    settling: float  # seconds at the start of a turn that are not measured
    contenders: int  # only the fastest in a first call take turns


SHORT = Turns(rounds=4, seconds=0.01, most=8, settling=0.0, contenders=PROPOSALS)
SUSTAINED = Turns(rounds=2, seconds=0.1, most=10000, settling=0.1, contenders=10)
# (tokens, in, out): heads of language models with chunks of tokens, and layers of MLPs.
LAYERS = [
    *((t, 4096, 128256) for t in (512, 1024, 2048, 4096, 8192)),
    *((t, 3584, 151936) for t in (768, 1024, 1280, 2048, 4096, 8192)),
    *((t, 2048, 128256) for t in (512, 1024, 2048, 4096, 8192)),
    *((t, 4096, 32000) for t in (1024, 4096, 8192)),
    *((t, 3072, 256000) for t in (1024, 2048, 4096)),
    *((t, 8192, 128256) for t in (1024, 2048, 4096)),
    (16384, 4096, 4096), (16384, 4096, 14336), (16384, 14336, 4096), (16384, 3584, 18944), (16384, 18944, 3584),
    (8192, 3072, 24576), (8192, 24576, 3072),
]  # fmt: skip
SUSTAINED_LAYERS = [
    (16384, 4096, 4096), (16384, 4096, 14336), (16384, 14336, 4096), (16384, 3584, 18944), (16384, 18944, 3584),
    (8192, 3072, 24576), (8192, 24576, 3072), (4096, 4096, 128256),
]  # fmt: skip
# Layers with as many outputs are heads. The gradient of their weight is accumulated over chunks of tokens.
HEAD = 32000
ROLES = ("output", "d input", "d weight", "d weight +=")
# Tiles that cuBLAS supports but does not propose: a proposed algorithm, with its tile replaced.
RELATIVES = {
    "256x128/1x2": [(256, n) for n in range(136, 200, 8)],
    "128x256/2x1": [(n, 256) for n in range(136, 200, 8)],
}
# The part of the last wave's idle time that is lost, as in csrc/gemm/plan.cpp.
IDLE_LOST = {False: 1.0, True: 0.5}
# The sustained GEMMs are too few to fit epilogues. Smaller tiles than this overlap their epilogue.
OVERLAPS_BELOW = 128 * 192


@dataclass(frozen=True)
class Tile:
    """A tile of c, columns first, and the cluster of tiles. parts: the number of split-k parts."""

    rows: int
    columns: int
    cluster_rows: int
    cluster_columns: int
    parts: int = 1

    @classmethod
    def of(cls, text: str) -> Tile:
        tile, cluster, *parts = text.split("/")
        return cls(*map(int, tile.split("x")), *map(int, cluster.split("x")), *map(int, parts))

    def __str__(self) -> str:
        parts = f"/{self.parts}" if self.parts > 1 else ""
        return f"{self.rows}x{self.columns}/{self.cluster_rows}x{self.cluster_columns}{parts}"

    def waves(self, m: int, n: int, multiprocessors: int) -> float:
        clusters = -(-m // (self.rows * self.cluster_rows)) * -(-n // (self.columns * self.cluster_columns))
        return clusters / max(1, multiprocessors // (self.cluster_rows * self.cluster_columns))


@dataclass(frozen=True)
class Gemm:
    """c (m x n) = op(a) op(b), column-major."""

    role: str
    layer: tuple[int, int, int]

    @property
    def transposed(self) -> tuple[bool, bool]:
        return {"output": (True, False), "d input": (False, False)}.get(self.role, (False, True))

    @property
    def sizes(self) -> tuple[int, int, int]:
        tokens, inner, outer = self.layer
        return {"output": (outer, tokens, inner), "d input": (inner, tokens, outer)}.get(
            self.role, (inner, outer, tokens)
        )

    def operands(self, x: torch.Tensor, w: torch.Tensor, d: torch.Tensor, out: Sequence[torch.Tensor]) -> Any:
        """(a, b, c, beta, the same GEMM by torch)"""
        y, dx, dw = out
        if self.role == "output":
            return w, x, y, 0.0, lambda: torch.mm(x, w.t(), out=y)
        if self.role == "d input":
            return w, d, dx, 0.0, lambda: torch.mm(d, w, out=dx)
        if self.role == "d weight":
            return x, d, dw, 0.0, lambda: torch.mm(d.t(), x, out=dw)
        return x, d, dw, 1.0, lambda: dw.addmm_(d.t(), x)


# ---- cuBLAS


class Algorithm(ctypes.Structure):
    _fields_ = [("opaque", c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    _fields_ = [
        ("algorithm", Algorithm), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("reserved", c_int * 4),
    ]  # fmt: skip


COMPUTE_F32, F32, BF16 = 68, 0, 14
TRANSPOSE_A, WORKSPACE_LIMIT = 3, 1
TILE, PARTS, CLUSTER = 1, 2, 8


@dataclass
class Cublas:
    """The cuBLASLt that torch has loaded. tiles, clusters: (rows, columns) by their number in its header."""

    library: ctypes.CDLL
    tiles: dict[int, tuple[int, int]]
    clusters: dict[int, tuple[int, int]]
    handle: c_void_p = field(default_factory=c_void_p)

    def __post_init__(self) -> None:
        self.call("cublasLtCreate", byref(self.handle))

    def call(self, name: str, *args: Any) -> None:
        status = getattr(self.library, name)(*args)
        if status:
            raise RuntimeError(f"{name}: status {status}")

    def describe(self, gemm: Gemm) -> tuple[c_void_p, list[c_void_p]]:
        (m, n, k), transposed = gemm.sizes, gemm.transposed
        operation, layouts = c_void_p(), []
        self.call("cublasLtMatmulDescCreate", byref(operation), COMPUTE_F32, F32)
        for i, flag in enumerate(transposed):
            self.call("cublasLtMatmulDescSetAttribute", operation, TRANSPOSE_A + i, byref(c_int(flag)), c_size_t(4))
        shapes = [(k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n), (m, n)]
        for rows, columns in shapes:
            layouts.append(c_void_p())
            create = "cublasLtMatrixLayoutCreate"
            self.call(create, byref(layouts[-1]), BF16, c_uint64(rows), c_uint64(columns), c_int64(rows))
        return operation, layouts

    def proposals(self, operation: c_void_p, layouts: Sequence[c_void_p]) -> list[Heuristic]:
        preference, found, count = c_void_p(), (Heuristic * PROPOSALS)(), c_int()
        self.call("cublasLtMatmulPreferenceCreate", byref(preference))
        limit = byref(c_size_t(WORKSPACE))
        self.call("cublasLtMatmulPreferenceSetAttribute", preference, WORKSPACE_LIMIT, limit, c_size_t(8))
        for attribute in range(5, 9):
            alignment = byref(c_uint32(256))
            self.call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, alignment, c_size_t(4))
        a, b, c = layouts
        self.call(
            "cublasLtMatmulAlgoGetHeuristic",
            self.handle,
            operation,
            a,
            b,
            c,
            c,
            preference,
            PROPOSALS,
            found,
            byref(count),
        )
        self.call("cublasLtMatmulPreferenceDestroy", preference)
        return list(found)[: count.value]

    def relatives(self, proposal: Heuristic, operation: c_void_p, layouts: Sequence[c_void_p]) -> Iterator[Heuristic]:
        a, b, c = layouts
        for sizes in RELATIVES.get(str(self.tile(proposal.algorithm)), []):
            for number in (n for n, known in self.tiles.items() if known == sizes):
                found = Heuristic()
                algorithm = Algorithm.from_buffer_copy(proposal.algorithm)
                tile = byref(c_int(number))
                self.call("cublasLtMatmulAlgoConfigSetAttribute", byref(algorithm), TILE, tile, c_size_t(4))
                status = self.library.cublasLtMatmulAlgoCheck(
                    self.handle, operation, a, b, c, c, byref(algorithm), byref(found)
                )
                if status == 0 and found.state == 0 and found.workspace <= WORKSPACE:
                    found.algorithm = algorithm
                    yield found

    def tile(self, algorithm: Algorithm) -> Tile | None:
        """The tile of an algorithm, or None if the header does not list it."""

        def config(attribute: int, kind: Callable) -> int:
            value, written = kind(), c_size_t()
            name = "cublasLtMatmulAlgoConfigGetAttribute"
            self.call(name, byref(algorithm), attribute, byref(value), c_size_t(ctypes.sizeof(kind)), byref(written))
            return value.value

        tile, cluster = self.tiles.get(config(TILE, c_int)), self.clusters.get(config(CLUSTER, c_uint16))
        return Tile(*tile, *cluster, max(1, config(PARTS, c_int))) if tile and cluster else None

    def runner(self, gemm: Gemm, proposal: Heuristic, described: Any, workspace: torch.Tensor) -> Callable:
        operation, (a, b, c) = described
        stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
        one = c_float(1)

        def run(at_a: torch.Tensor, at_b: torch.Tensor, at_c: torch.Tensor, beta: float) -> None:
            into = c_void_p(at_c.data_ptr())
            self.call(
                "cublasLtMatmul", self.handle, operation, byref(one), c_void_p(at_a.data_ptr()), a,
                c_void_p(at_b.data_ptr()), b, byref(c_float(beta)), into, c, into, c, byref(proposal.algorithm),
                c_void_p(workspace.data_ptr()), c_size_t(WORKSPACE), c_void_p(stream),
            )  # fmt: skip

        return run


def numbers_of(header: str, kind: str) -> dict[int, tuple[int, int]]:
    found = re.findall(rf"CUBLASLT_{kind}_(\d+)x(\d+)\w*\s*=\s*(\d+)", header)
    return {int(number): (int(rows), int(columns)) for rows, columns, number in found}


def load() -> Cublas:
    torch.zeros(1, device="cuda") @ torch.zeros(1, device="cuda")
    (path,) = {line.split()[-1] for line in open("/proc/self/maps") if "libcublasLt.so" in line}
    header = next(iter(Path(path).parents[1].glob("include/cublasLt.h")), None)
    if header is None:
        raise SystemExit(f"gemm: no include/cublasLt.h next to {path}")
    text = header.read_text()
    return Cublas(ctypes.CDLL(path), numbers_of(text, "MATMUL_TILE"), numbers_of(text, "CLUSTER_SHAPE"))


# ---- Measuring


def in_turns(
    ways: dict[str, Callable[[], None]], clock: Callable[[Callable, int], Callable[[], float]], turns: Turns = SHORT
) -> dict[str, float]:
    """Median milliseconds of each way. clock(way, calls) runs it and returns a function that gives the time of one call."""
    for way in ways.values():
        way()  # the first call loads the kernel
    looks = {name: clock(way, 1) for name, way in ways.items()}
    first = {name: max(look(), 1e-3) for name, look in looks.items()}
    names = sorted(first, key=lambda name: (name != TORCH, first[name]))[: turns.contenders + 1]
    times = defaultdict(list)
    for turn in range(turns.rounds):
        for name in in_turn(names, turn):
            for _ in range(int(turns.settling * 1e3 / first[name])):
                ways[name]()
            calls = max(2, min(turns.most, int(turns.seconds * 1e3 / first[name])))
            times[name].append(clock(ways[name], calls))
    return {name: statistics.median(time() for time in taken) for name, taken in times.items()}


def cuda_clock(way: Callable[[], None], calls: int) -> Callable[[], float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        way()
    end.record()
    return lambda: (end.synchronize(), start.elapsed_time(end) / calls)[1]


def measure(
    cublas: Cublas, layers: Sequence[tuple[int, int, int]], device: str, clock: Callable, turns: Turns = SHORT
) -> Iterator[dict[str, Any]]:
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
    for layer in layers:
        tokens, inner, outer = layer
        make = {"dtype": torch.bfloat16, "device": device}
        x, w = torch.randn(tokens, inner, **make), torch.randn(outer, inner, **make) * inner**-0.5
        d, out = torch.randn(tokens, outer, **make) / tokens, [torch.zeros_like(t) for t in (x, w)]
        out.insert(0, torch.zeros_like(d))
        for role in ROLES if turns is SHORT or outer >= HEAD else ROLES[:3]:
            gemm = Gemm(role, layer)
            a, b, c, beta, by_torch = gemm.operands(x, w, d, out)
            described = cublas.describe(gemm)
            ways: dict[str, Callable[[], None]] = {TORCH: by_torch}
            proposals = cublas.proposals(*described)
            relatives = [r for p in proposals for r in cublas.relatives(p, *described)]
            for proposal in proposals + relatives:
                tile = cublas.tile(proposal.algorithm)
                if tile is not None and str(tile) not in ways:
                    run = cublas.runner(gemm, proposal, described, workspace)
                    ways[str(tile)] = lambda run=run: run(a, b, c, beta)
            yield {"kind": "gemm", **asdict(gemm), "ms": in_turns(ways, clock, turns)}


# ---- Fitting


def multiplications(gemm: Gemm) -> int:
    return math.prod(gemm.sizes)


def expected_ms(
    gemm: Gemm, tile: Tile, rate: float, epilogue: int, multiprocessors: int, sustained: bool = False
) -> float:
    """The model of csrc/gemm/plan.cpp. rate: in TFLOP/s."""
    m, n, k = gemm.sizes
    waves = tile.waves(m, n, multiprocessors)
    waves += IDLE_LOST[sustained] * (math.ceil(waves) - waves)
    work = waves * multiprocessors * tile.rows * tile.columns * (k + epilogue)
    return 2 * work / rate / 1e9


def fit(
    records: Sequence[dict[str, Any]], multiprocessors: int, sustained: bool = False
) -> dict[tuple, tuple[float, int, float, int]]:
    """(transposed, tile) -> (rate, epilogue, mean error, measurements)"""
    points = defaultdict(list)
    for record in records:
        gemm = Gemm(record["role"], tuple(record["layer"]))
        for name, ms in record["ms"].items():
            if name != TORCH and (tile := Tile.of(name)).parts == 1:
                points[gemm.transposed, tile].append((gemm, ms))
    found = {}
    for (transposed, tile), measured in points.items():
        overlaps = tile.rows * tile.columns < OVERLAPS_BELOW
        for epilogue in (0 if overlaps else 160,) if sustained else EPILOGUES:
            rates = [expected_ms(p, tile, 1.0, epilogue, multiprocessors, sustained) / ms for p, ms in measured]
            rate = statistics.median(rates)
            error = statistics.mean(abs(math.log(r / rate)) for r in rates)
            if (transposed, tile) not in found or error < found[transposed, tile][2]:
                found[transposed, tile] = (rate, epilogue, error, len(measured))
    return found


def table(sustained: bool = False) -> dict[tuple, tuple[int, int]]:
    """(transposed, tile) -> (rate, epilogue), read from the library's source."""
    rows = re.findall(r"^ +\{(true|false), (true|false), \d+, \d+, ([\d, ]+)\},$", TABLE.read_text(), re.MULTILINE)
    out = {}
    for a, b, numbers in rows:
        *tile, rate, epilogue, sustained_rate, sustained_epilogue = list(map(int, numbers.split(", ")))[:8]
        known = (sustained_rate, sustained_epilogue) if sustained else (rate, epilogue)
        if known[0]:
            out[(a == "true", b == "true"), Tile(*tile)] = known
    return out


def choice(
    gemm: Gemm, proposed: Sequence[str], rates: dict[tuple, tuple], multiprocessors: int, sustained: bool = False
) -> str:
    """The tile that the library chooses."""
    times = {}
    for name in proposed:
        if name != TORCH and (known := rates.get((gemm.transposed, Tile.of(name)))):
            times[name] = expected_ms(gemm, Tile.of(name), *known, multiprocessors, sustained)
    return min(times, key=times.__getitem__) if times else TORCH


def page(records: Sequence[dict[str, Any]]) -> str:
    machine, *gemms = records
    sustained = machine.get("sustained", False)
    rates, rows, gains = table(sustained), [], defaultdict(list)
    for record in gemms:
        gemm, ms = Gemm(record["role"], tuple(record["layer"])), record["ms"]
        chosen = choice(gemm, list(ms), rates, machine["multiprocessors"], sustained)
        best = min(ms, key=ms.__getitem__)
        gains[gemm.role].append(ms[TORCH] / ms[chosen])
        rate = 2 * multiplications(gemm) / ms[chosen] / 1e9
        rows.append([
            gemm.role, size(gemm.layer), f"{ms[TORCH]:.3f}", f"{ms[chosen]:.3f}", chosen,
            f"{ms[TORCH] / ms[chosen]:.2f}", f"{ms[best]:.3f}", best, f"{rate:.0f}",
        ])  # fmt: skip
    header = [
        "GEMM", "tokens×in×out", "torch, ms", "ours, ms", "tile/cluster", "faster by", "fastest, ms", "its tile",
        "TFLOP/s",
    ]  # fmt: skip
    summary = [
        [role, len(g), f"{statistics.mean(g):.3f}", f"{min(g):.3f}", f"{max(g):.3f}"] for role, g in gains.items()
    ]
    return "\n".join([
        f"# {machine.get('gpu', 'stub')}: large GEMMs in bf16{', sustained' * sustained}", "",
        ", ".join(f"{k} {v}" for k, v in machine.items() if k not in ("kind", "device")), "",
        "GEMMs of linear layers by cuBLAS, in three tiles: the tile that torch gets, the tile that the table in "
        "csrc/gemm/plan.cpp chooses (ours), and the fastest tile measured. Medians of turns without a pause between them"
        + (f", each {SUSTAINED.seconds} s long after {SUSTAINED.settling} s for the clock to settle." if sustained else "."), "",
        grid(["GEMM", "measured", "faster by, mean", "least", "most"], [[str(c) for c in row] for row in summary]), "",
        grid(header, rows), "",
    ])  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gemm", description=__doc__.split("\n\n")[0])
    layer = lambda text: tuple(map(int, text.replace("×", "x").split("x")))  # noqa: E731
    parser.add_argument("--layers", nargs="*", type=layer, metavar="TOKENSxINxOUT")
    parser.add_argument("--sustained", action="store_true", help="long turns, for layers in training")
    add_out(parser)
    parser.add_argument("--fit", type=Path, metavar="FILE", help="records of an earlier run")
    args = parser.parse_args(argv)
    if args.fit is None and not torch.cuda.is_available():
        parser.error("measuring needs a CUDA device, but torch sees none (--fit FILE needs none)")
    path = args.fit
    if path is None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        path = args.out / f"{slug('cuda')}-gemm{'-sustained' * args.sustained}.jsonl"
        args.out.mkdir(parents=True, exist_ok=True)
        warm = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
        for _ in range(int(WARM_SECONDS * 700)):
            warm @ warm
        del warm
        with open(path, "w") as lines:
            record = describe("cuda") | {"multiprocessors": properties.multi_processor_count}
            record |= {"sustained": True} if args.sustained else {}
            layers, turns = (SUSTAINED_LAYERS, SUSTAINED) if args.sustained else (LAYERS, SHORT)
            print(json.dumps(record), file=lines)
            for record in measure(load(), args.layers or layers, "cuda", cuda_clock, turns):
                print(json.dumps(record), file=lines, flush=True)
                best = min(record["ms"], key=record["ms"].__getitem__)
                times = f"torch {record['ms'][TORCH]:.3f} ms, {best} {record['ms'][best]:.3f}"
                print(f"{record['role']} {size(record['layer'])}: {times}")
    records = read(path)
    text = page(records)
    write_above(path.with_suffix(".md"), text)
    print(text)
    found = fit(records[1:], records[0]["multiprocessors"], records[0].get("sustained", False))
    print("transpose a, b · tile/cluster · TFLOP/s · epilogue · mean error · measurements")
    for (transposed, tile), (rate, epilogue, error, count) in sorted(
        found.items(), key=lambda kv: (kv[0][0], -kv[1][0])
    ):
        print(f"{transposed} · {tile} · {rate:.0f} · {epilogue} · {error:.1%} · {count}")
    return 0
