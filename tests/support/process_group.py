"""Runs a file's cases in a group of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from checks import environment_of_tree


def results_of(script: Path, processes: int, folder: Path, names: list[str], device: str = "cpu") -> dict[str, str]:
    """The error of each case, or "". One process group runs all cases, because starting it takes most of the time."""
    command = [sys.executable, str(script), str(folder), device]
    (folder / "cases.json").write_text(json.dumps(names))
    group = []
    for rank in range(processes):
        # transformers reads these variables to distribute a model.
        env = environment_of_tree(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
        # Files, because a process that fills a pipe would wait for a reader, and all others for it.
        log = (folder / f"{rank}.log").open("w")
        group.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env))
    try:
        for process in group:
            process.wait(timeout=600)
    finally:
        for process in group:
            process.kill()
    output = [(folder / f"{rank}.log").read_text() for rank in range(processes)]
    found = json.loads((folder / "results.json").read_text()) if (folder / "results.json").exists() else {}
    crashed = any(process.returncode for process in group)
    return {name: found.get(name, "\n".join(output) if crashed else "it did not run") for name in names}


SOLO = "solo"


@cache
def group_of_one() -> dist.ProcessGroup:
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    kinds = dist.ProcessGroup.BackendType
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, dist.ProcessGroupGloo(store, 0, 1))
    if torch.cuda.is_available():
        group._register_backend(torch.device("cuda"), kinds.NCCL, dist.ProcessGroupNCCL(store, 0, 1))
    group._set_group_name(SOLO)
    return group


def solo_group() -> str:
    """The name of a group of this process alone. It leaves the default group to the tests."""
    try:
        torch._C._distributed_c10d._resolve_process_group(SOLO)
    except RuntimeError:  # new, or another test has destroyed all groups
        torch._C._distributed_c10d._register_process_group(SOLO, group_of_one())
    return SOLO


def run_cases(cases: dict[str, Callable[..., None]]) -> None:
    """In each process of the group: runs the cases that were asked for and writes their errors."""
    folder, device = Path(sys.argv[1]), sys.argv[2]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    reports = dist.new_group(backend="gloo")
    # One object: torch.compile fails if DTensor's caches hold an equal mesh of an earlier case.
    mesh = dist.init_device_mesh(device, (world,))
    found: dict[str, str] = {}
    for name in json.loads((folder / "cases.json").read_text()):
        try:
            cases[name](mesh=mesh)
            mine = ""
        except Exception:
            mine = traceback.format_exc()
        all_ranks: list = [None] * world
        dist.all_gather_object(all_ranks, mine, group=reports)
        found[name] = "\n".join(f"rank {i}: {text}" for i, text in enumerate(all_ranks) if text)
        if rank == 0:
            (folder / "results.json").write_text(json.dumps(found))
    dist.destroy_process_group()
