"""Reference formulas: compared with PyTorch and transformers, and as the operators if no operator library fits torch.

The second part runs a copy of the package without a library in new processes, which also import this file.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import liger_ops
from liger_ops import functional
from liger_ops.reference import operators
from tests.support.calls import NAMES, ROWS, RowModule, inputs_of, multiplies_in_fp8, outputs
from tests.support.checks import environment_of_tree
from tests.support.rows import PLAIN, Bound, bind

TESTS = Path(__file__).parent
PACKAGE = Path(liger_ops.__file__).parent


def close(ours, theirs) -> None:
    for a, b in zip(outputs(ours), outputs(theirs), strict=True):
        torch.testing.assert_close(a, b)


# ---- Formulas compared with PyTorch and transformers


def as_transformers(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """transformers' norms compute rows in fp32, also of fp64: ten operations, a sum of a row and a rotation of two terms."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    ours, theirs, own = ours.detach().double(), theirs.detach().double(), torch.finfo(theirs.dtype).eps
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    allowed = 16 * torch.finfo(torch.float32).eps + 2 * own
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def formula(name: str):
    return operators()[name].reference


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norms(dtype):
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, residual, w, b = (randn(*shape).to(dtype) for shape in ((3, 40), (3, 40), (40,), (40,)))
    llama, gemma = LlamaRMSNorm(40, 1e-5).to(dtype), GemmaRMSNorm(40, 1e-5).to(dtype)
    llama.weight.data, gemma.weight.data = w, w
    close(formula("rms_norm")(x), F.rms_norm(x, [40], None, 1e-6))
    close(formula("rms_norm")(x, w, 1e-3, casting_mode="none"), F.rms_norm(x, [40], w, 1e-3))
    as_transformers(formula("rms_norm")(x, w, 1e-5), llama(x))
    as_transformers(formula("rms_norm")(x, w, 1e-5, 1.0, "gemma"), gemma(x))
    close(formula("fused_add_rms_norm")(x, residual, w), (formula("rms_norm")(x + residual, w), x + residual))
    close(formula("layer_norm")(x, w, b, 1e-3), F.layer_norm(x, [40], w, b, 1e-3))


