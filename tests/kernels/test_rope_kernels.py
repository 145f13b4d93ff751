"""The rope kernel, in Triton's interpreter on CPU tensors."""

import numpy as np
import pytest
import torch
from checks import output_of
from rotations import reference, reference_freqs_cis

INTERPRETED_MODES = [(0, "plain"), (1, "plain"), (0, "sections"), (1, "sections"), (1, "complex")]
INTERPRETED_SIZES = [
    (32, 32, True),
    (64, 48, True),
    (96, 96, True),
    (320, 320, True),
    (64, 24, False),
    (160, 160, False),
]

INTERPRETED = """
import itertools, sys, types, torch, numpy
package = types.ModuleType("liger_ops"); package.__path__ = ["liger_ops"]; sys.modules["liger_ops"] = package
from liger_ops.kernels import find
torch.manual_seed(0)
B, H, K, S, saved = 2, 5, 2, 3, {{}}
for (D, R, aligned), (interleaved, mode) in itertools.product({sizes}, {modes}):
    variant = find("rope").pick({{"X": "fp32", "W": "fp32", "INTERLEAVED": interleaved}}, R, aligned)
    q, k = torch.randn(B, S, H, D).transpose(1, 2), torch.randn(B, K, S, D)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    cos, sin = torch.randn(3, B, S, R), torch.randn(3, B, S, R)
    first, second, section, flags = R // 2, R // 2, 0, 0
    if mode == "sections":
        first, second, section = R // 8, 3 * R // 8, cos.stride(0)
    if mode == "complex":
        sin, flags = cos, 2
    kept = dict(q=q, k=k, dq=dq.clone(), dk=dk.clone(), cos=cos, sin=sin)
    def run(out_q, out_k, q, k, width, flags, groups):
        strides = [s for t in (out_q, out_k, q, k) for s in t.stride()[:3]]
        variant.kernel.function[(B * S, groups)](
            out_q, out_k, q, k, cos, sin, S, H, K, R // 2, width, first, second, *strides, *cos.stride()[1:3], section,
            flags, INTERLEAVED=interleaved, **variant.config.constexprs)
    out_q, out_k = torch.full_like(q, float("nan")), torch.full_like(k, float("nan"))
    run(out_q, out_k, q, k, D, flags, 2)
    run(dq, dk, dq, dk, R, flags | 1, 1)
    for name, t in dict(**kept, out_q=out_q, out_k=out_k, got_q=dq, got_k=dk).items():
        saved[f"{{D}} {{R}} {{interleaved}} {{mode}} {{name}}"] = t.contiguous().numpy()
numpy.savez("{path}", **saved)
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    path = tmp_path_factory.mktemp("interpreted") / "out.npz"
    output_of(INTERPRETED.format(sizes=INTERPRETED_SIZES, modes=INTERPRETED_MODES, path=path), TRITON_INTERPRET="1")
    return np.load(path)


@pytest.mark.parametrize("interleaved,mode", INTERPRETED_MODES)
@pytest.mark.parametrize("size,rotated,aligned", INTERPRETED_SIZES)
def test_kernel_interpreted(size, rotated, aligned, interleaved, mode, interpreted):
    """Forward with two groups of heads, and the inverse rotation in place."""
    prefix = f"{size} {rotated} {interleaved} {mode} "
    got = {k.removeprefix(prefix): torch.from_numpy(interpreted[k]) for k in interpreted.files if k.startswith(prefix)}
    q, k = (got[name].double().requires_grad_() for name in "qk")
    if mode == "complex":
        outs = reference_freqs_cis(q, k, torch.view_as_complex(got["cos"][0].double().unflatten(-1, (-1, 2))))
    else:
        sections = [rotated // 8, rotated // 4, rotated // 8] if mode == "sections" else None
        cos, sin = (got[name] if sections else got[name][0] for name in ("cos", "sin"))
        outs = reference(q, k, cos, sin, bool(interleaved), sections)
    grads = torch.autograd.grad(outs, [q, k], [got["dq"].double(), got["dk"].double()])
    for name, expected in zip(("out_q", "out_k", "got_q", "got_k"), (*outs, *grads)):
        torch.testing.assert_close(got[name].double(), expected.detach(), rtol=2e-5, atol=2e-5)
