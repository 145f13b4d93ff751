"""Heads of latent attention: keys are joined and split without copies of whole gradients, queries rotate as a whole."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_ops.transformers import apply_liger_kernel, latent_heads, rewrite
from liger_ops.transformers.options import SWITCHES
from tests.support.models.language_models import known, step, tokens
from tests.support.models.patched_models import assert_same_step
from tests.support.models.tiny_models import tiny

ONLY = {name: name == "rope" for name in SWITCHES}


def helpers_of(function):
    return {name for name in rewrite.names_in(rewrite.inner_function(function).__code__) if name.startswith("liger")}


class Seen(TorchDispatchMode):
    """Counts operators of aten."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", known(["deepseek_v3", "deepseek_v32", "hy_v4"]))
def test_which_statements_are_rewritten(name):
    model = tiny(name)
    apply_liger_kernel(model, **ONLY)
    attention = model.model.layers[0].self_attn
    assert helpers_of(attention.expand_kv) == {latent_heads.JOIN, latent_heads.SPLIT}
    # Queries that rotate from pairs to halves rotate as a whole.
    assert (latent_heads.ROTATE_LAST in helpers_of(attention.forward)) == (name != "hy_v4")


@pytest.mark.skipif(not known(["deepseek_v3"]), reason="this release of transformers has no DeepSeek-V3")
@pytest.mark.parametrize("interleave", [True, False])
def test_queries_are_not_joined_again(interleave):
    """Nor gradients copied as a whole."""
    model, ids = tiny("deepseek_v3", rope_interleave=interleave), tokens()
    plain = step(model, ids)

    def seen():
        with Seen() as mode:
            step(model, ids)
        return mode.counts

    before = seen()
    apply_liger_kernel(model, **ONLY)
    layers = len(model.model.layers)
    counts = seen()
    assert_same_step(model, ids, plain)
    # Autograd's backward of copy_ makes a tensor, by new_empty_strided, and copies the gradient to it.
    assert before["new_empty_strided"] - counts.get("new_empty_strided", 0) == 2 * layers
    # Rotation: two in forward; queries: one in forward and in the backward of split, keys: one in backward.
    fewer = before["cat"] - counts.get("cat", 0)
    assert fewer >= (5 if interleave else 3) * layers


# ---- The functions


def split_and_joined(x, b, split, join):
    a, value = split(x, [8, 4])
    y = join(x, (*x.shape[:-1], 12), 8, a, b.expand(-1, x.shape[1], -1, -1))
    return y, value


def eager_join(x, shape, first, a, b):
    y = x.new_empty(*shape)
    y[..., :first].copy_(a)
    y[..., first:].copy_(b)
    return y


def eager_split(x, sizes):
    return torch.split(x, sizes, dim=-1)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)])
def test_keys(needs, dtypes):
    torch.manual_seed(0)
    rows = torch.randn(2, 5, 3 * 12).to(dtypes[0]).requires_grad_(needs[0])
    b = torch.randn(2, 1, 5, 4).to(dtypes[1]).requires_grad_(needs[1])
    douts = torch.randn(2, 3, 5, 12).to(dtypes[0]), torch.randn(2, 3, 5, 4).to(dtypes[0])

    def run(split, join):
        x = rows.view(2, 5, 3, 12).transpose(1, 2)
        outs = split_and_joined(x, b, split, join)
        leaves = [t for t in (rows, b) if t.requires_grad]
        both = [(out, dout) for out, dout in zip(outs, douts) if out.requires_grad]
        grads = torch.autograd.grad([o for o, _ in both], leaves, [d for _, d in both]) if leaves else ()
        return [*outs, *grads]

    for ours, theirs in zip(run(latent_heads.split, latent_heads.join), run(eager_split, eager_join), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype and ours.stride() == theirs.stride()


def test_one_result_is_used():
    rows = torch.randn(2, 5, 36, requires_grad=True)
    for part in range(2):
        grads = []
        for split in (latent_heads.split, eager_split):
            out = split(rows.view(2, 5, 3, 12).transpose(1, 2), [8, 4])[part]
            grads += torch.autograd.grad(out.square().sum(), rows)
        assert torch.equal(*grads)


def test_the_gradient_has_the_strides_of_the_input():
    x = torch.randn(2, 5, 3, 12, requires_grad=True).transpose(1, 2)
    strides = []
    x.register_hook(lambda grad: strides.append(grad.stride()))
    a, b = latent_heads.split(x, [8, 4])
    (a.sum() + b.sum()).backward()
    assert strides == [x.stride()]


def test_second_derivatives():
    x = torch.randn(1, 2, 3, 12, dtype=torch.float64, requires_grad=True)
    b = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)

    def run(x, b):
        y, value = split_and_joined(x, b, latent_heads.split, latent_heads.join)
        return y * y, value * value

    assert torch.autograd.gradcheck(run, (x, b)) and torch.autograd.gradgradcheck(run, (x, b))


@pytest.mark.parametrize("kind", ["another size", "broadcast", "another dtype"])
def test_other_shapes_run_the_original_statements(kind):
    a, b, first = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 4), 8
    x = a
    if kind == "another size":
        first = 7
        b = torch.randn(2, 3, 5)
    if kind == "broadcast":
        b = torch.randn(1, 1, 4)
    if kind == "another dtype":
        x = a.double()
    found, expected = [], []
    for join, results in ((latent_heads.join, found), (eager_join, expected)):
        try:
            results.append(join(x, (2, 3, 12), first, a, b))
        except RuntimeError as error:
            results.append(str(error))
    assert type(found[0]) is type(expected[0])
    assert found == expected if isinstance(found[0], str) else torch.equal(found[0], expected[0])
    assert "Join" not in str(getattr(found[0], "grad_fn", ""))