def angles_of(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles as models make them: both halves are equal."""
    angles = randn(*shape[:-1], shape[-1] // 2).repeat((1,) * (len(shape) - 1) + (2,))
    return angles.cos(), angles.sin()


def test_rotation():
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as neighbours
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as halves
    from transformers.models.llama4.modeling_llama4 import apply_rotary_emb as complex_angles

    q, k, (cos, sin) = randn(2, 4, 5, 8), randn(2, 2, 5, 8), angles_of(2, 5, 8)
    close(formula("rope")(q, k, cos, sin), halves(q, k, cos, sin))
    close(functional.apply_rotary_pos_emb(q, k, cos, sin), halves(q, k, cos, sin))
    part = angles_of(2, 5, 4)
    spread = (t[..., :2].repeat_interleave(2, -1) for t in part)
    close(formula("rope")(q, k, *spread, interleaved=True), neighbours(q, k, *part))
    turns = torch.polar(torch.ones(2, 5, 4), torch.randn(2, 5, 4))
    q, k = q.float(), k.float()
    expected = complex_angles(q.transpose(1, 2), k.transpose(1, 2), turns)
    close(formula("rope_freqs_cis")(q, k, turns), tuple(t.transpose(1, 2) for t in expected))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_by_sections(interleaved):
    """Compares with angles that are combined first, as Qwen2-VL does."""
    q, k, (cos, sin), sections = randn(2, 4, 5, 8), randn(2, 2, 5, 8), angles_of(3, 2, 5, 8), [1, 1, 2]

    def combined(t: torch.Tensor) -> torch.Tensor:
        half = torch.cat([m[i % 3] for i, m in enumerate(t[..., :4].split(sections, dim=-1))], dim=-1)
        return half.repeat_interleave(2, -1) if interleaved else torch.cat([half, half], -1)

    if interleaved:
        cos, sin = (t[..., :4].repeat_interleave(2, -1) for t in (cos, sin))
        expected = formula("rope")(q, k, *(combined(t[..., ::2]) for t in (cos, sin)), interleaved=True)
    else:
        expected = formula("rope")(q, k, combined(cos), combined(sin))
    close(formula("rope")(q, k, cos, sin, interleaved=interleaved, mrope_section=sections), expected)


def test_norms_of_heads_before_a_rotation():
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    q, k, (cos, sin), weights = randn(2, 4, 5, 8), randn(2, 2, 5, 8), angles_of(2, 5, 8), [randn(8), randn(8)]
    norms = [qwen3.Qwen3RMSNorm(8, eps=1e-3) for _ in weights]
    for norm, weight in zip(norms, weights):
        norm.weight = torch.nn.Parameter(weight)
    expected = qwen3.apply_rotary_pos_emb(norms[0](q), norms[1](k), cos, sin)
    for ours, theirs in zip(formula("qk_norm_rope")(q, k, *weights, cos, sin, 1e-3), expected, strict=True):
        as_transformers(ours, theirs)


def test_gated_activations():
    gate, up, w, b = (randn(*shape) for shape in ((3, 8), (3, 8), (5, 8), (5,)))
    packed = torch.cat([gate, up], -1)
    activations = [
        ("swiglu", F.silu(gate), {}),
        ("geglu", F.gelu(gate, approximate="tanh"), {}),
        ("geglu", F.gelu(gate), dict(approximate="none")),
    ]
    for name, activated, options in activations:
        product = activated * up
        close(formula(name)(gate, up, **options), product)
        close(formula(f"{name}_packed")(packed, **options), product)
        close(formula(f"{name}_linear")(gate, up, w, b, **options), F.linear(product, w, b))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses(reduction, weighted, smoothing):
    logits, target = randn(6, 9) * 3, torch.tensor([0, 8, -100, 3, 3, -100])
    weight = torch.rand(9, dtype=torch.float64) if weighted else None
    expected = F.cross_entropy(logits, target, weight, reduction=reduction, label_smoothing=smoothing)
    options = dict(reduction=reduction, label_smoothing=smoothing)
    close(formula("cross_entropy")(logits.view(2, 3, 9), target.view(2, 3), weight, **options), expected.view(
        (2, 3) if reduction == "none" else ()))  # fmt: skip
    x, w, b = randn(6, 4), randn(9, 4), randn(9)
    linear = formula("fused_linear_cross_entropy")
    expected = F.cross_entropy(0.5 * F.linear(x, w, b), target, weight, reduction=reduction, label_smoothing=smoothing)
    close(linear(x, w, target, b, weight, **options, logits_scale=0.5), expected)


def test_losses_with_z_loss_softcap_and_metrics():
    logits, target = randn(4, 9) * 3, torch.tensor([0, 8, -100, 3])
    counted, capped = target >= 0, 5 * torch.tanh(logits / 5)
    z = 1e-2 * capped.logsumexp(-1).square()[counted].mean()
    ours = formula("cross_entropy_with_metrics")(logits, target, lse_square_scale=1e-2, softcap=5.0)
    right = (logits.argmax(-1) == target)[counted].double().mean()
    predicted = logits.argmax(-1).masked_fill(~counted, -1)
    close(tuple(ours), (F.cross_entropy(capped, target) + z, z, right, predicted))


def test_losses_with_log_probs_and_entropy():
    x, w, target, each = randn(4, 3), randn(9, 3), torch.tensor([0, 8, -100, 3]), torch.rand(4, dtype=torch.float64)
    distribution = torch.distributions.Categorical(logits=x @ w.T)
    counted = target >= 0
    log_probs = distribution.log_prob(target.clamp(min=0)) * counted
    ours = formula("fused_linear_cross_entropy_with_log_probs")(x, w, target, token_weight=each)
    close(tuple(ours), (-(each * log_probs).sum() / 3, log_probs, distribution.entropy() * counted))


def test_the_gradient_overwrites_the_logits():
    logits, target = randn(3, 9).requires_grad_(), torch.tensor([0, 8, 3])
    loss = F.cross_entropy(logits, target)
    (expected,) = torch.autograd.grad(loss, logits)
    copy = logits * 1
    ours = formula("cross_entropy_")(copy, target)
    close((ours, copy), (loss, expected))
    close(torch.autograd.grad(2 * ours, logits), (2 * expected,))


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in outputs(result):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel())
        return result


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_linear_loss_computes_chunks(reduction):
    x, w, b, target = randn(40, 8).requires_grad_(), randn(100, 8).requires_grad_(), randn(100), torch.arange(40)
    target[3] = -100
    loss = formula("fused_linear_cross_entropy")
    results = []
    for budget in (None, 7 * 16 * 100):
        with Largest() as seen:
            ours = loss(x, w, target, b, None, reduction, token_weight=target.double(), memory_budget=budget)
            results.append((ours, *torch.autograd.grad(ours.sum(), (x, w))))
        assert (seen.elements < 40 * 100) == (budget is not None)
    close(*results)
    gradient = torch.func.grad(lambda x: loss(x, w, target, b, memory_budget=budget))(x)
    close(gradient, torch.autograd.grad(loss(x, w, target, b), x))


# ---- Without a fitting library


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the package with two unusable libraries: one for another torch, one broken."""
    root = tmp_path_factory.mktemp("without")
    shutil.copytree(PACKAGE, root / "liger_ops", ignore=shutil.ignore_patterns("lib", "packs", "__pycache__"))
    libraries = root / "liger_ops" / "lib"
    libraries.mkdir()
    for minor in ("1.0", liger_ops._runtime.loader.torch_minor()):
        (libraries / f"libliger_ops_torch{minor}.so").write_bytes(b"not a library")
    return root


def run(copy: Path, code: str, *options: str, **env: str) -> str:
    """stdout and stderr of code in a process that imports the copy."""
    environment = environment_of_tree(**env)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [copy, TESTS, TESTS.parents[1]]))
    # Python searches the working directory before PYTHONPATH.
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def call(copy: Path, *functions: str) -> None:
    """Calls functions of this file in a process where the operators are the formulas."""
    code = "import liger_ops; assert liger_ops._loaded.library is None, liger_ops.__file__\nimport test_reference\n"
    code += "\n".join(f"test_reference.{function}" for function in functions)
    run(copy, code, "-W", "ignore::RuntimeWarning")


