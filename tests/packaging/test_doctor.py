"""`python -m liger_ops doctor`: what it finds, and that it finds what is wrong."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import liger_ops
from liger_ops import doctor
from liger_ops.doctor import installation, model, operators
from liger_ops.reference import operators as declared
from liger_ops.reference._calls import KEPT, calls, described_tensors
from tests.support.checks import ROOT, run_python, successful

FEW = ("rms_norm", "cross_entropy_", "lora_linear", "moe_router")


@pytest.fixture
def few(monkeypatch):
    """Only a few operators are checked."""
    monkeypatch.setattr(operators, "public_operators", lambda: [declared()[name] for name in FEW])
    monkeypatch.delenv("LIGER_OPS_LIBRARY", raising=False)


def run(capsys, *arguments):
    status = doctor.main([*arguments, "--device", "cpu"])
    return status, capsys.readouterr().out


def replaced(monkeypatch, name, function):
    """torch.ops.liger.<name> is `function` of its former self."""
    monkeypatch.setattr(torch.ops.liger, name, function(getattr(torch.ops.liger, name)))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("qwen3")
    sizes = dict(hidden_size=1 << 14, intermediate_size=1 << 16, vocab_size=1 << 20, num_hidden_layers=2)
    transformers.Qwen3Config(architectures=["Qwen3ForCausalLM"], **sizes).save_pretrained(folder)
    return folder


# ---- The operators


@pytest.mark.parametrize("name", [operator.__name__ for operator in operators.public_operators()])
def test_every_operator_is_right(name, device):
    found = operators.check(declared()[name], device)
    assert found.right, found.failures
    # Quantised numbers are exact.
    assert found.results and (0 < found.error <= 1 or (name.startswith("quantize") and found.error == 0))
    if liger_ops._loaded.library is not None and device == "cpu":
        assert found.path == "cpu"


@pytest.mark.parametrize("operator", operators.public_operators(), ids=lambda operator: operator.__name__)
def test_the_calls_cover_the_declaration(operator):
    """Every tensor, every choice, every flag and every number."""
    made = list(calls(operator))
    parameters = operator.__signature__.parameters
    given = {name for call in made for name, value in call.arguments.items() if value is not None}
    assert given >= set(described_tensors(operator)) and given >= set(operator.choices)
    for name, values in operator.choices.items():
        default = parameters[name].default
        assert {call.arguments.get(name, default) for call in made} == set(values)
    flags = {n for n, p in parameters.items() if operator.types[n] in (bool, float) and n not in KEPT}
    assert given >= flags
    assert len({call.text for call in made}) == len(made)


def wrong_result(op):
    return lambda *args, **kwargs: op(*args, **kwargs) * 1.01


class Doubled(torch.autograd.Function):
    """The identity, with twice its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def wrong_gradient(op):
    return lambda x, *args, **kwargs: op(Doubled.apply(x), *args, **kwargs)


def wrong_dtype(op):
    return lambda *args, **kwargs: op(*args, **kwargs).float()


def not_a_number(op):
    return lambda *args, **kwargs: op(*args, **kwargs) * torch.nan


def failing(op):
    def call(*args, **kwargs):
        raise RuntimeError("rms_norm: made up\nwith more lines")

    return call


@pytest.mark.parametrize(
    "defect, said",
    [
        (wrong_result, "result (float32): error 0.01, allowed "),
        (wrong_gradient, "gradient of x (float32): error "),
        (wrong_dtype, "result (bfloat16): dtype torch.float32, expected torch.bfloat16"),
        (not_a_number, "result (float32): 4352 elements are NaN or infinite, or should be"),
        (failing, "float32: RuntimeError: rms_norm: made up"),
    ],
)
def test_a_wrong_operator_is_found_and_named(monkeypatch, capsys, few, defect, said):
    replaced(monkeypatch, "rms_norm", lambda op: lambda **given: defect(op)(given.pop("x"), **given))
    status, text = run(capsys)
    assert status == 1 and "rms_norm" in text
    assert [line for line in text.splitlines() if "WRONG" in line and line.startswith("rms_norm ")]
    (problem,) = [line for line in text.splitlines() if line.startswith("Problem ") and "is wrong" in line]
    assert f"rms_norm is wrong on cpu: {said}" in problem and "with more lines" not in text
    assert text.rstrip().splitlines()[-1].startswith("Next step: ") and "LIGER_OPS_LIBRARY=0" in text


