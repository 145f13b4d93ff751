"""Packed samples in models with convolutions over time.

Several samples in one row of tokens are told apart by positions that restart. transformers gives positions to attention alone:
convolutions and recurrences run across the borders. The patched model derives `seq_idx`, a number for each token that is
the same within a sample, once a forward, and its layers pass it on as a keyword.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import rewrite
from .convolutions import DERIVED, OPERATOR, identify_convolution, looks_convolving, packaged, recurrences_of
from .patched import (
    NotUnderstood,
    Switches,
    give_subclass,
    has_replaced_forward,
    inner_function,
    original_class,
    require_switch,
)
from .recurrences import BORDERS, borders_of, recurrence_of, warn

# As for the masks of attention: with one of these, positions say nothing about samples.
OTHERWISE = ("attention_mask", "cache", "past_key_values", "cache_params", "seq_idx")


# ---- Where the keyword goes


def forward_of(module: nn.Module) -> Any:
    return inner_function(original_class(type(module)).forward)


def arguments_of(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(forward_of(module)).parameters)


def lists_of(module: nn.Module) -> list[nn.ModuleList]:
    return [child for child in module.children() if isinstance(child, nn.ModuleList)]


def runs_layers(module: nn.Module) -> bool:
    """Whether the module embeds tokens and runs layers with convolutions."""
    layers = lists_of(module)
    if not layers or not {"input_ids", "inputs_embeds"} <= set(arguments_of(module)):
        return False
    # One module of each class.
    classes = {type(below): below for found in layers for below in found.modules()}
    return any(map(looks_convolving, classes.values()))


def calls_with_keywords(function: Any) -> Iterator[ast.Call]:
    """The calls that get the function's keywords, or `seq_idx`."""
    found = rewrite.parsed(function)
    keywords = found[1].args.kwarg if found else None
    for node in ast.walk(found[1]) if found else ():
        if isinstance(node, ast.Call):
            for k in node.keywords:
                if k.arg == "seq_idx" or (k.arg is None and keywords and rewrite.is_name(k.value, keywords.arg)):
                    yield node


@functools.lru_cache(None)
def passes_on(function: Any, name: str) -> bool:
    """Whether the function gives its keywords to the call of `name` or ``self.name``; "": to any name, as a variable of a
    loop over layers."""
    called = [call.func for call in calls_with_keywords(function)]
    names = [f.id for f in called if isinstance(f, ast.Name)]
    children = [f.attr for f in called if isinstance(f, ast.Attribute) and rewrite.is_name(f.value, "self")]
    return bool(names) if not name else name in names or name in children


def dropping_class(model: nn.Module, path: str, functions: list[str]) -> str:
    """The class between the model and the convolution at `path` that does not pass keywords on, or ""."""
    module, names = model, path.split(".")
    for child in names:
        below = getattr(module, child)
        name = "" if isinstance(below, nn.ModuleList) else child
        if not isinstance(module, nn.ModuleList) and not passes_on(forward_of(module), name):
            return type(module).__name__
        module = below
    return "" if any(passes_on(forward_of(module), name) for name in functions) else type(module).__name__


class Packing(NamedTuple):
    takes_ends: bool  # whether a recurrence takes `cu_seqlens`
    missing: tuple[str, ...] = ()  # packages of recurrences that run without them
    shares: tuple[str, ...] = ()  # recurrences that carry a state into the next sample even outside of torch.compile

    @property
    def reason(self) -> str:
        """What packed samples share."""
        text = "packed samples share the state of their recurrence"
        if self.missing:
            text += f" without {' and '.join(self.missing)}"
            return text if self.shares else f"under torch.compile, {text}"
        return text if self.shares else ""


