"""Patched models in training loops and inside wrappers."""

import inspect
import threading

import pytest
import torch
from torch import nn

from liger_ops.transformers import apply_liger_kernel, unpatch
from tests.support.checks import count_graphs, forked_output_of
from tests.support.models.language_models import make, nodes, step, tokens
from tests.support.models.patched_models import FUSED, assert_same_logits, assert_same_step

pytestmark = pytest.mark.usefixtures("as_large_models")


# ---- Devices


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("training", [True, False])
def test_meta_tensors(name, training):
    def facts(model):
        with torch.device("meta"):
            ids = torch.zeros(2, 12, dtype=torch.long)
            out = model.train(training)(input_ids=ids, labels=ids)
            found = [model(input_ids=ids).logits, out.loss]
        out.loss.backward()
        assert (FUSED in nodes(out.loss)) == (training and model is ours)
        found += [p.grad for p in model.parameters()]
        return [(t.shape, t.dtype, t.device.type) for t in found]

    # The experts of transformers do not take fp32 on meta.
    plain, ours = (make(name, dtype=torch.bfloat16).to("meta") for _ in range(2))
    apply_liger_kernel(ours)
    assert facts(ours) == facts(plain)


# ---- Training loops


def test_other_threads_get_logits():
    model, ids = make("llama"), tokens()
    expected = model(input_ids=ids, labels=ids)
    apply_liger_kernel(model)
    inside, others_done, losses = threading.Event(), threading.Event(), []

    def wait(*_):
        if threading.current_thread() is trainer:
            inside.set()
            others_done.wait(60)

    model.model.layers[0].register_forward_hook(wait)
    trainer = threading.Thread(target=lambda: losses.append(model(input_ids=ids, labels=ids).loss))
    trainer.start()
    assert inside.wait(60)
    try:
        outputs = [model(input_ids=ids), model(input_ids=ids, labels=ids)]
    finally:
        others_done.set()
        trainer.join()
    for out in outputs:
        assert type(out.logits) is torch.Tensor
        assert_same_logits(out.logits, expected.logits, model, ids)
    for loss in (outputs[1].loss, *losses):
        torch.testing.assert_close(loss, expected.loss)
    assert FUSED in nodes(losses[0])


def test_num_items_in_batch_divides_the_sum():
    model, ids = make("mistral"), tokens()
    plain = step(model, ids, num_items_in_batch=torch.tensor(7))
    apply_liger_kernel(model)
    assert_same_step(model, ids, plain, num_items_in_batch=torch.tensor(7))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_gradient_checkpointing(name, reentrant):
    model, ids = make(name), tokens()
    plain = step(model, ids)
    apply_liger_kernel(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_same_step(model, ids, plain)


def test_tied_and_frozen_heads():
    model, ids = make("gemma", tie_word_embeddings=True), tokens()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    plain = step(model, ids)
    apply_liger_kernel(model)
    assert_same_step(model, ids, plain)
    model = make("llama")
    model.lm_head.requires_grad_(False)
    plain = step(model, ids)
    apply_liger_kernel(model)
    assert_same_step(model, ids, plain)
    assert "lm_head.weight" not in plain[1]


def losses_of_a_trainer(folder, patch, **arguments):
    from transformers import Trainer, TrainingArguments

    model = make("llama")
    if patch:
        apply_liger_kernel(model)
    data = [
        {"input_ids": tokens(8, seed=i), "labels": torch.where(torch.arange(8) < i % 5, -100, tokens(8, seed=i))}
        for i in range(48)
    ]
    options = TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=6, logging_steps=1,
        learning_rate=1e-2, lr_scheduler_type="constant", report_to="none", use_cpu=True, disable_tqdm=True,
        save_strategy="no", seed=0, **arguments,
    )  # fmt: skip
    trainer = Trainer(model, options, train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"], torch.cat([p.detach().flatten() for p in model.parameters()])


def test_trainer_accumulates_gradients_exactly(tmp_path):
    plain, ours = (losses_of_a_trainer(str(tmp_path / name), name == "ours") for name in ("plain", "ours"))
    assert len(plain[0]) == 6
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(plain[0]), rtol=1e-4, atol=1e-4)
    assert abs(ours[1] - plain[1]) < 1e-3
    # AdamW takes a full step even for a tiny gradient, whose sign may differ.
    assert float((ours[2] - plain[2]).pow(2).mean().sqrt()) < 1e-3


# ---- Wrappers


def compiled_models():
    for name in ("llama", "gemma2", "gemma3_text", "qwen3", "exaone4", "phi3", "glm4", "granite", "cohere"):
        yield pytest.param(name, marks=[pytest.mark.thorough] * (name not in ("llama", "gemma2")))


@pytest.mark.parametrize("name", [*compiled_models()])
@pytest.mark.usefixtures("fresh_dynamo")
def test_compile_makes_one_graph(name):
    model, ids = make(name), tokens()
    plain = step(model, ids)
    report = apply_liger_kernel(model)
    backend, graphs = count_graphs()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert_same_step(compiled, ids, plain)
    called = {str(n.target) for g in graphs for n in g.graph.nodes}
    rewritten = {row.replacement for row in report.replaced if row.kind in ("rope", "layer")}
    assert len(graphs) == 1 and all(f"liger.{op}" in str(called) for op in {FUSED, *rewritten})
    step(compiled, tokens(seed=5))
    assert len(graphs) == 1


