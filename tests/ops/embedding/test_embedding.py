"""embedding: torch.ops.liger.embedding against F.embedding in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops
from liger_ops import functional
from tests.support.checks import (
    CPU_DTYPES,
    assert_no_worse,
    check_deterministic,
    check_no_double_backward,
    check_reads_only,
    check_second_backward,
    count_graphs,
    gradients,
    like,
    path_taken,
    served_by,
)
from tests.support.pairs import pairwise, sizes_by_device

embedding = torch.ops.liger.embedding
CLASSES = 100
# Shapes of indices: on CUDA, ATen handles few indices and our kernel handles many.
FEW, MANY = (3, 7), (5, 1000)


def make(shape, n, dtype, device, classes=CLASSES, index_dtype=torch.int64) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    input = torch.randint(classes, shape, device=device).to(index_dtype)
    weight = torch.randn(classes, n, dtype=dtype, device=device, requires_grad=True)
    return [input, weight], [torch.randn(*shape, n, dtype=dtype, device=device)]


def check(inputs, grads, *options):
    """Eager on CPU accumulates bf16 in bf16, so the tolerance is tight on CUDA only."""

    def run(op, dtype=None):
        return gradients(lambda *a: op(*a, *options), [like(t, dtype) for t in inputs], grads)

    ours, eager, oracle = run(embedding), run(F.embedding), run(F.embedding, torch.float64)
    assert torch.equal(ours[0], eager[0])
    assert_no_worse("d weight", ours[1], eager[1], oracle[1])


@sizes_by_device(cpu=[1, 130], cuda=[1, 7, 64, 130, 1000, 4096], dtype=CPU_DTYPES, shape=[(), (1,), FEW, MANY])
def test_sizes(shape, n, dtype, device):
    inputs, grads = make(shape, n, dtype, device)
    check(inputs, grads)


def test_many_indices_of_a_weight_without_columns(device):
    (input, weight), grads = make(MANY, 0, torch.float32, device)
    out, dweight = gradients(embedding, [input, weight], grads)
    assert out.shape == (*MANY, 0) and dweight.shape == weight.shape


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8, 1023, 1024, 1032, 3584])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("classes", [1, 3, 70_000])
def test_kernel_on_cuda(n, dtype, classes):
    """One class with all indices, a few classes with thousands each, and many with one each."""
    inputs, grads = make((5000,), n, dtype, "cuda", classes)
    liger_ops.reset_launch_counts()
    check(inputs, grads)
    counts = liger_ops.launch_counts()
    assert counts[served_by("cuda")] == 1 and sum(counts.values()) == 1, counts
    # For any number of rows, a compensated sum errs by two roundings of the sum of magnitudes, plus one of the result.
    double = [like(t, torch.float64) for t in inputs]
    exact, added = (gradients(F.embedding, double, g)[1] for g in (grads, [g.abs() for g in grads]))
    ours = gradients(embedding, [like(t) for t in inputs], grads)[1]
    allowed = torch.finfo(dtype).eps * exact.abs() + torch.finfo(torch.float32).eps * added
    assert ((ours.double() - exact).abs() <= allowed).all()


def test_cpu_path():
    inputs, grads = make(MANY, 8, torch.float32, "cpu")
    with path_taken("cpu"):
        gradients(embedding, inputs, grads)


@pairwise(index_dtype=[torch.int64, torch.int32], padding_idx=[None, 0, 7, -1, -CLASSES], shape=[FEW, MANY])
def test_options(shape, padding_idx, index_dtype, device):
    inputs, grads = make(shape, 24, torch.float32, device, index_dtype=index_dtype)
    inputs[0].view(-1)[::3] = 0 if padding_idx is None else padding_idx % CLASSES
    check(inputs, grads, padding_idx)
    dweight = gradients(lambda *a: embedding(*a, padding_idx), inputs, grads)[1]
    if padding_idx is not None:
        assert not dweight[padding_idx].any() and dweight.any()


@pytest.mark.parametrize("shape", [FEW, MANY])
def test_layouts(shape, device):
    (input, weight), grads = make(shape, 24, torch.float32, device)
    expected = gradients(embedding, [input, weight], grads)
    strided = torch.stack([input, input], -1)[..., 0]
    transposed = weight.detach().t().contiguous().t().requires_grad_()
    sliced = [torch.cat([g, g], -1)[..., :24] for g in grads]
    for arguments, arriving in (([strided, weight], grads), ([input, transposed], grads), ([input, weight], sliced)):
        for ours, theirs in zip(gradients(embedding, arguments, arriving), expected):
            assert torch.equal(ours, theirs)
    expanded = [torch.ones((), device=device).expand_as(grads[0])]
    check([input, weight], expanded)


def test_gradients_of_many_indices(device):
    """test_every_operator.py makes these checks with few indices."""
    inputs, grads = make(MANY, 24, torch.float32, device)
    check_reads_only(embedding, inputs, grads)
    check_deterministic(embedding, inputs, grads)
    check_second_backward(embedding, inputs, grads)
    check_no_double_backward("embedding", embedding, inputs, grads)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda i, w: (i.float(), w), r"input must be int64 or int32 \(got Float\)"),
        (lambda i, w: (i, w[0]), r"weight must have two dimensions \(got \[24\]\)"),
        (lambda i, w: (i, w, CLASSES), r"padding_idx must lie in \[-100, 100\) \(got 100\)"),
        (lambda i, w: (i, w, -CLASSES - 1), r"padding_idx must lie in \[-100, 100\) \(got -101\)"),
    ],
)
def test_bad_arguments(change, message):
    (input, weight), _ = make(FEW, 24, torch.float32, "cpu")
    with pytest.raises(RuntimeError, match=f"^embedding: {message}"):
        embedding(*change(input, weight.detach()))


@pytest.mark.parametrize("index", [CLASSES, -1])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("op", [embedding, functional.embedding, functional.embedding.reference])
def test_an_index_out_of_range(op, index_dtype, index):
    (input, weight), _ = make(FEW, 24, torch.float32, "cpu", index_dtype=index_dtype)
    input[1, 2] = index
    with pytest.raises(IndexError, match=rf"^embedding: input must lie in \[0, 100\) \(got {index}\)"):
        op(input, weight)


def test_the_module():
    torch.manual_seed(0)
    plain = torch.nn.Embedding(10, 4, padding_idx=2)
    ours = liger_ops.nn.Embedding(10, 4, padding_idx=2)
    ours.load_state_dict(plain.state_dict())
    assert repr(ours) == repr(plain)
    input = torch.tensor([[1, 2, 9], [2, 2, 0]])
    results = []
    for module in (plain, ours):
        out = module(input)
        out.sin().sum().backward()
        results.append((out, module.weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*results))
    # Options that the operator does not support.
    for options in (dict(max_norm=1.0), dict(scale_grad_by_freq=True), dict(sparse=True)):
        modules = torch.nn.Embedding(10, 4, **options), liger_ops.nn.Embedding(10, 4, **options)
        modules[1].load_state_dict(modules[0].state_dict())
        outs = [module(input) for module in modules]
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
        a, b = (module.weight.grad for module in modules)
        assert torch.equal(*outs) and torch.equal(a.to_dense(), b.to_dense())


def test_the_module_scripted():
    module, input = liger_ops.nn.Embedding(10, 4), torch.arange(8)
    scripted = torch.jit.script(module)
    assert torch.equal(scripted(input), module(input)) and "liger::embedding" in str(scripted.inlined_graph)


def test_the_module_compiled(device):
    """torch.compile uses PyTorch's embedding, see liger_ops.nn."""
    backend, graphs = count_graphs()
    module, input = liger_ops.nn.Embedding(10, 4, device=device), torch.arange(8, device=device)
    assert torch.equal(torch.compile(module, backend=backend, fullgraph=True)(input), module(input))
    assert not any("liger" in str(node.target) for graph in graphs for node in graph.graph.nodes)
