"""Operators on DTensors compute what they compute on whole tensors, with the collectives that the rules list."""

from pathlib import Path

import pytest
from checks import output_of
from dtensor_cases import CASES
from process_group import results_of


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, str]:
    return results_of(Path(__file__).with_name("dtensor_cases.py"), 4, tmp_path_factory.mktemp("dtensor"), [*CASES])


@pytest.mark.parametrize("case", CASES)
def test_dtensor(case, results):
    assert not results[case], results[case]


@pytest.mark.parametrize("imports", ["liger_ops, torch.distributed.tensor", "torch.distributed.tensor, liger_ops"])
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
