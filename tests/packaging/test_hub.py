"""`make hub`: the repository for Hugging Face's library `kernels`. Tests marked `kernels` load the one in build/hub."""

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch.utils._pytree import tree_leaves

import liger_ops
from liger_ops._runtime.loader import torch_minor
from liger_ops.aot import declarations, hub
from liger_ops.reference import operators
from tests.support.calls import outputs
from tests.support.checks import ROOT, environment_of_tree, forked_output_of, output_of, successful
from tests.support.host.solo_group import solo_group
from tests.support.models.language_models import make, step, tokens
from tests.support.models.patched_models import assert_same_step
from tests.support.operator_calls import backward, differentiable, public_calls

PACKAGE = ROOT / "liger_ops"
MINOR = torch_minor()
OPERATORS = "liger_ops_0123456789ab"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Without real libraries."""
    folder = tmp_path_factory.mktemp("hub")
    files = [f"lib/lib{OPERATORS}_runtime.so", f"lib/libliger_ops_torch{MINOR}.so", "packs/sm_90.pack"]
    for name in files:
        (folder / "built" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "built" / name).touch()
    hub.write(folder / "repository", PACKAGE, folder / "built", [MINOR], OPERATORS)
    return folder / "repository"


def variants(repository):
    return sorted((repository / "build").iterdir())


def test_variants(repository):
    torch_ = f"torch{MINOR.replace('.', '')}"
    assert [v.name for v in variants(repository)] == [f"{torch_}-{b}-x86_64-linux" for b in ("cpu", "cu126", "cu130")]
    for folder in variants(repository):
        facts = json.loads((folder / "metadata.json").read_text())
        assert {"name", "id", "version", "license", "python-depends", "backend"} <= facts.keys()
        assert facts["id"].isidentifier() and facts["backend"]["type"] == ("cpu" if "-cpu-" in folder.name else "cuda")
        assert {path.name for path in (folder / "lib").iterdir()} == {
            f"lib{OPERATORS}_runtime.so", f"libliger_ops_torch{MINOR}.so"
        }  # fmt: skip
        assert (folder / "packs").exists() == ("-cpu-" not in folder.name)
    assert (repository / "README.md").read_text().startswith("---\n") and (repository / "LICENSE").exists()


@pytest.mark.thorough
def test_nothing_of_the_ordinary_namespace_is_left(repository):
    for folder in variants(repository):
        files = [*folder.rglob("*.py")]
        assert len(files) > 100
        for path in files:
            text = path.read_text()
            assert not re.search(r"ops\.liger\b|\bliger::|[\"']liger[\"']", text), path
            for node in ast.walk(ast.parse(text)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module]
                assert not any(name.split(".")[0] == "liger_ops" for name in names), path


def test_kernels_are_copied_unchanged(repository):
    """Their hashes name the variants in packs."""
    for folder in variants(repository):
        for path in (PACKAGE / "kernels").rglob("*.py"):
            assert (folder / path.relative_to(PACKAGE)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("changed", ["csrc/some.h", "package/some.py"])
def test_the_namespace_changes_with_the_sources(changed, tmp_path):
    for name in ("csrc/some.h", "package/some.py", "package/demo.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one")
    before = hub.namespace(tmp_path / "package", tmp_path / "csrc")
    (tmp_path / "package" / "demo.py").write_text("two")
    assert hub.namespace(tmp_path / "package", tmp_path / "csrc") == before
    (tmp_path / changed).write_text("two")
    assert hub.namespace(tmp_path / "package", tmp_path / "csrc") != before
    assert re.fullmatch("liger_ops_[0-9a-f]{12}", before)


def load(folder):
    """As `kernels` imports a folder."""
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


IMPORT = f"import importlib.util, json, sys, torch\nfrom pathlib import Path\n{inspect.getsource(load)}"
NAMES = "sorted(n.partition('::')[2] for n in torch._C._dispatch_get_all_op_names() if n.startswith({!r}))"


@pytest.mark.thorough
def test_a_copy_registers_its_operators_under_its_own_namespace_alone(repository):
    code = f"""{IMPORT}
