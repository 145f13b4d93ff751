"""Identifies the operator that computes the same values as a module or function.

The name of a class proves nothing. The class runs on small random inputs on the CPU, with random parameters. An
operator replaces it only if the operator's formula gives the same values.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .. import functional as F
from ..linear.layers import has_hooks, is_bare_linear
from ..linear.packed import is_linear_4bit
from ..linear.peft import Called, adapted, is_lora, peft_linear
from ..linear.project import project, project_gated, project_one, projected_in_fp8
from . import rewrite
from .patched import (
    Norm,
    NotUnderstood,
    Switches,
    epsilon_of,
    has_replaced_forward,
    inner_function,
    is_distributed,
    original_class,
    require_switch,
)

# Equal formulas differ by fp32 rounding; different formulas differ in the first digits.
TOLERANCE = 1e-4


def agrees(ours: Tensor, theirs: Any, tolerance: float = TOLERANCE) -> bool:
    if not isinstance(theirs, Tensor) or theirs.shape != ours.shape:
        return False
    scale = max(float(theirs.abs().max()), 1e-6)
    return float((ours.double() - theirs.double()).abs().max()) <= tolerance * scale


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random tensor that depends neither on the default device or dtype, nor on the user's seed."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)


def shallow_copy(module: nn.Module, **replaced: Any) -> nn.Module:
    """A copy of `module` that shares every attribute, except the given entries of its __dict__. Calls of the copy run no hooks,
    nor do those of its children, which are such copies too."""
    cls: Any = class_of(module)
    # The __new__ of FSDP's classes would construct and initialise a module.
    copy: nn.Module = object.__new__(class_without_hooks(cls))
    copy.__dict__.update(module.__dict__, **replaced)
    copy.__dict__.pop("forward", None)
    own = module._modules
    copy._modules = {name: unhooked(m) if m is own.get(name) else m for name, m in copy._modules.items()}
    return copy


def unhooked(module: nn.Module | None) -> nn.Module | None:
    # Classes of TorchScript cannot have subclasses.
    return shallow_copy(module) if module is not None and type(type(module)) is type else module


@functools.lru_cache(None)
def class_without_hooks(cls: type) -> Any:
    return type(cls.__name__, (cls,), {"__call__": lambda self, *args, **kwargs: self.forward(*args, **kwargs)})


def class_of(module: nn.Module) -> type[nn.Module]:
    """The module's own class, without the subclasses that a patch and torch's parametrisations make of it."""
    cls = original_class(type(module))
    return cls.__bases__[0] if cls is type(module) and is_parametrized(module) else cls


def described(error: Exception) -> str:
    """The error in a reason: its class, and the first line of its text."""
    text = next(iter(str(error).splitlines()), "")
    return ": ".join(filter(None, (type(error).__name__, textwrap.shorten(text, 120, placeholder=" ..."))))


def only_tensor_argument(function: Callable) -> bool:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return len(parameters) == 1 and parameters[0].kind is parameters[0].POSITIONAL_OR_KEYWORD


# ---- Norms


def norm_formula(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, norm: Norm) -> Tensor:
    x = x.double()
    if norm.op == "layer_norm":
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.double() + norm.offset)
    return y if bias is None else y + bias.double()


def identify_norm(module: nn.Module) -> Norm:
    cls = original_class(type(module))
    if not only_tensor_argument(cls.forward):
        raise NotUnderstood("takes more than one tensor")
    parameters = dict(module.named_parameters(recurse=False))
    others = [*module.children(), *module.buffers(recurse=False)]
    if others or not parameters.keys() <= {"weight", "bias"}:
        raise NotUnderstood("has parameters that no norm has")
    if any(p.dim() != 1 for p in parameters.values()):
        raise NotUnderstood("its weight has more than one dimension")
    names = [n for n, v in vars(module).items() if "eps" in n.lower() and (v is None or isinstance(v, float))]
    if not names:
        raise NotUnderstood("has no epsilon")
    if any(isinstance(vars(module).get(name), Tensor) for name in ("weight", "bias")):
        raise NotUnderstood("FSDP has flattened its weight: patch it before, or pass use_orig_params=True")
    # FSDP1 leaves a part of a weight, or nothing.
    n = math.prod(getattr(module, "normalized_shape", (0,)))
    n = n or next((p.shape[0] for p in parameters.values()), 0) or 24

    def run(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None]:
        # Large values, so that a module that clamps differs from the formula.
        values = {k: (20 * random_tensor(n, seed=7 + i)).to(dtype) for i, k in enumerate(parameters)}
        held = {k: values.get(k) for k in module._parameters}
        frozen = {k: None if v is None else nn.Parameter(v, False) for k, v in held.items()}
        probe = shallow_copy(module, _parameters=frozen)
        with torch.no_grad():
            return cls.forward(probe, x), held.get("weight"), held.get("bias")

    # In the row of small values, epsilon affects the result.
    rows = random_tensor(4, n) * torch.tensor([[1.0], [1e-3], [30.0], [1.0]], device="cpu")
    rows[3] += 2.0
    try:
        theirs, weight, bias = run(rows, torch.float32)
    except Exception as error:
        raise NotUnderstood(f"does not run on rows ({described(error)})") from None
    candidates = [Norm("rms_norm", e, offset) for e in names for offset in (0.0, 1.0)] if bias is None else []
    candidates += [Norm("layer_norm", e) for e in names]
    for norm in candidates:
        exact = norm_formula(rows, weight, bias, epsilon_of(module, norm.epsilon, rows), norm)
        if all(agrees(a, b) for a, b in zip(exact, theirs)):
            return refine_casting(norm, run, rows, epsilon_of(module, norm.epsilon, rows))
    raise NotUnderstood("computes something else")


def refine_casting(norm: Norm, run: Callable, rows: Tensor, eps: float) -> Norm:
    """Finds the casting mode that is closest in bf16, and whether a wider weight makes the result wider."""
    half = rows.to(torch.bfloat16)
    promotes = run(half, torch.float32)[0].dtype == torch.float32
    if norm.op == "layer_norm":
        return Norm(norm.op, norm.epsilon, promotes=promotes)
    theirs, weight, _ = run(half, torch.bfloat16)

    def distance(mode: str) -> float:
        ours = F.rms_norm(half, weight, eps, norm.offset, mode)
        return float((ours.double() - theirs.double()).abs().sum())

    mode = min(("gemma", "llama"), key=distance)
    return Norm(norm.op, norm.epsilon, norm.offset, mode, promotes)


def looks_like_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not isinstance(module, nn.modules.batchnorm._NormBase)


def is_rms_norm(module: nn.Module) -> bool:
    try:
        return identify_norm(module).op == "rms_norm"
    except NotUnderstood:
        return False


# ---- Decoder layers


def has_fusable_norms(module: nn.Module) -> bool:
    # Check the source first: probing norms takes longer.
    norms = frozenset(name for name, child in module.named_children() if looks_like_norm(child))
    forward = inner_function(original_class(type(module)).forward)
    if not norms or rewrite.with_fused_norms(forward, norms) is None:
        return False
    return rewrite.with_fused_norms(forward, rms_norms_of(module)) is not None


def rms_norms_of(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, child in module.named_children() if looks_like_norm(child) and is_rms_norm(child))


# ---- Gated MLPs

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": nn.functional.silu,
    "geglu": lambda gate: nn.functional.gelu(gate, approximate="tanh"),
    "geglu exact": nn.functional.gelu,
}


class Gate(NamedTuple):
    formula: str  # a key of ACTIVATIONS
    limit: float | None = None  # of swiglu

    @property
    def switch(self) -> str:
        return self.formula.split()[0]

    @property
    def options(self) -> tuple:
        """Of the operators."""
        return {"swiglu": (self.limit,), "geglu": ("tanh",), "geglu exact": ("none",)}[self.formula]

    def operator(self, form: str = "") -> Callable[..., Tensor]:
        return getattr(F, self.switch + form)

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        """For distributed tensors, which the operators do not take."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ACTIVATIONS[self.formula](gate) * up


