"""liger_ops.compat: layers of single models, losses and helpers that test_compat.py does not cover."""

import copy
import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as TF

from liger_ops import functional as F
from tests.support.checks import assert_no_worse, equal
from tests.support.models.language_models import SIZES


def agrees(ours, theirs, *inputs):
    """Checks outputs and all gradients of two modules with the same parameters, in fp64."""
    theirs.load_state_dict(ours.state_dict())
    results = []
    for module in (ours.double(), theirs.double()):
        given = [t.double().requires_grad_() if t.is_floating_point() else t for t in inputs]
        out = module(*given)
        leaves = [t for t in (*given, *module.parameters()) if t.requires_grad]
        results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(-1))])
    for pair in zip(*results, strict=True):
        torch.testing.assert_close(*pair)


def test_widths_and_biases_of_mlps(liger_kernel_served):
    from liger_kernel.transformers import LigerFalconH1MLP, LigerFalconH1SwiGLUMLP
    from liger_kernel.transformers.geglu import LigerGEGLUMLPForGemma4
    from liger_kernel.transformers.swiglu import LigerHunyuanV1SwiGLUMLP, LigerSwiGLUMLPForMuseGlimmer
    from transformers import FalconH1Config, Gemma4TextConfig, LlamaConfig
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP

    falcon = FalconH1Config(**SIZES, mlp_multipliers=[0.7, 1.3], mlp_bias=True)
    agrees(LigerFalconH1SwiGLUMLP(falcon), FalconH1MLP(falcon), torch.randn(2, 7, 32))
    with pytest.raises(ValueError, match="does not support bias"):
        LigerFalconH1MLP(falcon)
    config = LlamaConfig(**SIZES)
    assert LigerHunyuanV1SwiGLUMLP(config, 3).layer_idx == 3
    config.hidden_activation = "relu"
    with pytest.raises(ValueError, match="relu not supported"):
        LigerSwiGLUMLPForMuseGlimmer(config)

    gemma = {**SIZES, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    gemma = Gemma4TextConfig(**gemma, num_kv_shared_layers=1, use_double_wide_mlp=True)
    for layer, width in ((None, 48), (0, 48), (1, 48), (2, 96)):
        module = LigerGEGLUMLPForGemma4(gemma, layer)
        assert module.intermediate_size == module.up_proj.out_features == width


@pytest.mark.parametrize("shards, chunks", [(None, [24, 24, 22]), (1, [70]), (4, [18, 18, 18, 16])])
def test_tiled_mlps_run_one_chunk_at_a_time(shards, chunks, liger_kernel_served):
    from liger_kernel.ops import LigerTiledMLPFunction, apply_tiled_mlp
    from liger_kernel.transformers import LigerTiledSwiGLUMLP
    from transformers import LlamaConfig

    seen, linear = [], nn.Linear(32, 32)

    def fn(module, chunk):
        seen.append(chunk.shape[-2])
        return module(chunk)

    x = torch.randn(2, 70, 32, requires_grad=True)
    loss = apply_tiled_mlp(fn, linear, x, shards).sum()
    assert seen == chunks
    loss.backward()
    assert sorted(seen) == sorted(2 * chunks)  # each chunk runs again in backward
    torch.testing.assert_close(LigerTiledMLPFunction.apply(fn, linear, x[0], 3), linear(x[0]))
    with pytest.raises(ValueError, match="LigerTiledSwiGLUMLP: hidden_act must be silu or swish"):
        LigerTiledSwiGLUMLP(LlamaConfig(**SIZES, hidden_act="gelu_pytorch_tanh"))


# Mixtral's experts have the width of the config's intermediate_size.
@pytest.mark.parametrize(
    "name, experts, sizes",
    [
        ("mixtral", "MixtralExperts", {"num_local_experts": 5}),
        ("qwen3_moe", "Qwen3MoeExperts", {"num_experts": 5, "moe_intermediate_size": 24}),
        ("deepseek_v2", "DeepseekV2Experts", {"n_routed_experts": 5, "moe_intermediate_size": 24}),
    ],
)
def test_experts(name, experts, sizes, liger_kernel_served):
    from liger_kernel.transformers import LigerExperts
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **{**SIZES, **sizes})
    config._experts_implementation = "eager"
    theirs = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), experts)(config)
    ours = LigerExperts(config)
    for p in ours.parameters():
        nn.init.normal_(p, std=0.2)
    # The last expert has no tokens, and token 0 has the same expert twice.
    x, index, weights = torch.randn(9, 32), torch.randint(4, (9, 2)), torch.rand(9, 2)
    index[0] = 1
    agrees(ours, theirs, x, index, weights)

    ours, half = ours.float(), copy.deepcopy(ours).bfloat16()
    plain = ours(x, index, weights)
    folded = ours(x.view(3, 3, 32), index.view(3, 3, 2).int(), weights.view(3, 3, 2))
    assert torch.equal(folded.view(9, 32), plain)
    assert ours(x[:0], index[:0], weights[:0]).shape == (0, 32)
    found = half(x.bfloat16(), index, weights)
    assert found.dtype == torch.bfloat16
    assert_no_worse("in bf16", found, theirs.bfloat16()(x.bfloat16(), index, weights).to(found.dtype), plain)
    with pytest.raises(IndexError, match="top_k_index must be below the number of experts, 5 .got 5."):
        ours(x, torch.full_like(index, 5), weights)


