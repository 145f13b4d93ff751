"""Cases that tests/distributed/test_expert_parallel.py runs in two processes: Qwen3-MoE under the expert and tensor parallelism of
transformers, with our experts, against its own eager model in one process. A case raises if the loss or a gradient
differs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from sharded_cases import saved, whole
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from liger_ops.transformers import apply_liger_kernel, register_experts, unpatch
from tests.support.checks import overall_error
from tests.support.host.process_group import Cases
from tests.support.models.language_models import clone, make, nodes, step, tokens

NAME = "qwen3_moe"
CASES = Cases()
# Everything but transformers' softmax of routers is float64, so that a difference beyond rounding means a wrong exchange.
DTYPE = torch.float64


@cache
def exact() -> tuple[Tensor, dict[str, Tensor]]:
    model = clone(make(NAME), DTYPE).train()
    model.config._experts_implementation = "eager"
    return step(model, tokens())


def loaded(cls: Any = AutoModelForCausalLM, implementation: str | None = None, **layout: Any) -> Any:
    return cls.from_pretrained(
        saved(make(NAME)), distributed_config=DistributedConfig(**layout), dtype=DTYPE, attn_implementation="eager",
        **({} if implementation is None else {"experts_implementation": implementation}),
    ).train()  # fmt: skip


def experts_of(model: Any) -> list[Any]:
    return [layer.mlp.experts for layer in model.model.layers]


def assert_equal(model: Any) -> None:
    ids = tokens()
    loss = model(input_ids=ids, labels=ids).loss
    assert any("moe_experts" in node for node in nodes(loss)), nodes(loss)
    found, gradients = step(model, ids)
    expected, of_eager = exact()
    torch.testing.assert_close(whole(found).float(), expected.float())
    assert gradients.keys() == of_eager.keys(), gradients.keys() ^ of_eager.keys()
    for name, gradient in gradients.items():
        error = overall_error(whole(gradient), of_eager[name])
        assert error < 1e-6, (name, error)


def rows_of(report: Any) -> set[tuple[str, str]]:
    return {(row.replacement, row.reason) for row in report.rows if row.kind == "experts"}


SHARED = {"tp_size": 2, "ep_size": 2}  # both ranks have the same batch
EXCHANGES = {"all_reduce": "AllReduceEP", "all_to_all": "AllToAllEP", "auto": "AutoEP"}


def chosen_by_name(mesh: Any, **layout: Any) -> None:
    register_experts()
    model = loaded(implementation="liger_ops", **layout)
    assert not experts_of(model)[0].gate_up_proj.placements[0].is_replicate()
    assert_equal(model)


def patched_after(mesh: Any, row: str, **layout: Any) -> None:
    model = loaded(**layout)
    report = apply_liger_kernel(model)
    assert rows_of(report) == {(row, "")}, str(report)
    assert rows_of(apply_liger_kernel(model)) == {(row, "")}
    assert_equal(model)
    assert unpatch(model)
    model.set_experts_implementation("eager")
    ids = tokens()
    loss = model(input_ids=ids, labels=ids).loss
    assert not any("moe_experts" in node for node in nodes(loss))


def patched_class(mesh: Any, row: str, **layout: Any) -> None:
    model = loaded(apply_liger_kernel(type(make(NAME))), **layout)
    assert rows_of(apply_liger_kernel(model)) == {(row, "")}
    assert_equal(model)


for i, (exchange, cls) in enumerate(EXCHANGES.items()):
    layout = SHARED | {"ep_implementation": exchange}
    row = f"moe_experts, expert-parallel by {cls}"
    CASES.add(f"{exchange}, chosen by name", chosen_by_name, thorough=i != 0, **layout)
    CASES.add(f"{exchange}, patched after loading", patched_after, thorough=i != 1, row=row, **layout)
    CASES.add(f"{exchange}, patched class", patched_class, thorough=i != 2, row=row, **layout)
CASES.add("enable_expert_parallel", chosen_by_name, tp_size=2, tp_plan="auto", enable_expert_parallel=True)
CASES.add("tensor parallel, chosen by name", chosen_by_name, thorough=True, tp_size=2)
CASES.add("tensor parallel, patched after loading", patched_after, row="moe_experts, tensor-parallel", tp_size=2)


def different_batches(mesh: Any, order: str) -> None:
    """Each rank has half of the batch and, of the experts, its own: FSDP2 and expert parallelism. How gradients of experts
    are divided is transformers' matter, so that its eager experts in the same layout are the truth."""
    layout = {"fsdp_size": 2, "ep_size": 2}
    mine = tokens().chunk(2)[dist.get_rank()]
    model = loaded(apply_liger_kernel(type(make(NAME))), **layout) if order == "class" else loaded(**layout)
    report = apply_liger_kernel(model)
    assert rows_of(report) == {("moe_experts, expert-parallel by AutoEP", "")}, str(report)
    loss = model(input_ids=mine, labels=mine).loss
    assert any("moe_experts" in node for node in nodes(loss)), nodes(loss)
    found, gradients = step(model, mine)
    expected, of_eager = step(loaded(implementation="eager", **layout), mine)
    torch.testing.assert_close(whole(found).float(), whole(expected).float())
    for name, gradient in gradients.items():
        assert overall_error(whole(gradient), whole(of_eager[name])) < 1e-6, name
    # All sequences have as many tokens, so that the mean of the ranks' means is the mean of all.
    total = whole(found).float()
    dist.all_reduce(total)
    torch.testing.assert_close(total / 2, exact()[0].float())


CASES.add("FSDP2 and expert parallel, patched after loading", different_batches, thorough=True, order="after")
CASES.add("FSDP2 and expert parallel, patched class", different_batches, order="class")
