"""Compares every operator, forward and backward, with its formula in fp64 on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import liger_ops

from .._accuracy import gradients, judged, like, noise_of, roundings
from ..reference import Operator, operators
from ..reference._calls import calls

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of calls with other options. fp16 differs from bf16 in casts alone.
FEWER = DTYPES[:2]


@dataclass
class Checked:
    operator: str
    device: str
    path: str = ""  # which code ran: aot, jit, ptx, cpu or reference
    results: int = 0
    seconds: float = 0.0
    # The largest error, as a part of the error allowed for that result.
    error: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"right": self.right}


def flat(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a call; those of a list have names such as "a[0]"."""
    found = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    for name, value in arguments.items():
        if isinstance(value, list):
            found |= {f"{name}[{i}]": t for i, t in enumerate(value) if isinstance(t, Tensor)}
    return found


def with_tensors(arguments: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments of a call, with these tensors in place of its own."""
    given = {k: list(v) if isinstance(v, list) else v for k, v in arguments.items()}
    for place, t in tensors.items():
        name, _, index = place.rstrip("]").partition("[")
        if index:
            given[name][int(index)] = t
        else:
            given[name] = t
    return given


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    if t.is_complex():
        return t.to(torch.complex64)
    moved = t.detach().to(dtype) if t.is_floating_point() else t
    return moved.requires_grad_(t.requires_grad)


class Comparison:
    """One call, of the operator and of its formula."""

    def __init__(self, operator: Operator, arguments: dict[str, Any], dtype: torch.dtype, device: str) -> None:
        self.operator, self.arguments = operator, arguments
        tensors = {name: cast(t, dtype).to(device) for name, t in flat(arguments).items()}
        self.names = list(tensors)
        self.tensors = [t.detach().requires_grad_(t.requires_grad) for t in tensors.values()]
        self.dtype = dtype

    def function(self, of: Callable) -> Callable[..., tuple[Tensor, ...]]:
        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            named = dict(zip(self.names, tensors))
            if self.operator.__name__.endswith("_"):  # must not overwrite a leaf
                named[self.names[0]] = named[self.names[0]] * 1
            result = of(**with_tensors(self.arguments, named))
            return tuple(result) if isinstance(result, tuple) else (result,)

        return call

    def result_name(self, i: int, count: int) -> str:
        if i < count:
            fields = getattr(self.operator.result, "_fields", None)
            return fields[i] if fields else "result" if count == 1 else f"result {i}"
        wanted = [name for name, t in zip(self.names, self.tensors) if t.requires_grad]
        return f"gradient of {wanted[i - count]}"

    def run(self) -> Iterator[tuple[str, float, str]]:
        """Of each result and gradient: its name, its error as a part of the error allowed, and what is wrong with it."""
        exact = self.function(self.operator.reference)
        doubles = [like(t, torch.float64) for t in self.tensors]
        generator = torch.Generator().manual_seed(1)
        upstream = [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.device) for o in exact(*doubles)
        ]
        count = len(upstream)
        ours = gradients(self.function(getattr(torch.ops.liger, self.operator.__name__)), self.tensors, upstream)
        eager, oracle = gradients(exact, self.tensors, upstream), gradients(exact, doubles, upstream)
        # A low-rank addend is rounded before the logits are; the formula rounds the other summand.
        precision = self.dtype if any("low_rank" in name for name in self.names) else None
        bounds = roundings(exact, self.tensors, upstream, oracle, precision)
        scale = max((float(g.abs().max()) for g in upstream if g.numel()), default=0.0)
        for i, (a, b, truth) in enumerate(zip(ours, eager, oracle)):
            error, wrong = 0.0, difference(a, b, truth)
            if not wrong and a.is_floating_point():
                a, b, truth = (t.nan_to_num() for t in (a, b, truth))
                noise = noise_of(self.operator.__name__, a.device.type)
                found, allowed = judged(a, b, truth, scale if i >= count else 0.0, noise, bounds=(bounds, i))
                error = found / allowed
                wrong = f"error {found:.3g}, allowed {allowed:.3g}" if error > 1 else ""
            yield self.result_name(i, count), error, wrong


def difference(ours: Tensor, eager: Tensor, oracle: Tensor) -> str:
    """What makes results incomparable; empty if nothing does."""
    if ours.shape != oracle.shape:
        return f"shape {tuple(ours.shape)}, expected {tuple(oracle.shape)}"
    if ours.dtype != eager.dtype:
        return f"dtype {ours.dtype}, expected {eager.dtype}"
    if not ours.is_floating_point():
        wrong = int((ours != oracle).sum())
        return f"{wrong} of {ours.numel()} elements differ" if wrong else ""
    wrong = int((ours.isfinite() != oracle.isfinite()).sum() + (ours.isnan() != oracle.isnan()).sum())
    return f"{wrong} elements are NaN or infinite, or should be" if wrong else ""


def path_taken() -> str:
    """Of the calls since the counts were reset."""
    used = sorted(path for path, count in liger_ops.launch_counts().items() if count)
    return "+".join(used) or ("torch" if liger_ops._loaded.library else "reference")


def check(operator: Operator, device: str) -> Checked:
    found, start = Checked(operator.__name__, device), time.perf_counter()
    liger_ops.reset_launch_counts()
    for call in calls(operator):
        for dtype in FEWER if call.text else DTYPES:
            what = ", ".join(filter(None, [str(dtype).removeprefix("torch."), call.text]))
            try:
                for name, error, wrong in Comparison(operator, call.arguments, dtype, device).run():
                    found.results += 1
                    found.error = max(found.error, error)
                    if wrong:
                        found.failures.append(f"{name} ({what}): {wrong}")
            except Exception as error:
                found.failures.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}")
    found.path, found.seconds = path_taken(), time.perf_counter() - start
    return found


def public_operators() -> list[Operator]:
    return [operator for operator in operators().values() if not operator.alias_of]


def check_all(device: str, progress: Callable[[str], None]) -> list[Checked]:
    chosen = public_operators()
    found = []
    for i, operator in enumerate(chosen):
        progress(f"{device}: {operator.__name__} ({i + 1} of {len(chosen)})")
        found.append(check(operator, device))
    return found
