"""Cases that tests/distributed/test_sharded.py runs in a process group: models with adapters of peft under FSDP2, patched
against unpatched ones. A case raises if the two differ."""

from __future__ import annotations

from typing import Any

from sharded_cases import BF16, after_two_steps, as_large_models, assert_same, batch, enable_checkpoints, in_order, step
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from liger_ops.transformers import apply_liger_kernel
from tests.support.checks import assert_no_worse_overall
from tests.support.host.process_group import Cases
from tests.support.models.language_models import nodes
from tests.support.models.lora_layers import build

CASES = Cases(prepare=as_large_models)
case = CASES.named
# Of projections, and of the down projection with the product in front of it.
FUSED = {"lora_linear", "_ProjectionsBackward"}


def sharded(model: nn.Module, mesh: Any, alone: bool = False, **options: Any) -> nn.Module:
    """alone: each A and each B in a group of its own."""
    for layer in model.base_model.model.model.layers:
        for name, module in layer.named_modules():
            if alone and ".lora_" in name and isinstance(module, nn.Linear):
                fully_shard(module, mesh=mesh, **options)
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def path_of(model: nn.Module) -> set[str]:
    ids, labels = batch()
    return nodes(model(input_ids=ids, labels=labels).loss) & FUSED


@case("adapters, patched before", order="before")
@case("adapters, patched after", order="after")
@case("adapters, not resharded", order="before", reshard_after_forward=False, thorough=True)
@case("adapters, offloaded", order="after", offload_policy=CPUOffloadPolicy(pin_memory=False), thorough=True)
def agree(mesh: Any, order: str, **options: Any) -> None:
    plain = step(sharded(build("")[0], mesh, **options))
    model = sharded(build(order)[0], mesh, **options)
    # The second step detects state that the first one left behind.
    for _ in range(2):
        assert_same(step(model), plain)
    assert path_of(model) == FUSED


@case("adapters, patched when sharded")
def patched_last(mesh: Any) -> None:
    plain = step(sharded(build("")[0], mesh))
    model = sharded(build("")[0], mesh)
    apply_liger_kernel(model)
    assert_same(step(model), plain)
    assert path_of(model) == FUSED


@case("adapters in groups of their own")
def in_groups(mesh: Any) -> None:
    """FSDP gathers A and B in hooks of their modules, so peft's forward calls them."""
    plain = step(sharded(build("")[0], mesh, alone=True))
    model = sharded(build("before")[0], mesh, alone=True)
    assert_same(step(model), plain)
    assert not path_of(model)


@case("adapters, checkpoints", reentrant=False)
@case("adapters, reentrant checkpoints", reentrant=True, thorough=True)
def checkpointed(mesh: Any, reentrant: bool) -> None:
    plain = step(sharded(build("")[0], mesh))
    model = build("after")[0]
    enable_checkpoints(model, reentrant)
    model.enable_input_require_grads()
    assert_same(step(sharded(model, mesh)), plain)


@case("adapters, bf16 policy", policy=BF16)
def no_worse_than_plain(mesh: Any, policy: MixedPrecisionPolicy) -> None:
    """Compared with peft in fp32, the error is no larger than peft's with this policy."""
    exact = step(sharded(build("")[0], mesh))
    plain = step(sharded(build("")[0], mesh, mp_policy=policy))
    model = sharded(build("before")[0], mesh, mp_policy=policy)
    ours = step(model)
    assert path_of(model) == FUSED
    assert_no_worse_overall(*in_order(ours, plain, exact))


@case("adapters, two AdamW steps")
def two_steps(mesh: Any) -> None:
    assert_same(*(after_two_steps(sharded(build(order)[0], mesh)) for order in ("before", "")))
