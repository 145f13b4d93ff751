"""Cases that pass and cases that fail, for test_process_group.py."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.support.host.process_group import Cases

CASES = Cases()


@CASES.named("passes")
def passes(mesh: Any) -> None:
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh.get_group())
    assert total == mesh.size()


@CASES.named("raises in one rank", rank=1)
@CASES.named("raises in every rank", rank=None)
def raises(mesh: Any, rank: int | None) -> None:
    if rank in (None, dist.get_rank()):
        raise ValueError(f"no good, said by {dist.get_rank()}")


@CASES.named("leaves the others waiting")
def leaves(mesh: Any) -> None:
    if dist.get_rank() == 0:
        raise ValueError("no good")
    time.sleep(600)


@CASES.named("crashes")
def crashes(mesh: Any) -> None:
    if dist.get_rank() == 1:
        os.write(2, b"last words\n")
        os.abort()


@CASES.named("hangs")
def hangs(mesh: Any) -> None:
    if dist.get_rank() == 1:
        print("before the wait", flush=True)
        time.sleep(600)


@CASES.named("leaves a mark")
def leaves_a_mark(mesh: Any) -> None:
    mesh.mark = os.getpid()


@CASES.named("finds the mark")
def finds_the_mark(mesh: Any) -> None:
    assert mesh.mark == os.getpid()
