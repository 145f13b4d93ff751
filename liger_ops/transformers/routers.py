"""Routers whose scores are sqrt(softplus(logits)), as those of DeepSeek-V4: ``forward(hidden_states)`` or, with a table of
experts by token, ``forward(hidden_states, input_ids)`` returns logits, weights and experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from ..linear.layers import autocast_dtype
from ..reference.moe_router import MOST_CHOICES, MOST_EXPERTS
from . import probe
from .patched import NotUnderstood, Switches, give_subclass, is_distributed, original_class, require_switch

OPERATOR, SCORE = "moe_router", "sqrtsoftplus"
BIAS, TABLE, SCALE = "e_score_correction_bias", "tid2eid", "routed_scaling_factor"


@dataclass(frozen=True)
class Router:
    normalize: bool
    by_token: bool  # whether a table gives the experts of each token

    def __call__(self, module: Any, hidden_states: Tensor, *tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states.reshape(-1, module.hidden_dim), module.weight)
        experts = getattr(module, TABLE)[tokens[0].reshape(-1)] if self.by_token else None
        weights, chosen = F.moe_router(
            logits, module.top_k, None if self.by_token else getattr(module, BIAS), None, SCORE, experts,
            normalize=self.normalize, scale=float(getattr(module, SCALE)),
        )[:2]  # fmt: skip
        return logits, weights.to(logits.dtype), chosen


def looks_like_router(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Router") and hasattr(module, "score_fn")


def identify(module: Any, switches: Switches) -> Router:
    require_switch(switches, OPERATOR)
    constants = dict(module.named_buffers(recurse=False))
    by_token = TABLE in constants
    if constants.keys() != {TABLE if by_token else BIAS} or not hasattr(module, SCALE):
        raise NotUnderstood("has other numbers than a bias, or a table of experts, and a scale")
    if module.weight.shape[0] > MOST_EXPERTS or module.top_k > MOST_CHOICES:
        raise NotUnderstood(f"has more than {MOST_EXPERTS} experts or {MOST_CHOICES} choices")
    experts, hidden = 2 * module.top_k, 6
    x, tokens = probe.random_tensor(5, hidden, seed=1), torch.arange(5, device="cpu")
    choice = torch.stack([torch.arange(i, i + module.top_k, device="cpu") % experts for i in range(7)])
    buffer = {TABLE: choice} if by_token else {BIAS: probe.random_tensor(experts, seed=2)}
    weight = 4 * probe.random_tensor(experts, hidden)
    sizes = {name: experts for name in ("num_experts", "num_local_experts") if name in vars(module)}

    def copy_of(dtype: torch.dtype) -> nn.Module:
        parameters = {**module._parameters, "weight": nn.Parameter(weight.to(dtype), False)}
        return probe.shallow_copy(module, _parameters=parameters, _buffers=buffer, hidden_dim=hidden, **sizes)

    def run(dtype: torch.dtype) -> tuple:
        forward, arguments = original_class(type(module)).forward, (tokens,) if by_token else ()
        results = probe.try_call(forward, copy_of(dtype), x.to(dtype), *arguments)
        if results is None or len(results) != 3:
            raise NotUnderstood("does not run on a small copy")
        return results

    # The operator rounds these scores, and no others, to the dtype of the logits.
    rounds = {t.dtype for t in run(torch.bfloat16)[:2]} == {torch.bfloat16}
    theirs = run(torch.float32)
    for normalize in (True, False):
        found = Router(normalize, by_token)
        ours = found(copy_of(torch.float32), x, *((tokens,) if by_token else ()))
        if rounds and all(map(probe.agrees, in_order(*ours), in_order(*theirs))):
            return found
    raise NotUnderstood("computes something else")


def in_order(logits: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By expert: routers return them in any order."""
    order = experts.argsort(-1)
    return logits, weights.gather(-1, order), experts.gather(-1, order)


def patch(module: nn.Module, found: Router) -> str:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = (*args, *kwargs.values())
        understood = len(tokens) == found.by_token and all(isinstance(t, Tensor) for t in tokens)
        # Autocast computes scores in fp32.
        if (
            not understood
            or is_distributed(self.weight)
            or is_distributed(hidden_states)
            or autocast_dtype(hidden_states) is not None
            or (hidden_states.is_cuda and hidden_states.dtype == torch.float64)
        ):
            return original_class(type(self)).forward(self, hidden_states, *args, **kwargs)
        return found(self, hidden_states, *tokens)

    follows = "weight", "hidden_dim", "top_k", BIAS, TABLE, SCALE
    give_subclass(module, "router", OPERATOR, found, lambda cls: {"forward": forward}, follows)
    return OPERATOR
