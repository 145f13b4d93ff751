"""liger_ops.compat: code written for liger_kernel runs on liger_ops."""

import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as TF

import liger_ops.compat as compat
from liger_ops import functional as F
from liger_ops.compat import run
from tests.support.checks import equal, forked_output_of, run_forked, run_python
from tests.support.models.language_models import SIZES, make, nodes, step, tokens


def test_names_exist_only_while_installed():
    with pytest.raises(ImportError):
        import liger_kernel
    compat.install()
    compat.install()
    import liger_kernel.transformers.monkey_patch
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    assert liger_kernel.ops.LigerRMSNormFunction is LigerRMSNormFunction and compat.installed()
    compat.uninstall()
    with pytest.raises(ImportError):
        import liger_kernel.ops


def test_an_installed_package_is_not_shadowed_by_default(tmp_path, monkeypatch):
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel/__init__.py").write_text("real = True")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="liger_kernel is installed .*replace=True"):
        compat.install()
    assert not compat.installed()
    import liger_kernel

    assert liger_kernel.real
    compat.install(replace=True)
    import liger_kernel as served

    assert served is not liger_kernel and not hasattr(type(served), "real")
    compat.uninstall()
    import liger_kernel as again

    assert again is liger_kernel
    import sys

    del sys.modules["liger_kernel"]


def test_transformers_finds_the_package(liger_kernel_served):
    from transformers.utils import is_liger_kernel_available

    assert is_liger_kernel_available()
    compat.uninstall()
    assert not is_liger_kernel_available()


def test_options_that_the_formulas_do_not_have(liger_kernel_served):
    """test_compat_operators.py has the results of every name."""
    from liger_kernel.transformers import LigerCrossEntropyLoss, LigerLayerNorm, LigerSwiGLUMLP
    from liger_kernel.transformers.functional import CrossEntropyOutput
    from transformers import LlamaConfig

    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(LigerLayerNorm(32)(x), nn.LayerNorm(32, 1e-6)(x))
    assert LigerSwiGLUMLP(LlamaConfig(**SIZES), intermediate_size=12).up_proj.out_features == 12
    with pytest.raises(ValueError, match="Activation function relu not supported"):
        LigerSwiGLUMLP(LlamaConfig(**SIZES, hidden_act="relu"))
    out = LigerCrossEntropyLoss(return_token_accuracy=True)(x[0], torch.arange(7))
    assert isinstance(out, CrossEntropyOutput) and out.z_loss is out.predicted_tokens is None
    assert out.token_accuracy == (x[0].argmax(-1) == torch.arange(7)).float().mean()


def test_options_of_divergences(liger_kernel_served):
    """Other reductions, and labels that are absent or all ignored."""
    from liger_kernel.ops import LigerJSDFunction
    from liger_kernel.transformers import LigerJSD, LigerTVDLoss
    from liger_kernel.transformers.functional import liger_kl_div, liger_tvd

    x, t = (torch.randn(6, 11).log_softmax(-1) for _ in range(2))
    p, q = x.exp(), t.exp()
    torch.testing.assert_close(liger_kl_div(x, q), TF.kl_div(x, q))
    m = (0.25 * q + 0.75 * p).log()
    losses = 0.25 * q * (t - m) + 0.75 * p * (x - m)
    torch.testing.assert_close(LigerJSD(0.25)(x, t), losses.sum() / 6)
    torch.testing.assert_close(liger_tvd(p, q), (p - q).abs().mean() / 2)
    torch.testing.assert_close(LigerTVDLoss("none")(p, q), (p - q).abs() / 2)

    half = x.bfloat16().requires_grad_()
    loss = LigerJSDFunction.apply(half, half.detach(), torch.full((6,), -100))
    assert loss.dtype == torch.bfloat16 and loss == 0
    loss.backward()
    assert not half.grad.any()


