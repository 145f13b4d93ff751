"""Identifies the operator that computes the same values as a module or function.

The name of a class proves nothing. The class runs on small random inputs on the CPU, with random parameters. An
operator replaces it only if the operator's formula gives the same values.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized

from .. import functional as F
from ..projections import autocast_dtype, is_bare_linear, project

# Equal formulas differ by fp32 rounding; different formulas differ in the first digits.
TOLERANCE = 1e-4


class NotUnderstood(Exception):
    """The reason why no operator replaces a module."""


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
    """A copy of `module` that shares every attribute, except the given entries of its __dict__."""
    # The __new__ of FSDP's classes would construct and initialise a module.
    copy: nn.Module = object.__new__(class_of(module))
    copy.__dict__.update(module.__dict__, **replaced)
    copy.__dict__.pop("forward", None)
    return copy


def original_class(cls: type) -> type[nn.Module]:
    return getattr(cls, "liger_original", cls)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The module's own class, without the subclasses that a patch and torch's parametrisations make of it."""
    cls = original_class(type(module))
    return cls.__bases__[0] if cls is type(module) and is_parametrized(module) else cls


def is_distributed(tensor: Tensor | None) -> bool:
    """Whether the tensor is a DTensor, for which the operators have no sharding rules."""
    # isinstance would need DTensor, which is slow to import.
    return hasattr(tensor, "device_mesh")


def only_tensor_argument(function: Callable) -> bool:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return len(parameters) == 1 and parameters[0].kind is parameters[0].POSITIONAL_OR_KEYWORD


# ---- Norms


@dataclass(frozen=True)
class Norm:
    op: str  # "rms_norm" or "layer_norm"
    epsilon: str  # name of the module's attribute
    offset: float = 0.0
    casting_mode: str = "llama"
    promotes: bool = False  # whether a wider weight makes the result wider


def epsilon_of(module: nn.Module, attribute: str, x: Tensor) -> float:
    value = getattr(module, attribute)
    # torch's norms compute in fp32 or wider.
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if value is None else value


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
    n = next((p.shape[0] for p in parameters.values()), math.prod(getattr(module, "normalized_shape", (24,))))

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
        raise NotUnderstood(f"does not run on rows ({type(error).__name__})") from None
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


# ---- Gated MLPs

GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": F.swiglu,
    "geglu": F.geglu,
    "geglu exact": lambda gate, up: F.geglu(gate, up, "none"),
}
LINEAR: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]] = {
    "swiglu": F.swiglu_linear,
    "geglu": F.geglu_linear,
    "geglu exact": lambda gate, up, weight, bias: F.geglu_linear(gate, up, weight, bias, "none"),
}
PACKED: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.swiglu_packed,
    "geglu": F.geglu_packed,
    "geglu exact": lambda gate_up: F.geglu_packed(gate_up, "none"),
}


# For distributed tensors, which the operators do not take.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": functional.silu,
    "geglu": lambda gate: functional.gelu(gate, approximate="tanh"),
    "geglu exact": functional.gelu,
}


@dataclass(frozen=True)
class MLP:
    gate: str  # a key of GATES
    projections: tuple[str, ...]  # (gate, up, down), or (gate and up in one, down)


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
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules()):
        raise NotUnderstood("has dropout")

    # Run the module with small projections.
    hidden, inner = 6, 10
    down = [n for n in linears if linears[n].out_features == next(iter(linears.values())).in_features][-1:]
    if not down:
        raise NotUnderstood("no projection returns to the size of the input")
    sizes = {linears[down[0]].out_features: hidden, linears[down[0]].in_features: inner}
    sizes.setdefault(2 * linears[down[0]].in_features, 2 * inner)
    if any(m.in_features not in sizes or m.out_features not in sizes for m in linears.values()):
        raise NotUnderstood("its projections have unexpected sizes")
    small: dict[str, nn.Module] = {}
    for i, (name, linear) in enumerate(linears.items()):
        shape = sizes[linear.out_features], sizes[linear.in_features]
        small[name] = nn.Linear(*shape[::-1], bias=False, device="meta")
        small[name].weight = nn.Parameter(random_tensor(*shape, seed=i).double(), False)
    scalars = {k: sizes.get(v, v) for k, v in vars(module).items() if type(v) is int}
    probe = shallow_copy(module, _modules={**module._modules, **small}, training=True, **scalars)
    # The second input is large, so that an MLP that clamps differs from the formula.
    inputs = [random_tensor(5, hidden, seed=9).double(), 50 * random_tensor(5, hidden, seed=10).double()]
    try:
        with torch.no_grad():
            theirs = [cls.forward(probe, x) for x in inputs]
    except Exception as error:
        raise NotUnderstood(f"does not run on a small copy ({type(error).__name__})") from None
    for names, gate in itertools.product(itertools.permutations(linears), GATES):
        mlp = MLP(gate, names)
        try:
            if all(agrees(mlp_forward(mlp)(probe, x), y, 1e-9) for x, y in zip(inputs, theirs)):
                return mlp
        except RuntimeError:
            continue
    raise NotUnderstood("computes something else")