def limits_of(module: nn.Module) -> list[float]:
    """Numbers of the module that may limit its gate."""
    return sorted({float(v) for v in vars(module).values() if type(v) in (int, float) and 0 < v < math.inf})


def gates_of(module: nn.Module) -> list[Gate]:
    return [*map(Gate, ACTIVATIONS), *(Gate("swiglu", limit) for limit in limits_of(module))]


def input_sizes(module: nn.Module) -> list[float]:
    """Scales of random inputs. Large ones reach the limit of a module that clamps."""
    return [1.0, 50.0, *(50 * limit for limit in limits_of(module) if limit > 1)]


@dataclass(frozen=True)
class MLP:
    formula: str  # of the gate
    projections: tuple[str, ...]  # (gate, up, down), or (gate and up in one, down)
    lora: bool = True  # whether LoRA layers among them may run in operators
    limit: float | None = None  # of the gate
    # The attributes by which the results of the first and of the last projection are multiplied.
    factors: tuple[str | None, str | None] = (None, None)

    @property
    def gate(self) -> Gate:
        return Gate(self.formula, self.limit)

    @property
    def switch(self) -> str:
        return self.gate.switch


# Sizes of the small copies of an MLP that are run, and how many there are at most.
HIDDEN, INNER, MOST_COPIES = 6, 10, 64
OTHER_VALUES = "computes something else"


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a projection, or a wrapper around one such as a LoRA layer."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def identify_mlp(module: nn.Module) -> MLP:
    cls = original_class(type(module))
    if not only_tensor_argument(cls.forward):
        raise NotUnderstood("takes more than one tensor")
    linears: dict[str, Any] = {n: m for n, m in module.named_children() if is_linear(m)}
    others = [m for m in module.children() if not is_linear(m)]
    if list(module.parameters(recurse=False)) or any([*m.parameters(), *m.buffers()] for m in others):
        raise NotUnderstood("has parameters of its own")
    if len(linears) not in (2, 3):
        raise NotUnderstood(f"has {len(linears)} projections")
    # That of a LoRA layer belongs to its projection.
    if any(isinstance(m, nn.Dropout) and m.p > 0 for other in others for m in other.modules()):
        raise NotUnderstood("has dropout")

    scales = input_sizes(module)
    inputs = [scale * random_tensor(5, HIDDEN, seed=9 + i).double() for i, scale in enumerate(scales)]
    failed = "its projections have unexpected sizes"
    for small, factors in itertools.product(small_copies(module, linears), factors_of(module)):
        probe = with_factors(small, factors)
        try:
            with torch.no_grad():
                theirs = [cls.forward(probe, x) for x in inputs]
        except Exception as error:
            if failed != OTHER_VALUES and factors == (None, None):
                failed = f"does not run on a small copy ({described(error)})"
            continue
        failed = OTHER_VALUES
        for names, gate in itertools.product(itertools.permutations(linears), gates_of(module)):
            mlp = MLP(gate.formula, names, limit=gate.limit, factors=factors)
            try:
                if all(agrees(mlp_forward(mlp)(probe, x), y, 1e-9) for x, y in zip(inputs, theirs)):
                    return mlp
            except RuntimeError:
                continue
    raise NotUnderstood(failed)