def test_arguments_of_norms(liger_kernel_served):
    """In bf16, "gemma" rounds differently from the default, "llama"."""
    from liger_kernel.transformers import LigerFusedAddRMSNorm, LigerLayerNorm, LigerRMSNorm
    from liger_kernel.transformers import functional as theirs

    x, residual = torch.randn(2, 7, 32).bfloat16()
    weight, bias = torch.randn(2, 32).bfloat16()
    options = (1e-2, 1.0, "gemma")

    def filled(module):
        for p, value in zip(module.parameters(), (weight, bias)):
            p.data = value
        return module

    norm, both = F.rms_norm(x, weight, *options), F.fused_add_rms_norm(x, residual, weight, *options)
    for found in (theirs.liger_rms_norm(x, weight, *options), filled(LigerRMSNorm(32, *options))(x)):
        assert torch.equal(found, norm)
    for found in (
        theirs.liger_fused_add_rms_norm(x, residual, weight, *options),
        filled(LigerFusedAddRMSNorm(32, *options))(x, residual),
    ):
        assert equal(found, both)
    for found in (theirs.liger_layer_norm(x, weight, bias, 1e-2), filled(LigerLayerNorm(32, 1e-2, bias=True))(x)):
        assert torch.equal(found, F.layer_norm(x, weight, bias, 1e-2))


@pytest.mark.parametrize("metrics", [False, True])
@pytest.mark.parametrize("scaling", [False, True])
def test_arguments_of_losses(scaling, metrics, liger_kernel_served):
    from liger_kernel import functional
    from liger_kernel.transformers import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
    from liger_kernel.transformers import functional as theirs

    x, head, bias, per_class = torch.randn(14, 32), torch.randn(11, 32), torch.randn(11), torch.rand(11) + 0.5
    target, logits = torch.randint(11, (14,)), torch.randn(14, 11)
    # -1 is not a class, so the test fails if it is not ignored.
    target[::3] = -1
    x[1], head[target[1]], logits[1, target[1]] = 9.0, 9.0, 99.0  # a correct prediction
    options = dict(ignore_index=-1, lse_square_scale=0.1, label_smoothing=0.2, reduction="sum", softcap=5.0)
    asked = dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), metrics)

    def agree(found, expected):
        # With reduction="sum", the package's accuracy is a mean; the operator's is the number of hits.
        expected = expected._replace(token_accuracy=expected.token_accuracy / (target != -1).sum())
        found = [t for t in results_of(found) if t is not None]
        assert equal(found, expected if metrics else expected[:1])

    expected = F.cross_entropy_with_metrics(logits, target, per_class, **options)
    agree(LigerCrossEntropyLoss(per_class, **options, **asked)(logits, target), expected)
    for module in (theirs.liger_cross_entropy, functional.cross_entropy):
        agree(module(logits, target, per_class, **options, **asked), expected)

    weights = None
    if scaling:
        weights = F.fused_linear_cross_entropy_with_log_probs(
            x, head, target, bias, reduction="none", ignore_index=-1, softcap=5.0
        ).log_probs.exp()
    arguments = (x, head, target, bias, per_class)
    expected = F.fused_linear_cross_entropy_with_metrics(*arguments, **options, token_weight=weights)
    asked["use_token_scaling"] = scaling
    agree(LigerFusedLinearCrossEntropyLoss(per_class, **options, **asked)(head, x, target, bias), expected)
    for module in (theirs.liger_fused_linear_cross_entropy, functional.fused_linear_cross_entropy):
        agree(module(*arguments, **options, **asked), expected)


def results_of(found):
    """The loss and the metrics."""
    if isinstance(found, torch.Tensor):
        return (found,)
    return found if isinstance(found, tuple) else tuple(vars(found).values())


