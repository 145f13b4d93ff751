"""Assembler for kernels written in PTX. They use features of compute capability 9.0 that Triton cannot express.

These features are clusters of programs, copies into the shared memory of both programs of a cluster (multicast), warp
specialisation, and GEMMs whose accumulators stay in registers while other warps multiply. Such a kernel is a Python
function that takes an Assembler and the registers of its arguments. In a table it takes the place of a @triton.jit
function.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ARCH = 90
WARP, WARPGROUP = 32, 128
CLUSTER = 2  # programs that run at the same time and can access each other's shared memory
# Limit of shared memory per program.
SHARED_BYTES = 227 * 1024
# One swizzled row of a 16-bit tile in shared memory; eight rows form a block, the unit that wgmma reads.
ROW_BYTES, BLOCK_BYTES = 128, 1024

TYPES = {"i32": "b32", "i64": "b64", "fp32": "f32"}
PREFIXES = {"pred": "p", "b16": "h", "b32": "r", "b64": "d", "f32": "f"}


@dataclass(frozen=True)
class Assembly:
    """A kernel function that writes PTX: fn(assembler, arguments..., constants...)."""

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
    """Collects the lines of one kernel. It may use any number of virtual registers: ptxas assigns the real ones."""

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
        """A new register with the result of an operation."""
        out = self.new(kind)
        self(f"{operation} {out}, {', '.join(map(str, operands))}")
        return out

    def integer(self, operation: str, *operands: Any) -> str:
        return self.make("b32", operation, *operands)

    def real(self, operation: str, *operands: Any) -> str:
        return self.make("f32", operation, *operands)

    def test(self, comparison: str, *operands: Any) -> str:
        return self.make("pred", f"setp.{comparison}", *operands)

    def label(self, name: str) -> str:
        """A new label. `place` puts it before the next line."""
        self.used["label"] += 1
        return f"{name}_{self.used['label']}"

    def place(self, label: str) -> None:
        self.lines.append(f"{label}:")

    def argument(self, name: str, kind: str) -> str:
        """A register with the value of an argument, or with the address of a tensor map."""
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

    # ---- Program, shared memory, cluster

    def special(self, name: str) -> str:
        return self.integer("mov.u32", f"%{name}")

    def shared(self, size: int) -> str:
        """Address of `size` bytes of shared memory, aligned to BLOCK_BYTES."""
        self.shared_bytes = size + BLOCK_BYTES
        start = self.integer("mov.u32", "memory")
        return self.integer("and.b32", self.integer("add.u32", start, BLOCK_BYTES - 1), -BLOCK_BYTES)

    def cluster_sync(self, converged: bool = True) -> None:
        """converged: all threads of a warp arrive together."""
        for step in ("arrive", "wait"):
            self(f"barrier.cluster.{step}{'.aligned' if converged else ''}")

    # ---- Barriers in shared memory

    def barrier(self, address: str, arrivals: int, when: str = "") -> None:
        self(f"mbarrier.init.shared::cta.b64 [{address}], {arrivals}", when)

    def publish_barriers(self, when: str) -> None:
        self("fence.mbarrier_init.release.cluster", when)
        self("fence.proxy.async", when)

    def wait(self, address: str, parity: str) -> None:
        again, done = self.label("wait"), self.new("pred")
        self.place(again)
        self(f"mbarrier.try_wait.parity.shared::cta.b64 {done}, [{address}], {parity}")
        self(f"bra {again}", f"!{done}")

    def arrive(self, address: str, when: str) -> None:
        self(f"mbarrier.arrive.shared::cta.b64 _, [{address}]", when)

    def arrive_at(self, program: str, address: str, when: str) -> None:
        """Arrives at the barrier of a program of the cluster. Needs no .release.cluster, whose fence would include
        device memory: the data was read only by wgmma instructions, which have completed."""
        there = self.integer("mapa.shared::cluster.u32", address, program)
        self(f"mbarrier.arrive.shared::cluster.b64 _, [{there}]", when)

    def expect(self, address: str, size: int) -> None:
        self(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [{address}], {size}")

    def warpgroup_sync(self, number: str) -> None:
        self(f"bar.sync {number}, {WARPGROUP}")

    # ---- The copy engine

    def fetch(self, to: str, tensor_map: str, barrier: str, column: str, row: str, multicast: bool = False) -> None:
        """Copies a tile into shared memory; multicast: into every program of the cluster, at the same address."""
        form = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        where = f"[{to}], [{tensor_map}, {{{column}, {row}}}], [{barrier}]"
        if multicast:
            self(f"{form}.multicast::cluster {where}, {self.make('b16', 'mov.b16', (1 << CLUSTER) - 1)}")
        else:
            self(f"{form} {where}")

    def put(self, tensor_map: str, at: str, column: str, row: str, when: str) -> None:
        """Copies a tile from shared memory to device memory."""
        self(f"cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [{tensor_map}, {{{column}, {row}}}], [{at}]", when)

    # ---- GEMM

    def operand(self, address: str) -> str:
        """The wgmma descriptor of a tile in shared memory: rows of 128 swizzled bytes, eight rows per block."""
        start = self.make("b64", "cvt.u64.u32", self.integer("shr.u32", address, 4))
        return self.make("b64", "or.b64", start, hex(1 << 16 | (BLOCK_BYTES >> 4) << 32 | 1 << 62))

    def multiply(self, sums: list[str], a: str, b: str) -> None:
        """sums += a @ b.T over 16 columns of a and b. A warpgroup holds 64 rows by 2 * len(sums) columns of sums."""
        shape = f"m64n{2 * len(sums)}k16"
        self(f"wgmma.mma_async.sync.aligned.{shape}.f32.bf16.bf16 {{{', '.join(sums)}}}, {a}, {b}, 1, 1, 1, 0, 0")