WITHOUT_A_LIBRARY = """
import sys, torch, liger_ops
torch.ops.liger.rms_norm(torch.ones(2, 8))
import liger_ops._runtime.loader
from liger_ops.__main__ import main
sys.argv[1:] = ["--json"]
main()
"""


def test_one_warning_lists_the_libraries_tried_and_a_remedy(copy):
    """And the command line reports the formulas."""
    output = run(copy, WITHOUT_A_LIBRARY)
    facts, _ = json.JSONDecoder().raw_decode(output)
    assert facts["library"] is None and set(facts["operators"]) == set(operators())
    assert all(paths == {"cpu": "reference"} for paths in facts["operators"].values())
    (line,) = [line for line in output.splitlines() if "RuntimeWarning" in line]
    minor = liger_ops._runtime.loader.torch_minor()
    for part in (
        f"no operator library fits torch {torch.__version__}",
        f"libliger_ops_torch1.0.so built for torch 1.0, installed is {torch.__version__}",
        f"libliger_ops_torch{minor}.so did not load: ",
        "`python -m liger_ops build`",
    ):
        assert part in line


DISABLED = """
import warnings
warnings.simplefilter("error", RuntimeWarning)
import liger_ops
assert liger_ops._loaded == (None, {"every library": "LIGER_OPS_LIBRARY=0"}), liger_ops._loaded
"""


def test_a_fitting_library_can_be_disabled():
    """Disabling it on purpose does not warn."""
    run(PACKAGE.parent, DISABLED, LIGER_OPS_LIBRARY="0")