# The dtypes are those of loss, z-loss, accuracy and predictions. In the package, the linear loss is fp32.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_have_the_dtypes_of_the_package(reduction, dtype, liger_kernel_served):
    import liger_kernel.ops as their_ops
    from liger_kernel.transformers import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
    from liger_kernel.transformers import functional as theirs

    logits, target = torch.randn(6, 11).to(dtype), torch.tensor([1, 2, -100, 3, 4, 5])
    x, head = torch.randn(6, 8).to(dtype), torch.randn(11, 8).to(dtype)
    asked = dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), True)
    options = dict(lse_square_scale=0.1, reduction=reduction)
    tail = (-100, 0.1, 0.0, reduction, None, True)
    of_metrics = (dtype, torch.float32, torch.int64)
    plain, linear = their_ops.LigerCrossEntropyFunction, their_ops.LigerFusedLinearCrossEntropyFunction
    for of_loss, calls in (
        (dtype, (
            LigerCrossEntropyLoss(reduction=reduction)(logits, target),
            theirs.liger_cross_entropy(logits, target, reduction=reduction),
            plain.apply(logits, target, None, -100, 0.0, 0.0, reduction)[0],
            LigerCrossEntropyLoss(**options, **asked)(logits, target),
            theirs.liger_cross_entropy(logits, target, **options, **asked),
            plain.apply(logits, target, None, *tail, True, True),
        )),
        (torch.float32, (
            LigerFusedLinearCrossEntropyLoss(reduction=reduction)(head, x, target),
            theirs.liger_fused_linear_cross_entropy(x, head, target, reduction=reduction),
            LigerFusedLinearCrossEntropyLoss(**options, **asked)(head, x, target),
            theirs.liger_fused_linear_cross_entropy(x, head, target, **options, **asked),
            linear.apply(x, head, target, None, None, *tail, None, False, True, True),
        )),
    ):  # fmt: skip
        for found in map(results_of, calls):
            assert tuple(t.dtype for t in found) == (of_loss, *of_metrics)[: len(found)] and len(found) in (1, 4)


def test_patching_an_instance(liger_kernel_served):
    from liger_kernel.transformers import _apply_liger_kernel_to_instance, apply_liger_kernel_to_llama

    ids, plain = tokens(), make("llama")
    for patch in (
        lambda m: _apply_liger_kernel_to_instance(model=m, rope=False),
        lambda m: apply_liger_kernel_to_llama(False, model=m),
    ):
        model = make("llama")
        assert patch(model) is None
        names = nodes(model(input_ids=ids, labels=ids).loss)
        assert "fused_linear_cross_entropy" in names and "rope" not in names
        torch.testing.assert_close(step(model, ids)[0], step(plain, ids)[0])
    with pytest.raises(AssertionError, match="cannot both be True"):
        apply_liger_kernel_to_llama(cross_entropy=True)


@pytest.mark.parametrize("config, rule", [
    ({"flash": True}, r"keys must be of rope, rms_norm, .*, memory_budget, fp8, fp8_filter, relu_squared \(got flash\)"),
    ({"rope": 0}, r"rope must be True or False \(got 0\)"),
    ({"relu_squared": "no"}, r"relu_squared must be True or False \(got 'no'\)"),
    ({"memory_budget": "1GiB"}, r"memory_budget must be a positive number of bytes or None \(got '1GiB'\)"),
    ({"fp8": "columns"}, r"fp8 must be 'rows', .* or None \(got 'columns'\)"),
])  # fmt: skip
def test_wrong_keys_and_values_of_trainers_config(config, rule, liger_kernel_served):
    from liger_kernel.transformers import _apply_liger_kernel
    from transformers.integrations.liger import apply_liger_kernel as integration

    model = make("llama")
    for call in (lambda: integration(model, config), lambda: _apply_liger_kernel("llama", **config)):
        with pytest.raises((TypeError, ValueError), match=f"^liger_kernel_config: {rule}$"):
            call()
    assert type(make("llama")) is type(model) is type(make("llama"))


def test_trainers_config(liger_kernel_served, caplog):
    from transformers.integrations.liger import apply_liger_kernel as integration

    model = make("llama")
    config = {"rope": False, "relu_squared": True, "memory_budget": 1 << 20, "fp8": "rows"}
    caplog.set_level("INFO", logger="liger_ops")
    for _ in range(2):
        integration(model, config)
    assert model.lm_head.liger_memory_budget == 1 << 20
    (record,) = caplog.records
    assert record.name == "liger_ops" and record.message.startswith("liger_ops on llama\n")
    assert "rope is switched off" in record.message and "fp8_linear, rows" in record.message


