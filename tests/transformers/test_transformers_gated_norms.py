"""Norms with a gate, and norms of groups: what each class of transformers is recognised as."""

import importlib.util

import pytest
import torch
from torch import nn

from liger_ops import functional as F
from liger_ops.transformers import apply_liger_kernel, unpatch
from tests.support.checks import assert_no_worse, path_taken
from tests.support.models.language_models import known

N = 32
# model type, class, further arguments, options of the operator
CLASSES = [
    ("qwen3_next", "Qwen3NextRMSNormGated", (), {}),
    ("qwen3_5", "Qwen3_5RMSNormGated", (), {}),
    ("qwen3_5_moe", "Qwen3_5MoeRMSNormGated", (), {}),
    ("olmo_hybrid", "OlmoHybridRMSNormGated", (), {}),
    ("qwen4_exp", "Qwen4ExpTextRMSNormGated", (1e-6, "silu"), {}),
    ("qwen4_exp", "Qwen4ExpTextRMSNormGated", (1e-6, "sigmoid"), dict(activation="sigmoid")),
    ("lara_mini", "LaraMiniRMSNormGated", (), dict(casting_mode="gemma")),
    ("kimi_linear", "KimiLinearRMSNormGated", (), dict(casting_mode="gemma", activation="sigmoid")),
    ("glm5_next", "Glm5NextTextRMSNormGated", (), dict(casting_mode="gemma", activation="sigmoid")),
    ("bailing_hybrid", "BailingHybridRMSNormGated", (), dict(casting_mode="gemma", activation="sigmoid")),
    ("mamba2", "MambaRMSNormGated", (N,), dict(gate_first=True)),
    ("mamba2", "MambaRMSNormGated", (4,), dict(gate_first=True, group_size=4)),
    ("bamba", "BambaRMSNormGated", (N,), dict(gate_first=True)),
    ("granitemoehybrid", "GraniteMoeHybridRMSNormGated", (N,), dict(gate_first=True)),
    ("nemotron_h", "NemotronHRMSNormGated", (8,), dict(gate_first=True, group_size=8)),
    ("zamba2", "Zamba2RMSNormGated", (16,), dict(gate_first=True, group_size=16)),
    ("falcon_h1", "FalconH1RMSNormGated", (1e-6, 4, True), dict(casting_mode="gemma", group_size=8)),
    ("falcon_h1", "FalconH1RMSNormGated", (1e-6, 4, False), dict(casting_mode="gemma", gate_first=True, group_size=8)),
]
# Older releases of transformers lack the newest models.
CLASSES = [row for row in CLASSES if importlib.util.find_spec(f"transformers.models.{row[0]}")]
NAMES = [" ".join([cls, *map(str, more)]) for _, cls, more, _ in CLASSES]
DTYPES = [torch.float32, torch.bfloat16]


def made(model_type, cls, more):
    source = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    norm = getattr(source, cls)(N, *more)
    norm.weight.data += torch.randn(N, generator=torch.Generator().manual_seed(3))
    return norm


