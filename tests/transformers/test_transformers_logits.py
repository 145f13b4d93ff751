"""Logits of patched models: deferred in training, and materialized on request."""

import collections
import copy
import dataclasses
import functools
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as TF
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from liger_ops.transformers import apply_liger_kernel, probe
from liger_ops.transformers.deferred import DeferredLogits
from tests.support.checks import ROOT
from tests.support.models.language_models import make, nodes, step, tokens
from tests.support.models.patched_models import FUSED, assert_as_exact, assert_same_logits, assert_same_step, patched

pytestmark = pytest.mark.usefixtures("as_large_models")


def test_the_error_of_code_that_uses_absent_logits_stands_in_troubleshooting_with_what_helps():
    model, ids = make("llama"), tokens()
    apply_liger_kernel(model)
    with pytest.raises(AttributeError) as error:
        model(input_ids=ids, labels=ids).logits.argmax(-1)
    said = str(error.value).removesuffix("'argmax'")
    (row,) = [line for line in (ROOT / "docs/troubleshooting.md").read_text().splitlines() if said in line]
    (keyword,) = re.findall(r"`model\(\.\.\., (\w+)=False\)`", row)
    assert model(input_ids=ids, labels=ids, **{keyword: False}).logits.argmax(-1).shape == ids.shape


def test_logits_are_returned_on_request():
    model, ids = make("gemma2"), tokens()
    logits = model(input_ids=ids).logits
    plain = step(model, ids)
    apply_liger_kernel(model)
    assert "logits" not in model(input_ids=ids, labels=ids)
    out = model(input_ids=ids, labels=ids, skip_logits=False)
    assert_same_logits(out.logits, logits, model, ids)
    assert_same_step(model, ids, plain, skip_logits=False)
    model.eval()
    assert_same_logits(model(input_ids=ids, labels=ids).logits, logits, model, ids)
    assert "logits" not in model(input_ids=ids, labels=ids, skip_logits=True)
    assert_same_logits(model(input_ids=ids, labels=ids, return_dict=False)[1], logits, model, ids)
    model.train()
    assert model(input_ids=ids, labels=ids, return_dict=False)[0].dim() == 0