def factors_of(module: nn.Module) -> list[tuple[str | None, str | None]]:
    """Candidates for MLP.factors, those with most attributes first: a factor that is 1 now may change."""
    read = rewrite.names_in(inner_function(original_class(type(module)).forward).__code__)
    numbers = [name for name, value in vars(module).items() if type(value) in (int, float) and name in read]
    names: list[str | None] = [*numbers, None]
    pairs = [(first, last) for first in names for last in names if first != last or first is None]
    return sorted(pairs, key=lambda pair: pair.count(None))


def with_factors(small: Any, factors: tuple[str | None, str | None]) -> nn.Module:
    """The small copy with other values of these attributes, and with biases. They show whether a factor multiplies the result
    of the last projection or its input, which round differently."""
    values = {name: value for name, value in zip(factors, (1.3, 0.7)) if name is not None}
    modules = dict(small._modules)
    for i, (name, linear) in enumerate(modules.items() if factors[1] else ()):
        if type(linear) is nn.Linear:
            modules[name] = shallow_copy(linear, _parameters={**linear._parameters, "bias": bias_of(linear, i)})
    return shallow_copy(small, _modules=modules, **values)


def bias_of(linear: nn.Linear, seed: int) -> nn.Parameter:
    return nn.Parameter(random_tensor(linear.weight.shape[0], seed=seed).double(), False)


