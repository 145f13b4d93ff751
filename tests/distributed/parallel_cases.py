"""Cases that tests/distributed/test_parallel_training.py runs in process groups: two AdamW steps of a patched model on several
processes against the unpatched model on one. A case raises if a loss or a parameter differs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from sharded_cases import saved, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from liger_ops import functional
from liger_ops.transformers import apply_liger_kernel
from liger_ops.transformers.heads import loss_operator
from tests.support.host.process_group import Cases
from tests.support.models.language_models import make as make_tied
from tests.support.models.language_models import nodes, tokens

MODELS = ("llama", "qwen3", "gemma3_text")
BATCH, LENGTH, STEPS = 4, 16, 2

CASES = Cases()
PROCESSES: dict[str, int] = {}  # of a case


# Plans give the embedding and the head separate layouts, and pipeline stages separate processes.
make = partial(make_tied, tie_word_embeddings=False)


def case(name: str, processes: int = 2, **options: Any) -> Callable:
    def add(function: Callable) -> Callable:
        turn = MODELS[len(CASES) // len(MODELS) % len(MODELS)]  # each case with one model is enough for make test
        for model in MODELS:
            CASES.add(f"{model}, {name}", function, name=model, thorough=model != turn, **options)
            PROCESSES[f"{model}, {name}"] = processes
        return function

    return add


# ---- Batches, the same on all ranks, and the training that all others must equal


def batch(step: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels that are shifted already, and their number. Labels before `first` are ignored, and more of some
    sequences."""
    ids = tokens(BATCH, LENGTH, seed=step)
    labels = nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    labels[:, :first] = labels[0, :11] = labels[2, :2] = -100
    return ids, labels, (labels != -100).sum()


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    # A large eps keeps the sign of a gradient that is zero up to rounding from deciding a whole update.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def call(model: nn.Module, ids: Tensor, labels: Tensor, count: Tensor, **arguments: Any) -> Tensor:
    return model(input_ids=ids, labels=ids, shift_labels=labels, num_items_in_batch=count, **arguments).loss


