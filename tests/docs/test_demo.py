"""`python -m liger_ops.demo`: two short training runs, a table and a plot."""

import argparse
import subprocess
import sys

import pytest
import torch

from liger_ops import demo
from tests.support.checks import environment_of_tree, served_by


def run_demo(*arguments):
    command = [sys.executable, "-m", "liger_ops.demo", "--device", "cpu", "--model-size", "tiny", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment_of_tree())


@pytest.mark.thorough
def test_output_ends_with_a_table_and_a_plot(tmp_path):
    picture = tmp_path / "demo.png"
    done = run_demo("--out", picture)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = {name: next(line for line in lines if line.startswith(name)) for name in demo.NAMES.values()}
    assert rows["transformers"].endswith("none") and rows["with liger_ops"].endswith(" cpu")
    difference = float(next(line for line in lines if line.startswith("largest difference")).split(": ")[1])
    assert difference < 1e-3
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    assert lines[-1] == f"picture: {picture}" and "step 8" in done.stderr


def test_a_failing_run_ends_the_demo(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    arguments = argparse.Namespace(device="cpu", model_size="tiny", compile=False)
    with pytest.raises(SystemExit, match="the run transformers ended with exit code 1"):
        demo.run_in_turns(8, arguments)


def test_training_text_comes_from_the_package():
    text = demo.text()
    assert b"It learns byte by byte" in text and b"torch.ops.liger" in text and len(text) > 100_000
    size = demo.SIZES["tiny"]
    first, second = (demo.batches(text, size, "cpu") for _ in range(2))
    assert len(first) == size.steps and all(torch.equal(a, b) for a, b in zip(first, second))
    assert first[0].shape == (size.batch, size.length) and int(first[0].max()) < 256


def test_progress_in_a_log_is_ten_lines(capsys):
    for i in range(1, 61):
        demo.progress(i, 60, f"step {i}")
    assert len(capsys.readouterr().err.splitlines()) == 10


@pytest.mark.gpu
def test_on_a_gpu_under_compile(tmp_path):
    done = run_demo("--device", "cuda", "--compile", "--out", tmp_path / "demo.png")
    assert done.returncode == 0 and f" {served_by('cuda')}" in done.stdout, done.stdout + done.stderr