class Pair(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    vocabulary: int = dataclasses.field(default=64, init=False)


@pytest.mark.parametrize(
    "output, logits_of",
    [
        (lambda loss, logits: loss, None),
        (lambda loss, logits: [loss, logits], lambda out: out[1]),
        (lambda loss, logits: (loss, (logits,)), lambda out: out[1][0]),
        (lambda loss, logits: (loss, [Pair(loss, logits)]), lambda out: out[1][0].logits),
        (Pair, lambda out: out.logits),
        (Output, lambda out: out.logits),
        (lambda loss, logits: (loss, Output(loss, logits)), lambda out: out[1].logits),
        (lambda loss, logits: {"loss": loss, "logits": logits}, lambda out: out["logits"]),
        (lambda loss, logits: {0: loss, "more": collections.OrderedDict({1: logits})}, lambda out: out["more"][1]),
        (lambda loss, logits: CausalLMOutput(loss, hidden_states=(CausalLMOutput(loss, logits),)),
         lambda out: out.hidden_states[0].logits),
    ],
)  # fmt: skip
def test_logits_are_found_in_any_output(output, logits_of):
    losses = []

    class Model(LlamaForCausalLM):
        def forward(self, input_ids, labels):
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            losses.append(self.loss_function(logits, labels, 64))
            return output(losses[-1], logits)

    model, ids = make("llama"), tokens()
    model.__class__ = Model
    plain = model(ids, ids)
    apply_liger_kernel(model)
    for skip in (True, False):
        ours = model(ids, ids, skip_logits=skip)
        assert type(ours) is type(plain) and (FUSED in nodes(losses[-1])) == skip
        torch.testing.assert_close(losses[-1], losses[0])
        if logits_of is None:
            assert ours is losses[-1]
        elif skip:
            assert logits_of(ours) is None
        else:
            of_eager = logits_of(plain)
            assert_as_exact(
                lambda: [[logits_of(model(ids, ids, skip_logits=False))]], [[of_eager]], model, [[logits_of(ours)]]
            )


def test_the_head_called_directly_returns_logits():
    model, _ = patched("llama")
    assert type(model.lm_head(torch.randn(1, 3, 32))) is torch.Tensor


def test_a_failing_forward_leaves_the_head_usable():
    model, _ = patched("llama")
    with pytest.raises((RuntimeError, ValueError)):
        model(input_ids=tokens(), labels=tokens(3, 7))
    assert type(model.lm_head(torch.randn(1, 3, 32))) is torch.Tensor


@pytest.mark.parametrize(
    "use",
    [
        lambda x, t: TF.cross_entropy(x.float().view(-1, 10), t.view(-1)),
        lambda x, t: TF.cross_entropy(x[..., :-1, :].contiguous().view(-1, 10), t[..., 1:].reshape(-1)),
        lambda x, t: TF.cross_entropy(x[:, :-1].reshape(-1, x.size(-1)), t[:, 1:].reshape(-1), reduction="sum"),
        lambda x, t: TF.cross_entropy(
            input=(x * 3 / 5).reshape(-1, x.shape[-1]), target=t.flatten(), label_smoothing=0.1
        ),
        lambda x, t: TF.cross_entropy((2 * torch.tanh(x / 2)).view(-1, 10), t.view(-1)),
        lambda x, t: nn.CrossEntropyLoss()(x.to(torch.float32).view(-1, 10), t.view(-1)),
        lambda x, t: TF.cross_entropy(x[t > 4], t[t > 4]),
        # uses that materialize the logits
        lambda x, t: TF.cross_entropy(x.transpose(1, 2), t),
        lambda x, t: TF.cross_entropy((x + 1).view(-1, 10), t.view(-1)),
        lambda x, t: TF.cross_entropy(torch.tanh(torch.tanh(x)).view(-1, 10), t.view(-1)),
        lambda x, t: TF.cross_entropy(x.view(-1, 10), TF.one_hot(t.view(-1), 10).float()),
        lambda x, t: torch.logsumexp(x, -1).sum() + x.sum() + (1 - x).mean() + len(x) + x[..., 3].sum() + x[0].sum(),
        lambda x, t: (abs(-x) + x % 2 + 2**x + (+x) ** 2).sum() + (torch.eye(5) @ x @ x.mT).sum(),
        lambda x, t: x.sum() * ((x == x // 2).sum() + (x != 3 % x).sum() + (3 // x > 1).sum() + len({x, x})),
        lambda x, t: x.sum() * (~(x > 0) & (x < 1) | (x > 2)).sum() + x.sum() * (3.0 in x),
        lambda x, t: x.sum() * bool(x.sum() > 0) + x.sum() * int(x[0, 0, 0] * 99) + x.sum() * float(x[0, 0, 1]),
        lambda x, t: x.contiguous(memory_format=torch.contiguous_format).mean() + x.reshape(shape=(-1, 10)).mean(),
        lambda x, t: x.view(-1)[0] * x.view(torch.int32).sum(),
        lambda x, t: x.view([-1, 10])[0].sum() + x.view(t.shape + (10,)).mean(),
        lambda x, t: torch.cat([x, x]).mean() + TF.log_softmax(x.to(x.device, torch.float64), -1)[0].sum(),
    ],
)
def test_deferred_logits_behave_like_logits(use):
    assert_same_of_deferred(use)


def forward_of(head: nn.Linear, x: Tensor, liger_call: Any = None) -> Tensor:
    if liger_call is None:
        return TF.linear(x, head.weight, head.bias)
    return liger_call.run(x, head.weight, head.bias, None)


def assert_same_of_deferred(use):
    head, target = nn.Linear(6, 10), tokens(2, 5, vocabulary=10)
    results = []
    for deferred in (False, True):
        hidden = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        if deferred:
            wrapped = copy.deepcopy(head)
            wrapped.forward = functools.partial(forward_of, head)
            x = DeferredLogits(wrapped, hidden, torch.float32)
            assert (x.shape, x.dim(), x.ndim, x.dtype, x.requires_grad) == ((2, 5, 10), 3, 3, torch.float32, True)
        else:
            x = head(hidden)
        loss = use(x, target)
        results.append((loss, *torch.autograd.grad(loss, (hidden, head.weight, head.bias))))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def add_in_place(x, y):
    x += y


def assign(x, index, y):
    x[index] = y


def loss_of(x, target, *written):
    """The loss of x after the writes to x that the remaining arguments perform."""
    return TF.cross_entropy(x.view(-1, 10), target.flatten())


@pytest.mark.parametrize(
    "use",
    [
        lambda x, t: loss_of(x, t, x.mul_(3)),
        lambda x, t: loss_of(x, t, torch.clamp_(x, -0.1, 0.1)),
        lambda x, t: loss_of(x.float(), t, x.tanh_()),
        lambda x, t: loss_of(x, t, x.float().mul_(3)),
        lambda x, t: loss_of(x, t, add_in_place(x, torch.arange(10))),
        lambda x, t: loss_of(x, t, assign(x, (slice(None), slice(None), [3, 5]), torch.finfo(x.dtype).min)),
        lambda x, t: loss_of(x, t, assign(x, x > 0.5, 0.5)),
        lambda x, t: loss_of(x, t, x.contiguous().mul_(3)),
        lambda x, t: loss_of(x, t, x.view(-1, 10).masked_fill_(t.view(-1, 1) > 4, -3.0)),
        lambda x, t: loss_of(x, t, x[:, 1:][0].reshape(2, 2, 10)[-1].zero_()),
        lambda x, t: loss_of(x[1:], t[1:], x.mul_(3)),
        lambda x, t: loss_of(x.transpose_(0, 1).contiguous(), t.t()) * len(x) * x.shape[0] * x.dim(),
        # copies do not change
        lambda x, t: loss_of(x * 2, t, x.zero_()),
        lambda x, t: loss_of(x.view(-1, 10)[t.view(-1) > 0], t, x.zero_()),
        lambda x, t: loss_of(x[:, :-1].contiguous(), t[:, 1:], x.zero_()),
        lambda x, t: loss_of(x, t, x[:, :-1].reshape(-1, 10).zero_()),
        # gradients are unchanged
        lambda x, t: loss_of(x, t, x.register_hook(lambda gradient: 2 * gradient)),
        lambda x, t: loss_of(x, t, torch.no_grad()(lambda: x.argmax(-1))()),
    ],
)
def test_writes_to_deferred_logits_are_kept(use):
    assert_same_of_deferred(use)


def test_hooks_on_the_head_see_logits():
    model, _ = patched("llama")
    seen, ids = [], tokens()
    model.lm_head.register_forward_hook(lambda module, inputs, out: seen.append(type(out)))
    loss = model(input_ids=ids, labels=ids).loss
    assert seen == [torch.Tensor] and FUSED not in nodes(loss)


def test_hooks_that_gather_weights_run_once_around_the_loss():
    """The weight is complete only between the two hooks, as with DeepSpeed's ZeRO-3."""
    model, ids = make("llama"), tokens()
    plain = step(model, ids)
    apply_liger_kernel(model)
    whole, called = model.lm_head.weight.data, []

    def gather(module, inputs):
        called.append("gather")
        module.weight.data = whole

    def free(module, inputs, out):
        called.append("free")
        module.weight.data = torch.empty(0)

    for hook in (gather, free):
        hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    model.lm_head.register_forward_pre_hook(gather)
    model.lm_head.register_forward_hook(free)
    model.lm_head.weight.data = torch.empty(0)
    loss = model(input_ids=ids, labels=ids).loss
    assert called == ["gather", "free"] and FUSED in nodes(loss)
    torch.testing.assert_close(loss.detach(), plain[0])


@pytest.mark.parametrize("hook", [lambda m, inputs: (2 * inputs[0],), lambda m, inputs: (2 * inputs[0], *inputs[1:])])
def test_hooks_before_the_head_change_its_input_once(hook):
    model, ids = make("llama"), tokens()
    handle = model.lm_head.register_forward_pre_hook(hook)
    plain = step(model, ids)
    apply_liger_kernel(model)
    assert_same_step(model, ids, plain)
    handle.remove()
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss)


def test_global_hooks_see_the_same_calls():
    model, ids = make("llama"), tokens()
    seen: list = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, out: seen.append((out.shape, type(out))) if probe.is_linear(module) else None
    )
    try:
        plain = step(model, ids)
        before = list(seen)
        apply_liger_kernel(model)
        seen.clear()
        step(model, ids)
        after = list(seen)
        assert_same_step(model, ids, plain)
    finally:
        handle.remove()
    assert sorted(map(str, after)) == sorted(map(str, before)) and len(after) == 15
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss)
