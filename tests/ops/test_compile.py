"""Models under torch.compile, checkpointing and CUDA graphs: one graph for all sizes, results as in eager."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.support.checks import count_graphs
from tests.support.host.cpp_example import example

SIZES = [(2, 6), (3, 9), (5, 17), (4, 33)]


def model_and_text(device):
    torch.manual_seed(0)
    models = example()
    model = models.WithLoss(models.TinyLlama()).to(device)
    texts = [torch.randint(128, (batch, length + 1), device=device) for batch, length in SIZES]
    return model, [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]


def step(function, model, text):
    loss = function(*text)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_one_graph_trains_at_every_size(backend, device):
    model, texts = model_and_text(device)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for text in texts:
        for ours, theirs in zip(step(compiled, model, text), step(model, model, text)):
            torch.testing.assert_close(ours, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_changing_sizes_recompile_once(device):
    """Without dynamic=True, the second size triggers the dynamic graph, and later sizes reuse it."""
    model, texts = model_and_text(device)
    torch._dynamo.reset()
    backend, graphs = count_graphs()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for text in texts:
        compiled(*text)
    assert len(graphs) == 2


# ---- Checkpointing.


class Record(TorchDispatchMode):
    """Records the names of our operators that run below autograd, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "liger":
            self.names.append(func.name().removeprefix("liger::"))
        return func(*args, **(kwargs or {}))


def block(device):
    torch.manual_seed(0)
    module = example().Block(64, 4, 96).to(device)
    x = torch.randn(2, 8, 64, device=device, requires_grad=True)
    angles = torch.randn(1, 8, 16, device=device)
    return module, x, angles.cos(), angles.sin()


def block_gradients(module, x, cos, sin, **options):
    out = checkpoint(module, x, cos, sin, use_reentrant=False, **options) if options else module(x, cos, sin)
    return torch.autograd.grad(out.sum(), [x, *module.parameters()])


def policy(kept, context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


FORWARD = ["_rms_norm_fwd", "rope", "_fused_add_rms_norm_fwd", "swiglu_packed"]


@pytest.mark.parametrize("kept", [[], ["rope"], ["_rms_norm_fwd", "_fused_add_rms_norm_fwd"], FORWARD])
def test_a_policy_chooses_which_operators_are_recomputed(kept, device):
    module, x, cos, sin = block(device)
    ops = [getattr(torch.ops.liger, name).default for name in kept]
    contexts = partial(create_selective_checkpoint_contexts, partial(policy, ops))
    expected = block_gradients(module, x, cos, sin)
    with Record() as record:
        ours = block_gradients(module, x, cos, sin, context_fn=contexts)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected))
    counts = {name: record.names.count(name) for name in FORWARD}
    assert counts == {name: 1 if name in kept else 2 for name in FORWARD}, record.names


def test_checkpointing_recomputes_bit_for_bit(device):
    module, x, cos, sin = block(device)
    ours = block_gradients(module, x, cos, sin, determinism_check="default")
    assert all(torch.equal(a, b) for a, b in zip(ours, block_gradients(module, x, cos, sin)))


@pytest.mark.parametrize("kept", [[], ["rope"], FORWARD])
def test_compiled_checkpoints_follow_the_policy(kept, device):
    module, x, cos, sin = block(device)
    ops = [getattr(torch.ops.liger, name).default for name in kept]
    contexts = partial(create_selective_checkpoint_contexts, partial(policy, ops))
    graphs = []

    def compile_graph(graph, inputs):
        graphs.append([n.target.name().removeprefix("liger::") for n in graph.graph.nodes if "liger" in str(n.target)])
        return graph

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=compile_graph, bw_compiler=compile_graph, partition_fn=min_cut_rematerialization_partition
    )

    def function(x, cos, sin):
        return checkpoint(module, x, cos, sin, use_reentrant=False, context_fn=contexts)

    out = torch.compile(function, backend=backend, fullgraph=True)(x, cos, sin)
    ours = torch.autograd.grad(out.sum(), [x, *module.parameters()])
    for a, b in zip(ours, block_gradients(module, x, cos, sin)):
        torch.testing.assert_close(a, b)
    forward, backward = graphs
    assert sorted(set(forward)) == sorted(FORWARD)
    assert not set(kept) & set(backward)
    if not kept:
        assert "rope" in backward


# ---- CUDA graphs.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_training_step_equals_eager(dtype):
    """A CUDA graph of forward, loss, backward and optimizer, replayed on new tokens, is bitwise equal to eager."""
    import liger_ops

    def train(captured: bool):
        model, _ = model_and_text("cuda")
        model = model.to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
        texts = torch.randint(128, (8, 4, 65), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        tokens, target = texts[0, :, :-1].contiguous(), texts[0, :, 1:].contiguous()

        def one_step():
            optimizer.zero_grad(set_to_none=True)
            loss = model(tokens, target)
            loss.backward()
            optimizer.step()
            return loss

        losses = []
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                losses.append(one_step().item())
        torch.cuda.current_stream().wait_stream(stream)
        if captured:
            graph = torch.cuda.CUDAGraph()
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                loss = one_step()
        for text in texts:
            tokens.copy_(text[:, :-1])
            target.copy_(text[:, 1:])
            if captured:
                graph.replay()
            else:
                loss = one_step()
            losses.append(loss.item())
        return losses, [p.detach().clone() for p in model.parameters()]

    liger_ops.preload()
    (eager_losses, eager), (graph_losses, graphed) = train(False), train(True)
    assert eager_losses == graph_losses
    assert all(torch.equal(a, b) for a, b in zip(eager, graphed))


@pytest.mark.gpu
def test_reduce_overhead():
    model, texts = model_and_text("cuda")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        for ours, theirs in zip(step(compiled, model, texts[0]), step(model, model, texts[0])):
            torch.testing.assert_close(ours, theirs)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
