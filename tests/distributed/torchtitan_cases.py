"""Cases that tests/integrations/test_torchtitan.py runs in a process group: torchtitan's debug models in its trainer, with and without
the overrides of liger_ops.integrations.torchtitan. A case raises if losses or gradient norms differ."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support.host.process_group import Cases

CASES = Cases()
case = CASES.named
OURS = "liger_ops.integrations.torchtitan."
NAMES = ("rms_norm", "feed_forward", "grouped_experts", "rope", "loss")
RMS_NORM, FEED_FORWARD, GROUPED_EXPERTS, ROPE, LOSS = OVERRIDES = [OURS + name for name in NAMES]


def trained(model: str, steps: int, overrides: Sequence = (), **options: Any) -> Any:
    from torchtitan_on_cpu import configuration, train

    torch.compiler.reset()
    # They hold meshes of earlier cases, which are equal to this one's, and fully_shard refuses all but the same mesh.
    _clear_sharding_prop_cache()
    with tempfile.TemporaryDirectory() as folder:
        # Whole debug models where the training is long.
        config = configuration(model, 8 if steps > 3 else 2, folder, steps=steps, **options)
        config.override.imports = list(overrides)
        half = torch.Tensor.bfloat16
        exact = options.get("mixed_precision_param") != "bfloat16"
        # Experts cast to bfloat16, whose roundings would hide errors.
        with mock.patch.object(torch.Tensor, "bfloat16", (lambda t: t) if exact else half):
            return train(config)


@cache
def plain(model: str, steps: int, **options: Any) -> tuple[list[float], list[float]]:
    # Gate and up in one parameter are initialised by other random numbers than in two.
    fused = ["torchtitan.overrides.fused_swiglu.fused_grouped_experts"] if model.endswith("_moe") else []
    return trained(model, steps, fused, **options)[:2]


def check(mesh: Any, model: str, steps: int = 3, overrides: Sequence = OVERRIDES, **options: Any) -> None:
    losses, norms, trainer = trained(model, steps, overrides, **options)
    expected = plain(model, steps, **options)
    assert len(losses) == steps
    # Sums in another order; differences grow with the steps.
    assert losses == pytest.approx(expected[0], rel=1e-5 * steps), (losses, expected[0])
    assert norms == pytest.approx(expected[1], rel=1e-4 * steps), (norms, expected[1])
    uses_ours(trainer, model.endswith("_moe"))


def uses_ours(trainer: Any, has_experts: bool) -> None:
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.rope import RoPE

    from liger_ops.integrations import torchtitan as ours

    modules = list(trainer.model_parts[0].modules())
    layer = (GroupedExperts, ours.LigerGroupedExperts) if has_experts else (FeedForward, ours.LigerFeedForward)
    for theirs, own in ((RMSNorm, ours.LigerRMSNorm), layer, (RoPE, ours.LigerRoPE)):
        assert len([m for m in modules if isinstance(m, own)]) == len([m for m in modules if isinstance(m, theirs)]) > 1
    assert type(trainer.loss_fn) is ours.LigerLoss


TENSOR = {"tensor_parallel_degree": 2}
CONTEXT = {"context_parallel_degree": 2}
EXPERT = {"expert_parallel_degree": 2}
UNGATHERED = [(RMS_NORM, {"gather": False}), FEED_FORWARD, ROPE, LOSS]

for _model in ("llama3", "qwen3"):
    _long = {"model": _model, "steps": 20, "thorough": _model == "qwen3"}
    case(f"{_model}, FSDP2", spmd_backend="partial_dtensor", **_long)(check)
    case(f"{_model}, TP and SP", spmd_backend="partial_dtensor", **_long, **TENSOR)(check)
    case(f"{_model}, TP and SP of plain tensors", spmd_backend="spmd_types", **_long, **TENSOR)(check)
for _backend in ("partial_dtensor", "full_dtensor", "spmd_types"):
    _short = {"model": "llama3", "spmd_backend": _backend, "thorough": _backend == "partial_dtensor"} | TENSOR
    case(f"{_backend}, TP", enable_sequence_parallel=False, **_short)(check)
    case(f"{_backend}, SP not gathered before the loss", overrides=UNGATHERED, **_short)(check)
case("full_dtensor, FSDP2", model="llama3", spmd_backend="full_dtensor")(check)
case("full_dtensor, TP and SP", model="llama3", spmd_backend="full_dtensor", **TENSOR)(check)
case("full_dtensor, CP", model="llama3", spmd_backend="full_dtensor", **CONTEXT)(check)
case("spmd_types, CP", model="llama3", spmd_backend="spmd_types", **CONTEXT)(check)
case("spmd_types, checked", model="llama3", spmd_backend="spmd_types", spmd_typechecking=True, thorough=True,
     **TENSOR)(check)  # fmt: skip
case("spmd_types, not gathered, checked", model="llama3", spmd_backend="spmd_types", spmd_typechecking=True,
     overrides=UNGATHERED, **TENSOR)(check)  # fmt: skip
case("compiled, FSDP2", model="llama3", spmd_backend="partial_dtensor", enable=True, backend="aot_eager")(check)
case("compiled, TP and SP", model="llama3", spmd_backend="spmd_types", enable=True, backend="aot_eager", **TENSOR)(
    check
)
for _name, _layout in {"FSDP2": {}, "EP": EXPERT, "TP and SP": TENSOR, "TP, SP and EP": TENSOR | EXPERT}.items():
    _more = {"model": "qwen3_moe", "thorough": _name != "TP, SP and EP"} | _layout
    case(f"experts, {_name}", spmd_backend="partial_dtensor", **_more)(check)
    case(f"experts, full_dtensor, {_name}", spmd_backend="full_dtensor", **_more)(check)
# With expert parallelism, torchtitan's own all-to-all fails here in recomputation.
case("experts, spmd_types, TP and SP", model="qwen3_moe", spmd_backend="spmd_types", **TENSOR)(check)
case("experts, spmd_types, TP, checked", model="qwen3_moe", spmd_backend="spmd_types", spmd_typechecking=True,
     thorough=True, **TENSOR)(check)  # fmt: skip
case("a memory budget", model="llama3", spmd_backend="partial_dtensor",
     overrides=[*OVERRIDES[:-1], (LOSS, {"memory_budget": 1 << 17})])(check)  # fmt: skip


@case("bf16")
def half_precision(mesh: Any) -> None:
    """The loss is no further from fp32 than torchtitan's own in bf16."""
    options = {"model": "llama3", "spmd_backend": "partial_dtensor", "steps": 1}
    exact, theirs = (plain(**options, mixed_precision_param=dtype)[0][0] for dtype in ("float32", "bfloat16"))
    ours = trained(**options, overrides=OVERRIDES, mixed_precision_param="bfloat16")[0][0]
    assert abs(ours - exact) <= 1.5 * abs(theirs - exact) + 2**-8, (ours, theirs, exact)