def identify_model(model: nn.Module, switches: Switches) -> Packing:
    require_switch(switches, OPERATOR)
    if "position_ids" not in arguments_of(model):
        raise NotUnderstood("its forward takes no position_ids")
    takes_ends = False
    missing: set[str] = set()
    shares: dict[str, None] = {}
    for path, module in model.named_modules():
        if not looks_convolving(module):
            continue
        name = type(module).__name__
        methods = identify_convolution(module, switches).methods
        if has_replaced_forward(module):
            raise NotUnderstood(f"the forward of {name} was replaced")
        if dropping := dropping_class(model, path, list(methods.get("forward", ()))):
            raise NotUnderstood(f"{dropping} passes no keywords on")
        own = {p.package for used in methods.values() for f in used.values() if (p := packaged(f))}
        # With a cache, one step runs in another function.
        recurrences = [*recurrences_of(type(module)).values()]
        called = [(n, f) for used in recurrences for n, f in used.items() if "update" not in n]
        found = [(n, f, p) for n, f in called if (p := packaged(f)) is not None and p.package not in own]
        separating = [p for _, _, p in found if p.installed and {"seq_idx", "cu_seqlens"} & set(p.parameters)]
        takes_ends |= any("cu_seqlens" in p.parameters for p in separating)
        absent = {p.package for _, _, p in found if not p.installed}
        missing |= absent
        forward = forward_of(module)
        alone = [n for n, f, p in found if not p.installed and recurrence_of(f) and passes_on(forward, n)]
        if found and not separating and not alone:
            shares |= dict.fromkeys(n for n, _, p in found if not absent or not p.installed)
    return Packing(takes_ends, tuple(sorted(missing)), tuple(shares))


# ---- What the model's forward adds


def numbers_of(positions: Tensor) -> Tensor:
    """seq_idx: (B, S), from positions: (B, S). A sample begins where a position does not follow the one before."""
    starts = positions[:, 1:] != positions[:, :-1] + 1
    return nn.functional.pad(starts.cumsum(1, dtype=torch.int32), (1, 0))


def ends_of(seq_idx: Tensor) -> Tensor:
    """cu_seqlens: [0, ..., S], of one row. Its length is read from the device, as what takes it does too."""
    (row,) = seq_idx
    inner = (row[1:] != row[:-1]).nonzero().flatten() + 1
    return nn.functional.pad(nn.functional.pad(inner, (1, 0)), (0, 1), value=len(row)).int()


def positions_in(given: dict[str, Any], batch: int, length: int) -> Tensor | None:
    positions = given.get("position_ids")
    if not isinstance(positions, Tensor):
        return None
    # Those of text, before those of images.
    if positions.dim() == 3 and positions.shape[0] == 4:
        positions = positions[0]
    if positions.dim() != 2 or positions.shape[0] not in (1, batch) or positions.shape[1] != length:
        return None
    return positions.expand(batch, -1)


def samples_in(given: dict[str, Any], takes_ends: bool, reads_borders: bool = False) -> dict[str, Any]:
    """The keywords that tell the samples apart, or none. reads_borders: a recurrence without its package needs them."""
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if not isinstance(tokens, Tensor) or tokens.dim() < 2 or any(given.get(name) is not None for name in OTHERWISE):
        return {}
    batch, length = tokens.shape[:2]
    ends, positions = given.get("cu_seq_lens_q"), positions_in(given, batch, length)
    if ends is not None and batch == 1:
        time = torch.arange(length, device=ends.device, dtype=ends.dtype)
        seq_idx = torch.searchsorted(ends, time, out_int32=True, right=True)[None]
    elif positions is not None:
        seq_idx = numbers_of(positions)
        ends = ends_of(seq_idx) if takes_ends and batch == 1 else None
    else:
        return {}
    samples = {"seq_idx": seq_idx, DERIVED: ends if takes_ends else None}
    borders = borders_of(seq_idx) if reads_borders else None
    return samples if borders is None else samples | {BORDERS: borders}


def patch_model(model: nn.Module, found: Packing) -> str:
    names = arguments_of(model)[1:]
    reads, package = bool(found.missing or found.shares), " and ".join(found.missing) or "a package that takes samples"

    def members(cls: Any) -> dict[str, Any]:
        @functools.wraps(cls.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            samples = samples_in(dict(zip(names, args)) | kwargs, found.takes_ends, reads)
            if found.shares and samples:
                compiling = torch.compiler.is_compiling()
                if compiling or (BORDERS in samples and samples[BORDERS].packed):
                    warn(", ".join(found.shares), package, not compiling)
            return cls.forward(self, *args, **kwargs | samples)

        # inspect.unwrap must not go past this function.
        vars(forward).pop("__wrapped__")
        vars(forward)["__signature__"] = inspect.signature(cls.forward)
        return {"forward": forward, "liger_reason": found.reason}

    give_subclass(model, "packing", OPERATOR, found, members)
    return OPERATOR
