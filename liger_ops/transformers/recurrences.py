"""Recurrences of transformers that run without their package: they carry the state of a packed sample into the next.

Called for each sample alone, they begin each with a state of zeros. This needs the borders of the samples on the host, so the
model reads them once a forward. Where it cannot, as under torch.compile, a warning says that samples share the state.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .patched import inner_function


class Recurrence(NamedTuple):
    parameters: tuple[str, ...]  # the first ones
    over_time: tuple[str, ...]  # those of (batch, tokens, ...), as the result
    states: tuple[str, ...]  # arguments that carry a state in or out


KNOWN = (
    Recurrence(
        ("query", "key", "value", "g", "beta"),
        ("query", "key", "value", "g", "beta"),
        ("initial_state", "output_final_state"),
    ),
    Recurrence(
        ("hidden_states", "dt", "A", "B", "C", "chunk_size"),
        ("hidden_states", "dt", "B", "C"),
        ("initial_states", "return_final_states"),
    ),
)
# The keywords that tell samples apart.
SAMPLES = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")


# The keyword with which a patched model hands them to its layers.
BORDERS = "liger_borders"


class Borders:
    """Where samples begin and end in the tokens of all rows, one row after the other: [0, ..., rows * length]."""

    # No tuple, so that torch.compile guards on no number that it does not read.
    def __init__(self, ends: Sequence[int], rows: int) -> None:
        self.ends = ends
        self.rows = rows
        self.packed = len(ends) > rows + 1


def recurrence_of(function: Any) -> Recurrence | None:
    names = tuple(inspect.signature(inner_function(function)).parameters)
    return next((known for known in KNOWN if names[: len(known.parameters)] == known.parameters), None)


def borders_of(seq_idx: Tensor) -> Borders | None:
    """Read from the device, or None where this is not possible."""
    if torch.compiler.is_compiling() or type(seq_idx) is not Tensor or seq_idx.is_meta:
        return None
    if seq_idx.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    rows, length = seq_idx.shape
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return Borders([*starts.flatten().nonzero().flatten().tolist(), rows * length], rows)


def sample_by_sample(function: Callable, known: Recurrence, borders: Borders, given: dict[str, Any]) -> Any:
    """The function of each sample alone, as one result. given: all arguments by name."""
    rest = {name: value for name, value in given.items() if name not in (*known.over_time, *SAMPLES)}
    # Rows behind each other in time, and a batch of one.
    whole = {name: given[name].flatten(0, 1)[None] for name in known.over_time}
    results = [
        function(**{name: t[:, start:end] for name, t in whole.items()}, **rest)
        for start, end in zip(borders.ends, borders.ends[1:])
    ]
    tensors = [result[0] if isinstance(result, tuple) else result for result in results]
    y = torch.cat(tensors, 1).unflatten(1, (borders.rows, -1))[0]
    return (y, *(None for _ in results[0][1:])) if isinstance(results[0], tuple) else y


def is_set(value: Any) -> bool:
    return value is not None and value is not False


def separated(function: Callable, borders: Borders, args: Any, named: dict[str, Any]) -> Any:
    """The result of a recurrence without a package, or None if it must run on all samples at once."""
    known, names = recurrence_of(function), inspect.signature(inner_function(function)).parameters
    given = dict(zip(names, args)) | named
    if known is None or any(is_set(given.get(name)) for name in known.states):
        return None
    shape = (borders.rows, borders.ends[-1] // borders.rows)
    tensors = [given.get(name) for name in known.over_time]
    if not all(isinstance(t, Tensor) and t.dim() > 2 and t.shape[:2] == shape for t in tensors):
        return None
    return sample_by_sample(function, known, borders, given)


# ---- The warning

# Packages that are called otherwise where they are installed from.
DISTRIBUTIONS = {"fla": "flash-linear-attention"}
_warned: set[str] = set()


@torch.compiler.assume_constant_result
def warn(recurrence: str, package: str, certain: bool) -> bool:
    """Once in a process for each recurrence. torch.compile calls it while it traces."""
    if recurrence not in _warned:
        _warned.add(recurrence)
        compiled = "" if certain else ", compiled,"
        condition = "" if certain else " if positions restart within a row"
        text = f"liger_ops: {recurrence}{compiled} carries the state of a packed sample into the next{condition}"
        remedy = f"install {DISTRIBUTIONS.get(package, package)}, or do not pack samples"
        warnings.warn(f"{text}: {remedy}", RuntimeWarning, stacklevel=2)
    return True