def mlp_forward(mlp: MLP) -> Callable[[nn.Module, Tensor], Tensor]:
    activation = ACTIVATIONS[mlp.gate]
    if len(mlp.projections) == 3:
        gate, up, down = mlp.projections
        product, product_linear = GATES[mlp.gate], LINEAR[mlp.gate]

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            (gate_out, up_out), last = project((getattr(self, gate), getattr(self, up)), x), getattr(self, down)
            if is_distributed(gate_out):
                return last(activation(gate_out) * up_out)
            if is_bare_linear(last):
                return product_linear(gate_out, up_out, last.weight, last.bias)
            return last(product(gate_out, up_out))

        return forward
    gate_up, down = mlp.projections
    packed = PACKED[mlp.gate]

    def packed_forward(self: nn.Module, x: Tensor) -> Tensor:
        both, last = getattr(self, gate_up)(x), getattr(self, down)
        if is_distributed(both):
            gate_out, up_out = both.chunk(2, -1)
            return last(activation(gate_out) * up_out)
        return last(packed(both))

    return packed_forward


def identify_experts(module: nn.Module) -> str:
    """The key of GATES for a stack of experts, whose gate transformers applies in the method `_apply_gate`."""
    cls: Any = original_class(type(module))
    x = torch.cat([random_tensor(5, 12, seed=9), 50 * random_tensor(5, 12, seed=10)])
    try:
        with torch.no_grad():
            theirs = cls._apply_gate(shallow_copy(module), x)
    except Exception as error:
        raise NotUnderstood(f"its gate does not run on a small input ({type(error).__name__})") from None
    for gate, packed in PACKED.items():
        if agrees(packed(x), theirs, 1e-6):
            return gate
    raise NotUnderstood("its gate computes something else")


# ---- Rotary position embedding