def test_embedding_returns_zeros_for_padding(liger_kernel_served):
    from liger_kernel.transformers.experimental.embedding import LigerEmbedding

    ids, module = torch.tensor([[1, 2, 0], [2, 2, 4]]), LigerEmbedding(5, 8, 2)
    assert not module.weight[2].any()
    agrees(module, nn.Embedding(5, 8, 2), ids)
    nn.init.ones_(module.weight)
    assert torch.equal(module(ids).sum(-1) == 0, ids == 2)


def test_norms_of_single_models(liger_kernel_served):
    from liger_kernel.transformers import rms_norm as norms

    x, weight = torch.randn(7, 32).bfloat16(), torch.randn(32).bfloat16()
    added = ("Gemma", "Gemma2", "Gemma3", "Qwen3Next", "MuseGlimmerTextCentered")
    for name in (*added, "Gemma4", "MuseGlimmer", "Olmo2", "Glm4"):
        module = getattr(norms, f"LigerRMSNormFor{name}")(32, eps=1e-2).bfloat16()
        assert isinstance(module, norms.LigerRMSNorm)
        assert torch.equal(module.weight, torch.full_like(weight, 0.0 if name in added else 1.0))
        module.weight.data = weight
        mode = "llama" if name in ("Olmo2", "Glm4") else "gemma"
        assert torch.equal(module(x), F.rms_norm(x, weight, 1e-2, 1.0 if name in added else 0.0, mode))
    for name in ("Gemma4", "MuseGlimmer"):
        bare = getattr(norms, f"LigerRMSNormFor{name}")(32, with_scale=False)
        assert not bare.state_dict() and bare(x).dtype == x.dtype
        torch.testing.assert_close(bare(x), TF.rms_norm(x.float(), (32,), eps=1e-6).bfloat16())


def test_shapes_of_angles(liger_kernel_served):
    from liger_kernel.transformers import llama4_rope, rope

    q, k, angles = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 7, 16), torch.randn(1, 7, 8)
    cos, sin = angles.cos(), angles.sin()
    full = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    rotated = rope.liger_rotary_pos_emb(q, k, *full)
    for dim in (1, 2):
        assert equal(rope.liger_rotary_pos_emb(q, k, *(t.unsqueeze(dim) for t in full), None, dim), rotated)
    part = rope.liger_rotary_pos_emb(q, k, cos[..., :6], sin[..., :6], rotary_dim=8)
    expected = rope.liger_rotary_pos_emb(q, k, *(torch.cat([t[..., :4]] * 2, -1) for t in (cos, sin)))
    assert equal(part, expected) and torch.equal(part[0][..., 8:], q[..., 8:])
    for wrong in (7, 18):
        with pytest.raises(ValueError, match="rotary_dim must be even and in"):
            rope.liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=wrong)

    q, k = q.transpose(1, 2), k.transpose(1, 2)
    text, picture = llama4_rope.liger_llama4_text_rotary_pos_emb, llama4_rope.liger_llama4_vision_rotary_pos_emb
    for freqs in (torch.polar(torch.ones(7, 8), torch.randn(7, 8)), torch.randn(7, 8)):
        expected = text(q, k, torch.complex(freqs.real, freqs.imag if freqs.is_complex() else 0 * freqs))
        for given in (freqs, freqs[:, None], freqs[None]):
            assert equal(picture(q, k, given), expected)
    assert equal(text(q, k, torch.cat([freqs.cfloat()] * 2)), expected)


