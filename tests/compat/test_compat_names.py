"""liger_ops.compat: every name of liger_kernel 0.8.5 works as listed, or says why not and what to use."""

import functools
import importlib
import importlib.util
import inspect
import pickle
import re
import zipfile

import pytest
import torch

from liger_ops.compat import missing
from liger_ops.compat.modules import MODULES
from tests.support.checks import ROOT
from tests.support.oracles import from_liger_kernel
from tests.support.oracles.from_liger_kernel import path_of
from tests.support.oracles.liger_kernel_names import LIST, Names, modules_of

pytestmark = pytest.mark.usefixtures("liger_kernel_served")
LINES = [line for line in LIST.read_text().splitlines() if line[0] != "#"]
PATHS = {path_of(line) for line in LINES}


def found(path):
    """The value of a path: modules, a name, and optionally an attribute of that class."""
    modules, name = re.fullmatch(r"((?:[a-z]\w*\.)*)(_?\w+(?:\.\w+)?)", path).groups()
    first, _, attribute = name.partition(".")
    value = getattr(importlib.import_module(f"liger_kernel.{modules}".rstrip(".")), first)
    return getattr(value, attribute) if attribute else value


def parameters_of(path):
    ours = [p.replace(annotation=p.empty) for p in inspect.signature(found(path)).parameters.values()]
    if "apply_liger_kernel_to_" in path:  # drop the extra keywords of apply_liger_kernel
        ours = [p for p in ours if p.kind != p.KEYWORD_ONLY]
    return f"{inspect.Signature([p for p in ours if p.name != 'self'])}"


def test_signatures_match_the_package():
    recorded = {path: f"({rest}" for path, bracket, rest in (line.partition("(") for line in LINES) if bracket}
    assert len(recorded) > 280 and {path: parameters_of(path) for path in recorded} == recorded


def test_every_other_name_says_what_to_use():
    refused = [line for line in LINES if "(" not in line]
    assert len(refused) > 100
    for path in refused:
        stem = path.removeprefix("ops.").rpartition(".")[0]
        if path.startswith("ops.") and path.rpartition(".")[2] in " ".join(missing.RAW.values()).split():
            kernel = found(path)
            assert stem == "" or path.rpartition(".")[2] in missing.RAW[stem].split()
            for use in (kernel, kernel.__getitem__):
                with pytest.raises(NotImplementedError, match=rf"liger_kernel.{path} launches kernels .* Call \w"):
                    use(torch.ones(1))
            continue
        rule = r"liger_kernel\.[\w.]+ has no counterpart .*\. Use .*[\w)]\.$"
        with pytest.raises((ImportError, AttributeError), match=rule) as raised:
            found(path)
        if isinstance(raised.value, ImportError):
            assert f"liger_kernel.{path}".startswith(raised.value.name)


def test_served_names_exist_in_the_package():
    # Models that the package lacks, and names that it defines but does not export from transformers.
    beyond = {f"apply_liger_kernel_to_{name}" for name in ("cohere", "cohere2", "glm")}
    beyond |= {"MODEL_TYPE_TO_APPLY_LIGER_FN", "PEFT_AVAILABLE", "element_mul_kernel", "liger_cross_entropy_kernel"}
    last = {path.rpartition(".")[2] for path in PATHS}
    for module, names in MODULES.items():
        for name in set(names) - beyond:
            assert f"{module}.{name}" in PATHS or (module.startswith("transformers") and name in last), name
            assert found(f"{module}.{name}") is not None
        assert set(importlib.import_module(f"liger_kernel.{module}").__all__) == set(names)


def test_kernels_that_are_not_listed_in_a_module_are_those_it_imports():
    """liger_kernel.ops.fused_linear_jsd has element_mul_kernel from liger_kernel.ops.utils."""
    for stem, names in missing.RAW.items():
        for name in names.split():
            assert f"ops.{stem}.{name}" in PATHS or name in ("element_mul_kernel", "liger_cross_entropy_kernel")
            assert repr(found(f"ops.{stem}.{name}")).startswith(
                f"<liger_kernel.ops.{stem}.{name} of liger_kernel: call "
            )


