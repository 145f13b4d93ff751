"""Operators on DTensors compute what they compute on whole tensors, with the collectives that the rules list."""

import dtensor_cases
import dtensor_expert_cases
import dtensor_loss_cases
import pytest

from tests.support.checks import output_of
from tests.support.host.process_group import run_case


@pytest.mark.parametrize("case", dtensor_cases.CASES.parameters())
def test_operators(case):
    run_case(case, dtensor_cases, 4)


@pytest.mark.parametrize("case", dtensor_loss_cases.CASES.parameters())
def test_losses(case):
    run_case(case, dtensor_loss_cases, 4)


@pytest.mark.parametrize("case", dtensor_expert_cases.CASES.parameters())
def test_experts(case):
    run_case(case, dtensor_expert_cases, 4)


@pytest.mark.parametrize(
    "imports",
    [
        "liger_ops, torch.distributed.tensor",
        pytest.param("torch.distributed.tensor, liger_ops", marks=pytest.mark.thorough),
    ],
)
def test_rules_are_registered_in_either_order_of_imports(imports):
    code = f"""
import {imports}
import torch
from torch.distributed.tensor import Shard, distribute_tensor
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
mesh = torch.distributed.init_device_mesh("cpu", (1,))
print(torch.ops.liger.rms_norm(distribute_tensor(torch.ones(2, 8), mesh, [Shard(0)])).placements)
"""
    assert output_of(code) == "(Shard(dim=0),)\n"


def test_importing_loads_no_dtensor():
    loaded = output_of("import sys, liger_ops; print('torch.distributed.tensor' in sys.modules)")
    assert loaded == "False\n"
