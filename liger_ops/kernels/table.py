"""Tables that declare the variants of kernels.

A kernel file ends with a table: its runtime arguments, its named axes (dtypes, options) and its configs (tile shapes).
The ahead-of-time build, the JIT, the C++ argument structs and the documentation are derived from that table. A variant
is one point of axes x configs.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from .hopper import Assembly

# Bytes of each argument type in the parameter buffer. A map is a tensor map for the copy engine. It is aligned to half
# its size; other types are aligned to their size.
SCALAR_BYTES = {"i32": 4, "i64": 8, "fp32": 4, "map": 128}
POINTER_BYTES = 8

# An aligned config assumes 16-byte aligned pointers, and integers that are multiples of 8: every 16-byte access to a
# row of 2-byte elements is then aligned.
POINTER_ALIGNMENT = 16
INTEGER_ALIGNMENT = 8

# The same on every architecture since 8.0.
REGISTERS_PER_SM = 65536

# Mixed precision means parameters of higher precision than the activations, never the reverse.
ACTIVATION_WEIGHT_DTYPES = (
    {"X": "bf16", "W": "bf16"},
    {"X": "bf16", "W": "fp32"},
    {"X": "fp16", "W": "fp16"},
    {"X": "fp16", "W": "fp32"},
    {"X": "fp32", "W": "fp32"},
)
# Mixed precision uses only the configs with these max_n.
MIXED_WIDTHS = (128, 512, 1024, 2048, 4096, 8192, 16384, None)
# Restrict a config to 16-bit (HALVES) or 32-bit (FLOATS) rows.
HALVES = {"X": ("fp16", "bf16")}
FLOATS = {"X": ("fp32",)}


def is_rare(choices: Mapping[str, Any]) -> bool:
    """Parameters or logits wider than the activations, or a loss with extras. Rare choices have fewer configs."""
    return bool(choices.get("EXTRAS")) or len({choices[letter] for letter in "XWL" if letter in choices}) > 1


@dataclass(frozen=True)
class Config:
    """One launch shape. A call uses the first config of its kernel that admits it."""

    max_n: int | None  # widest row it takes; None: any
    aligned: bool  # needs the alignment above
    num_warps: int
    programs_per_sm: int = 0  # programs that must fit on one multiprocessor: limits registers; 0: no limit
    constexprs: Mapping[str, int] = field(default_factory=dict)
    common_only: bool = False  # not used or compiled for rare choices
    max_rows: int | None = None  # most rows that it takes; None: any number
    # Axis letter or option -> choices that it serves. It is not used or compiled for others.
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def serves(self, choices: Mapping[str, Any]) -> bool:
        return not (self.common_only and is_rare(choices)) and all(choices[k] in v for k, v in self.only.items())

    def admits(self, n: int, aligned: bool, choices: Mapping[str, Any], rows: int | None = None) -> bool:
        """rows: None means many."""
        fits = (self.max_n is None or n <= self.max_n) and (aligned or not self.aligned) and self.serves(choices)
        return fits and (self.max_rows is None or (rows is not None and rows <= self.max_rows))

    def shadows(self, other: Config, choices: Mapping[str, Any]) -> bool:
        """Whether this config, if it comes first, takes all calls that the other would admit."""
        wide = self.max_n is None or (other.max_n is not None and self.max_n >= other.max_n)
        long = self.max_rows is None or (other.max_rows is not None and self.max_rows >= other.max_rows)
        return wide and long and (other.aligned or not self.aligned) and self.serves(choices)


def fewer_when_mixed(configs: Sequence[Config]) -> list[Config]:
    """These configs, restricted for wider parameters to those with MIXED_WIDTHS."""
    return [
        replace(c, common_only=c.common_only or c.max_n not in MIXED_WIDTHS or c.max_rows is not None) for c in configs
    ]


@dataclass(frozen=True)
class Variant:
    """One compiled kernel: the choice made on every axis, and the config."""

    kernel: Kernel
    index: int
    choices: Mapping[str, Any]
    config: Config

    @property
    def name(self) -> str:
        choices = ",".join(f"{k}={v}" for k, v in self.choices.items())
        width = "n" if self.config.max_n is None else f"n<={self.config.max_n}"
        width += "" if self.config.max_rows is None else f",rows<={self.config.max_rows}"
        return f"{self.kernel.name}[{choices},{width},{'aligned' if self.config.aligned else 'any'}]"

    @property
    def signature(self) -> dict[str, str]:
        types = {a: self.choices[t[1:]] if t[1:] in self.choices else t[1:] for a, t in self.kernel.args.items()}
        signature = {a: ("*" + types[a] if t[0] == "*" else t) for a, t in self.kernel.args.items()}
        return signature | dict.fromkeys(self.constexprs, "constexpr")

    @property
    def constexprs(self) -> dict[str, Any]:
        options = {k: v for k, v in self.choices.items() if not isinstance(v, str)}
        return {**options, **self.config.constexprs}

    @property
    def max_registers(self) -> int | None:
        """Registers per thread that let programs_per_sm programs be resident, in the hardware's steps of 8."""
        if not self.config.programs_per_sm:
            return None
        return min(255, REGISTERS_PER_SM // (32 * self.config.num_warps * self.config.programs_per_sm) // 8 * 8)

    @property
    def divisibility(self) -> dict[str, int]:
        if not self.config.aligned:
            return {}
        width = {True: POINTER_ALIGNMENT, False: INTEGER_ALIGNMENT}
        return {a: width[self.kernel.args[a][0] == "*"] for a in self.kernel.aligned}


@dataclass(frozen=True)
class Kernel:
    """A @triton.jit function, or an Assembly, with the grid of variants it is compiled for."""

    function: Any
    args: Mapping[str, str]  # name -> "*X" (pointer, dtype of axis letter X), "*fp32", "i32", "i64", "fp32", "map"
    aligned: Sequence[str]  # arguments that an aligned config assumes divisible
    axes: Mapping[str, Sequence[Mapping[str, Any]]]
    configs: Sequence[Config]
    # Supported compute capabilities; empty: all. A @triton.jit function that supports one is lowered for it, with its
    # own instructions.
    archs: Sequence[int] = ()
    suffix: str = ""  # of the name, if several kernels share a function

    def __post_init__(self) -> None:
        expected = [*self.args, *self.variant(0).constexprs]
        if sorted(self.function.arg_names) != sorted(expected) or self.function.arg_names[: len(self.args)] != [
            *self.args
        ]:
            raise ValueError(f"{self.name}: the table declares {expected}, the kernel takes {self.function.arg_names}")

    @property
    def symbol(self) -> str:
        return self.function.fn.__name__

    @property
    def name(self) -> str:
        return self.symbol.removesuffix("_kernel") + self.suffix

    @property
    def axis_points(self) -> list[dict[str, Any]]:
        """Every combination of axis values; the last axis varies fastest."""
        return [{k: v for value in point for k, v in value.items()} for point in product(*self.axes.values())]

    @property
    def indices(self) -> int:
        """Number of variant indices. Some have no variant: rare choices skip common_only configs, and a config that is
        shadowed by an earlier one gets no calls."""
        return len(self.axis_points) * len(self.configs)

    def has_variant(self, index: int) -> bool:
        point, config = divmod(index, len(self.configs))
        found, choices = self.configs[config], self.axis_points[point]
        return found.serves(choices) and not any(c.shadows(found, choices) for c in self.configs[:config])

    def variant(self, index: int) -> Variant:
        point, config = divmod(index, len(self.configs))
        return Variant(self, index, self.axis_points[point], self.configs[config])

    def is_for(self, arch: int) -> bool:
        return not self.archs or arch in self.archs

    def variants(self) -> Iterator[Variant]:
        return map(self.variant, filter(self.has_variant, range(self.indices)))

    def pick(self, choices: Mapping[str, Any], n: int, aligned: bool, rows: int | None = None) -> Variant:
        """The first config that admits the call. C++ follows the same rule."""
        point = next(i for i, p in enumerate(self.axis_points) if all(p[k] == v for k, v in choices.items()))
        config = next(i for i, c in enumerate(self.configs) if c.admits(n, aligned, self.axis_points[point], rows))
        return self.variant(point * len(self.configs) + config)

    @property
    def layout(self) -> list[tuple[str, str, int, int]]:
        """(name, type, offset, bytes) of every parameter, with Triton's two hidden scratch pointers last."""
        hidden = (
            [] if isinstance(self.function, Assembly) else [("global_scratch", "*void"), ("profile_scratch", "*void")]
        )
        out, offset = [], 0
        for name, kind in [*self.args.items(), *hidden]:
            size = POINTER_BYTES if kind[0] == "*" else SCALAR_BYTES[kind]
            boundary = size // 2 if kind == "map" else size
            offset = -(-offset // boundary) * boundary
            out.append((name, kind, offset, size))
            offset += size
        return out

    def points(self, config: Config) -> int:
        """Bit mask of the axis points that the config serves."""
        if len(self.axis_points) > 64:
            raise ValueError(f"{self.name}: axes must have at most 64 points (got {len(self.axis_points)})")
        return sum(config.serves(choices) << i for i, choices in enumerate(self.axis_points))

    @property
    def config_format(self) -> str:
        """struct format of the host's Config: bounds, points, alignment, launch shape, constexprs."""
        return f"qqQ?ii{len(self.configs[0].constexprs)}i0q"

    def config_bytes(self, config: Config) -> bytes:
        bounds = [-1 if bound is None else bound for bound in (config.max_n, config.max_rows)]
        numbers = [config.num_warps, config.programs_per_sm, *config.constexprs.values()]
        return struct.pack(self.config_format, *bounds, self.points(config), config.aligned, *numbers)

    @property
    def takes_maps(self) -> bool:
        return "map" in self.args.values()

    @property
    def sources(self) -> list[str]:
        """Source texts of everything that the kernel's code depends on."""
        if isinstance(self.function, Assembly):
            return [self.function.write(self.layout, v.constexprs, v.config.num_warps)[0] for v in self.variants()]
        return reachable_source(self.function)

    @property
    def source_hash(self) -> str:
        """Hash of the kernel's table and of all code that it uses: equal hashes mean equal compiled variants."""
        table = [list(self.args.items()), list(self.aligned), {k: list(map(dict, v)) for k, v in self.axes.items()}]
        configs = [
            (
                c.max_n,
                c.aligned,
                c.num_warps,
                c.programs_per_sm,
                dict(c.constexprs),
                c.common_only,
                c.max_rows,
                dict(c.only),
            )
            for c in self.configs
        ]
        text = "\n".join(self.sources) + self.suffix + json.dumps([table, configs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def reachable_source(function: Any, seen: set[str] | None = None) -> list[str]:
    """Source of a jit function and, recursively, of every jit function, constexpr function and constant it names."""
    seen = set() if seen is None else seen
    seen.add(function.fn.__name__)
    out = [function.src]
    for name in sorted(function.fn.__code__.co_names):
        value = function.fn.__globals__.get(name)
        if hasattr(value, "src") and hasattr(value, "fn"):
            if value.fn.__name__ not in seen:
                out += reachable_source(value, seen)
        elif hasattr(value, "value") and type(value).__name__ == "constexpr":
            out.append(f"{name}={value.value!r}")
    return out
