"""The gradients of every operator for each choice of the tensors that require one, which decides what backward computes."""

from itertools import combinations

import torch
from checks import equal, gradients
from rows import bind, check_as_accurate, each_row

from liger_ops._accuracy import noise_of


def choices(wanted: list[int]) -> list[tuple[int, ...]]:
    """All of up to four, else each alone and all but one."""
    sizes = range(1, len(wanted)) if len(wanted) <= 4 else (1, len(wanted) - 1)
    return [kept for size in sizes for kept in combinations(wanted, size)]


@each_row
def test_gradients_do_not_depend_on_which_others_are_wanted(row, device):
    call = bind(row, device)
    slopes = [torch.randn_like(r) if r.is_floating_point() else torch.zeros_like(r) for r in call.op(*call.tensors)]
    wanted = [i for i, t in enumerate(call.tensors) if t.requires_grad]
    whole = gradients(call.op, call.tensors, slopes)
    results, of_all = whole[: len(slopes)], dict(zip(wanted, whole[len(slopes) :], strict=True))
    for kept in choices(wanted):
        tensors = [t.detach().requires_grad_(i in kept) for i, t in enumerate(call.tensors)]
        ours, theirs = gradients(call.op, tensors, slopes), [*results, *(of_all[i] for i in kept)]
        if not equal(ours, theirs):
            check_as_accurate(call, ours, theirs, tensors, slopes, noise_of(row.op, device))