def test_a_wrong_index_is_found(monkeypatch):
    def off_by_one(op):
        return lambda **given: tuple(t if t.is_floating_point() else t + 1 for t in op(**given))

    replaced(monkeypatch, "moe_router", off_by_one)
    failures = operators.check(declared()["moe_router"], "cpu").failures
    assert failures[0] == "experts (float32): 68 of 68 elements differ"


# ---- The command


@pytest.mark.library
def test_a_healthy_machine(capsys, few):
    status, text = run(capsys)
    lines = text.splitlines()
    assert status == 0 and lines[-1] == "Everything is right."
    assert f"torch     {torch.__version__}" in lines and f"library   {liger_ops._loaded.library}" in lines
    for name in FEW:
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert line.split()[1:3] == ["cpu", "right,"]


@pytest.mark.library
def test_json(capsys, few, config):
    status, text = run(capsys, str(config), "--json")
    facts = json.loads(text)
    assert status == 0 and facts["problems"] == []
    assert {each["operator"]: (each["right"], each["path"]) for each in facts["checked"]} == dict.fromkeys(
        FEW, (True, "cpu")
    )
    assert facts["library"] == str(liger_ops._loaded.library) and set(facts["operators"]) == set(
        installation.operators()
    )
    assert facts["environment"]["packages"]["transformers"] and facts["model"]["model_type"] == "qwen3"
    assert {row["kind"] for row in facts["model"]["rows"]} >= {"loss", "mlp", "norm"}


def test_progress_stands_on_one_line_of_a_terminal(monkeypatch, capsys, few):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    doctor.main(["--device", "cpu"])
    said = sys.stderr.getvalue()
    assert "\n" not in said and f"cpu: moe_router (4 of {len(FEW)})" in said and said.endswith("\r\033[K")


WITHOUT_LIBRARY = """
import torch
torch.__version__ = "2.99.0"
import warnings
warnings.simplefilter("ignore")
from liger_ops import doctor
from liger_ops.doctor import operators
everything = operators.public_operators()
operators.public_operators = lambda: [o for o in everything if o.__name__ == "rms_norm"]
print("status", doctor.main(["--device", "cpu"]))
"""


@pytest.mark.thorough
def test_without_a_library_the_formulas_are_checked():
    text = successful(run_python(WITHOUT_LIBRARY))
    assert "status 1" in text and "rms_norm  reference  right" in text
    minor = ".".join(torch.__version__.split(".")[:2])
    if liger_ops._loaded.library is not None:
        assert f"built for torch {minor}, installed is 2.99.0" in text
    assert "Problem 1: there is no operator library for this torch" in text
    assert "Next step: Build a library with `python -m liger_ops build`." in text


def without_machine(line):
    """Without numbers, which depend on the machine, and folders."""
    return re.sub(r"\S*/|\d[\d.]*(\+\w+)?", "", line) if not re.match(r"kind|\w+ +Qwen3", line) else line