def small_copies(module: nn.Module, linears: dict[str, Any]) -> Iterator[nn.Module]:
    """Copies with small projections, whose sizes differ even where those of the module coincide: one for each part that the
    projections and numbers of the module may play by their sizes."""
    for down in reversed(linears):
        hidden, inner = linears[down].out_features, linears[down].in_features
        others = [linear for name, linear in linears.items() if name != down]
        outer = {linear.out_features for linear in others}
        if {linear.in_features for linear in others} != {hidden} or outer not in ({inner}, {2 * inner}):
            continue
        columns = INNER if outer == {inner} else 2 * INNER
        small: dict[str, nn.Module] = {}
        for i, name in enumerate(linears):
            shape = (HIDDEN, INNER) if name == down else (columns, HIDDEN)
            small[name] = nn.Linear(*shape[::-1], bias=False, device="meta")
            small[name].weight = nn.Parameter(random_tensor(*shape, seed=i).double(), False)
        sizes = ((hidden, HIDDEN), (inner, INNER), (2 * inner, 2 * INNER))
        meanings = {
            name: [ours for theirs, ours in sizes if theirs == value]
            for name, value in vars(module).items()
            if type(value) is int and any(theirs == value for theirs, _ in sizes)
        }
        for numbers in itertools.islice(itertools.product(*meanings.values()), MOST_COPIES):
            scalars = dict(zip(meanings, numbers))
            yield shallow_copy(module, _modules={**module._modules, **small}, training=True, **scalars)


def times(x: Tensor, module: nn.Module, factor: str | None) -> Tensor:
    return x if factor is None else x * getattr(module, factor)


def mlp_forward(mlp: MLP) -> Callable[[nn.Module, Tensor], Tensor]:
    inner, last = without_last_factor(mlp), mlp.factors[1]
    if last is None:
        return inner
    return lambda self, x: times(inner(self, x), self, last)


def without_last_factor(mlp: MLP) -> Callable[[nn.Module, Tensor], Tensor]:
    found, factor = mlp.gate, mlp.factors[0]
    options = found.options
    product, product_linear, packed = (found.operator(form) for form in ("", "_linear", "_packed"))
    if len(mlp.projections) == 3:
        gate, up, down = mlp.projections

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            first, last = (getattr(self, gate), getattr(self, up)), getattr(self, down)
            side_by_side = projected_in_fp8(first, x) if factor is None else None
            if side_by_side is not None:
                return project_one(last, packed(side_by_side, *options), mlp.lora)
            gate_out, up_out = project(first, x, mlp.lora)
            gate_out = times(gate_out, self, factor)
            if is_distributed(gate_out):
                return last(found.product(gate_out, up_out))
            if is_bare_linear(last):
                return product_linear(gate_out, up_out, last.weight, last.bias, *options)
            adapted_out = project_gated(last, mlp.switch, options, gate_out, up_out, mlp.lora)
            if adapted_out is not None:
                return adapted_out
            return project_one(last, product(gate_out, up_out, *options), mlp.lora)

        return forward
    gate_up, down = mlp.projections

    def packed_forward(self: nn.Module, x: Tensor) -> Tensor:
        both, last = times(project_one(getattr(self, gate_up), x, mlp.lora), self, factor), getattr(self, down)
        if is_distributed(both):
            gate_out, up_out = both.chunk(2, -1)
            return last(found.product(gate_out, up_out))
        return project_one(last, packed(both, *options), mlp.lora)

    return packed_forward