def results(function, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """And gradients."""
    found = function(*tensors)
    differentiable, wanted = ([t for t in ts if t.requires_grad] for ts in (found, tensors))
    upstream = [(0.5 + torch.arange(r.numel()) % 64 / 128).view(r.shape).to(r.dtype) for r in differentiable]
    return [t.detach() for t in (*found, *torch.autograd.grad(differentiable, wanted, upstream))]


def calls_of_rows() -> Iterator[Bound]:
    for row, dtype in product(ROWS, (torch.float32, torch.bfloat16)):
        torch.manual_seed(0)
        yield bind(row, dtype=dtype)


def save_results(path: str) -> None:
    torch.save([results(call.op, call.tensors) for call in calls_of_rows()], path)


def test_results_are_those_of_the_formulas(copy, tmp_path):
    """test_properties.py compares the library with them."""
    call(copy, f"save_results({str(tmp_path / 'results')!r})")
    for name, found, bound in zip(
        [name for name in NAMES for _ in range(2)], torch.load(tmp_path / "results"), calls_of_rows(), strict=True
    ):
        for ours, theirs in zip(found, results(bound.formula, bound.tensors), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


def check_transforms() -> None:
    """torch.compile makes one graph of each operator, and vmap does not fall back to a loop."""
    for row in PLAIN:
        torch.manual_seed(0)
        module, inputs = RowModule(row), list(inputs_of(row, 2, 5, requires_grad=True))
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        wanted = [*inputs, *module.parameters()]
        close(*(tuple(results(lambda *_: outputs(f(*inputs)), wanted)) for f in (compiled, module)))
        # Collectives have no batching rule.
        if row.op.endswith("_") or "group" in row.options:
            continue
        # Nor has a gradient that is no derivative of its formula.
        if multiplies_in_fp8(row):
            continue
        examples = [inputs_of(row, 2, 5) for _ in range(3)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = torch.func.vmap(module)(*map(torch.stack, zip(*examples)))
        alone = [outputs(module(*example)) for example in examples]
        close(ours, tuple(map(torch.stack, zip(*alone))))


def check_autocast() -> None:
    ops, target = torch.ops.liger, torch.tensor([0, 2])
    x, weight, logits = torch.randn(2, 8), torch.randn(5, 8), torch.randn(2, 5)
    with torch.autocast("cpu", torch.bfloat16):
        for loss in (
            ops.cross_entropy(logits, target),
            ops.cross_entropy(logits.bfloat16(), target),
            ops.fused_linear_cross_entropy(x, weight, target),
            ops.fused_linear_cross_entropy(x.bfloat16(), weight, target),
        ):
            assert loss.dtype == torch.float32
        assert ops.swiglu_linear(x.bfloat16(), x, weight).dtype == torch.bfloat16
        assert ops.rms_norm(x.bfloat16(), torch.ones(8)).dtype == torch.bfloat16
        ops.fused_add_rms_norm(x.bfloat16(), x)


def check_refusals() -> None:
    ops, x, target = torch.ops.liger, torch.ones(2, 8), torch.zeros(2, dtype=torch.long)
    linear = (x, torch.ones(5, 8), target)
    for op, inputs, options in (
        (ops.rms_norm, (x,), dict(casting_mode="no")),
        (ops.rms_norm, (x,), dict(eps=-1.0)),
        (ops.fused_add_rms_norm, (x, x, None, 1e-6, 0.0, "no"), {}),
        (ops.layer_norm, (x,), dict(eps=math.inf)),
        (ops.geglu, (x, x, "no"), {}),
        (ops.cross_entropy, (x, target), dict(reduction="no")),
        (ops.cross_entropy, (x, target), dict(label_smoothing=2.0)),
        (ops.cross_entropy, (x, target), dict(weight=torch.ones(8, requires_grad=True))),
        (ops.cross_entropy_, (x, target), dict(softcap=0.0)),
        (ops.cross_entropy_with_metrics, (x, target), dict(lse_square_scale=math.inf)),
        (ops.fused_linear_cross_entropy, linear, dict(logits_scale=math.nan)),
        (ops.fused_linear_cross_entropy, linear, dict(memory_budget=0)),
        (ops.fused_linear_cross_entropy_with_log_probs, linear, dict(reduction="no")),
    ):
        name = op.default.name().removeprefix("liger::")
        with pytest.raises(RuntimeError, match=rf"^{name}: \w+ must .* \(got ") as caught:
            op(*inputs, **options)
        assert set(options) <= set(str(caught.value).replace(":", "").split()), caught.value


def check_other_functions() -> None:
    """Launch counts, plans, modules and inference mode work."""
    assert set(liger_ops.launch_counts().values()) == {0}
    liger_ops.reset_launch_counts()
    plan = functional.fused_linear_cross_entropy_plan(16384, 4096, 128256, memory_budget=256 << 20)
    assert 1 < plan.chunks and plan.workspace <= 256 << 20
    with torch.inference_mode():
        logits = torch.zeros(1, 2)
        assert functional.cross_entropy_(logits, torch.tensor([0])).item() == pytest.approx(math.log(2))
        assert logits.tolist() == [[-0.5, 0.5]]
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        functional.cross_entropy_(torch.zeros(1, 2, requires_grad=True), torch.tensor([0]))
    x = torch.randn(3, 8, requires_grad=True)
    model = torch.nn.Sequential(liger_ops.nn.RMSNorm(8), liger_ops.nn.SwiGLUMLP(8, 16), liger_ops.nn.LayerNorm(8))
    liger_ops.nn.CrossEntropyLoss()(model(x), torch.arange(3)).backward()
    assert x.grad.abs().sum() > 0 and all(p.grad is not None for p in model.parameters())


@pytest.mark.thorough
def test_transforms(copy):
    call(copy, "check_transforms()")


def test_autocast_refusals_and_other_functions(copy):
    call(copy, "check_autocast()", "check_refusals()", "check_other_functions()")


def check_a_model() -> None:
    from liger_ops.linear import project
    from liger_ops.transformers import apply_liger_kernel
    from tests.support.models.language_models import make, step, tokens

    project.LARGE = 0
    model, ids = make("llama"), tokens()
    plain = step(model, ids)
    assert not apply_liger_kernel(model).left_alone
    ours = step(model, ids)
    torch.testing.assert_close(ours[0], plain[0])
    for name, gradient in plain[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-3, atol=1e-5)


def check_a_sharded_tensor() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x, w = torch.randn(4, 8), torch.randn(8)
    whole = torch.ops.liger.rms_norm(x, w)
    mesh = init_device_mesh("cpu", (1,))
    ours = torch.ops.liger.rms_norm(distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh))
    assert isinstance(ours, DTensor) and ours.placements == (Shard(0),)
    torch.testing.assert_close(ours.full_tensor(), whole)
    dist.destroy_process_group()


@pytest.mark.thorough
def test_a_model_trains(copy):
    call(copy, "check_a_model()", "check_a_sharded_tensor()")