def test_rotations_of_a_module(liger_kernel_served):
    from liger_kernel.transformers import llama4_rope

    modeling = SimpleNamespace()
    assert llama4_rope.apply_liger_llama4_rope_full(modeling) is None
    assert modeling.apply_rotary_emb is llama4_rope.liger_llama4_text_rotary_pos_emb
    assert modeling.vision_apply_rotary_emb is llama4_rope.liger_llama4_vision_rotary_pos_emb


def test_the_loss_of_causal_language_models(liger_kernel_served):
    """Of labels that are not shifted yet."""
    from liger_kernel.transformers.functional import CrossEntropyOutput
    from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss, unpack_cross_entropy_result

    x, head, labels = torch.randn(2, 7, 32), torch.randn(11, 32), torch.randint(11, (2, 7))
    labels[0, 3] = -100
    logits, shifted = (x @ head.T)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = TF.cross_entropy(logits, shifted, reduction="sum")
    loss = LigerForCausalLMLoss(x, head, labels, 32, output_attentions=True)
    torch.testing.assert_close(loss, total / 11)
    torch.testing.assert_close(LigerForCausalLMLoss(x, head, labels, 32, num_items_in_batch=4), total / 4)
    out = LigerForCausalLMLoss(x, head, labels, 32, return_token_accuracy=True)
    assert isinstance(out, CrossEntropyOutput) and out.predicted_tokens is None
    torch.testing.assert_close(out.token_accuracy, (logits.argmax(-1) == shifted).sum() / 11)
    assert unpack_cross_entropy_result(out) == (out.loss, None, out.token_accuracy, None)
    assert unpack_cross_entropy_result(loss) == (loss, None, None, None)
    assert unpack_cross_entropy_result((loss, total)) == (loss, total, None, None)


def test_loss_options_are_checked_on_construction(liger_kernel_served):
    from liger_kernel.transformers import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss

    for loss in (LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss):
        for wrong in (dict(label_smoothing=1.5), dict(reduction="batchmean"), dict(softcap=0.0)):
            with pytest.raises(AssertionError, match=next(iter(wrong))):
                loss(**wrong)


def test_patching_functions_have_the_package_defaults(liger_kernel_served, monkeypatch):
    from liger_kernel.transformers import monkey_patch

    from liger_ops.compat import patching

    calls = []
    monkeypatch.setattr(patching, "apply_liger_kernel", lambda model, **switches: calls.append(switches))
    model = nn.Linear(1, 1)
    for name, off in (
        ("llama", {"cross_entropy"}),
        ("granite", {"fused_linear_cross_entropy"}),
        ("qwen3_next", {"rope", "cross_entropy"}),
        ("gpt_oss", {"swiglu", "cross_entropy"}),
        ("gemma4", {"rope", "layer_norm", "cross_entropy"}),
    ):
        getattr(monkey_patch, f"apply_liger_kernel_to_{name}")(model=model)
        assert {switch for switch, on in calls.pop().items() if on is False} == off
    # Positional arguments: the fourth switch of paligemma is not that of llama.
    monkey_patch.apply_liger_kernel_to_paligemma(True, False, True, False, model=model)
    assert not calls.pop()["layer_norm"]
    monkey_patch.apply_liger_kernel_to_llama(True, False, True, False, True, model)
    assert not calls.pop()["rms_norm"]
    monkey_patch.apply_liger_kernel_to_llava(model=model, rope=False, text_model_option=1)
    assert not calls.pop()["rope"]
    monkey_patch.apply_liger_kernel_to_llama(model=model, layer_norm=False)
    assert not calls.pop()["layer_norm"]


