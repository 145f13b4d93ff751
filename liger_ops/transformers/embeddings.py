"""Embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import functional as F
from ..nn import use_torch_embedding
from .patched import Switches, give_subclass, require_switch
from .probe import NotUnderstood, original_class


def is_embedding(module: nn.Module) -> bool:
    return original_class(type(module)).forward is nn.Embedding.forward


FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def embedding_forward(self: nn.Embedding, input: Tensor) -> Tensor:
    # Distributed and quantised weights have other classes.
    understood = type(self.weight) in (nn.Parameter, Tensor) and self.weight.dtype in FLOATS
    if understood and not use_torch_embedding():
        return F.embedding(input, self.weight, self.padding_idx)
    return original_class(type(self)).forward(self, input)


def patch_embedding(module: nn.Embedding, switches: Switches) -> str:
    require_switch(switches, "embedding")
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise NotUnderstood("it has max_norm, scale_grad_by_freq or sparse gradients")
    give_subclass(module, "embedding", "embedding", None, lambda cls: {"forward": embedding_forward})
    return "embedding"