# What Trainer calls for --use_liger_kernel, without the time that it takes to import Trainer.
SCRIPT = """
import sys
from beside import make
from transformers.integrations.liger import apply_liger_kernel
model = make("llama")
apply_liger_kernel(model, None)
print(hasattr(model.lm_head, "liger_memory_budget"), __name__, sys.argv[1:])
"""
RUN = """
import runpy, sys
sys.argv[:] = ["liger_ops", "run", *{arguments}, "--use_liger_kernel"]
runpy.run_module("liger_ops", run_name="__main__")
"""


@pytest.mark.parametrize("form", ["script", pytest.param("module", marks=pytest.mark.thorough)])
def test_a_script_is_run_with_the_package_served(form, tmp_path):
    """Trainer's users on a command line need not change their script."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("from tests.support.models.language_models import make")
    arguments = [str(tmp_path / "train.py")] if form == "script" else ["-m", "train"]
    code = f"import sys; sys.path.append({str(tmp_path)!r})\n" * (form == "module") + RUN.format(
        arguments=arguments, folder=str(tmp_path)
    )
    done = run_forked(code, ["tests.support.models.language_models"])
    assert (done.returncode, done.stdout) == (0, "True __main__ ['--use_liger_kernel']\n"), done.stderr
    assert "liger_ops on llama\nkind " in done.stderr


@pytest.mark.parametrize("arguments, status", [([], 2), (["-m"], 2), (["--help"], 0)])
def test_run_says_how_it_is_called(arguments, status, capsys):
    assert run.main(arguments) == status
    said = capsys.readouterr()
    assert (said.out if status == 0 else said.err).startswith("usage: python -m liger_ops run SCRIPT [ARGUMENTS]\n")


def test_patching_models_constructed_later(liger_kernel_served):
    from liger_kernel.transformers import AutoLigerKernelForCausalLM, apply_liger_kernel_to_llama

    ids = tokens()
    assert apply_liger_kernel_to_llama(rope=False) is None
    names = nodes(make("llama")(input_ids=ids, labels=ids).loss)
    assert {"fused_linear_cross_entropy", "rms_norm"} <= names and "rope" not in names
    assert "rms_norm" not in nodes(make("mistral")(input_ids=ids, labels=ids).loss)
    compat.uninstall()
    assert "rms_norm" not in nodes(make("llama")(input_ids=ids, labels=ids).loss)
    model = AutoLigerKernelForCausalLM.from_config(make("mistral").config, rope=False)
    assert "rms_norm" in nodes(model(input_ids=ids, labels=ids).loss)


def test_unknown_keywords_raise_type_errors(liger_kernel_served):
    from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_nemotron

    with pytest.raises(TypeError, match=r"apply_liger_kernel_to_llama\(\) .* 'rms_nrom'"):
        apply_liger_kernel_to_llama(rms_nrom=False)
    apply_liger_kernel_to_nemotron(relu_squared=False)
    apply_liger_kernel_to_llama(embedding=False, memory_budget=1 << 20)
    model = make("llama")
    assert type(model.model.embed_tokens) is nn.Embedding and model.lm_head.liger_memory_budget == 1 << 20


def test_patching_only_the_loss_does_not_warn(liger_kernel_served):
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(rope=False, rms_norm=False, swiglu=False)
    ids = tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model = make("llama")
    assert "fused_linear_cross_entropy" in nodes(model(input_ids=ids, labels=ids).loss)
    apply_liger_kernel_to_llama(rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=False)
    with pytest.warns(RuntimeWarning, match="LlamaForCausalLM is left as it is") as caught:
        make("llama")
    assert len(caught) == 1


TRAINER = """
import sys, torch, liger_ops
from tests.support.models.language_models import make, tokens
import liger_ops.compat
liger_ops.compat.install()
from transformers import Trainer, TrainingArguments
data = [{"input_ids": tokens(8, seed=i), "labels": tokens(8, seed=i)} for i in range(8)]
def losses(**options):
    arguments = TrainingArguments(sys.argv[1], max_steps=3, logging_steps=1, per_device_train_batch_size=2,
        report_to="none", gradient_accumulation_steps=2, use_cpu=True, disable_tqdm=True, save_strategy="no", **options)
    trainer = Trainer(make("llama"), arguments, train_dataset=data, eval_dataset=data)
    liger_ops.reset_launch_counts()
    trainer.train()
    trainer.evaluate()
    return [e.get("loss", e.get("eval_loss")) for e in trainer.state.log_history], liger_ops.launch_counts()["cpu"]
