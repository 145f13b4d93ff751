"""Cases that tests/distributed/test_sharded.py runs in a process group: patched against unpatched models under FSDP2 and tensor
parallelism. A case raises if the two differ."""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from liger_ops.linear import project
from liger_ops.transformers import apply_liger_kernel, probe, unpatch
from liger_ops.transformers.coverage import NO_OPERATOR
from tests.support.checks import assert_no_worse_overall, count_graphs, overall_error
from tests.support.host.process_group import Cases
from tests.support.models.language_models import make, nodes, tokens

FUSED = "fused_linear_cross_entropy"
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def as_large_models() -> None:
    """Input gradients accumulate inside GEMMs."""
    project.LARGE = 0


CASES = Cases(prepare=as_large_models)
case = CASES.named


def batch(index: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and labels. Each rank has different ids and a different number of ignored labels."""
    ids = tokens(2, 12, seed=100 * dist.get_rank() + index)
    labels = ids.clone()
    labels[0, : 2 + 3 * dist.get_rank()] = -100
    return ids, labels


# ---- Module groups, as different training frameworks choose them


def by_layers(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def head_alone(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    fully_shard(model.lm_head, mesh=mesh, **options)
    return by_layers(model, mesh, **options)


def norm_and_head(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, **options)
    return by_layers(model, mesh, **options)


def torchtitan(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """As torchtitan's apply_fsdp, which gathers the final norm and the head only once per step."""
    fully_shard(model.model.embed_tokens, mesh=mesh, **options)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, **options | {"reshard_after_forward": False})
    return by_layers(model, mesh, **options)


