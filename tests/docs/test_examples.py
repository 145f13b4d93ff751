"""The programs in examples/ run and print the results that they document."""

import json
import re
import subprocess
import sys

import pytest
import torch

from tests.support.checks import environment_of_tree, successful
from tests.support.host.programs import output_of_program
from tests.support.host.stub_cuda import ROOT

EXAMPLES = ROOT / "examples"


def run_example(file, *options, processes=1):
    return output_of_program(str(EXAMPLES / file), *options, processes=processes)


def losses(text):
    return [float(x) for x in re.findall(r"loss (\S+)", text)]


@pytest.mark.thorough
def test_medusa_learns():
    out = run_example("medusa.py", "--steps", 30).splitlines()
    first, last = (list(map(float, out[i].split("losses")[1].split())) for i in (0, -1))
    assert len(first) == 3 and all(b < a - 0.5 for a, b in zip(first, last))


@pytest.mark.thorough
def test_grpo_learns_from_rewards(tmp_path):
    picture = tmp_path / "grpo.png"
    out = run_example("grpo.py", "--steps", 20, "--out", picture)
    first, last = map(float, re.search(r"reward (\S+) -> (\S+);", out).groups())
    assert first < 0.2 and last > first + 0.3 and picture.stat().st_size > 5_000


@pytest.mark.thorough
def test_distillation_comes_closer_to_the_teacher_than_text_does(tmp_path):
    picture = tmp_path / "distillation.png"
    out = run_example("distillation.py", "--steps", 40, "--out", picture)
    found = {name.strip(): (float(a), float(b)) for name, a, b in re.findall(r"^(.*) KL .* (\S+) -> (\S+)$", out, re.M)}
    whole, top, plain = found["whole teacher"], found["4 likeliest classes"], found["text alone"]
    assert whole[1] < whole[0] / 2 and top[1] < plain[1] - 0.2 and whole[1] < plain[1] - 0.2
    assert picture.stat().st_size > 5_000


@pytest.mark.thorough
def test_lora_with_and_without_the_operators():
    out = run_example("finetune_lora.py", "--steps", 20, "--layers", 2)
    first, last = zip(*((float(a), float(b)) for a, b in re.findall(r"ms/step, loss (\S+) -> ([\d.]+)", out)))
    assert "lora_linear" in out and len(last) == 2 and max(last) < min(first) - 0.1
    # GPUs compute in bf16.
    assert last[0] == pytest.approx(last[1], abs=0.02 if torch.cuda.is_available() else 1e-3)


