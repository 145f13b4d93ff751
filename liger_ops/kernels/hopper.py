"""A vocabulary for kernels that write PTX themselves: what compute capability 9.0 has and Triton no words for.

Programs in clusters, a copy engine that fills both programs' shared memory at once, warps that each have a part of
their own to play, matrix products whose sums stay in registers while other warps' products run. Such a kernel is a
function of an Assembler and of its arguments' names there; it stands in a table where a @triton.jit function does.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ARCH = 90
WARP, WARPGROUP = 32, 128
CLUSTER = 2  # programs that run at one time and reach each other's memory
# What a program may have of a multiprocessor's memory.
SHARED_BYTES = 227 * 1024
# A row of a tile of 16-bit numbers that the copy engine swizzles; eight rows make up a block that products read.
ROW_BYTES, BLOCK_BYTES = 128, 1024

TYPES = {"i32": "b32", "i64": "b64", "fp32": "f32"}
PREFIXES = {"pred": "p", "b16": "h", "b32": "r", "b64": "d", "f32": "f"}


@dataclass(frozen=True)
class Assembly:
    """The function of a table's kernel that is written in PTX: fn(assembler, arguments..., constants...)."""

    fn: Callable[..., None]

    @property
    def arg_names(self) -> list[str]:
        return list(inspect.signature(self.fn).parameters)[1:]

    def write(
        self, layout: list[tuple[str, str, int, int]], constants: Mapping[str, Any], warps: int
    ) -> tuple[str, int]:
        """(PTX, bytes of shared memory)."""
        assembler = Assembler(self.fn.__name__, layout, warps)
        self.fn(assembler, *[assembler.argument(name, kind) for name, kind, *_ in layout], **constants)
        return assembler.text(), assembler.shared_bytes