@pytest.mark.thorough
@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_trains_a_patched_model(monkeypatch):
    """Backward must not end with an operator that Inductor first sees there: Inductor in torch 2.11 prints its arguments
    as nested expressions, whose length would grow exponentially with the number of layers."""
    import torch._inductor.graph as lowering

    model, ids = make("llama", num_hidden_layers=3), tokens()
    plain = step(model, ids)
    compiled = torch.compile(model, fullgraph=True)
    assert apply_liger_kernel(compiled).replaced
    lengths = []
    monkeypatch.setattr(lowering, "LazyString", lambda spell, *args: lengths.append(len(spell(*args))), raising=False)
    with torch._inductor.config.patch(force_disable_caches=True):
        assert_same_step(compiled, ids, plain)
    assert max(lengths, default=0) < 1_000_000
    assert lengths or not hasattr(lowering, "LazyString")


def test_data_parallel_wrappers_are_unwrapped():
    model = make("llama")
    assert apply_liger_kernel(nn.DataParallel(model)).replaced and unpatch(nn.DataParallel(model))


def test_hooks_of_the_last_projection_are_called():
    model, ids = make("llama"), tokens()
    apply_liger_kernel(model)
    seen: list = []
    handle = model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    expected = model(input_ids=ids, labels=ids).loss
    assert seen and {"swiglu", "swiglu_linear"} <= nodes(expected)
    handle.remove()
    loss = model(input_ids=ids, labels=ids).loss
    assert len(seen) == 1 and "swiglu" not in nodes(loss)
    torch.testing.assert_close(loss, expected)


def test_models_placed_by_accelerate():
    from accelerate.hooks import ModelHook, add_hook_to_module

    model, ids = make("llama"), tokens()
    plain = step(model, ids)
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    assert not apply_liger_kernel(model).left_alone
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss)
    assert_same_step(model, ids, plain)
    unpatch(model)
    loss, gradients = step(model, ids)
    assert torch.equal(loss, plain[0]) and all(torch.equal(g, plain[1][name]) for name, g in gradients.items())


@pytest.fixture
def accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # A Trainer may have set the state of the process.
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_wraps_and_unwraps_the_patched_forward(accelerator):
    model, ids = make("llama"), tokens()
    expected = list(inspect.signature(model.forward).parameters)
    report = apply_liger_kernel(model)
    assert list(inspect.signature(model.forward).parameters) == expected
    model = accelerator.prepare(model)
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss) and apply_liger_kernel(model).rows == report.rows
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss) and apply_liger_kernel(model).rows == report.rows
    model.forward = lambda **inputs: None
    assert apply_liger_kernel(model).rows[-1].reason == "its forward was replaced"


DISTRIBUTED = """
import gc, torch, torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor import parallel as tp
from tests.support.models.language_models import make, nodes, step, tokens
from liger_ops.linear import project
from liger_ops.transformers import apply_liger_kernel, rewrite

dist.init_process_group("gloo", init_method="file://STORE", rank=0, world_size=1)
mesh, ids = dist.init_device_mesh("cpu", (1,)), tokens()
first = "model.layers.0."
whole = tp.ColwiseParallel(use_local_output=False)
head = tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
plans = {
    "norm": ("llama", {"model.norm": tp.SequenceParallel(), "lm_head": head}),
    "gates": ("llama", {first + "mlp.gate_proj": whole, first + "mlp.up_proj": whole,
                        first + "mlp.down_proj": tp.RowwiseParallel()}),
    "packed gates": ("phi3", {first + "mlp.gate_up_proj": whole, first + "mlp.down_proj": tp.RowwiseParallel()}),
}
for name, plan in plans.values():
    plain = step(make(name), ids)
    model = make(name)
    apply_liger_kernel(model)
    tp.parallelize_module(model, mesh, plan)
    loss, gradients = step(model, ids)
    torch.testing.assert_close(loss, plain[0])
    for name, gradient in gradients.items():
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(gradient, plain[1][name], rtol=1e-4, atol=1e-5)
    assert "rms_norm" in nodes(model(input_ids=ids, labels=ids).loss)

# Distributed norms without hooks, in both helpers of rewritten layers.
project.LARGE = 0
norm = distribute_module(model.model.norm, mesh)
x = distribute_tensor(torch.randn(3, 32, requires_grad=True), mesh)
expected = norm(x + x).full_tensor()
torch.testing.assert_close(rewrite.add_norm(norm, x, x)[0].full_tensor(), expected)
torch.testing.assert_close(rewrite.norm_and_input(norm, x + x)[0].full_tensor(), expected)

# Destroy the group and its threads before the interpreter shuts down.
dist.destroy_process_group()
gc.collect()
print("done")
"""


@pytest.mark.thorough
def test_distributed_norms_and_gates(tmp_path):
    code = DISTRIBUTED.replace("STORE", str(tmp_path / "store"))
    assert forked_output_of(code, ["tests.support.models.language_models"]).endswith("done\n")
