"""Stacks of experts: one operator for the whole stack, else one for its gate."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional as F
from ..reference.moe_experts import ACTIVATIONS, activated
from . import probe
from .patched import NotUnderstood, Switches, give_subclass, inner_function, is_distributed, require_switch
from .probe import agrees, class_of, described, random_tensor, shallow_copy
from .reads import reads_of, unchanged

OP = "moe_experts"
HIDDEN, INNER, EXPERTS = 6, 5, 3  # of the small copy that is run
WEIGHTS, BIASES = ("gate_up_proj", "down_proj"), ("gate_up_proj_bias", "down_proj_bias")
# The operator computes the same as each implementation of transformers, whose calls differ by the config. It takes the
# number of experts from the weights, of which expert parallelism leaves some.
FOLLOWS = (*WEIGHTS, *BIASES, "config._experts_implementation", "num_experts")


class Factors(NamedTuple):
    """Low-rank adapters of a weight of all experts: scale * b @ a."""

    a: Tensor  # (E, r, in)
    b: Tensor  # (E, out, r)
    scale: float


@dataclass(frozen=True)
class Experts:
    """Options of the operator for a stack of experts."""

    activation: str
    interleaved: bool
    transposed: bool
    limit: float | None
    alpha: float
    up_offset: float
    biases: bool

    def __call__(self, module: Any, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        (gate_up, down), adapters = self.weights_of(module)
        gate_up_bias, down_bias = (getattr(module, name) if self.biases else None for name in BIASES)
        dtype = gate_up.dtype
        if weight.dtype not in (dtype, torch.float32):
            weight = weight.to(dtype)
        out = F.moe_experts(
            x.to(dtype), gate_up, down, index, weight, gate_up_bias, down_bias, self.activation,
            interleaved=self.interleaved, transposed=self.transposed, limit=self.limit, alpha=self.alpha,
            up_offset=self.up_offset, **adapters,
        )  # fmt: skip
        return out.to(x.dtype)

    def weights_of(self, module: Any) -> tuple[list[Tensor], dict[str, Any]]:
        """Both weights as they are stored, and the adapters that they have in this call, as arguments of the operator."""
        weights: list[Tensor] = []
        arguments: dict[str, Any] = {}
        for name, prefix in zip(WEIGHTS, ("gate_up", "down")):
            weight, factors = stored(module, name, self.transposed)
            weights.append(weight)
            if factors is not None:
                arguments |= {f"{prefix}_a": factors.a, f"{prefix}_b": factors.b, f"{prefix}_scale": factors.scale}
        return weights, arguments


def stored(module: Any, name: str, transposed: bool) -> tuple[Tensor, Factors | None]:
    if factors := module.__dict__.get("liger_adapters", {}).get(name):
        return getattr(module, name), factors
    # peft, unless its wrapper is patched, parametrises the weight during the call: with the product of two factors, if
    # there is one adapter.
    added = module._modules.get("parametrizations", {})
    if (
        name not in module._parameters
        and name in added
        and len(added[name]) == 1
        and type(added[name][0]).__name__ == "_LoraFactorsProxy"
    ):
        proxy = added[name][0]
        a, b = (proxy.lhs.mT, proxy.rhs.mT) if transposed else (proxy.rhs, proxy.lhs)
        return added[name].original, Factors(a, b, proxy.scaling)
    return getattr(module, name), None


class EagerConfig:
    """A config with which transformers computes expert by expert, for any sizes."""

    _experts_implementation = "eager"

    def __init__(self, config: Any) -> None:
        self.liger_config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.liger_config, name)


def gates(module: Any) -> Iterator[tuple[str, bool, float | None, float, float]]:
    """Candidates for a gate: activation, interleaved, limit, alpha, offset of up. Limit and alpha are numbers that the
    module has."""
    numbers = sorted({float(v) for v in vars(module).values() if type(v) in (int, float) and 0 < v < 100})
    for activation, interleaved, limit, offset in itertools.product(
        ACTIVATIONS["activation"], (False, True), (None, *numbers), (0.0, 1.0)
    ):
        for alpha in (1.0, *numbers) if activation == "silu" else (1.0,):
            yield activation, interleaved, limit, alpha, offset


def identify(module: Any) -> Experts:
    if getattr(module, "has_post_expert_norm", False):
        raise NotUnderstood("its experts end in a norm")
    names = WEIGHTS + (BIASES if getattr(module, "has_bias", False) else ())
    # peft parametrises weights while it calls the module.
    parameters = {*module._parameters, *getattr(module, "parametrizations", ())}
    if set(names) != parameters:
        raise NotUnderstood(f"its parameters are {', '.join(sorted(parameters)) or 'not its own'}")
    if any(getattr(module, name).dim() != 3 for name in WEIGHTS):
        raise NotUnderstood("its weights are not stacks of matrices")
    cls: Any = class_of(module)
    pair = torch.cat([random_tensor(5, 12, seed=9), 50 * random_tensor(5, 12, seed=10)])
    transposed = bool(getattr(module, "is_transposed", False))
    small = {
        "gate_up_proj": random_tensor(EXPERTS, 2 * INNER, HIDDEN),
        "down_proj": random_tensor(EXPERTS, HIDDEN, INNER),
    }
    small = {name: w.transpose(1, 2).contiguous() if transposed else w for name, w in small.items()}
    if len(names) > 2:
        small |= {
            "gate_up_proj_bias": random_tensor(EXPERTS, 2 * INNER, seed=1),
            "down_proj_bias": random_tensor(EXPERTS, HIDDEN, seed=2),
        }
    own: dict[str, Any] = {n: EXPERTS for n in ("num_experts", "num_local_experts") if n in vars(module)}
    if "config" in vars(module):
        own["config"] = EagerConfig(module.config)
    copy: Any = shallow_copy(module, _parameters=small, **own)
    x = torch.cat([random_tensor(4, HIDDEN, seed=3), 20 * random_tensor(4, HIDDEN, seed=4)])
    index = torch.tensor([[0, 2], [2, 1], [1, 0], [0, 1]] * 2, device="cpu")  # models may be built on meta
    weight = random_tensor(8, 2, seed=5).abs()
    try:
        with torch.no_grad():
            gate_out = cls._apply_gate(copy, pair)
            theirs = cls.forward(copy, x, index, weight)
    except Exception as error:
        raise NotUnderstood(f"does not run on a small copy ({described(error)})") from None
    for activation, interleaved, limit, alpha, offset in gates(module):
        gate, up = (pair[:, 0::2], pair[:, 1::2]) if interleaved else pair.chunk(2, -1)
        if agrees(activated(gate, up, activation, limit, alpha, offset), gate_out, 1e-6):
            found = Experts(activation, interleaved, transposed, limit, alpha, offset, len(names) > 2)
            with torch.no_grad():
                if agrees(found(copy, x, index, weight), theirs, 1e-5):
                    return found
            raise NotUnderstood("its experts compute something else")
    raise NotUnderstood("its gate computes something else")


class GateAlone(NamedTuple):
    """Of a stack of which only the gate is replaced."""

    gate: probe.Gate
    reason: str  # why the operator for the whole stack does not apply


def identify_operator(module: nn.Module, switches: Switches) -> Experts | GateAlone:
    try:
        require_switch(switches, OP)
        found = identify(module)
        require_switch(switches, "swiglu" if found.activation == "silu" else "geglu")
        return found
    except NotUnderstood as reason:
        alone = GateAlone(probe.identify_experts(module), str(reason))
    require_switch(switches, alone.gate.switch)
    return alone


def patch_experts(module: nn.Module, found: Experts | GateAlone) -> str:
    if isinstance(found, GateAlone):
        switch, packed, options = found.gate.switch, found.gate.operator("_packed"), found.gate.options
        members = {"_apply_gate": lambda self, gate_up: packed(gate_up, *options), "liger_reason": found.reason}
        give_subclass(module, "experts", switch, found, lambda cls: members, (), "_apply_gate")
        return switch

    def forward(self: Any, hidden_states: Tensor, *args: Tensor, **named: Tensor) -> Tensor:
        index, weight = (*args, *named.values())
        w, _ = stored(self, WEIGHTS[0], found.transposed)
        if is_distributed(w) or (w.is_cuda and w.dtype == torch.float64):
            return class_of(self).forward(self, hidden_states, index, weight)
        return found(self, hidden_states, index, weight)

    give_subclass(module, "experts", OP, found, lambda cls: {"forward": forward}, FOLLOWS)
    return OP


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """``experts_implementation="liger_ops"`` of transformers, for models that are not patched."""
    if "liger_experts" not in vars(self):
        try:
            self.liger_experts, self.liger_reads = identify(self), reads_of(self, "forward", FOLLOWS)
        except NotUnderstood as reason:
            raise ValueError(f"experts_implementation='liger_ops': {type(self).__name__}: {reason}") from None
    if not unchanged(self, self.liger_reads):
        return inner_function(type(self).forward)(self, hidden_states, top_k_index, top_k_weights)
    return self.liger_experts(self, hidden_states, top_k_index, top_k_weights)


def register_experts() -> None:
    """Lets transformers, from version 5 on, run experts in `moe_experts` by ``experts_implementation="liger_ops"``."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return
    ALL_EXPERTS_FUNCTIONS.register("liger_ops", experts_forward)