@cache
def exact(name: str, first: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, and the parameters before and after."""
    model = make(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = trained(model, lambda step: call(model, *batch(step, first)))
    return losses, before, {n: p.detach() for n, p in model.named_parameters()}


def assert_uses(loss: Tensor, uses: tuple[str, ...]) -> None:
    """`rope` may be a part of a larger operator."""
    found = nodes(loss)
    assert all(any(use in node for node in found) for use in uses), found


def trained(
    model: nn.Module, loss_of: Callable[[int], Tensor], total: Callable | None = None, uses: tuple[str, ...] = ()
) -> list[float]:
    """Losses of the steps. `total` reduces the loss over the ranks, after backward. uses: operators in the graph."""
    optimizer, losses = optimizer_of(model.parameters()), []
    for step in range(STEPS):
        loss = loss_of(step)
        assert_uses(loss, uses)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = whole(loss)
        losses.append(float(loss if total is None else total(loss)))
    return losses


def assert_equal(name: str, losses: list[float], parameters: Any, first: int = 0, some: bool = False) -> None:
    """parameters: pairs of names and tensors, all of the model's or some."""
    expected, before, after = exact(name, first)
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    assert worst < 1e-5, (losses, expected)
    found = {n: whole(p) for n, p in parameters}
    assert found and (some or found.keys() == after.keys()), found.keys() ^ after.keys()
    errors = {n: float((p - after[n]).norm() / (after[n] - before[n]).norm()) for n, p in found.items()}
    assert max(errors.values()) < 1e-3, {n: error for n, error in errors.items() if error >= 1e-3}


# ---- Tensor parallelism as transformers applies it


@case("tp_plan, patched after", order="after")
@case("tp_plan, patched class", order="class")
def tp_plan(mesh: Any, name: str, order: str) -> None:
    model = make(name)
    cls = apply_liger_kernel(type(model)) if order == "class" else type(model)
    options = {"tp_plan": "auto", "device_mesh": mesh, "dtype": torch.float32, "attn_implementation": "eager"}
    model = cls.from_pretrained(saved(model), **options).train()
    if order == "after":
        apply_liger_kernel(model)
    assert type(model.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
    # The mesh's dimension has a name in some releases of transformers.
    assert re.fullmatch("fused_linear_cross_entropy, vocab-parallel over (tp|0)", loss_operator(model))
    ids, *_ = batch(0)
    with torch.no_grad():
        assert model(input_ids=ids).logits.shape[-1] == model.config.vocab_size
    assert model(input_ids=ids, labels=ids).logits is None
    uses = ("rms_norm", "rope", "fused_linear_cross_entropy")
    assert_equal(name, trained(model, lambda step: call(model, *batch(step)), uses=uses), model.named_parameters())


# ---- Tensor and sequence parallelism with plans as torchtitan writes them


def plan_of(model: nn.Module, head: ColwiseParallel) -> dict[str, Any]:
    """Between the layers, hidden states are split along the sequence."""
    split, gathered = (Shard(1),), (Replicate(),)
    norm = SequenceParallel(use_local_output=True)
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.0": PrepareModuleInput(
            input_layouts=gathered, desired_input_layouts=split, use_local_output=True
        ),
        "model.norm": norm,
        "lm_head": head,
    }  # fmt: skip
    for i, layer in enumerate(model.model.layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        plan[attention] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        plan[mlp] = PrepareModuleInput(input_layouts=split, desired_input_layouts=gathered)
        plan |= {f"{attention}.{n}_proj": ColwiseParallel() for n in "qkv"}
        plan |= {f"{mlp}.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
        plan |= {n: RowwiseParallel(output_layouts=Shard(1)) for n in (f"{attention}.o_proj", f"{mlp}.down_proj")}
        plan |= {f"model.layers.{i}.{n}": norm for n, _ in layer.named_children() if n.endswith("layernorm")}
        if hasattr(layer.self_attn, "q_norm"):
            heads = SequenceParallel(sequence_dim=1 if "Gemma" in type(layer).__name__ else 2, use_local_output=True)
            plan |= {f"{attention}.{n}_norm": heads for n in "qk"}
    return plan


GATHERED = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
SPLIT = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)


def parallelized(name: str, mesh: Any, order: str, head: ColwiseParallel = GATHERED) -> nn.Module:
    model = make(name)
    if order == "before":
        apply_liger_kernel(model)
    parallelize_module(model, mesh, plan_of(model, head))
    if order == "after":
        apply_liger_kernel(model)
    return model


@case("TP and SP, patched before", order="before")
@case("TP and SP, patched after", order="after")
def sequence_parallel(mesh: Any, name: str, order: str) -> None:
    model = parallelized(name, mesh, order)
    assert loss_operator(model) == "fused_linear_cross_entropy, vocab-parallel over 0"
    losses = trained(model, lambda step: call(model, *batch(step)), uses=("rope", "fused_linear_cross_entropy"))
    assert_equal(name, losses, model.named_parameters())


@case("TP and SP, the vocabulary split")
def split_vocabulary(mesh: Any, name: str) -> None:
    model = parallelized(name, mesh, "before", SPLIT)

    def loss_of(step: int) -> Tensor:
        ids, labels, count = batch(step)
        logits = model(input_ids=ids).logits.to_local()
        assert logits.shape[-1] * 2 == model.config.vocab_size
        split = dict(group=mesh.get_group().group_name, classes=model.config.vocab_size)
        return functional.cross_entropy(logits, labels, reduction="sum", **split) / count

    assert_equal(name, trained(model, loss_of), model.named_parameters())


@case("TP and SP, torch's loss_parallel")
def torch_loss_parallel(mesh: Any, name: str) -> None:
    model = parallelized(name, mesh, "before", SPLIT)
    with loss_parallel():
        assert_equal(name, trained(model, lambda step: call(model, *batch(step))), model.named_parameters())


# ---- FSDP2 with tensor and sequence parallelism


def part_of(rank: int, ranks: int, tensors: tuple[Tensor, Tensor, Tensor], dim: int = 0) -> tuple:
    """Ids and labels of one rank, and the number of all labels."""
    ids, labels, count = tensors
    return ids.chunk(ranks, dim)[rank].contiguous(), labels.chunk(ranks, dim)[rank].contiguous(), count


def shard(model: nn.Module, mesh: Any) -> None:
    """As torchtitan groups modules."""
    fully_shard(model.model.embed_tokens, mesh=mesh)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def summed(group: Any) -> Callable[[Tensor], Tensor]:
    def total(loss: Tensor) -> Tensor:
        dist.all_reduce(loss, group=group)
        return loss

    return total


@case("FSDP2 with TP and SP, patched before", processes=4, order="before")
@case("FSDP2 with TP and SP, patched after", processes=4, order="after")
def two_dimensions(mesh: Any, name: str, order: str) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelized(name, mesh["tp"], "before" if order == "before" else "")
    shard(model, mesh["dp"])
    if order == "after":
        apply_liger_kernel(model)
    rank, group = mesh["dp"].get_local_rank(), mesh["dp"].get_group()
    uses = ("rope", "fused_linear_cross_entropy")
    losses = trained(model, lambda step: call(model, *part_of(rank, 2, batch(step))), summed(group), uses)
    assert_equal(name, losses, model.named_parameters())


# ---- Context parallelism: keys and values travel around a ring


class FromNeighbour(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: int = 1) -> Tensor:
        ctx.step, rank, ranks, out = step, dist.get_rank(), dist.get_world_size(), torch.empty_like(x).contiguous()
        sends = dist.P2POp(dist.isend, x.contiguous(), (rank + step) % ranks)
        receives = dist.P2POp(dist.irecv, out, (rank - step) % ranks)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple:
        return FromNeighbour.apply(d_out, -ctx.step), None


def ring_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal. q: (B, Hq, S / ranks, D), k, v: (B, Hk, S / ranks, D)"""
    rank, ranks, n = dist.get_rank(), dist.get_world_size(), q.shape[2]
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    outputs, normalizers = [], []
    for i in range(ranks):
        source = (rank - i) % ranks
        later = torch.arange(n) + source * n > torch.arange(n)[:, None] + rank * n
        scores = (q @ k.mT * scaling).masked_fill(later, -1e9)
        normalizers.append(scores.logsumexp(-1, keepdim=True))
        outputs.append(scores.softmax(-1) @ v)
        if i + 1 < ranks:
            k, v = FromNeighbour.apply(torch.stack((k, v))).unbind()
    weights = torch.stack(normalizers).softmax(0)
    return (weights * torch.stack(outputs)).sum(0).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("ring", ring_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("ring", lambda *_, **__: None)


@case("CP, a ring")
@case("CP, a rank without labels", first=LENGTH // 2)
def context_parallel(mesh: Any, name: str, first: int = 0) -> None:
    model = make(name)
    model.config._attn_implementation = "ring"
    apply_liger_kernel(model)
    shard(model, mesh)
    rank = dist.get_rank()
    positions = torch.arange(LENGTH)[None].chunk(2, 1)[rank]

    def loss_of(step: int) -> Tensor:
        return call(model, *part_of(rank, 2, batch(step, first), dim=1), position_ids=positions)

    losses = trained(model, loss_of, summed(None), ("rms_norm", "rope", "fused_linear_cross_entropy"))
    assert_equal(name, losses, model.named_parameters(), first)


# ---- Pipeline stages: a patched model cut in two


class Stage(nn.Module):
    def __init__(self, model: nn.Module, rank: int, head: bool) -> None:
        super().__init__()
        self.model, self.is_first = model, rank == 0
        # The last stage's head belongs to the loss if it is fused.
        self.head = model.lm_head if head and rank else nn.Identity()
        body = model.model
        body.layers = body.layers[rank : rank + 1]
        model.config.num_hidden_layers, model.config.use_cache = 1, False
        if self.is_first:
            body.norm, model.lm_head = nn.Identity(), None
        else:
            body.embed_tokens = None

    def forward(self, x: Tensor) -> Tensor:
        given = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        return self.head(self.model.model(**given).last_hidden_state)

    def named_pieces(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.model.named_parameters():
            yield name if self.is_first else name.replace("layers.0.", "layers.1."), p


@case("PP, GPipe", schedule=ScheduleGPipe, fused=True)
@case("PP, 1F1B", schedule=Schedule1F1B, fused=True)
@case("PP, 1F1B with logits", schedule=Schedule1F1B, fused=False)
def pipeline(mesh: Any, name: str, schedule: type, fused: bool) -> None:
    rank = dist.get_rank()
    model = make(name)
    apply_liger_kernel(model)
    module = Stage(model, rank, head=not fused)
    counts = [batch(step)[2] for step in range(STEPS)]
    step_of: list[int] = []
    graphs: list[Tensor] = []

    def loss_of(output: Tensor, labels: Tensor) -> Tensor:
        if fused:
            head = model.lm_head
            loss = functional.fused_linear_cross_entropy(output, head.weight, labels, head.bias, reduction="sum")
        else:
            loss = functional.cross_entropy(output, labels, reduction="sum")
        graphs.append(loss)
        return loss / counts[step_of[-1]]

    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    stages = [stage] if schedule is ScheduleInterleavedZeroBubble else stage
    run = schedule(stages, 2, loss_fn=loss_of, scale_grads=False)
    optimizer, found = optimizer_of(module.parameters()), []
    for step in range(STEPS):
        ids, labels, _ = batch(step)
        step_of.append(step)
        losses: list[Tensor] = []
        run.step(*([ids] if rank == 0 else []), target=labels, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack(losses).sum() if rank else torch.zeros(())
        dist.broadcast(total, 1)
        found.append(float(total))
    assert_equal(name, found, module.named_pieces(), some=True)
    # Not inside a step: the other rank would wait for this one.
    for loss in graphs:
        assert_uses(loss, ("rms_norm", "rope"))


# In torch 2.11 this schedule adds up the gradients of all results of a node, as if they were those of the first.
if torch.__version__ >= (2, 12):
    case("PP, zero bubble", schedule=ScheduleInterleavedZeroBubble, fused=True)(pipeline)