@case("parameters keep their names")
def names(mesh: Any) -> None:
    from torchtitan.models.llama3 import model_registry

    from liger_ops.integrations import torchtitan as ours

    config = model_registry("debugmodel").model
    layer = config.layers[0]
    for theirs, own in (
        (config.norm, ours.rms_norm(config.norm)),
        (layer.feed_forward, ours.feed_forward(layer.feed_forward)),
        (layer.attention.rope, ours.rope(layer.attention.rope)),
    ):
        assert type(own) is not type(theirs)
        with torch.device("meta"):
            assert own.build().state_dict().keys() == theirs.build().state_dict().keys()


@case("what is not replaced")
def others(mesh: Any) -> None:
    from torchtitan.components.loss import MSELoss
    from torchtitan.models.common.config_utils import make_ffn_config
    from torchtitan.models.common.feed_forward import SigmoidGatedFeedForward
    from torchtitan.models.common.linear import Linear

    from liger_ops.integrations import torchtitan as ours

    with pytest.raises(ValueError, match="loss: its configuration must be a CrossEntropyLoss, chunked or not"):
        ours.loss(MSELoss.Config())
    fused = make_ffn_config(dim=8, hidden_dim=16, w1_param_init={}, w2w3_param_init={}, tp_gemm_backend="dist_gemm")
    assert ours.feed_forward(fused) is fused
    parts = {name: getattr(fused, name) for name in ("w1", "w2", "w3")}
    parts = {n: Linear.Config(in_features=p.in_features, out_features=p.out_features) for n, p in parts.items()}
    gated = SigmoidGatedFeedForward.Config(**parts, gate=Linear.Config(in_features=8, out_features=1))
    theirs, own = gated.build(), ours.feed_forward(gated).build()
    own.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(own(x), theirs(x))
    assert isinstance(own, ours.LigerFeedForward)