def norms_of_heads(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            fully_shard(norm, mesh=mesh, **options)
    return by_layers(model, mesh, **options)


def tied(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """Modules that share a weight must be in one group."""
    fully_shard([model.model.norm, model.model.embed_tokens, model.lm_head], mesh=mesh, **options)
    return by_layers(model, mesh, **options)


def accelerate(model: nn.Module, mesh: Any) -> nn.Module:
    """Calls the function behind Accelerator.prepare, which without a GPU would use DistributedDataParallel."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )  # fmt: skip
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), device=torch.device("cpu"), mixed_precision="no",
        torch_device_mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",)),
        parallelism_config=SimpleNamespace(fsdp_dim_names=["dp_shard"]), is_main_process=dist.get_rank() == 0,
    )  # fmt: skip
    with mock.patch.dict(os.environ, ACCELERATE_USE_FSDP="true"):
        return fsdp2_prepare_model(accelerator, model)


def saved(model: nn.Module) -> str:
    """Saves the model to a folder from which all ranks can load it."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    return folder[0]


def transformers_own(model: nn.Module, mesh: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    chosen = DistributedConfig(fsdp_size=dist.get_world_size())
    options = {"distributed_config": chosen, "dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(saved(model), **options).train()


# ---- Comparison


def whole(t: Tensor) -> Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def step(model: nn.Module, call: Callable | None = None, micro: int = 1, sync: bool = False, **arguments: Any) -> dict:
    """The loss, under the key "loss", and the gradients by parameter name, accumulated over `micro` batches."""
    call = model if call is None else call
    model.zero_grad()
    total = torch.zeros(())
    for i in range(micro):
        if sync:
            model.set_requires_gradient_sync(i == micro - 1)
        ids, labels = batch(i)
        loss = call(input_ids=ids, labels=labels, **arguments).loss
        (loss / micro).backward()
        total += whole(loss) / micro
    plain_name = {
        n: n.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "") for n, _ in model.named_parameters()
    }
    found = {plain_name[n]: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": total} | found


def after_two_steps(model: nn.Module) -> dict:
    """What `step` finds after two of AdamW."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for i in range(2):
        ids, labels = batch(i)
        model(input_ids=ids, labels=labels).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return step(model)


def in_order(*found: dict) -> list[list[Tensor]]:
    """The results of each, which must have the same names."""
    first, *others = found
    assert all(other.keys() == first.keys() for other in others), [other.keys() ^ first.keys() for other in others]
    return [[results[name] for name in first] for results in found]


def assert_same(found: dict, exact: dict) -> None:
    worst = max(map(overall_error, *in_order(found, exact)))
    assert worst < 1e-4, f"differs by {worst:.2g}"


def used_by(model: nn.Module, **arguments: Any) -> set[str]:
    ids, labels = batch()
    return nodes(model(input_ids=ids, labels=labels, **arguments).loss)


class Gathers:
    """Counts how often FSDP gathers the group of the head."""

    def __enter__(self) -> Gathers:
        self.count = 0
        original = FSDPParamGroup.unshard

        def unshard(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            before = group._all_gather_result
            out = original(group, *args, **kwargs)
            names = [p._param_fqn for p in group.fsdp_params]
            self.count += before is None and group._all_gather_result is not None and "lm_head.weight" in names
            return out

        self.patch = mock.patch.object(FSDPParamGroup, "unshard", unshard)
        self.patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.patch.stop()


# ---- The cases


def check(shard: Callable, mesh: Any, order: str = "before", prepare: Callable | None = None, **options: Any) -> None:
    """Loss and gradients agree with the unpatched model, and the expected operator computed them."""
    name, arch = options.pop("model", "llama"), options.pop("arch", {})
    taken = options.pop("taken", FUSED)
    switches, run = options.pop("switches", {}), options.pop("run", {})

    def built(patch: bool) -> nn.Module:
        model = make(name, **arch)
        if patch and order == "class":
            cls = apply_liger_kernel(type(model), **switches)
            twin = cls(model.config)
            twin.load_state_dict(model.state_dict())
            model = twin
        if patch and order == "before":
            apply_liger_kernel(model, **switches)
        if prepare:
            prepare(model)
        model = shard(model, mesh, **options)
        if patch and order == "after":
            assert {row.reason for row in apply_liger_kernel(model, **switches).left_alone} <= {NO_OPERATOR}
        return model

    plain = step(built(False), **{k: v for k, v in run.items() if k != "skip_logits"})
    model = built(True)
    # The second step detects state that the first one left behind.
    for _ in range(2):
        assert_same(step(model, **run), plain)
    assert taken in used_by(model, **{k: v for k, v in run.items() if k == "skip_logits"})


ORDERS = ("before", "after", "class")
for _i, _shard in enumerate((by_layers, head_alone, norm_and_head, torchtitan)):
    for _order in ORDERS:
        _more = {"thorough": _order != ORDERS[_i % 3]}
        case(f"{_shard.__name__}, patched {_order}", shard=_shard, order=_order, **_more)(check)
for _order in ORDERS:
    _more = {"order": _order, "model": "qwen3", "thorough": _order == "class"}
    case(f"qwen3, patched {_order}", shard=by_layers, taken="qk_norm_rope", **_more)(check)
    # FSDP gathers a norm of its own group in a hook of the norm, so the norm must be called.
    case(f"norms_of_heads, patched {_order}", shard=norms_of_heads, taken="rope", **_more)(check)
case("accelerate, patched before", shard=accelerate, thorough=True)(check)
case("accelerate, patched after", shard=accelerate, order="after")(check)
case("transformers", shard=transformers_own, order="after")(check)
case("tied", shard=tied, arch={"tie_word_embeddings": True})(check)
case("tied, patched after", shard=tied, order="after", arch={"tie_word_embeddings": True}, thorough=True)(check)
for _shard, _also in ((head_alone, True), (norm_and_head, False)):
    _name = _shard.__name__
    _one, _other = {"shard": _shard, "thorough": _also}, {"shard": _shard, "thorough": not _also}
    case(f"{_name}, not resharded", reshard_after_forward=False, **_one)(check)
    case(f"{_name}, logits kept", run={"skip_logits": False}, taken="cross_entropy", **_other)(check)
    case(f"{_name}, cross_entropy alone", switches={FUSED: False}, taken="cross_entropy", **_one)(check)
    case(f"{_name}, accumulated", run={"micro": 3, "sync": True}, **_other)(check)
    case(f"{_name}, offloaded", offload_policy=CPUOffloadPolicy(pin_memory=False), **_one)(check)


def wrap_in_checkpoints(model: nn.Module) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    layer = type(model.model.layers[0])
    model.config.use_cache = False
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layer))


def enable_checkpoints(model: nn.Module, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


for _name, _prepare in (
    ("checkpoints", partial(enable_checkpoints, reentrant=False)),
    ("reentrant checkpoints", partial(enable_checkpoints, reentrant=True)),
    ("checkpoint wrappers", wrap_in_checkpoints),
):
    case(f"norm_and_head, {_name}", shard=norm_and_head, prepare=_prepare, thorough=_name != "checkpoints")(check)


@case("bf16 policy", shard=norm_and_head, policy=BF16)
@case("bf16 policy, head alone", shard=head_alone, policy=BF16, thorough=True)
@case("bf16 policy, bf16 outputs", shard=norm_and_head, thorough=True, policy=MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16))  # fmt: skip
@case("bf16 policy, fp32 outputs", shard=norm_and_head, thorough=True, policy=MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32))  # fmt: skip
def no_worse_than_plain(mesh: Any, shard: Callable, policy: MixedPrecisionPolicy) -> None:
    """Compared with the unpatched model in fp32, the error is no larger than the unpatched model's with this policy."""
    exact = step(norm_and_head(make("llama"), mesh))
    plain = step(shard(make("llama"), mesh, mp_policy=policy))
    model = make("llama")
    apply_liger_kernel(model)
    shard(model, mesh, mp_policy=policy)
    ours = step(model)
    assert FUSED in used_by(model)
    assert_no_worse_overall(*in_order(ours, plain, exact))


@case("outputs in bf16 leave the loss in fp32")
def loss_dtype(mesh: Any) -> None:
    """The output dtype of the head's policy does not apply to the loss. Class weights keep their dtype too."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16)
    model = make("llama")
    apply_liger_kernel(model)
    seen: list[tuple] = []
    fused = torch.ops.liger.fused_linear_cross_entropy
    # Shard the inner model, so that no policy casts the outputs of the outer one.
    for module in ([model.model.norm, model.lm_head], *model.model.layers, model.model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    ids, labels = batch()
    weight = torch.linspace(0.3, 1.7, 64)

    def weighted(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        return nn.functional.cross_entropy(logits.float().view(-1, vocab_size), shifted.flatten(), weight)

    def record(
        input: Tensor, weight: Tensor, target: Tensor, bias: Any, ce_weight: Tensor, *rest: Any, **named: Any
    ) -> Tensor:
        seen.append((input.dtype, weight.dtype, ce_weight.dtype))
        return fused(input, weight, target, bias, ce_weight, *rest, **named)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.ops.liger, FUSED, record))
        model.loss_function = weighted
        loss = model(input_ids=ids, labels=labels).loss
    assert loss.dtype == torch.float32 and seen == [(torch.bfloat16, torch.bfloat16, torch.float32)], (loss.dtype, seen)
    loss.backward()
    # The loss was not rounded to bf16 on the way.
    bf16 = loss.detach().to(torch.bfloat16).float()
    assert model.lm_head.weight.grad is not None and not torch.equal(bf16, loss.detach())


@case("gathers of the head")
def gathers(mesh: Any) -> None:
    def count(patch: bool, backward: bool = True, **switches: Any) -> int:
        model = make("llama")
        if patch:
            apply_liger_kernel(model, **switches)
        head_alone(model, mesh)
        model.lm_head.set_unshard_in_backward(backward)
        ids, labels = batch()
        with Gathers() as seen:
            model(input_ids=ids, labels=labels).loss.backward()
        return seen.count

    assert count(False) == 2
    assert count(True) == 2 and count(True, backward=False) == 1
    assert count(True, fused_linear_cross_entropy=False) == 2


@case("compiled whole, by layers", shard=by_layers, thorough=True)
@case("compiled whole, norm_and_head", shard=norm_and_head, thorough=True)
def compiled_whole(mesh: Any, shard: Callable) -> None:
    """Same loss and gradients, with no more graph breaks than in the unpatched model."""
    from torch._dynamo.utils import counters

    found, breaks = [], []
    for patch in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = make("llama", num_hidden_layers=1)  # compiling takes half the time of two
        if patch:
            apply_liger_kernel(model)
        shard(model, mesh)
        backend, graphs = count_graphs()
        found.append(step(model, torch.compile(model, backend=backend)))
        breaks.append(sum(counters["graph_break"].values()))
        assert graphs
    assert_same(found[1], found[0])
    assert breaks[1] <= breaks[0], breaks


@case("compiled by layers", thorough=True)
def compiled_by_layers(mesh: Any) -> None:
    torch._dynamo.reset()

    def compile_layers(model: nn.Module) -> None:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")

    check(norm_and_head, mesh, prepare=compile_layers)


@case("unpatched while sharded", shard=norm_and_head)
def unpatched(mesh: Any, shard: Callable) -> None:
    model = make("llama")
    apply_liger_kernel(model)
    shard(model, mesh)
    ours = step(model)
    unpatch(model)
    assert_same(step(model), ours)
    assert FUSED not in used_by(model)


@case("a hook on the head", shard=norm_and_head)
def hooked(mesh: Any, shard: Callable) -> None:
    """The hook sees logits, from which the loss is then computed."""
    plain = step(shard(make("llama"), mesh))
    model = make("llama")
    apply_liger_kernel(model)
    shard(model, mesh)
    seen: list[tuple] = []
    model.lm_head.register_forward_hook(lambda module, inputs, out: seen.append((type(out), out.shape[-1])))
    assert_same(step(model), plain)
    assert seen == [(Tensor, 64)] and "cross_entropy" in used_by(model)


@case("two AdamW steps", shard=norm_and_head, thorough=True)
def two_steps(mesh: Any, shard: Callable) -> None:
    def trained(patch: bool) -> dict:
        model = make("llama")
        if patch:
            apply_liger_kernel(model)
        shard(model, mesh)
        return after_two_steps(model)

    assert_same(trained(True), trained(False))


# ---- FP8


@case("fp8", recipe="rows")
@case("fp8, gradients of weights in their own dtype", recipe="rows_hp", thorough=True)
@case("fp8, a scale per tensor", recipe="tensor", thorough=True)
@case("fp8, linear layers in groups of their own", recipe="rows", alone=True)
@case("fp8, checkpoints", recipe="rows", checkpoints=True)
@case("fp8, patched after", recipe="rows", order="after")
@case("fp8, linear layers in groups of their own, patched after", recipe="rows", alone=True, order="after")
@case("fp8, given to a patched model", recipe="rows", order="again")
def in_fp8(mesh: Any, recipe: str, alone: bool = False, checkpoints: bool = False, order: str = "before") -> None:
    """The gradients are the mean of those that the ranks find without sharding."""

    def made(order: str = "before") -> nn.Module:
        model = make("llama").train()
        if order != "after":
            apply_liger_kernel(model, **{"fp8": recipe} if order == "before" else {})
        return model

    # Hooks gather layers in groups of their own, which therefore quantise their input one by one.
    with ExitStack() as separate:
        for module in (project, probe) if alone else ():
            separate.enter_context(mock.patch.object(module, "projected_in_fp8", lambda *_: None))
        expected = step(made())
    for name, t in expected.items():
        if name != "loss":
            dist.all_reduce(t)
            t /= dist.get_world_size()
    model = made(order)
    if checkpoints:
        enable_checkpoints(model, False)
    if alone:
        for linear in [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]:
            fully_shard(linear, mesh=mesh)
    model = by_layers(model, mesh)
    if order != "before":
        rows = [row for row in apply_liger_kernel(model, fp8=recipe).rows if row.kind == "linear"]
        assert len(rows) == 14 and {row.replacement for row in rows} == {f"fp8_linear, {recipe}"}, rows
    for _ in range(2):
        assert_same(step(model), expected)


# ---- Tensor parallelism


@case("a head that returns a rank's logits")
def logits_of_a_rank(mesh: Any) -> None:
    """As ColwiseParallel() does by default. The fused loss is right without logits; a loss of a rank's logits would be wrong."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model, (ids, labels) = make("llama"), batch()
    dist.broadcast(ids, 0), dist.broadcast(labels, 0)
    expected = model(input_ids=ids, labels=labels).loss
    apply_liger_kernel(model)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, expected)
    size = dist.get_world_size()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert model(input_ids=ids).logits.shape[-1] == 64 // size
    assert re.search(rf"the head returns {64 // size} of 64 logits, .*output_layouts=Replicate", str(said[-1].message))
    for call in (lambda: model(input_ids=ids, labels=labels, skip_logits=False),
                 lambda: model.eval()(input_ids=ids, labels=labels)):  # fmt: skip
        try:
            call()
        except ValueError as error:
            assert re.search(rf"the loss needs all logits .got {64 // size} of 64", str(error)), str(error)
        else:
            raise AssertionError("it was not refused")
