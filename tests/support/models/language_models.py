"""Tiny models of many architectures, and functions that train them, for the tests of liger_ops.transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
SOFTCAPS = {"query_pre_attn_scalar": 8, "sliding_window": 16}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {"num_local_experts": 4, **MOE},
    "gemma": {},
    "gemma2": SOFTCAPS,
    "gemma3_text": SOFTCAPS,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, **MOE},
    "glm4_moe": {"use_qk_norm": True, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, **MOE},
    "exaone4": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "olmo2": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "cohere": {"logit_scale": 0.25},
}


def known(names: Iterable[str]) -> list[str]:
    """Those that this release of transformers has. Older ones lack the newest models."""
    return [name for name in names if name in CONFIG_MAPPING]


def make(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **{**SIZES, **ARCHITECTURES.get(name, {}), **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    # Norm weights of exactly one would hide errors.
    for p in model.parameters():
        if p.dim() == 1:
            p.data += 0.1 * torch.randn_like(p)
    return model.to(dtype)


def tokens(*shape: int, seed: int = 0, vocabulary: int = 64) -> Tensor:
    return torch.randint(3, vocabulary, shape or (2, 12), generator=torch.Generator().manual_seed(seed))


def nodes(loss: Tensor) -> set[str]:
    """The names of the nodes in the loss's autograd graph."""
    seen, waiting = {}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node
            waiting += [n for n, _ in node.next_functions]
    return {node.name() for node in seen.values()}


def step(model: nn.Module, ids: Tensor, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients by parameter name."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, **arguments).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def train(model: nn.Module, steps: int = 32) -> dict[str, Tensor]:
    """Trains with AdamW. Returns the losses, the evaluation logits and the parameters in float64."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for i in range(steps):
        loss = model(input_ids=tokens(4, 16, seed=i % 8), labels=tokens(4, 16, seed=i % 8)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().double())
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens(2, 12, seed=99)).logits.double()
    parameters = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    return {"losses": torch.stack(losses), "logits": logits, "parameters": parameters}


def clone(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    twin = copy.deepcopy(model).to(dtype)
    if dtype == torch.float64:  # grouped GEMMs do not support float64
        twin.config._experts_implementation = "eager"
    return twin
