"""Runs a file's cases in a group of gloo processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from support import environment_of_tree


def results_of(script: Path, processes: int, folder: Path, names: list[str]) -> dict[str, str]:
    """The error of each case, or "". One process group runs all cases, because starting it takes most of the time."""
    command = [sys.executable, str(script), str(folder / "store"), str(folder / "results.json")]
    group = []
    for rank in range(processes):
        # transformers reads these variables to distribute a model.
        env = environment_of_tree(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
        group.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env))
    output = [process.communicate(timeout=900)[0] for process in group]
    found = json.loads((folder / "results.json").read_text()) if (folder / "results.json").exists() else {}
    crashed = any(process.returncode for process in group)
    return {name: found.get(name, "\n".join(output) if crashed else "it did not run") for name in names}


def run_cases(cases: dict[str, Callable[..., None]]) -> None:
    """In each process of the group: runs all cases and writes their errors."""
    store, results = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    found: dict[str, str] = {}
    for name, run in cases.items():
        try:
            run(mesh=dist.init_device_mesh("cpu", (world,)))
            mine = ""
        except Exception:
            mine = traceback.format_exc()
        all_ranks: list = [None] * world
        dist.all_gather_object(all_ranks, mine)
        found[name] = "\n".join(f"rank {i}: {text}" for i, text in enumerate(all_ranks) if text)
        if rank == 0:
            Path(results).write_text(json.dumps(found))
    dist.destroy_process_group()