def test_patching_functions_are_of_types_that_transformers_has():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from liger_ops.compat import patching

    types = {*patching.MODEL_TYPE_TO_APPLY_LIGER_FN}
    assert len(types) > 50 and {*types} - {*CONFIG_MAPPING_NAMES} == set()


def test_devices_and_backends(liger_kernel_served, monkeypatch):
    from liger_kernel import utils

    def device_is(cuda=False, xpu=False, npu=False, **properties):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.xpu, "is_available", lambda: xpu)
        fake = SimpleNamespace(is_available=lambda: npu)
        found = SimpleNamespace(total_memory=5 * 2**30 - 1, **properties)
        for module in (torch.cuda, torch.xpu, fake):
            monkeypatch.setattr(module, "get_device_properties", lambda device=0: found, raising=False)
        monkeypatch.setattr(torch, "npu", fake, raising=False)
        utils.infer_device_arch.cache_clear()

    device_is()
    assert (utils.infer_device(), utils.infer_device_arch(), utils.is_npu_available()) == ("cpu", "cpu", False)
    with pytest.raises(RuntimeError, match="there is no GPU"):
        utils.get_total_gpu_memory()
    device_is(cuda=True)
    assert (utils.infer_device(), utils.get_total_gpu_memory()) == ("cuda", 4)
    names = {(8, 6): "ampere_ada", (9, 0): "hopper", (10, 3): "blackwell_ultra", (11, 0): "sm_110"}
    for capability, arch in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0, found=capability: found)
        utils.infer_device_arch.cache_clear()
        assert utils.infer_device_arch() == arch
    monkeypatch.setattr(torch.version, "hip", "6.0")
    names = {"gfx942:sramecc+:xnack-": "cdna3", "gfx1100": "rdna3", "gfx9999": "gfx9999", "": "cuda"}
    for target, arch in names.items():
        device_is(cuda=True, gcnArchName=target)
        assert utils.infer_device_arch() == arch
    for name, arch in (("Data Center GPU Max 1550", "pvc"), ("Arc(TM) A770", "arc"), ("Other", "xpu")):
        device_is(xpu=True, name=name)
        assert (utils.infer_device(), utils.infer_device_arch()) == ("xpu", arch)
    for name, arch in (("Ascend910B3", "ascend910"), ("Ascend310P", "ascend310"), ("Other", "npu")):
        device_is(npu=True, name=name)
        assert (utils.infer_device(), utils.infer_device_arch()) == ("npu", arch)
    device_is(xpu=True)  # a device without a name
    assert utils.infer_device_arch() == "xpu"

    for available in (["nccl", "gloo"], ["xccl", "mpi"], ["mpi", "gloo"], ["gloo"]):
        for name in ("nccl", "xccl", "mpi", "gloo"):
            monkeypatch.setattr(torch.distributed, f"is_{name}_available", lambda found=name in available: found)
        assert utils.infer_comm_backend() == available[0]
    device_is(npu=True)
    assert utils.infer_comm_backend() == "hccl"
    device_is()
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    with pytest.raises(RuntimeError, match="no distributed backend"):
        utils.infer_comm_backend()


def test_versions_and_packages(liger_kernel_served, monkeypatch):
    import transformers
    from liger_kernel.transformers import is_transformers_available
    from liger_kernel.utils import PEFT_AVAILABLE, is_peft_available, transformers_version_dispatch

    monkeypatch.setattr(transformers, "__version__", "4.48.0")

    def chosen(required):
        old, new = (lambda *a, **k: ("old", a, k)), (lambda *a, **k: ("new", a, k))
        return transformers_version_dispatch(required, old, new, (1,), (2,), {"x": 3}, {"y": 4})

    assert chosen("4.49.0") == chosen("4.48.1") == ("old", (1,), {"x": 3})
    assert chosen("4.48.0") == chosen("4.9.0") == ("new", (2,), {"y": 4})
    assert is_transformers_available()
    assert is_peft_available() == PEFT_AVAILABLE == (importlib.util.find_spec("peft") is not None)