module = load(Path({str(variants(repository)[0])!r}))
assert not [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("liger::")]
assert "liger_ops" not in sys.modules and "transformers" not in sys.modules
assert module.functional.relu_squared(torch.tensor([3.0])).item() == 9
assert torch.ops.{OPERATORS}.rms_norm is not None and "RMSNorm" in module.layers.__all__
print(json.dumps({NAMES.format(f"{OPERATORS}::")}))
"""
    assert {*operators()} <= {*json.loads(output_of(code, LIGER_OPS_LIBRARY="0"))}


def test_a_copy_without_a_fitting_library_names_no_command_of_the_package(repository):
    code = f"""{IMPORT}
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    load(Path({str(variants(repository)[0])!r}))
print(*(w.message for w in caught if w.category is RuntimeWarning))
"""
    message = forked_output_of(code, LIGER_OPS_LIBRARY="")
    assert f"libliger_ops_torch{MINOR}.so did not load" in message and "python -m liger_ops" not in message
    assert message.endswith("Load a revision of the repository that serves this torch\n")


# ---- With libraries.


def test_only_one_source_contains_the_namespace():
    """So copies share all other object files."""
    for path in [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")]:
        code = re.sub("//.*", "", path.read_text())
        found = re.findall(r'"liger(?:::|")|TORCH_LIBRARY|LIGER_NAMESPACE', code)
        assert found == (["LIGER_NAMESPACE"] if path.name == "namespace.cpp" else []), path
    assert '"liger' not in declarations.schemas()


def object_files():
    return {path: path.stat().st_mtime_ns for path in (ROOT / "build").glob("*-torch*/CMakeFiles/liger_*/**/*.o")}


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    """The repository that `make hub` writes after `make build`."""
    folder, before = tmp_path_factory.mktemp("linked"), object_files()
    command = [sys.executable, "setup.py", "-q", "hub", "--build-lib", str(folder / "files")]
    env = environment_of_tree(LIGER_OPS_ARCHS="none", LIGER_OPS_TORCH_VERSIONS="")
    successful(subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True))
    compiled = {path.name for path, time in object_files().items() if time != before.get(path)}
    assert compiled <= {"namespace.cpp.o"}, "run `make build` first"
    return folder / "hub"


@pytest.fixture(scope="module")
def copied(linked):
    return load(linked / "build" / hub.variant(MINOR, "cpu"))


@pytest.mark.library
@pytest.mark.thorough
def test_every_operator_of_a_copy_returns_what_the_package_returns(copied):
    (namespace,) = {n.partition("::")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("liger_ops_")}
    assert copied._loaded.library.parent == Path(copied.__file__).parent / "lib"
    solo_group()
    for op, arguments in public_calls().items():
        results = []
        for ours, other, name in ((liger_ops, copied, "liger"), (copied, liger_ops, namespace)):
            ours.reset_launch_counts()
            other.reset_launch_counts()
            given = differentiable(op, arguments, "cpu")
            out = getattr(getattr(torch.ops, name), op)(**given)
            backward(out)
            leaves = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor) and t.is_leaf and t.requires_grad]
            results.append([*outputs(out), *(t.grad for t in leaves)])
            # Each has a runtime of its own, in which its backward counts too.
            assert ours.launch_counts()["cpu"] > 0 and other.launch_counts()["cpu"] == 0, op
        for a, b in zip(*results, strict=True):
            assert a is b is None or torch.equal(a, b), op


@pytest.mark.library
@pytest.mark.thorough
def test_a_process_with_a_copy_alone_has_no_operator_in_the_ordinary_namespace(linked):
    code = f"""{IMPORT}
