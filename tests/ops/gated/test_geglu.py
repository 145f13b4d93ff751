"""geglu and geglu_packed against the formula in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.oracles.gated import GatedTests


class TestGeglu(GatedTests):
    op, packed, stem = torch.ops.liger.geglu, torch.ops.liger.geglu_packed, "geglu"
    linear = torch.ops.liger.geglu_linear
    choices = [{"approximate": "tanh"}, {"approximate": "none"}]

    @staticmethod
    def reference(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
        return F.gelu(gate, approximate=approximate) * up

    def test_tanh_is_the_default(self, device):
        x = torch.randn(4, 64, device=device)
        assert torch.equal(self.op(x, x), self.op(x, x, "tanh")) and not torch.equal(
            self.op(x, x), self.op(x, x, "none")
        )

    def test_unknown_approximation_is_refused(self):
        x = torch.ones(2, 8)
        for name, arguments in {"geglu": (x, x), "geglu_packed": (x,), "geglu_linear": (x, x, x)}.items():
            with pytest.raises(RuntimeError, match=f"^{name}: approximate must be 'tanh' or 'none' .got 'erf'"):
                getattr(torch.ops.liger, name)(*arguments, approximate="erf")