def looks_like_mlp(module: nn.Module) -> bool:
    linears = sum(is_linear(child) for child in module.children())
    name = type(module).__name__.lower()
    return linears in (2, 3) and any(word in name for word in ("mlp", "feedforward", "ffn", "expert"))


def looks_like_experts(module: nn.Module) -> bool:
    return hasattr(type(module), "_apply_gate") and getattr(module, "has_gate", True)


def identify_experts(module: nn.Module) -> Gate:
    """The gate of a stack of experts, which transformers applies in the method `_apply_gate`."""
    cls: Any = original_class(type(module))
    inputs = [scale * random_tensor(5, 12, seed=9 + i) for i, scale in enumerate(input_sizes(module))]
    try:
        with torch.no_grad():
            theirs = [cls._apply_gate(shallow_copy(module), x) for x in inputs]
    except Exception as error:
        raise NotUnderstood(f"its gate does not run on a small input ({described(error)})") from None
    for gate in gates_of(module):
        packed = gate.operator("_packed")
        if all(agrees(packed(x, *gate.options), y, 1e-6) for x, y in zip(inputs, theirs)):
            return gate
    raise NotUnderstood("its gate computes something else")


# ---- Embeddings


def is_embedding(module: nn.Module) -> bool:
    return original_class(type(module)).forward is nn.Embedding.forward


def identify_embedding(module: nn.Embedding, switches: Switches) -> None:
    require_switch(switches, "embedding")
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise NotUnderstood("it has max_norm, scale_grad_by_freq or sparse gradients")


# ---- Rotary position embedding


@dataclass(frozen=True)
class Rotary:
    kind: str  # a key of KINDS, or "complex"
    arguments: tuple[str, ...]  # names of the function's parameters
    tensors: int  # number of rotated tensors: q and k, or one
    layout: str  # "BHSD", "BSHD" or "SHD"
    promotes: bool = False  # whether wider cos and sin make the result wider

    @property
    def takes_norms(self) -> bool:
        """Whether rotary_function's result also applies HeadNorms."""
        if self.kind == "complex" or self.layout != "BHSD":
            return False
        return not KINDS[self.kind].trailing and not KINDS[self.kind].halves_out


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    r = cos.shape[-1]
    a, b = x[..., : r // 2], x[..., r // 2 : r]
    return torch.cat([x[..., :r] * cos + torch.cat([-b, a], -1) * sin, x[..., r:]], -1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    r = cos.shape[-1]
    turned = torch.stack([-x[..., 1:r:2], x[..., 0:r:2]], -1).flatten(-2)
    return torch.cat([x[..., :r] * cos + turned * sin, x[..., r:]], -1)


def rotate_last_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (t.repeat_interleave(2, -1) for t in (cos, sin))
    rest = x.shape[-1] - cos.shape[-1]
    return torch.cat([x[..., :rest], rotate_pairs(x[..., rest:], cos, sin)], -1)


def rotate_pairs_to_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    r = cos.shape[-1]
    return rotate_halves(torch.cat([x[..., 0:r:2], x[..., 1:r:2], x[..., r:]], -1), cos, sin)


class RotaryKind(NamedTuple):
    widen: Callable[[Tensor], Tensor]  # expands cos and sin to those of the operator
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]  # the operator's formula
    # Options of the operator.
    interleaved: bool = False
    trailing: bool = False
    halves_out: bool = False
    half_table: bool = False  # whether pairs have one angle each


KINDS = {
    "half": RotaryKind(lambda t: t, rotate_halves),
    "interleaved": RotaryKind(
        lambda t: t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1), rotate_pairs, interleaved=True
    ),
    "half table": RotaryKind(lambda t: torch.cat([t, t], -1), rotate_halves, half_table=True),
    "pairs": RotaryKind(lambda t: t, rotate_pairs, interleaved=True),
    "last pairs": RotaryKind(lambda t: t, rotate_last_pairs, trailing=True, half_table=True),
    "pairs to halves": RotaryKind(lambda t: t, rotate_pairs_to_halves, halves_out=True),
}


