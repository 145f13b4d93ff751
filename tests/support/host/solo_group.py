"""A group of this process alone. Needs no pytest: wheels are checked without it."""

from functools import cache

import torch
import torch.distributed as dist

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