@pytest.mark.thorough
def test_fsdp_training_equals_training_without_the_operators():
    """By the command in its description, and in forks."""
    command = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    done = subprocess.run(
        [sys.executable, *command, EXAMPLES / "fsdp.py", "--steps", "4"],
        capture_output=True, text=True, env=environment_of_tree(),
    )  # fmt: skip
    ours, plain = successful(done), run_example("fsdp.py", "--steps", 4, "--plain", processes=2)
    assert "fused_linear_cross_entropy" in ours and "liger_ops" not in plain
    assert len(losses(ours)) == 4 and losses(ours) == pytest.approx(losses(plain), abs=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("processes, tp", [(2, 2), (2, 1)])
def test_tensor_parallel_training_does_not_depend_on_the_layout(processes, tp, one_process):
    out = run_example("tensor_parallel.py", "--tp", tp, "--steps", 4, processes=processes)
    assert losses(out) == pytest.approx(one_process, abs=1e-4) and "tokens/s" in out


@pytest.fixture(scope="module")
def one_process():
    found = losses(run_example("tensor_parallel.py", "--tp", 1, "--steps", 4))
    assert len(found) == 4 and found[-1] < found[0] - 1
    return found


@pytest.mark.thorough
def test_trainer_with_accelerate(device):
    processes = 2 if device == "cpu" else torch.cuda.device_count()
    ours, plain = (
        run_example("accelerate_fsdp2.py", "--steps", 4, *option, processes=processes) for option in ([], ["--plain"])
    )
    assert "fused_linear_cross_entropy" in ours and "liger_ops" not in plain and "tokens/s" in ours
    assert ("DistributedType.FSDP" in ours) == (device == "cuda")
    # GPUs compute in bf16.
    assert len(losses(ours)) == 4 and losses(ours) == pytest.approx(
        losses(plain), abs=1e-4 if device == "cpu" else 0.02
    )


def test_examples_document_their_command():
    for path in EXAMPLES.glob("*.py"):
        assert f"examples/{path.name}" in path.read_text().split('"""')[1]


# ---- Benchmarks of whole models


MODELS = (ROOT / "benchmarks/results/models.md").read_text()


def models_of_the_page():
    return re.search(
        r"^(\d+) causal .* transformers (\d+\.\d+)\.\d+, torch .*,\non 20\d\d-.*: (\d+) agree\b", MODELS, re.MULTILINE
    )


def test_pages_quote_the_sweep_over_all_models():
    _, release, agreeing = models_of_the_page().groups()
    quoted = re.findall(
        r"all (\d+)\s+causal\s+language\s+models\s+of\s+transformers\s+([\d.]+\d)", (ROOT / "README.md").read_text()
    )
    assert quoted == [(agreeing, release)]
    assert len(re.findall(r"^\| \S+ \| agrees \|", MODELS, re.MULTILINE)) == int(agreeing)


def rows_of_the_page():
    """What was replaced or left alone, and why, by the type of a model that agrees."""
    rows = re.findall(r"^\| (\S+) \| agrees \| (.*)", MODELS, re.MULTILINE)
    return {model: {*re.findall(r"(\w+: [^|]+?) × \d", row)} for model, row in rows}


def test_the_sweep_knows_every_switch():
    """A page that is older than a switch has no operator of it."""
    from liger_ops.transformers import SWITCHES

    shown = set().union(*rows_of_the_page().values())
    assert {switch for switch in SWITCHES if not any(switch in row for row in shown)} == {"lora"}


@pytest.mark.thorough
def test_the_sweep_over_all_models():
    """Shows what the page shows, if it is of the installed release of transformers. Of models, as few as have every row."""
    import transformers

    found, models = rows_of_the_page(), []
    missing = set().union(*found.values())
    assert len(missing) > 20
    while missing:
        models.append(max(found, key=lambda model: len(found[model] & missing)))
        missing -= found[models[-1]]
    out = output_of_program("benchmarks.all_models", "--types", *models)
    assert f": {len(models)} agree." in out
    # Without the bytes that eager operators move, which may depend on the release of torch.
    row = re.compile(r"^\| (\S+) \| agrees \| [^|]*\|(.*)", re.MULTILINE)
    if transformers.__version__.startswith(models_of_the_page()[2] + "."):
        assert {*row.findall(out)} <= {*row.findall(MODELS)}


@pytest.mark.thorough
def test_whole_training_steps(tmp_path):
    options = "--tiny --device cpu --models llama --steps 1 --providers hf,ours --out".split()
    out = output_of_program("benchmarks.training", *options, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert [r.get("provider") for r in rows] == [None, "hf", "ours"] and not any("error" in r for r in rows)
    assert rows[1]["losses"] == pytest.approx(rows[2]["losses"], abs=1e-4)
    assert (tmp_path / "training.md").read_text() in out and (tmp_path / "training.png").stat().st_size > 5_000


@pytest.mark.thorough
def test_sharded_training_steps(tmp_path):
    options = ["--tiny", "--device", "cpu", "--steps", 1, "--groupings", "norm_and_head,head_alone", "--out", tmp_path]
    out = output_of_program("benchmarks.sharded", *options, processes=2)
    _, *rows = [json.loads(line) for line in (tmp_path / "sharded.jsonl").read_text().splitlines()]
    assert [(r["grouping"], r["provider"], r.get("head_gathers")) for r in rows] == [
        ("norm_and_head", "hf", 2), ("norm_and_head", "ours", 2), ("head_alone", "hf", 2), ("head_alone", "ours", 1),
    ]  # fmt: skip
    # Computed in bf16, with another summation order.
    assert all(r["losses"] == pytest.approx(rows[0]["losses"], rel=2**-8) for r in rows)
    assert (tmp_path / "sharded.md").read_text() in out


@pytest.mark.thorough
def test_post_training_losses(tmp_path):
    options = ["--device", "cpu", "--rounds", 1, "--providers", "torch", "ours", "--out", tmp_path]
    output_of_program("benchmarks.post_training", *options)
    (jsonl,) = tmp_path.glob("*.jsonl")
    _, *rows = [json.loads(line) for line in jsonl.read_text().splitlines()]
    values = {
        provider: {r["name"]: r["loss"] for r in rows if r["provider"] == provider} for provider in ("torch", "ours")
    }
    assert len(values["ours"]) == 7 and not any("error" in r for r in rows)
    assert values["torch"] == pytest.approx({name: values["ours"][name] for name in values["torch"]}, rel=1e-4)
    assert jsonl.with_suffix(".png").stat().st_size > 5_000 and jsonl.with_suffix(".md").exists()
