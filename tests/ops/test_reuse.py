"""Backward overwrites the incoming gradient if and only if no other reference to it exists.

core::is_sole_owner decides by reference counts, which depend on torch's internals; these tests check them for each
torch release. The name of the private operator that ran shows whether backward was in place. One test also compares
addresses. Which backward of every operator overwrites, and what it computes then, is in test_every_operator.py.
"""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.checks import LAYOUTS, RecordAddress, equal, path_taken
from tests.support.pairs import sizes_by_device

NORMS = {
    "rms_norm": lambda x, w: torch.ops.liger.rms_norm(x, w),
    "fused_add_rms_norm": lambda x, w: torch.ops.liger.fused_add_rms_norm(x, torch.full_like(x, 0.5), w)[0],
}


@pytest.fixture(params=NORMS)
def norm(request):
    return NORMS[request.param]


def make(device, shape=(6, 160), dtype=torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in (shape, shape[-1:])]


def is_backward(name: str) -> bool:
    return name.startswith("liger::_") and name.split(".")[0].removesuffix("_").endswith("_bwd")


def writes_in_place(run) -> bool:
    """Whether the norm's backward, which must run exactly once, overwrote its gradient."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run()
    names = [event.name for event in seen.events() if is_backward(event.name)]
    assert len(names) == 1, names
    return names[0].endswith("_bwd_")


class Produce(torch.autograd.Function):
    """Returns `make()` as the gradient of its input, after passing it to `see`."""

    @staticmethod
    def forward(ctx, y: Tensor, make, see=lambda gradient: None) -> Tensor:
        ctx.make, ctx.see = make, see
        return y.sum()

    @staticmethod
    def backward(ctx, _):
        gradient = ctx.make()
        ctx.see(gradient)
        return gradient, None, None


def cosine(y: Tensor):
    """Makes a fixed gradient with the shape of y."""
    return lambda: torch.cos(torch.arange(y.numel(), device=y.device, dtype=y.dtype).view(y.shape))


def dense_like(y: Tensor):
    return lambda: torch.empty_like(y).copy_(cosine(y)())


# ---- Unreferenced gradients are overwritten


def read_by_a_hook(y: Tensor) -> Tensor:
    y.register_hook(lambda gradient: gradient.norm().item() and None)
    return y.pow(2).sum()


UNREFERENCED = {
    "read by a hook": read_by_a_hook,
    "made in C++": lambda y: y.pow(2).sum(),
    "made in C++, through a GEMM": lambda y: (y @ torch.ones_like(y).t()).square().sum(),
    "made in Python": lambda y: Produce.apply(y, dense_like(y)),
    "read but not kept": lambda y: Produce.apply(y, dense_like(y), lambda g: g.sum().item()),
    "sum of two consumers": lambda y: y.pow(2).sum() + y.sin().sum(),
    "sum of two consumers, one of them in Python": lambda y: y.pow(2).sum() + Produce.apply(y, dense_like(y)),
}


@pytest.mark.parametrize("producer", UNREFERENCED)
def test_an_unreferenced_gradient_is_overwritten(producer, norm, device):
    x, w = make(device)
    kept = torch.autograd.grad(UNREFERENCED[producer](norm(x, w)), [x, w], retain_graph=True)
    loss = UNREFERENCED[producer](norm(x, w))
    grads = []
    with path_taken(device):
        assert writes_in_place(lambda: grads.extend(torch.autograd.grad(loss, [x, w])))
    assert equal(grads, kept)


def test_the_result_has_the_address_of_the_gradient(norm, device):
    x, w = make(device)
    incoming, outgoing = [], []
    for retain in (True, False):
        y = RecordAddress.apply(norm(RecordAddress.apply(x, outgoing), w), incoming)
        y.pow(2).sum().backward(retain_graph=retain)
    assert incoming[0] != outgoing[0] and incoming[1] == outgoing[1]


def test_retain_grad(norm, device):
    """torch stores a copy in y.grad, so the gradient itself may be overwritten."""
    x, w = make(device)
    y = norm(x, w)
    y.retain_grad()
    Produce.apply(y, dense_like(y)).backward()
    assert torch.equal(y.grad, dense_like(y)())


# Every kind of kernel reads the gradient from the memory it writes: one tile, several, prefetched, looped; two or more
# rows per program; aligned or not.
@sizes_by_device(
    cpu=[130, 40_001],
    cuda=[8, 64, 130, 512, 1000, 1024, 2560, 3072, 4096, 5120, 8192, 14336, 20_000, 40_001],
    dtype=[torch.float32, torch.bfloat16],
)
def test_results_do_not_depend_on_reuse(n, dtype, norm, device):
    x, w = make(device, (700 if n < 2000 else 40, n), dtype)
    kept = torch.autograd.grad(norm(x, w).pow(2).sum(), [x, w], retain_graph=True)
    loss = norm(x, w).pow(2).sum()
    assert equal(torch.autograd.grad(loss, [x, w]), kept)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_with_the_strides_of_the_result_is_overwritten(layout, norm, device):
    """The layout of y matters, not that of x."""
    x, w = make(device, (3, 2, 5, 64))
    y = norm(LAYOUTS[layout](x.detach()).requires_grad_(), w)
    loss = Produce.apply(y, dense_like(y))
    assert writes_in_place(loss.backward)


# ---- Referenced gradients are left unchanged


def kept_by_producer(look):
    """A backward that keeps `look(gradient)` when the gradient is made."""

    def run(y: Tensor, wanted: list[Tensor], kept: list):
        return torch.autograd.grad(Produce.apply(y, dense_like(y), lambda g: kept.append(look(g))), wanted)

    return run


def given(y, wanted, kept):
    kept.append(dense_like(y)())
    return torch.autograd.grad(y, wanted, kept[0])


def given_to_backward(y, wanted, kept):
    kept.append(dense_like(y)())
    y.backward(kept[0])
    return [t.grad for t in wanted]


def requested(y, wanted, kept):
    dy, *grads = torch.autograd.grad(Produce.apply(y, dense_like(y)), [y, *wanted])
    kept.append(dy)
    return grads


def hooked(y, wanted, kept):
    y.register_hook(kept.append)
    return torch.autograd.grad(Produce.apply(y, dense_like(y)), wanted)


def hooked_node(y, wanted, kept):
    y.grad_fn.register_prehook(lambda gradients: kept.append(gradients[0]))
    return torch.autograd.grad(Produce.apply(y, dense_like(y)), wanted)


REFERENCED = {
    "given by the caller": given,
    "given to backward by the caller": given_to_backward,
    "requested": requested,
    "kept by a hook": hooked,
    "kept by a hook of the node": hooked_node,
    "kept by its producer": kept_by_producer(lambda g: g),
    "detached and kept": kept_by_producer(lambda g: g.detach()),
    "a view kept": kept_by_producer(lambda g: g.view(-1)),
    "a row kept": kept_by_producer(lambda g: g[1]),
    "its storage kept": kept_by_producer(lambda g: g.untyped_storage()),
}


def check_unchanged(run, norm, device) -> list:
    """Checks that backward is not in place, and returns the objects that `run` kept."""
    x, w = make(device)
    y = norm(x, w)
    expected = torch.autograd.grad(Produce.apply(y, dense_like(y)), [x, w], retain_graph=True)
    kept, grads = [], []
    assert not writes_in_place(lambda: grads.extend(run(norm(x, w), [x, w], kept)))
    assert equal(grads, expected)
    return kept


@pytest.mark.parametrize("situation", REFERENCED)
def test_a_referenced_gradient_is_unchanged(situation, norm, device):
    (held,) = check_unchanged(REFERENCED[situation], norm, device)
    if isinstance(held, torch.UntypedStorage):
        held = torch.empty(0, device=device).set_(held)
    made = dense_like(make(device)[0])()
    assert torch.equal(held.flatten(), (made[1] if situation == "a row kept" else made).flatten())


def test_a_gradient_kept_as_an_array_is_unchanged(norm):
    (held,) = check_unchanged(kept_by_producer(lambda g: g.detach().numpy()), norm, "cpu")
    assert np.array_equal(held, dense_like(make("cpu")[0])().numpy())


# Memory that torch borrows: its owner may read it again, and torch's reference counts do not show this.
BORROWED = {
    "NumPy": lambda t: torch.from_numpy(t.numpy()),
    "DLPack": lambda t: torch.from_dlpack(t.numpy()),
    "a buffer": lambda t: torch.frombuffer(t.numpy(), dtype=t.dtype).view(t.shape),
}


@pytest.mark.parametrize("lender", BORROWED)
def test_a_gradient_in_borrowed_memory_is_unchanged(lender, norm):
    owned = []

    def borrow(y):
        owned.append(dense_like(y)())
        return BORROWED[lender](owned[-1])

    x, w = make("cpu")
    loss = Produce.apply(norm(x, w), lambda: borrow(x.detach()))
    assert not writes_in_place(loss.backward)
    assert torch.equal(owned[0], dense_like(x.detach())())


@pytest.mark.parametrize("lender", BORROWED)
def test_an_input_in_borrowed_memory_is_unchanged(lender):
    up = torch.randn(6, 160)
    before = up.clone()
    gate = torch.randn(6, 160, requires_grad=True)
    torch.ops.liger.swiglu(gate * 2, BORROWED[lender](up)).sum().backward()
    assert torch.equal(up, before)


def by(make_gradient):
    """A loss whose gradient is `make_gradient(y)`."""
    return lambda y: Produce.apply(y, lambda: make_gradient(y))


# name -> (loss, options of torch.autograd.grad)
UNSUITABLE = {
    "retain_graph": (UNREFERENCED["made in C++"], dict(retain_graph=True)),
    "create_graph": (UNREFERENCED["made in C++"], dict(create_graph=True)),
    "expanded": (lambda y: y.sum(), {}),
    "expanded rows": (by(lambda y: cosine(y)()[:1].expand_as(y)), {}),
    "part of a larger tensor": (by(lambda y: torch.cat([cosine(y)(), cosine(y)()])[: y.shape[0]]), {}),
    "zeros without storage": (by(lambda y: torch._efficientzerotensor(y.shape, device=y.device)), {}),
    "another layout": (by(lambda y: torch.empty(y.shape[::-1], device=y.device).t().copy_(cosine(y)())), {}),
    "another layout, not a view": (
        by(lambda y: torch.empty_strided(y.shape, (1, y.shape[0]), device=y.device).copy_(cosine(y)())),
        {},
    ),
}


@pytest.mark.parametrize("situation", UNSUITABLE)
def test_an_unsuitable_gradient_is_unchanged(situation, norm, device):
    x, w = make(device)
    loss, how = UNSUITABLE[situation]
    expected = torch.autograd.grad(loss(norm(x, w)), [x, w], retain_graph=True)
    made, grads = loss(norm(x, w)), []
    assert not writes_in_place(lambda: grads.extend(torch.autograd.grad(made, [x, w], **how)))
    assert equal(grads, expected)


def test_y_and_s_may_share_their_gradient(device):
    x, w = make(device)
    residual = torch.randn_like(x).requires_grad_()
    grads = []
    for retain in (True, False):
        y, s = torch.ops.liger.fused_add_rms_norm(x, residual, w)
        total = (y + s).pow(2).sum()

        def run(total=total, retain=retain):
            grads.append(torch.autograd.grad(total, [x, residual, w], retain_graph=retain))

        assert not writes_in_place(run)
    assert equal(*grads)


def test_gradients_of_x_and_residual_accumulate_independently(device):
    """Both gradients share a buffer at first; accumulation must not mix them up."""
    x, w = make(device)
    residual = torch.zeros_like(x, requires_grad=True)
    for _ in range(2):
        y, _ = torch.ops.liger.fused_add_rms_norm(x, residual, w)
        (y.pow(2).sum() + x.sum()).backward()
    x.grad.mul_(2)
    y, _ = torch.ops.liger.fused_add_rms_norm(x, residual, w)
    once = torch.autograd.grad(y.pow(2).sum(), residual)[0]
    torch.testing.assert_close(residual.grad, 2 * once)
    torch.testing.assert_close(x.grad, 4 * (once + 1))


# ---- Residual stream: the gradient has a second consumer


@pytest.mark.parametrize("leaf", [True, False])
def test_a_gradient_with_a_second_consumer(leaf, norm, device):
    x, w = make(device)
    results = []
    for retain in (True, False):
        other = torch.ones_like(x, requires_grad=True)
        inputs = [x, w, other]
        z = norm(x, w) + (other if leaf else other.sin())
        results.append(torch.autograd.grad(z.pow(2).sum(), inputs, retain_graph=retain))
        for t in inputs:
            t.grad = None
        z = norm(x, w) + (other if leaf else other.sin())
        z.pow(2).sum().backward(retain_graph=retain)
        results.append([t.grad for t in inputs])
    assert all(equal(results[0], r) for r in results[1:])


# ---- Hooks on saved tensors: norms do not overwrite saved tensors


@pytest.mark.parametrize("how", ["hooks", "save_on_cpu", "checkpoint", "reentrant checkpoint"])
def test_saved_tensor_hooks(how, norm, device):
    x, w = make(device)
    expected = torch.autograd.grad(norm(x.sin(), w).pow(2).sum(), [x, w], retain_graph=True)
    packed = []

    def pack(t):
        packed.append((t, t.clone()))
        return t

    if how == "hooks":
        with saved_tensors_hooks(pack, lambda t: t):
            loss = norm(x.sin(), w).pow(2).sum()
    elif how == "save_on_cpu":
        with save_on_cpu():
            loss = norm(x.sin(), w).pow(2).sum()
    else:
        y = checkpoint(lambda x, w: norm(x.sin(), w), x, w, use_reentrant=how.startswith("reentrant"))
        loss = y.pow(2).sum()
    loss.backward()
    assert equal([x.grad, w.grad], expected)
    assert all(torch.equal(t, before) for t, before in packed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_tensors_may_come_back_in_another_layout(layout, norm, device):
    """Hooks must preserve values, not strides. Rows are numbered in memory order, so x may not match its statistics."""
    x, w = make(device, (3, 2, 5, 64))
    x = LAYOUTS[layout](x.detach()).requires_grad_()
    upstream = torch.randn(x.shape, device=device)
    expected = torch.autograd.grad(norm(x, w), [x, w], upstream)
    for unpack in (Tensor.contiguous, lambda t: t.transpose(0, -1).contiguous().transpose(0, -1)):
        with saved_tensors_hooks(lambda t: t, unpack):
            y = norm(x, w)
        for ours, theirs in zip(torch.autograd.grad(y, [x, w], upstream), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


# ---- Tracers and dispatch modes see functional operators only


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def names_in(graph) -> list[str]:
    return [node.target.name() for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def dispatched(loss, x, w):
    made = loss(x, w)
    with Log() as log:
        return torch.autograd.grad(made, [x, w]), log.names


def traced(mode):
    def run(loss, x, w):
        graph = make_fx(lambda x, w: torch.autograd.grad(loss(x, w), [x, w]), tracing_mode=mode)(x, w)
        return graph(x, w), names_in(graph)

    return run


def compiled(loss, x, w):
    from torch._dynamo.backends.common import aot_autograd

    names = []

    def compiler(graph, example_inputs):
        names.extend(names_in(graph))
        return graph.forward

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    return torch.autograd.grad(torch.compile(loss, backend=backend, fullgraph=True)(x, w), [x, w]), names


@pytest.mark.parametrize("run", [dispatched, traced("real"), traced("symbolic"), compiled])
def test_tracers(run, norm, device):
    def loss(x, w):
        return norm(x, w).pow(2).sum()

    x, w = make(device)
    grads, names = run(loss, x, w)
    assert [name.endswith("_bwd") for name in names if is_backward(name)] == [True]
    assert equal(grads, torch.autograd.grad(loss(x, w), [x, w]))


# ---- Memory saved


@pytest.mark.gpu
def test_backward_needs_one_buffer_fewer(norm):
    x, w = make("cuda", (4096, 4096))
    c = torch.randn_like(x)
    peaks = []
    for retain in (True, False):
        # The backward of the multiplication allocates the norm's incoming gradient only.
        loss = (norm(x, w) * c).sum()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(loss, [x, w], retain_graph=retain)
        peaks.append(torch.cuda.max_memory_allocated())
        del loss
    assert peaks[0] - peaks[1] >= x.nbytes, peaks