class Holder(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm


def rows(dtype, seed):
    return torch.randn(2, 5, N, generator=torch.Generator().manual_seed(seed)).to(dtype)


def recorded(monkeypatch):
    """The options of the operator's calls."""
    calls, operator = [], F.rms_norm_gated

    def record(x, gate, weight, eps, offset, casting_mode, activation, *, gate_first, group_size):
        found = dict(casting_mode=casting_mode, activation=activation, gate_first=gate_first, group_size=group_size)
        defaults = dict(casting_mode="llama", activation="silu", gate_first=False, group_size=None)
        calls.append({name: value for name, value in found.items() if value != defaults[name]})
        return operator(x, gate, weight, eps, offset, casting_mode, activation, **dict(list(found.items())[2:]))

    monkeypatch.setattr(F, "rms_norm_gated", record)
    return calls


@pytest.mark.parametrize("model_type, cls, more, options", CLASSES, ids=NAMES)
def test_classes(model_type, cls, more, options, monkeypatch):
    """Which operator replaces a class. In every mix of dtypes, results have the original's dtype and, but for roundings
    that may go either way, its values."""
    model = Holder(made(model_type, cls, more))
    (row,) = (row for row in apply_liger_kernel(model).rows if row.module == "norm")
    assert (row.type, row.kind, row.replacement, row.reason) == (cls, "norm", "rms_norm_gated", "")
    calls, checked = recorded(monkeypatch), 0
    for x_dtype in DTYPES:
        for gate_dtype in DTYPES:
            for weight_dtype in DTYPES:
                x, gate = rows(x_dtype, 0), rows(gate_dtype, 1)
                norm = model.norm.to(weight_dtype)
                with torch.no_grad(), path_taken("cpu"):
                    ours = norm(x, gate=gate)
                theirs = type(norm).liger_original.forward(norm, x, gate)
                assert ours.dtype == theirs.dtype
                # Half-precision results, or results of rounded rows: by one rounding, or two, of the larger spacing.
                rounded = torch.bfloat16 in (ours.dtype, x_dtype)
                close = dict(rtol=2**-6, atol=2**-6) if rounded else dict(rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(ours, theirs, **close)
                checked += 1
    # torch.bfloat16 alone, as models are trained: rounding in the wrong place would change a fourth of the results.
    x, gate, norm = rows(torch.bfloat16, 0), rows(torch.bfloat16, 1), model.norm.bfloat16()
    differ = norm(x, gate) != type(norm).liger_original.forward(norm, x, gate)
    assert differ.double().mean() < 0.02
    assert len(calls) == checked + 1 and all(call == options for call in calls)


@pytest.mark.parametrize("model_type, cls, more, options", CLASSES[::5], ids=NAMES[::5])
def test_calls_that_were_not_probed_run_the_original(model_type, cls, more, options, monkeypatch):
    model = Holder(made(model_type, cls, more))
    apply_liger_kernel(model)
    calls, norm, x = recorded(monkeypatch), model.norm, rows(torch.float32, 0)
    narrow = rows(torch.float32, 1)[:, :1]
    for given, named in (((x,), {}), ((x, None), {}), ((x, narrow), {}), ((x, x, x), {}), ((x, x), dict(gate=x))):
        found = []
        for forward in (norm, lambda *a, **k: type(norm).liger_original.forward(norm, *a, **k)):
            try:
                found.append(forward(*given, **named))
            except Exception as error:
                found.append(type(error))
        same = found[0] is found[1] if isinstance(found[0], type) else torch.equal(*found)
        assert same and not calls


def test_what_is_left_alone():
    """Modules that look like gated norms, and are none."""

    class RMSNormGated(nn.Module):
        def __init__(self, act=nn.functional.silu, clamp=None):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(N)), 1e-6
            self.act, self.clamp = act, clamp

        def forward(self, x, gate):
            y = F.rms_norm(x, self.weight, self.eps) * self.act(gate)
            return y if self.clamp is None else y.clamp(-self.clamp, self.clamp)

    cases = {
        "computes something else": RMSNormGated(nn.functional.gelu),
        "": RMSNormGated(),
    }
    cases["has no epsilon"] = RMSNormGated()
    del cases["has no epsilon"].eps
    cases["its forward was replaced"] = RMSNormGated()
    cases["its forward was replaced"].forward = lambda x, gate: x
    cases["has parameters that no gated norm has"] = RMSNormGated()
    cases["has parameters that no gated norm has"].bias = nn.Parameter(torch.zeros(N))
    clamped = Holder(RMSNormGated(clamp=1.0))
    with pytest.warns(RuntimeWarning, match="left as it is"):
        assert "computes something else" in str(apply_liger_kernel(clamped))
    for reason, norm in cases.items():
        model = nn.ModuleDict(dict(gated=norm, plain=nn.RMSNorm(N, 1e-6)))
        (row,) = (row for row in apply_liger_kernel(model).rows if row.module == "gated")
        assert row.reason == reason and bool(row.replacement) == (not reason)
        assert unpatch(model) == 1 + (not reason)
    off = nn.ModuleDict(dict(gated=RMSNormGated(), plain=nn.LayerNorm(N)))
    assert "rms_norm is switched off" in str(apply_liger_kernel(off, rms_norm=False))


# ---- Groups without a gate


def grouped(groups=4):
    return made("qwen4_exp", "Qwen4ExpTextRMSNorm", (N // groups,))


HAS_GROUPS = pytest.mark.skipif(not known(["qwen4_exp_text"]), reason="this release of transformers has no Qwen4")


@HAS_GROUPS
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_groups(x_dtype, weight_dtype, monkeypatch):
    model = Holder(grouped()).to(weight_dtype)
    x, dy = rows(x_dtype, 0).requires_grad_(), rows(x_dtype, 2)

    def results():
        y = model.norm(x)
        return y, *torch.autograd.grad(y, [x, model.norm.weight], dy)

    theirs = results()
    wide = Holder(grouped()).double()
    wide.norm.weight.data.copy_(model.norm.weight.data)
    # The module itself computes in fp32.
    d, w = x.detach().double().requires_grad_(), wide.norm.weight
    groups = d.unflatten(-1, (4, -1))
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + wide.norm.eps)).flatten(-2) * (1 + w)
    exact = y, *torch.autograd.grad(y, [d, w], dy.double())
    (row,) = (row for row in apply_liger_kernel(model).rows if row.module == "norm")
    assert (row.replacement, row.reason) == ("rms_norm_gated", "")
    calls = recorded(monkeypatch)
    with path_taken("cpu"):
        ours = results()
    assert calls[0] == dict(casting_mode="gemma", activation="sigmoid", group_size=N // 4)
    for name, *tensors in zip(("y", "x", "weight"), ours, theirs, exact, strict=True):
        # Sums of 8 columns or of 10 rows are rounded in any order.
        assert_no_worse(name, *tensors, noise=10 * torch.finfo(torch.float32).eps)
    assert unpatch(model) == 1 and all(map(torch.equal, results(), theirs))


@HAS_GROUPS
def test_which_norms_have_groups():
    """One of all columns is a plain norm, and one that computes something else stays."""
    other = grouped()
    cls = type(other)
    other.__class__ = type(cls.__name__, (cls,), {"forward": lambda self, x: cls.forward(self, x).clamp(-3, 3)})
    model = nn.ModuleDict(dict(groups=grouped(), plain=grouped(1), other=other, torchs=nn.GroupNorm(4, N)))
    found = {row.module: (row.replacement, row.reason) for row in apply_liger_kernel(model).rows}
    assert found["groups"] == ("rms_norm_gated", "") and found["plain"] == ("rms_norm", "")
    assert found["other"] == ("", "computes something else") and not found["torchs"][0]
    compiled = torch.compile(model["groups"], fullgraph=True, backend="aot_eager", dynamic=True)
    x = rows(torch.float32, 0)
    assert torch.equal(compiled(x), model["groups"](x))
    off = nn.ModuleDict(dict(groups=grouped(), plain=nn.LayerNorm(N)))
    assert "rms_norm is switched off" in str(apply_liger_kernel(off, rms_norm=False))