def test_private_kernels_can_be_imported():
    from liger_kernel.ops.sparsemax import _sparsemax_forward_kernel as kernel

    with pytest.raises(
        NotImplementedError, match=r"sparsemax\._sparsemax_forward_kernel .* Call .*SparsemaxFunction.apply"
    ):
        kernel[(1,)](torch.ones(1))
    with pytest.raises(AttributeError, match="Call .*SparsemaxFunction.apply. It has no fn"):
        kernel.fn  # noqa: B018
    assert not hasattr(kernel, "__wrapped__")
    assert "_sparsemax_forward_kernel" not in dir(importlib.import_module("liger_kernel.ops.sparsemax"))
    with pytest.raises(ImportError, match="no counterpart"):
        from liger_kernel.transformers.sparsemax import _sparsemax_forward_kernel  # noqa: F401


@pytest.mark.parametrize("path", [
    "ops.swiglu.infer_device_arch", "ops.geglu.device_context", "ops.fused_moe.BLOCK_M_TOKEN",
    "ops.utils.amp_custom_fwd", "transformers.jsd.LigerJSDFunction", "transformers.swiglu.LigerFusedMoEFunction",
    "transformers.monkey_patch.LigerRMSNorm", "transformers.monkey_patch.PEFT_AVAILABLE",
    "transformers.grpo_loss._reduce_grpo_loss", "transformers.grpo_loss.LigerFusedLinearPPOBase",
    "chunked_loss.grpo_loss.LigerFusedLinearPPOBase", "chunked_loss.functional.LigerFusedLinearDPOFunction",
])  # fmt: skip
def test_names_that_a_module_imports_from_another(path):
    assert found(path) is not None
    module, _, name = path.rpartition(".")
    assert name not in dir(importlib.import_module(f"liger_kernel.{module}"))


def test_missing_modules():
    for path, words in (
        ("backends", "no registry"), ("backends.dispatch", "no registry"), ("ops.backends._ascend", "other hardware"),
        ("transformers.model.llama", "apply_liger_kernel_to_llama"), ("unheard.of", "does not know the name"),
        ("ops.fused_moe_kernels", "LigerFusedMoEFunction.apply"),
    ):  # fmt: skip
        with pytest.raises(ImportError, match=f"liger_kernel.{path.split('.')[0]}.* has no counterpart .*{words}"):
            importlib.import_module(f"liger_kernel.{path}")
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.util.find_spec("liger_kernel.backends")
    assert raised.value.name == "liger_kernel.backends"
    with pytest.raises(ImportError, match="LigerNothing has no counterpart"):
        from liger_kernel.transformers import LigerNothing  # noqa: F401
    with pytest.raises(ImportError, match="MAX_FUSED_SIZE has no counterpart .* choose the settings of their kernels"):
        from liger_kernel.ops.kl_div import MAX_FUSED_SIZE  # noqa: F401
    with pytest.raises(ImportError, match="_select_block_size has no counterpart .* private"):
        from liger_kernel.ops.vocab_parallel_cross_entropy import _select_block_size  # noqa: F401
    assert not hasattr(importlib.import_module("liger_kernel.ops"), "__nothing__")


def test_names_can_be_probed():
    """As code that supports several releases of the package does."""
    module = importlib.import_module("liger_kernel.transformers")
    assert not hasattr(module, "LigerNothing") and getattr(module, "LigerNothing", 3) == 3
    with pytest.raises(AttributeError, match="transformers.LigerNothing has no counterpart .* Use the operators"):
        module.LigerNothing  # noqa: B018
    for code in ("from liger_kernel.transformers import LigerNothing", "import liger_kernel.transformers.LigerNothing"):
        for _ in range(2):  # the first attempt leaves nothing behind
            with pytest.raises(
                ModuleNotFoundError, match="LigerNothing has no counterpart .* Use the operators"
            ) as raised:
                exec(code)
            direct = "liger_kernel.transformers.LigerNothing"
            assert raised.value.name == (direct if code.startswith("import") else "liger_kernel.transformers")