@pytest.mark.library
def test_the_transcript_of_the_docs_is_what_is_printed(capsys, tmp_path, monkeypatch):
    """Apart from what depends on the machine. A line of dots stands for others."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.delenv("LIGER_OPS_LIBRARY", raising=False)
    transformers.Qwen3Config(architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path / "qwen3")
    status, printed = run(capsys, str(tmp_path / "qwen3/config.json"))
    page = (ROOT / "docs/troubleshooting.md").read_text()
    transcript, _on_an_h100 = re.findall(r"^```text\n(liger-ops .*?)^```$", page, re.MULTILINE | re.DOTALL)
    expected = [
        r".*\n" if line == "..." else re.escape(without_machine(line) + "\n") for line in transcript.splitlines()
    ]
    found = "".join(without_machine(line) + "\n" for line in printed.splitlines())
    assert status == 0 and re.fullmatch("".join(expected), found, re.DOTALL), found


# ---- What is wrong with an installation

DEVICE = {"index": 0, "name": "Some GPU", "capability": 75}


def test_a_gpu_without_kernels():
    facts = {"library": "a", "devices": [DEVICE], "operators": {"rope": {"cuda:0": "none"}, "tvd": {"cuda:0": "aot"}}}
    (found,) = doctor.problems_of_installation(facts, {"nvidia_driver": "570.1", "torch_cuda": "12.8"})
    assert found["problem"] == "cuda:0 (Some GPU, sm_75) has no kernels for rope"
    assert found["next_step"] == "install Triton, or build again with LIGER_OPS_ARCHS=75"


def test_torch_for_cpu_beside_a_gpu(monkeypatch, tmp_path):
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\nGCC version:\n"
    )
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "version")
    surroundings = doctor.environment() | {"torch_cuda": None}
    (found,) = doctor.problems_of_installation({"library": "a", "devices": []}, surroundings)
    assert surroundings["nvidia_driver"] == "570.86.15" and found["next_step"] == "install a CUDA build of torch"


# ---- The model


@pytest.mark.parametrize("given", ["folder", "file"])
def test_a_model_is_built_without_memory(config, given):
    """Its weights would take 70 GB."""
    report, said = model.examine(str(config if given == "folder" else config / "config.json"))
    assert {row.replacement for row in report.rows} >= {"fused_linear_cross_entropy", "swiglu", "rms_norm"}
    assert all(p.is_meta for p in model.build(str(config)).parameters()) and said == []


def test_a_model_of_which_nothing_is_understood(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.CTRLConfig(n_layer=1, architectures=["CTRLLMHeadModel"]).save_pretrained(tmp_path)
    report, said = model.examine(str(tmp_path))
    assert bool(report.replaced) != bool(said)


@pytest.fixture
def no_checks(monkeypatch):
    """The operators must not be checked."""
    monkeypatch.setattr(operators, "check", lambda operator, device: pytest.fail(f"{operator.__name__} is checked"))


@pytest.mark.parametrize("content", ["{}", "not JSON"])
def test_what_is_no_model_is_a_problem(capsys, no_checks, tmp_path, monkeypatch, content):
    """It is said first: checks of the operators take minutes."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path: Path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(content)
    status, text = run(capsys, str(path))
    assert status == 1 and f"{path} has no config that transformers can read: " in text
    assert "Next step: pass a folder with a config.json" in text and "Every operator" not in text


@pytest.mark.parametrize(
    "name", ["{}/model", "{}/config.json", "./model", "../model", "model/", "a/b/c", "config.json"]
)
def test_a_path_that_does_not_exist_does_not_go_to_the_hub(capsys, no_checks, tmp_path, monkeypatch, name):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name: pytest.fail(f"the hub gets {name}"))
    monkeypatch.chdir(tmp_path)
    status, text = run(capsys, name.format(tmp_path))
    assert status == 1 and f"Problem 1: {name.format(tmp_path)} does not exist.\nNext step: pass a folder" in text


def test_names_go_to_the_hub(monkeypatch):
    asked = []

    def from_pretrained(name):
        asked.append(name)
        raise OSError("offline")

    monkeypatch.setattr(pytest.importorskip("transformers").AutoConfig, "from_pretrained", from_pretrained)
    for name in ("gpt2", "meta-llama/Llama-3.2-1B"):
        with pytest.raises(model.CannotExamine, match="offline"):
            model.build(name)
    assert asked == ["gpt2", "meta-llama/Llama-3.2-1B"]


def test_a_model_alone(capsys, no_checks, config):
    status, text = run(capsys, str(config), "--model-only")
    assert (status == 0) == (liger_ops._loaded.library is not None) and "fused_linear_cross_entropy" in text
    assert "Every operator" not in text
    status, text = run(capsys, str(config), "--model-only", "--json")
    assert json.loads(text)["checked"] == [] and json.loads(text)["model"]["rows"]
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "--model-only")


@pytest.mark.parametrize(
    "device, said",
    [
        ("cuda", "--device must be a device of this machine (got cuda: "),
        ("cuda:99", "--device must be a device of this machine (got cuda:99: "),
        ("gpu", "--device must be cpu, cuda or cuda:N (got gpu)"),
        ("meta", "--device must be cpu, cuda or cuda:N (got meta)"),
    ],
)
def test_a_device_that_is_not_there_is_one_sentence(capsys, no_checks, monkeypatch, device, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="2"):
        doctor.main(["--device", device])
    out, err = capsys.readouterr()
    assert out == "" and said in err.splitlines()[-1]


def test_without_transformers(capsys, no_checks, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, text = run(capsys, "anything")
    assert status == 1 and ": transformers is not installed.\nNext step: pip install" in text


def test_no_model_needs_no_transformers(capsys, few, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(capsys)[0] == (liger_ops._loaded.library is None)