def identify_rotary(function: Callable) -> Rotary:
    names = tuple(inspect.signature(function).parameters)
    if names[2:4] == ("cos", "sin"):
        return identify_angles(function, names, 2)
    if names[1:3] == ("cos", "sin"):
        return identify_angles(function, names, 1)
    if len(names) == 3 and "freqs" in names[2]:
        return identify_complex(function, names)
    raise NotUnderstood(f"{function.__name__} takes ({', '.join(names)})")


def try_call(function: Callable, *args: Any, **kwargs: Any) -> Any:
    try:
        with torch.no_grad():
            out = function(*args, **kwargs)
    except Exception:
        return None
    return out if isinstance(out, tuple) else (out,)


def identify_angles(function: Callable, names: tuple[str, ...], tensors: int) -> Rotary:
    size, positions = 8, 5
    for layout in ("BHSD", "SHD"):
        shapes = [(2, 3, positions, size), (2, 2, positions, size)] if layout == "BHSD" else [(positions, 3, size)] * 2
        x = [random_tensor(*shape, seed=i) for i, shape in enumerate(shapes[:tensors])]
        for name, kind in KINDS.items():
            seen = False
            for width in (size, size // 2):
                table = [random_tensor(*shapes[0][:-3], positions, width // 2, seed=3 + i) for i in range(2)]
                if not kind.half_table:
                    table = [torch.cat([t, t], -1) for t in table]
                theirs = try_call(function, *x, *table)
                if theirs is None:
                    continue
                heads = -3 if layout == "BHSD" else -2
                cos, sin = (kind.widen(t).unsqueeze(heads).double() for t in table)
                turned = [kind.rotate(a.double(), cos, sin) for a in x] if cos.shape[-1] <= size else []
                if not turned or not all(map(agrees, turned, theirs)):
                    break
                seen = True
                half = try_call(function, *(t.to(torch.bfloat16) for t in x), *table)
            else:
                if seen:
                    return Rotary(name, names, tensors, layout, half is not None and half[0].dtype == torch.float32)
    raise NotUnderstood(f"{function.__name__} computes something else")


def identify_complex(function: Callable, names: tuple[str, ...]) -> Rotary:
    angles = random_tensor(2, 5, 4, seed=5)
    freqs = torch.polar(torch.ones_like(angles), angles)
    for layout in ("BHSD", "BSHD"):
        x = [random_tensor(2, *((heads, 5) if layout == "BHSD" else (5, heads)), 8, seed=heads) for heads in (3, 2)]
        theirs = try_call(function, *x, freqs)
        if theirs is None:
            continue
        heads = layout.index("H")
        cos, sin = (t.repeat_interleave(2, -1).unsqueeze(heads).double() for t in (angles.cos(), angles.sin()))
        if all(agrees(rotate_pairs(a.double(), cos, sin), b) for a, b in zip(x, theirs)):
            return Rotary("complex", names, 2, layout)
    raise NotUnderstood(f"{function.__name__} computes something else")


def methods_of(cls: type) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            return
        for name, value in vars(base).items():
            if name not in seen and isinstance(value, types.FunctionType) and not name.startswith("__"):
                seen.add(name)
                yield name, value


def is_rotary(name: str, value: Any) -> bool:
    return callable(value) and name.startswith("apply_rot") and inspect.isfunction(inner_function(value))


def methods_with(cls: type, wanted: Callable[[str, Any], bool]) -> dict[str, dict[str, Any]]:
    """The methods of a class that use wanted globals, with these globals by name."""
    found = {}
    for method, function in methods_of(cls):
        inner = inner_function(function)
        code, scope = getattr(inner, "__code__", None), getattr(inner, "__globals__", {})
        used = {n: scope[n] for n in code.co_names if n in scope and wanted(n, scope[n])} if code else {}
        if used:
            found[method] = used
    return found


def rotary_methods(cls: type) -> dict[str, dict[str, Any]]:
    """The methods of a class that call rotary functions, with these functions by name."""
    return methods_with(cls, is_rotary)


@functools.lru_cache(None)
def rotary_of(function: Any) -> Rotary | str:
    """What the function computes, or why it is not understood."""
    try:
        return identify_rotary(function)
    except NotUnderstood as reason:
        return str(reason)


def unfit_norms(module: nn.Module, switches: Switches) -> dict[str, str]:
    """For each child that looks like a norm, why it cannot become a part of the rotation, or ""."""
    found = {}
    for name, child in module.named_children():
        if looks_like_norm(child):
            unfit = "is hooked or wrapped" if has_hooks(child) or has_replaced_forward(child) else ""
            unfit = unfit or ("" if is_rms_norm(child) else "is no RMSNorm")
            found[name] = unfit or ("" if switches["rms_norm"] else "stays, because rms_norm is switched off")
    return found


class RotaryModule(NamedTuple):
    methods: dict[str, dict[str, Any]]  # see rotary_methods
    found: dict[Any, Rotary]  # by the function that is understood
    unfit: dict[str, str]  # see unfit_norms
    lora: bool = True  # whether LoRA layers among its projections may run in operators
    gates: bool = True  # whether its products with sigmoids may run in operators


def identify_rotary_module(module: nn.Module, switches: Switches) -> RotaryModule:
    require_switch(switches, "rope")
    methods = rotary_methods(type(module))
    found = {f: rotary_of(f) for used in methods.values() for f in used.values()}
    understood = {f: rotary for f, rotary in found.items() if isinstance(rotary, Rotary)}
    if not understood:
        raise NotUnderstood("; ".join(dict.fromkeys(map(str, found.values()))))
    return RotaryModule(methods, understood, unfit_norms(module, switches), switches["lora"], switches["sigmoid_gate"])


# ---- LoRA layers


def dtype_of(layer: Any, base: Any) -> torch.dtype:
    """Of the input of a LoRA layer, as far as its weights tell."""
    weight = getattr(base, "weight", None)
    if is_linear_4bit(base):
        return base.compute_dtype or getattr(getattr(weight, "quant_state", None), "dtype", torch.float32)
    known = getattr(weight, "dtype", torch.int8), *(a.weight.dtype for a in layer.lora_A.values())
    # Quantised weights have fewer bits.
    return next((dtype for dtype in known if dtype.is_floating_point and dtype.itemsize > 1), torch.float32)


UNLESS_GATHERED = "peft's own forward unless its weights are gathered"


def identify_lora(module: Any, switches: Switches) -> str:
    """When the layer, or its base, runs its own forward, or ""."""
    require_switch(switches, "lora")
    base = module.get_base_layer()
    if not is_lora(module):
        replaced = type(base) is nn.Linear or peft_linear(module)
        raise NotUnderstood("its forward is not peft's" if replaced else f"base is {type(base).__name__}")
    if any(map(is_distributed, module.parameters())):
        return UNLESS_GATHERED
    state = adapted(module, dtype_of(module, base))
    if isinstance(state, str):
        raise NotUnderstood(state)
    return f"calls its base, because {state.weight.reason}" if isinstance(state.weight, Called) else ""