def test_dir_lists_names_and_modules():
    for module in ("", *MODULES):
        name = f"liger_kernel.{module}".rstrip(".")
        listed = dir(importlib.import_module(name))
        assert set(MODULES.get(module, [])) <= set(listed) and "__name__" in listed
        assert all(getattr(importlib.import_module(name), n) is not None for n in listed if not n.startswith("__"))
    import liger_kernel

    assert {"chunked_loss", "functional", "megatron", "ops", "transformers", "utils"} <= set(dir(liger_kernel))


def test_classes_pickle_by_name():
    for path in ("ops.LigerSoftmaxFunction", "transformers.LigerDyT", "transformers.functional.liger_mhc_pre"):
        assert pickle.loads(pickle.dumps(found(path))) is found(path)


# ---- The page and the list


page = functools.cache(from_liger_kernel.page)


def test_the_page_is_up_to_date():
    """After a change: python -m tests.support.oracles.from_liger_kernel docs/from-liger-kernel.md"""
    assert (ROOT / "docs/from-liger-kernel.md").read_text() == page()
    assert not [line for line in page().splitlines() if len(line) > 120 and line[0] != "|"]


def test_the_page_names_every_name_once():
    for title, served in (
        ("Served by operators", "LigerRMSNormFunction"), ("Served by formulas", "LigerMHC"),
        ("Served otherwise", "infer_device"), ("Importable only", "liger_cross_entropy_kernel"),
        ("Not served", "set_backend"),
    ):  # fmt: skip
        assert f"`{served}`" in page().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    for path in PATHS:
        assert f"`{path.rpartition('.')[2]}`" in page()
    assert "| `LigerGEGLUMLP` | `transformers`, `transformers.geglu` | [`geglu`](operators.md#geglu) |" in page()


PACKAGE = {
    "ops/__init__": "from liger_kernel.ops.norm import LigerNormFunction",
    "ops/norm": """
EPS = 1e-6
class LigerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps: float = EPS, *, mode="a"): ...
def helper(n=2**3): ...
def _private(): ...
""",
    "layers": """
class Root(nn.Module):
    def __init__(self, size, dtype=torch.float16): ...
    def forward(self, x): ...
class Layer(Root): ...
class LossBase:
    def forward(cls, ctx, x): ...
class LossFunction(LossBase): ...
loss = LossFunction.apply
@dataclass
class Output:
    loss: Tensor
    z_loss: Tensor = None
""",
    "ops/backends/chip": "def hidden(): ...",
}


def test_names_are_read_from_a_wheel(tmp_path):
    with zipfile.ZipFile(tmp_path / "p.whl", "w") as wheel:
        for path, source in PACKAGE.items():
            wheel.writestr(f"liger_kernel/{path}.py", source)
    lines = Names(modules_of(tmp_path / "p.whl")).lines()
    assert lines == {
        "ops.LigerNormFunction": ["ops.LigerNormFunction.apply(x, eps=1e-06, *, mode='a')"],
        "ops.norm.LigerNormFunction": ["ops.norm.LigerNormFunction.apply(x, eps=1e-06, *, mode='a')"],
        "ops.norm.helper": ["ops.norm.helper(n=2 ** 3)"],
        "layers.Root": ["layers.Root(size, dtype=torch.float16)", "layers.Root.forward(x)"],
        "layers.Layer": ["layers.Layer(size, dtype=torch.float16)", "layers.Layer.forward(x)"],
        "layers.LossBase": ["layers.LossBase.forward(cls, ctx, x)"],
        "layers.LossFunction": ["layers.LossFunction.apply(ctx, x)"],
        "layers.loss": ["layers.loss(ctx, x)"],
        "layers.Output": ["layers.Output(loss, z_loss=None)"],
    }