class Assembler:
    """Collects the lines of one kernel. Registers are as many as it takes: ptxas assigns them."""

    def __init__(self, symbol: str, layout: list[tuple[str, str, int, int]], warps: int) -> None:
        self.symbol, self.layout, self.threads = symbol, layout, warps * WARP
        self.lines: list[str] = []
        self.used: Counter[str] = Counter()
        self.shared_bytes = 0

    # ---- Lines

    def __call__(self, line: str, when: str = "") -> None:
        self.lines.append(f"\t{f'@{when} ' if when else ''}{line};")

    def new(self, kind: str) -> str:
        self.used[kind] += 1
        return f"%{PREFIXES[kind]}{self.used[kind]}"

    def make(self, kind: str, operation: str, *operands: Any) -> str:
        """A new register with what an operation yields."""
        out = self.new(kind)
        self(f"{operation} {out}, {', '.join(map(str, operands))}")
        return out

    def integer(self, operation: str, *operands: Any) -> str:
        return self.make("b32", operation, *operands)

    def real(self, operation: str, *operands: Any) -> str:
        return self.make("f32", operation, *operands)

    def test(self, comparison: str, *operands: Any) -> str:
        return self.make("pred", f"setp.{comparison}", *operands)

    def mark(self, name: str) -> str:
        """A place to jump to, yet to be set."""
        self.used["mark"] += 1
        return f"{name}_{self.used['mark']}"

    def set(self, mark: str) -> None:
        self.lines.append(f"{mark}:")

    def argument(self, name: str, kind: str) -> str:
        """A register with an argument's value; of a tensor map, its address."""
        if kind == "map":
            address = self.make("b64", "mov.b64", name)
            return self.make("b64", "cvta.param.u64", address)
        width = "b64" if kind[0] == "*" else TYPES[kind]
        value = self.make(width, f"ld.param.{width}", f"[{name}]")
        return self.make("b64", "cvta.to.global.u64", value) if kind[0] == "*" else value

    def text(self) -> str:
        def declare(name: str, kind: str) -> str:
            if kind == "map":
                return f"\t.param .align 64 .b8 {name}[128]"
            return f"\t.param .{'u64' if kind[0] == '*' else TYPES[kind].replace('b', 'u')} {name}"

        parameters = ",\n".join(declare(name, kind) for name, kind, *_ in self.layout)
        registers = [f"\t.reg .{kind} %{letter}<{self.used[kind] + 1}>;" for kind, letter in PREFIXES.items()]
        head = [
            ".version 8.0", f".target sm_{ARCH}a", ".address_size 64",
            ".extern .shared .align 16 .b8 memory[];",
            f".visible .entry {self.symbol}(\n{parameters}\n)",
            f".reqntid {self.threads}, 1, 1", ".minnctapersm 1", ".explicitcluster",
            f".reqnctapercluster {CLUSTER}, 1, 1",
        ]  # fmt: skip
        return "\n".join([*head, "{", *registers, *self.lines, "\tret;", "}", ""])

    # ---- A program, its memory and its cluster

    def special(self, name: str) -> str:
        return self.integer("mov.u32", f"%{name}")

    def shared(self, size: int) -> str:
        """Address of that many bytes, at a block's boundary."""
        self.shared_bytes = size + BLOCK_BYTES
        start = self.integer("mov.u32", "memory")
        return self.integer("and.b32", self.integer("add.u32", start, BLOCK_BYTES - 1), -BLOCK_BYTES)

    def cluster_meets(self, together: bool = True) -> None:
        """together: the threads of a warp come at one time."""
        for step in ("arrive", "wait"):
            self(f"barrier.cluster.{step}{'.aligned' if together else ''}")

    # ---- Barriers in shared memory

    def barrier(self, address: str, arrivals: int, when: str = "") -> None:
        self(f"mbarrier.init.shared::cta.b64 [{address}], {arrivals}", when)

    def barriers_are_set(self, when: str) -> None:
        self("fence.mbarrier_init.release.cluster", when)
        self("fence.proxy.async", when)

    def wait(self, address: str, parity: str) -> None:
        again, done = self.mark("wait"), self.new("pred")
        self.set(again)
        self(f"mbarrier.try_wait.parity.shared::cta.b64 {done}, [{address}], {parity}")
        self(f"bra {again}", f"!{done}")

    def arrive(self, address: str, when: str) -> None:
        self(f"mbarrier.arrive.shared::cta.b64 _, [{address}]", when)

    def arrive_at(self, program: str, address: str, when: str) -> None:
        """At the barrier in the memory of a program of the cluster. Without .release.cluster, whose fence would reach
        as far as device memory: what was read here, products read, and these are through."""
        there = self.integer("mapa.shared::cluster.u32", address, program)
        self(f"mbarrier.arrive.shared::cluster.b64 _, [{there}]", when)

    def expect(self, address: str, size: int) -> None:
        self(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [{address}], {size}")

    def warpgroup_meets(self, number: str) -> None:
        self(f"bar.sync {number}, {WARPGROUP}")

    # ---- The copy engine

    def fetch(self, to: str, tensor_map: str, barrier: str, column: str, row: str, for_all: bool = False) -> None:
        """A tile into shared memory; for_all: into that of each program of the cluster, at the same address."""
        form = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        where = f"[{to}], [{tensor_map}, {{{column}, {row}}}], [{barrier}]"
        if for_all:
            self(f"{form}.multicast::cluster {where}, {self.make('b16', 'mov.b16', (1 << CLUSTER) - 1)}")
        else:
            self(f"{form} {where}")

    def put(self, tensor_map: str, at: str, column: str, row: str, when: str) -> None:
        self(f"cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [{tensor_map}, {{{column}, {row}}}], [{at}]", when)

    # ---- Products

    def operand(self, address: str) -> str:
        """How a product names a tile in shared memory: rows of 128 swizzled bytes, eight to a block."""
        start = self.make("b64", "cvt.u64.u32", self.integer("shr.u32", address, 4))
        return self.make("b64", "or.b64", start, hex(1 << 16 | (BLOCK_BYTES >> 4) << 32 | 1 << 62))

    def multiply(self, sums: list[str], a: str, b: str) -> None:
        """sums (64 rows by 2 * len(sums) columns over a warpgroup) += a @ b.T, over 16 columns of a and b."""
        shape = f"m64n{2 * len(sums)}k16"
        self(f"wgmma.mma_async.sync.aligned.{shape}.f32.bf16.bf16 {{{', '.join(sums)}}}, {a}, {b}, 1, 1, 1, 0, 0")
