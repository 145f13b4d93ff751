"""Layers for Hugging Face's library `kernels`, under the names that transformers' models declare.

`kernels` gives a module the forward of the layer of its name. Modules of one name differ: some norms multiply by the
weight before they round, some rotary functions pair neighbouring columns. So each layer identifies the module, as
`apply_liger_kernel` does, and calls the module's own forward if no operator computes the same.

A layer must have no member besides `forward` and the two flags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .. import functional as F
from ..reference.moe_router import MOST_CHOICES, MOST_EXPERTS
from . import modules, probe
from .patched import Norm, NotUnderstood
from .reads import reads_of, unchanged

_identified: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def identified(
    module: Any, identify: Callable[[nn.Module], Any], follows: Callable[[Any], Collection[str]] | None = None
) -> Any:
    """What `identify` finds, or None. It runs once for each module. follows: as in reads.py, by what was found."""
    if module not in _identified:
        # The probes compare values in fp32 and fp64.
        with torch.autocast("cpu", enabled=False):
            try:
                _identified[module] = identify(module)
            except NotUnderstood:
                _identified[module] = None
        if _identified[module] and follows:
            # On the module, where torch.compile can read it.
            module.liger_reads = reads_of(module, "forward", follows(_identified[module]))
    return _identified[module]


def facts_of(found: Any) -> tuple | None:
    """The fields of a dataclass, as torch.compile takes no dataclass for a constant."""
    return None if found is None else tuple(getattr(found, field.name) for field in dataclasses.fields(found))


# torch.compile takes these results for constants, and does not trace the probes.


@torch.compiler.assume_constant_result
def norm_of(module: nn.Module) -> tuple | None:
    return facts_of(identified(module, probe.identify_norm, lambda norm: ("weight", "bias", norm.epsilon)))


@torch.compiler.assume_constant_result
def mlp_of(module: nn.Module) -> tuple | None:
    return facts_of(identified(module, probe.identify_mlp, lambda mlp: mlp.projections))


def identify_rotary(module: nn.Module) -> probe.Rotary:
    """`kernels` wraps a function in a module, whose forward is the function."""
    found = probe.identify_rotary(MethodType(type(module).forward, module))
    if found.tensors != 2 or not found.takes_norms:
        raise NotUnderstood(f"rotates {found.layout}")
    return found


@torch.compiler.assume_constant_result
def rotary_of(module: nn.Module) -> tuple | None:
    return facts_of(identified(module, identify_rotary))


@torch.compiler.assume_constant_result
def is_softmax_router(module: nn.Module) -> bool:
    return bool(identified(module, identify_router, lambda _: ("weight", "top_k", "hidden_dim")))


def identify_router(module: Any) -> bool:
    """Whether the module returns logits, the renormalised softmax of the `top_k` largest, and their experts."""
    if module.weight.shape[0] > MOST_EXPERTS or module.top_k > MOST_CHOICES:
        return False
    # Twice as many experts as choices, and large logits, which a softcap would change.
    experts, hidden = 2 * module.top_k, 6
    weight = nn.Parameter(20 * probe.random_tensor(experts, hidden), False)
    small = probe.shallow_copy(module, _parameters={**module._parameters, "weight": weight}, hidden_dim=hidden)
    x = probe.random_tensor(5, hidden, seed=1)
    theirs = probe.try_call(type(module).forward, small, x)
    ours = routed(x, weight, module.top_k)
    return theirs is not None and len(theirs) == 3 and all(map(probe.agrees, ours, theirs))


def routed(x: Tensor, weight: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = nn.functional.linear(x, weight)
    weights, experts = F.moe_router(logits, top_k)[:2]
    return logits, weights.to(logits.dtype), experts


class _Layer(nn.Module):
    can_torch_compile = True
    has_backward = True


class RMSNorm(_Layer):
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        facts = norm_of(self)
        if facts is None or not unchanged(self, self.liger_reads):
            return type(self).forward(self, hidden_states)
        return modules.normed(self, hidden_states, Norm(*facts))


# ``x / rms(x) * (1 + weight)``
RMSNormZeroCentered = RMSNorm


class SwiGLUMLP(_Layer):
    def forward(self: Any, x: Tensor) -> Tensor:
        facts = mlp_of(self)
        if facts is None or not unchanged(self, self.liger_reads):
            return type(self).forward(self, x)
        return probe.mlp_forward(probe.MLP(*facts))(self, x)


GeGLUMLP = SwiGLUMLP


class RotaryPosEmb(_Layer):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        facts = rotary_of(self)
        if facts is None or not modules.is_probed(q, k, cos, sin, unsqueeze_dim):
            return type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
        return modules.rotate(probe.Rotary(*facts), q, k, cos, sin, unsqueeze_dim)


# transformers' name.
rotary_pos_emb = RotaryPosEmb


class SoftmaxTopKRouter(_Layer):
    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not is_softmax_router(self) or not unchanged(self, self.liger_reads):
            return type(self).forward(self, hidden_states)
        return routed(hidden_states.reshape(-1, self.hidden_dim), self.weight, self.top_k)


class ForCausalLMLoss(_Layer):
    """Also a loss on its own: ``model.loss_function = ForCausalLMLoss().forward``."""

    def forward(
        self,
        logits: Tensor,
        labels: Any,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1).to(logits.device)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = F.cross_entropy(logits.reshape(-1, vocab_size), target, None, reduction, ignore_index)
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch


__all__ = [
    "ForCausalLMLoss", "GeGLUMLP", "RMSNorm", "RMSNormZeroCentered", "SoftmaxTopKRouter", "SwiGLUMLP", "rotary_pos_emb"
]  # fmt: skip
