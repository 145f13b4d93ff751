"""torchtitan's trainer on CPUs with a stable release of torch, for tests/distributed/torchtitan_cases.py.

torchtitan is made for GPUs and a nightly build of torch. Replaced here are the device, the data, the attention
(FlexAttention has no backward on CPUs), and under the backend spmd_types FSDP: stable releases cannot shard its plain
tensors.
"""

from __future__ import annotations

import gc
import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Its log would fill the pipes of processes whose output nobody reads yet.
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

CPU = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__} | {
        name: lambda *_, **__: None for name in ("set_device", "reset_peak_memory_stats", "empty_cache")
    },
    get_device_name=lambda *_: "CPU",
    get_device_properties=lambda *_: SimpleNamespace(total_memory=1 << 34),
    memory_stats=lambda *_: {},
)  # fmt: skip
# torchtitan chooses its device when it is imported.
with mock.patch("torch._utils._get_available_device_type", lambda: "cpu"):
    with mock.patch("torch._utils._get_device_module", lambda _: CPU):
        from torchtitan.tools import utils
utils.get_local_device = lambda: torch.device("cpu")

import spmd_types as spmd  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import ParallelDims, fsdp  # noqa: E402
from torchtitan.distributed import utils as distributed_utils  # noqa: E402
from torchtitan.overrides import fused_swiglu  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

# A Triton kernel.
fused_swiglu.silu_and_mul_op = lambda gate, up, _: nn.functional.silu(gate) * up

VOCABULARY = 2048
BATCH, LENGTH = 2, 32


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        pass

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Counting(BaseDataLoader):
    """Sequences that count up from a random number. Some labels are ignored."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, **_: Any) -> None:
        self.rank = dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(1 + self.rank)
        positions = torch.arange(LENGTH).repeat(BATCH, 1)
        while True:
            starts = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
            ids = (starts + torch.arange(LENGTH + 1)) % VOCABULARY
            labels = ids[:, 1:].clone()
            labels[0, : 3 + self.rank] = -100
            yield {"input": ids[:, :-1].contiguous(), "positions": positions}, labels

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict: dict) -> None:
        pass


class Attention(Module):
    """Causal. Under context parallelism, the plan gathers keys and values, and queries are this rank's part."""

    parts: tuple[int, int] = (0, 1)

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, scale: float | None = None, enable_gqa: bool = False,
        **_: Any,
    ) -> Tensor:  # fmt: skip
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        rows, columns = q.shape[2], k.shape[2]
        first = self.parts[0] * rows if columns == self.parts[1] * rows else 0
        mask = torch.arange(columns) <= first + torch.arange(rows)[:, None]
        attended = nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
        return attended.transpose(1, 2)


def sum_without_scaling(model: nn.Module) -> None:
    """gloo has no sum that scales."""
    divide_nothing(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


meshes: dict[str, ParallelDims] = {}
from_config = ParallelDims.from_config


def shared_meshes(config: Any, processes: int) -> ParallelDims:
    """One for equal degrees: DTensor's caches take equal meshes for one another, which fully_shard refuses."""
    degrees = repr(replace(config, enable_sequence_parallel=True))
    if degrees not in meshes:
        meshes[degrees] = from_config(config, processes)
    return meshes[degrees]


divide_nothing = fsdp.disable_fsdp_gradient_division
fsdp.disable_fsdp_gradient_division = sum_without_scaling
ParallelDims.from_config = shared_meshes
# Needs a newer torch.
distributed_utils.set_pg_timeouts = lambda *_, **__: None


# ---- FSDP's part under spmd_types: parameters keep their types, and are initialised and reduced by them


def keep_types(module: Module, fn: Any, recurse: bool = True) -> Module:
    own = {n: p for n, p in module.named_parameters(recurse=False) if spmd.has_local_type(p)}
    types = {n: (spmd.get_local_type(p), spmd.get_partition_spec(p)) for n, p in own.items()}
    module = apply(module, fn, recurse)
    for name, of in types.items():
        if not spmd.has_local_type(module._parameters[name]):
            spmd.assert_type(module._parameters[name], *of)
    return module


apply = Module._apply


def initialise(module: Module, name: str, p: nn.Parameter) -> None:
    p.fill_(1.0) if p.ndim == 1 else p.normal_(0, 0.05)
    if spmd.V in spmd.get_local_type(p).values():  # another part on each rank
        p *= 1 + 0.5 * dist.get_rank()


def reduced(trainer: Trainer) -> Any:
    body, mesh = trainer.fwd_bwd_fn, trainer.parallel_dims.spmd_dense_mesh()
    groups = [mesh.get_group(name) for name in mesh.mesh_dim_names if mesh.get_group(name).size() > 1]

    def call(*arguments: Any) -> Tensor:
        loss = body(*arguments)
        for p in trainer.model_parts[0].parameters():
            for group in groups:
                if spmd.get_local_type(p)[spmd.normalize_axis(group)] is spmd.R:
                    dist.all_reduce(p.grad, group=group)
        return loss

    return call


# ---- One training


def configuration(name: str, layers: int, folder: str, spmd_backend: str, **options: Any) -> Trainer.Config:
    registry = importlib.import_module(f"torchtitan.models.{name.removesuffix('_moe')}.config_registry")
    config = getattr(registry, f"{name}_debug" if name.endswith("_moe") else f"{name}_debugmodel")()
    config.model_spec.model.layers = config.model_spec.model.layers[:layers]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = Attention.Config()
    config.dataloader, config.tokenizer, config.dump_folder = Counting.Config(), Tokenizer.Config(), folder
    config.checkpoint.enable = config.validator.enable = False
    config.debug.seed = 0
    # Norms of plain tensors are those of each rank's part.
    chosen = {"spmd_backend": spmd_backend, "max_norm": 1e9 if spmd_backend == "spmd_types" else 1.0}
    chosen |= {"local_batch_size": BATCH, "seq_len": LENGTH, "disable_cuda_graphs": True, "seed": 0}
    chosen |= {"mixed_precision_param": "float32", "context_parallel_load_balancer": None} | options
    for key, value in chosen.items():
        parts = (config.training, config.parallelism, config.debug, config.compile)
        setattr(next(part for part in parts if hasattr(part, key)), key, value)
    return config


def train(config: Trainer.Config) -> tuple[list[float], list[float], Trainer]:
    """Losses and gradient norms."""
    plain = config.parallelism.spmd_backend == "spmd_types"
    with ExitStack() as stack:
        if plain:
            parallelize = importlib.import_module(config.model_spec.parallelize_fn.__module__)
            stack.enter_context(mock.patch.object(parallelize, "apply_fsdp_to_decoder", lambda *_, **__: None))
            stack.enter_context(mock.patch.multiple(Module, _apply=keep_types, _init_param=initialise))
        trainer = config.build()
    if trainer.parallel_dims.cp_enabled:
        mesh = trainer.parallel_dims.get_mesh("cp")
        Attention.parts = mesh.get_local_rank(), mesh.size()
    if plain:
        trainer.fwd_bwd_fn = reduced(trainer)
    losses, norms = [], []

    def log(step: int, mean: float, largest: float, norm: float, **_: Any) -> None:
        losses.append(mean)
        norms.append(norm)

    trainer.metrics_processor.log = log
    with mock.patch("time.sleep"):
        trainer.train()
    trainer.close()
    gc.enable()  # the trainer collects by itself, and only now and then
    return losses, norms, trainer