plain, none = losses()
ours, launches = losses(use_liger_kernel=True, liger_kernel_config={"rope": True})
assert none == 0 and launches > 0, (none, launches)
assert all(a is b is None or abs(a - b) < 1e-3 for a, b in zip(plain, ours)), (plain, ours)
print("same")
"""


def test_trainer_uses_the_package(tmp_path):
    code = f"import sys; sys.argv = ['', {str(tmp_path)!r}]\n" + TRAINER
    assert forked_output_of(code, ["tests.support.models.language_models"]).endswith("same\n")


def test_what_is_built_from_the_table_behaves_as_written_by_hand(liger_kernel_served):
    from liger_kernel.chunked_loss import LigerFusedLinearCPOLoss
    from liger_kernel.ops import LigerRMSNormFunction
    from liger_kernel.transformers import LigerCrossEntropyLoss, LigerJSD, LigerRMSNorm
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy, liger_rms_norm

    x, head, y, ids = torch.randn(6, 8), torch.randn(11, 8), torch.randint(11, (6,)), torch.randint(11, (2, 6))
    logs = (x @ head.T).log_softmax(-1)
    for call, arguments in (
        (LigerRMSNorm(8), (x,)),
        (LigerJSD(), (logs, logs.roll(1, 0))),
        (LigerCrossEntropyLoss(return_z_loss=True), (logs, y)),
        (LigerFusedLinearCPOLoss(), (head, torch.stack([x, x]), ids)),
        (liger_fused_linear_cross_entropy, (x, head, y)),
        (lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6), (x, head[0])),
    ):
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        assert repr(compiled(*arguments)) == repr(call(*arguments))
    assert torch.equal(torch.jit.script(LigerJSD())(logs, logs.roll(1, 0)), LigerJSD()(logs, logs.roll(1, 0)))
    for value in (LigerRMSNormFunction, LigerRMSNormFunction.apply, LigerJSD, liger_rms_norm):
        assert pickle.loads(pickle.dumps(value)) is value
    with pytest.raises(TypeError, match=r"liger_rms_norm\(\) got an unexpected keyword argument 'epsilon'"):
        liger_rms_norm(x, head[0], 1e-6, epsilon=1e-5)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'eps'"):
        LigerRMSNormFunction.apply(x, head[0])


def test_parameters_that_the_operator_does_not_take_are_refused():
    from liger_ops.compat.forms import call

    with pytest.raises(TypeError, match="has no parameter epsilon"):
        call(F.rms_norm, {"X": "X", "W": "W", "epsilon": "epsilon"})


def test_without_transformers_the_layers_work():
    code = """
import sys
sys.modules["transformers"] = None
import liger_ops.compat
liger_ops.compat.install()
from liger_kernel.transformers import LigerRMSNorm
from liger_kernel.transformers.functional import liger_swiglu
import torch
print(LigerRMSNorm(4)(torch.ones(1, 4)).sum().item() > 3.9, liger_swiglu(torch.ones(1), torch.ones(1)).item() > 0.7)
"""
    done = run_python(code)
    assert done.stdout == "True True\n", done.stderr
