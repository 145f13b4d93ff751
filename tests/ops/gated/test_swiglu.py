"""swiglu and swiglu_packed against the formula in fp64."""

import torch
import torch.nn.functional as F
from gated import GatedTests
from torch import Tensor


class TestSwiglu(GatedTests):
    op, packed, stem = torch.ops.liger.swiglu, torch.ops.liger.swiglu_packed, "swiglu"
    linear = torch.ops.liger.swiglu_linear
    choices = [{}]

    @staticmethod
    def reference(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up
