"""Runs cases in groups of processes. A case is a function of the group's mesh that raises if it fails."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import select
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.host.fork_server import Fork

# What cases import, loaded once in the server.
IMPORTS = (
    "tests.support.checks", "tests.support.models.language_models", "torch.distributed.tensor.parallel", "torch.distributed.fsdp",
    "torch.distributed.pipelining", "torch._inductor.compile_fx", "liger_ops.transformers", "liger_ops.distributed",
    "transformers.models.gemma3.modeling_gemma3", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.qwen3_moe.modeling_qwen3_moe",
)  # fmt: skip
# Seconds for a case, and for the other ranks once one has failed: they may wait for it.
LIMIT, GRACE = 300.0, 20.0


class Cases(dict[str, Callable[..., None]]):
    """The cases of a module, by name. prepare: is called in each process ahead of the first case."""

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        self.prepare, self.thorough = prepare, set[str]()

    def add(self, name: str, function: Callable, /, *arguments: Any, thorough: bool = False, **options: Any) -> None:
        assert name not in self
        self[name] = partial(function, *arguments, **options)
        if thorough:
            self.thorough.add(name)

    def named(self, name: str, /, **options: Any) -> Callable:
        """A decorator that adds the function."""

        def add(function: Callable) -> Callable:
            self.add(name, function, **options)
            return function

        return add

    def parameters(self, names: Iterable[str] | None = None) -> list[Any]:
        """For pytest.mark.parametrize."""
        marks = {True: (pytest.mark.thorough,), False: ()}
        return [pytest.param(name, marks=marks[name in self.thorough]) for name in (self if names is None else names)]


def run_case(case: str, cases: ModuleType, processes: int, device: str = "cpu", alone: bool = False) -> None:
    """Fails if a case of cases.CASES fails in a process. Consecutive cases of a module share their processes.
    alone: in new processes, which run no other case."""
    if error := error_of(case, cases, processes, device, alone):
        pytest.fail(error, pytrace=False)


def error_of(
    case: str, cases: ModuleType, processes: int, device: str = "cpu", alone: bool = False, limit: float = LIMIT
) -> str:
    """The errors of all ranks, or ""."""
    key = processes, device
    if key in groups and (alone or groups[key].cases is not cases):
        groups.pop(key).close()
    if key not in groups:
        groups[key] = Group(cases, processes, device)
    found = groups[key].errors(case, limit)
    # Ranks may have got out of step.
    if found or alone:
        groups.pop(key).close()
    return found


class Group:
    def __init__(self, cases: ModuleType, processes: int, device: str) -> None:
        self.cases, self.folder = cases, tempfile.TemporaryDirectory()
        code = f"from tests.support.host import process_group\nprocess_group.answer(channel, {cases.__file__!r}, {self.folder.name!r}, {device!r})"
        self.logs = [Path(self.folder.name, f"{rank}.log") for rank in range(processes)]
        self.ranks = []
        for rank, path in enumerate(self.logs):
            # transformers reads these variables to distribute a model.
            env = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
            if device == "cpu":
                env["CUDA_VISIBLE_DEVICES"] = ""  # transformers would give each rank a GPU
            with path.open("w") as log:
                self.ranks.append(Fork(code, log, log, IMPORTS, **env))

    def errors(self, case: str, limit: float) -> str:
        logged = [path.stat().st_size for path in self.logs]
        for rank in self.ranks:
            rank.send([case, limit])
        waiting, found = dict(enumerate(self.ranks)), {}
        deadline = time.monotonic() + limit
        while waiting and (
            ready := select.select([*waiting.values()], [], [], max(0.0, deadline - time.monotonic()))[0]
        ):
            for i in [i for i, rank in waiting.items() if rank in ready]:
                rank = waiting.pop(i)
                answer = rank.receive(deadline)
                found[i] = f"ended with exit code {rank.returncode}" if answer is None else answer
                if found[i]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        found |= dict.fromkeys(waiting, "did not finish")
        texts = []
        for i, text in sorted(found.items()):
            if text:
                log = self.logs[i].read_bytes()[logged[i] :].decode(errors="replace")
                texts.append(f"rank {i}: {text}\n{log}")
        return "\n".join(texts)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.folder.cleanup()


groups: dict[tuple[int, str], Group] = {}


@atexit.register
def close_all() -> None:
    while groups:
        groups.popitem()[1].close()


def answer(channel: Any, file: str, folder: str, device: str) -> None:
    """In each process of a group: runs the cases that are asked for."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    # One object: torch.compile fails if DTensor's caches hold an equal mesh of an earlier case.
    mesh = dist.init_device_mesh(device, (world,))
    sys.path.insert(0, str(Path(file).parent))
    cases = importlib.import_module(Path(file).stem).CASES
    cases.prepare()
    for line in channel:
        name, limit = json.loads(line)
        # Shows where a rank waits forever.
        faulthandler.dump_traceback_later(0.9 * limit)
        torch.manual_seed(int(os.environ.get("LIGER_OPS_TEST_SEED", "0")))
        try:
            cases[name](mesh=mesh)
            error = ""
        except Exception:
            error = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        channel.write(json.dumps(error) + "\n")
        channel.flush()