@dataclass(frozen=True)
class Rotary:
    kind: str  # a key of KINDS, or "complex"
    arguments: tuple[str, ...]  # names of the function's parameters
    tensors: int  # number of rotated tensors: q and k, or one
    layout: str  # "BHSD", "BSHD" or "SHD"
    promotes: bool = False  # whether wider cos and sin make the result wider


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    r = cos.shape[-1]
    a, b = x[..., : r // 2], x[..., r // 2 : r]
    return torch.cat([x[..., :r] * cos + torch.cat([-b, a], -1) * sin, x[..., r:]], -1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    r = cos.shape[-1]
    turned = torch.stack([-x[..., 1:r:2], x[..., 0:r:2]], -1).flatten(-2)
    return torch.cat([x[..., :r] * cos + turned * sin, x[..., r:]], -1)


# kind: (how cos and sin are expanded to all rotated columns, whether neighbouring columns form a pair)
KINDS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "half": (lambda t: t, False),
    "interleaved": (lambda t: t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1), True),
    "half table": (lambda t: torch.cat([t, t], -1), False),
    "pairs": (lambda t: t, True),
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
        for kind, (widen, pairs) in KINDS.items():
            seen = False
            for width in (size, size // 2):
                table = [random_tensor(*shapes[0][:-3], positions, width // 2, seed=3 + i) for i in range(2)]
                if kind != "half table":
                    table = [torch.cat([t, t], -1) for t in table]
                theirs = try_call(function, *x, *table)
                if theirs is None:
                    continue
                heads = -3 if layout == "BHSD" else -2
                cos, sin = (widen(t).unsqueeze(heads).double() for t in table)
                rotate = rotate_pairs if pairs else rotate_halves
                if cos.shape[-1] > size or not all(agrees(rotate(a.double(), cos, sin), b) for a, b in zip(x, theirs)):
                    break
                seen = True
                half = try_call(function, *(t.to(torch.bfloat16) for t in x), *table)
            else:
                if seen:
                    return Rotary(kind, names, tensors, layout, half is not None and half[0].dtype == torch.float32)
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


class HeadNorms(NamedTuple):
    """RMS norms of the heads that a rotation takes; all have the same options."""

    weights: tuple[Tensor | None, ...]  # one for each tensor
    eps: float
    offset: float
    casting_mode: str


def norm_heads(norms: HeadNorms | None, *heads: Tensor) -> tuple[Tensor, ...]:
    if norms is None:
        return heads
    options = norms.eps, norms.offset, norms.casting_mode
    return tuple(F.rms_norm(x, weight, *options) for x, weight in zip(heads, norms.weights))


def rotary_function(rotary: Rotary, original: Callable) -> Callable:
    """A function with the original's signature. Calls with arguments that were not probed go to the original.

    If its attribute `takes_norms` is not 0, the function also takes HeadNorms of that many tensors as `norms`, and
    applies them before it rotates.
    """
    if rotary.kind == "complex":
        return complex_rotary_function(rotary, original)
    widen, pairs = KINDS[rotary.kind]
    defaults = {n: p.default for n, p in inspect.signature(original).parameters.items() if p.default is not p.empty}
    default_dim = defaults.get("unsqueeze_dim", 1)

    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, norms: HeadNorms | None = None
    ) -> tuple[Tensor, Tensor]:
        table = widen(cos), widen(sin)
        # Under autocast, attention casts q and k to half precision anyway.
        if rotary.promotes and cos.dtype != q.dtype and autocast_dtype(q) is None:
            q, k = (x.to(cos.dtype) for x in norm_heads(norms, q, k))
            norms = None
        elif cos.dtype not in (q.dtype, torch.float32):
            table = table[0].to(q.dtype), table[1].to(q.dtype)
        if unsqueeze_dim == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        if norms is None:
            q, k = F.rope(q, k, *table, interleaved=pairs)
        else:
            q_weight, k_weight = norms.weights
            options = norms.eps, norms.offset, norms.casting_mode
            q, k = F.qk_norm_rope(q, k, q_weight, k_weight, table[0], table[1], *options, interleaved=pairs)
        if unsqueeze_dim == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        return q, k

    def known(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> bool:
        if not isinstance(k, Tensor) or (q.dim(), k.dim(), cos.dim()) != (4, 4, 3) or unsqueeze_dim not in (1, 2):
            return False
        positions = 3 - unsqueeze_dim
        return (
            q.dtype == k.dtype
            and sin.dtype == cos.dtype
            and q.shape[0] == k.shape[0]
            and q.shape[positions] == k.shape[positions] == cos.shape[1]
            and cos.shape[0] in (1, q.shape[0])
        )

    if rotary.layout == "SHD":

        def rotated_positions(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs or q.dim() != 3 or k.shape[0] != q.shape[0] or cos.dim() != 2 or len(cos) != len(q):
                return original(q, k, cos, sin, *args, **kwargs)
            q, k = rotate(q.unsqueeze(0), k.unsqueeze(0), cos.unsqueeze(0), sin.unsqueeze(0), 2)
            return q.squeeze(0), k.squeeze(0)

        return rotated_positions

    if rotary.tensors == 1:

        def rotated_one(
            x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = default_dim, norms: HeadNorms | None = None
        ) -> Any:
            if not known(x, x, cos, sin, unsqueeze_dim):
                (x,) = norm_heads(norms, x)
                return original(x, cos, sin, unsqueeze_dim)
            none = x[:, :0] if unsqueeze_dim == 1 else x[:, :, :0]
            if norms is not None:
                norms = norms._replace(weights=(*norms.weights, None))
            return rotate(x, none, cos, sin, unsqueeze_dim, norms)[0]

        return taking_norms(rotated_one, 1)

    def rotated(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, norms: HeadNorms | None = None, **kwargs: Any
    ) -> Any:
        dim = kwargs.get("unsqueeze_dim", default_dim)
        if args or kwargs.keys() - {"unsqueeze_dim"} or not known(q, k, cos, sin, dim):
            q, k = norm_heads(norms, q, k)
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate(q, k, cos, sin, dim, norms)

    return taking_norms(rotated, 2)


def taking_norms(function: Any, tensors: int) -> Callable:
    function.takes_norms = tensors
    return function


def complex_rotary_function(rotary: Rotary, original: Callable) -> Callable:
    heads_last = rotary.layout == "BSHD"

    def rotated(q: Tensor, k: Tensor, freqs_cis: Tensor) -> Any:
        if q.dim() != 4 or k.dim() != 4 or freqs_cis.dim() != 3 or q.dtype != k.dtype:
            return original(q, k, freqs_cis)
        freqs_cis = freqs_cis.to(q.device)
        if not heads_last:
            return F.rope_freqs_cis(q, k, freqs_cis)
        q, k = F.rope_freqs_cis(q.transpose(1, 2), k.transpose(1, 2), freqs_cis)
        return q.transpose(1, 2), k.transpose(1, 2)

    return rotated
