"""The package's MLPs with the same constructors, parameters and results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from . import ops


def check_silu(activation: str | None) -> None:
    if activation not in ("silu", "swish"):
        raise ValueError(f"Activation function {activation} not supported.")


class GatedMLP(nn.Module):
    product: Any

    def __init__(self, config: Any, intermediate_size: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(self.hidden_size, self.intermediate_size, bias) for _ in range(2))
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.product(self.gate_proj(x), self.up_proj(x)))


class LigerSwiGLUMLP(GatedMLP):
    product = staticmethod(ops.swiglu)

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        check_silu(config.hidden_act)
        super().__init__(config, intermediate_size)


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    pass


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    def __init__(self, config: Any) -> None:
        check_silu(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))
        GatedMLP.__init__(self, config)


class LigerFalconH1SwiGLUMLP(LigerSwiGLUMLP):
    """``down_proj(silu(gate_proj(x) * gate_multiplier) * up_proj(x)) * down_multiplier``"""

    def __init__(self, config: Any) -> None:
        check_silu(config.hidden_act)
        GatedMLP.__init__(self, config, bias=getattr(config, "mlp_bias", False))
        self.gate_multiplier, self.down_multiplier = (float(m) for m in config.mlp_multipliers)

    def forward(self, x: Tensor) -> Tensor:
        product = self.product(self.gate_proj(x), self.up_proj(x), self.gate_multiplier)
        return self.down_proj(product) * self.down_multiplier


class LigerMLP(LigerSwiGLUMLP):
    """Reads only the weights of its projections: their hooks and adapters are not called."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)

    def forward(self, x: Tensor) -> Tensor:
        return ops.mlp(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)


class LigerFalconH1MLP(LigerMLP):
    def __init__(self, config: Any) -> None:
        if getattr(config, "mlp_bias", False):
            raise ValueError("LigerFalconH1MLP does not support bias")
        super().__init__(config)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        return ops.mlp(x, *weights, self.gate_multiplier, self.down_multiplier)


class LigerGEGLUMLP(GatedMLP):
    product = staticmethod(F.geglu)

    def __init__(self, config: Any) -> None:
        super().__init__(config)


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """With `use_double_wide_mlp` in the config, layers that share keys and values are twice as wide."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        shared = getattr(config, "num_kv_shared_layers", 0)
        first = getattr(config, "num_hidden_layers", 0) - shared
        wide = getattr(config, "use_double_wide_mlp", False) and shared > 0
        width = 2 if wide and layer_idx is not None and layer_idx >= first else 1
        GatedMLP.__init__(self, config, width * config.intermediate_size)


class TiledMLP(GatedMLP):
    activations: tuple[str, ...]

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        activation = getattr(config, "hidden_act", None)
        if activation is not None and activation not in self.activations:
            names = " or ".join(self.activations)
            raise ValueError(f"{type(self).__name__}: hidden_act must be {names} (got {activation})")
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        return ops.apply_tiled_mlp(GatedMLP.forward, self, x, self.num_shards)


class LigerTiledSwiGLUMLP(TiledMLP):
    product, activations = staticmethod(ops.swiglu), ("silu", "swish")


class LigerTiledGEGLUMLP(TiledMLP):
    product, activations = staticmethod(F.geglu), ("gelu", "gelu_new", "gelu_pytorch_tanh")


class LigerPhi3SwiGLUMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        check_silu(config.hidden_act)
        super().__init__()
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(*self.gate_up_proj(x).chunk(2, dim=-1)))


class LigerBlockSparseTop2MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        check_silu(config.hidden_act)
        super().__init__()
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(ops.swiglu(self.w1(x), self.w3(x)))


class LigerExperts(nn.Module):
    """The experts of a mixture without its router. Each parameter holds the weights of all experts."""

    def __init__(self, config: Any) -> None:
        check_silu(config.hidden_act)
        super().__init__()
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        self.num_experts = next(getattr(config, name) for name in names if hasattr(config, name))
        self.intermediate_dim = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        self.hidden_dim = config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: (..., H), top_k_index and top_k_weights: (..., K), each token's experts and their weights."""
        rows, index, weights = (t.flatten(0, -2) for t in (hidden_states, top_k_index, top_k_weights))
        out = ops.fused_moe(rows, self.gate_up_proj, self.down_proj, index, weights)
        return out.view(hidden_states.shape)
