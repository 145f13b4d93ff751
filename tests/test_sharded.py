"""Patched models train as unpatched ones do under FSDP2 and tensor parallelism."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sharded_cases import CASES
from support import environment_of_tree

PROCESSES = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, str]:
    """The error of each case, or "". One process group runs all cases, because starting it takes most of the time."""
    folder = tmp_path_factory.mktemp("sharded")
    script = Path(__file__).with_name("sharded_cases.py")
    command = [sys.executable, str(script), str(folder / "store"), str(folder / "results.json")]
    group = []
    for rank in range(PROCESSES):
        # transformers reads these variables to distribute a model.
        env = environment_of_tree(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(PROCESSES))
        group.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env))
    output = [process.communicate(timeout=900)[0] for process in group]
    found = json.loads((folder / "results.json").read_text()) if (folder / "results.json").exists() else {}
    crashed = any(process.returncode for process in group)
    return {name: found.get(name, "\n".join(output) if crashed else "it did not run") for name in CASES}


@pytest.mark.parametrize("case", CASES)
def test_sharded(case, results):
    assert not results[case], results[case]