copied = load(Path({str(linked / "build" / hub.variant(MINOR, "cpu"))!r}))
assert "liger_ops" not in sys.modules
copied.functional.rms_norm(torch.ones(2, 4, requires_grad=True)).sum().backward()
assert copied.launch_counts()["cpu"] > 0
maps = Path("/proc/self/maps").read_text()
assert "libliger_runtime.so" not in maps and "liger_ops/lib" not in maps
print(json.dumps([{NAMES.format("liger::")}, {NAMES.format("liger_ops_")}]))
"""
    ordinary, own = json.loads(output_of(code))
    names = [n.removeprefix("liger::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("liger::")]
    assert not ordinary and own == sorted(names)


@pytest.mark.library
@pytest.mark.thorough
def test_a_model_with_the_layers_of_a_copy_trains_as_before(copied):
    ids = tokens()
    expected, model = step(make("llama"), ids), make("llama")
    layers = {"LlamaRMSNorm": copied.layers.RMSNorm, "LlamaMLP": copied.layers.SwiGLUMLP}
    served = [module for module in model.modules() if type(module).__name__ in layers]
    for module in served:
        module.forward = MethodType(layers[type(module).__name__].forward, module)
    model.loss_function = copied.layers.ForCausalLMLoss().forward
    copied.reset_launch_counts()
    step(model, ids)
    # Those modules and the loss; forward and backward.
    assert len(served) == 7 and copied.launch_counts()["cpu"] >= 2 * 8
    assert_same_step(model, ids, expected)


# ---- The repository in build/hub, in the library `kernels` and in transformers.

HUB = ROOT / "build" / "hub"


@pytest.fixture
def kernel():
    from kernels import get_local_kernel

    assert HUB.exists(), "run `make test-hub`, which makes build/hub"
    module = get_local_kernel(HUB)
    assert Path(module.__file__).parent.parent == HUB / "build"
    return module


LAYERS = {"RMSNorm": "LlamaRMSNorm", "SwiGLUMLP": "LlamaMLP", "rotary_pos_emb": "Func"}


def mapping(device="cpu"):
    from kernels import LocalLayerRepository

    return {name: {device: LocalLayerRepository(HUB, layer_name=name)} for name in LAYERS}


def modules_of(model):
    """The model's modules and the functions that `kernels` made modules of."""
    for module in model.modules():
        yield module
        yield from getattr(module, "_kernel_funcs", {}).values()


@pytest.fixture
def declared():
    """Llama's MLP declares no layer."""
    from kernels import replace_kernel_forward_from_hub
    from transformers.models.llama.modeling_llama import LlamaMLP

    replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")
    yield
    del LlamaMLP.kernel_layer_name, LlamaMLP.kernel_condition


@pytest.mark.kernels
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("by", ["kernels", "transformers"])
def test_a_kernelized_model_trains_as_before(by, compiled, kernel, declared):
    import kernels
    from transformers.integrations import hub_kernels

    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE if compiled else kernels.Mode.TRAINING
    ids = tokens()
    expected, model = step(make("llama"), ids), make("llama")
    with kernels.use_kernel_mapping(mapping(), inherit_mapping=False):
        if by == "kernels":
            kernels.kernelize(model, mode=mode, device="cpu")
        else:
            hub_kernels.kernelize(model, mode=mode)
    model.loss_function = kernel.layers.ForCausalLMLoss().forward
    # A layer that does not fit is silently left alone.
    layers = kernel.layers.__name__
    found = {type(m).__name__ for m in modules_of(model) if getattr(m.forward, "__module__", "") == layers}
    assert found == {*LAYERS.values()}
    kernel.reset_launch_counts()
    torch.compiler.reset()
    run = torch.compile(model, fullgraph=True) if compiled else model
    step(run, ids)
    # Two layers with two norms, one MLP and one rotation each, the last norm and the loss; forward and backward.
    assert kernel.launch_counts()["cpu"] >= 2 * (2 * 4 + 2)
    assert_same_step(run, ids, expected)


@pytest.mark.kernels
def test_every_layer_passes_the_checks_of_the_library(kernel):
    """`kernels` compares the members and the arguments with those of a module that declares the layer."""
    from kernels import LocalLayerRepository
    from kernels.layer.layer import _validate_layer
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling_qwen

    class Loss(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return ForCausalLMLoss(*args, **kwargs)

    signature = inspect.signature(ForCausalLMLoss)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    Loss.forward.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])
    modules = {
        "ForCausalLMLoss": Loss,
        "GeGLUMLP": modeling_llama.LlamaMLP,
        "RMSNorm": modeling_llama.LlamaRMSNorm,
        "RMSNormZeroCentered": modeling_qwen.Qwen3_5MoeRMSNorm,
        "SoftmaxTopKRouter": modeling_qwen.Qwen3_5MoeTopKRouter,
        "SwiGLUMLP": modeling_llama.LlamaMLP,
        "rotary_pos_emb": type(modeling_llama.apply_rotary_pos_emb),
    }
    assert sorted(modules) == kernel.layers.__all__
    for name, module in modules.items():
        repository = LocalLayerRepository(HUB, layer_name=name)
        _validate_layer(check_cls=module, cls=repository.load(), repo=repository)
