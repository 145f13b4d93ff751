"""`liger_kernel.functional`. Each operator has one implementation, so `impl`, `mode` and `backend` are ignored."""

from __future__ import annotations

from functools import partial

from .. import functional as F
from . import forms, ops
from .formulas import activations

function = partial(forms.function, __name__)

cross_entropy = function("cross_entropy", ops.cross_entropy)
fused_add_rms_norm = function("fused_add_rms_norm", F.fused_add_rms_norm)
fused_linear_cross_entropy = function("fused_linear_cross_entropy", ops.fused_linear_cross_entropy)
fused_linear_jsd = function("fused_linear_jsd", ops.fused_linear_jsd)
geglu = function("geglu", F.geglu)
jsd = function("jsd", ops.jsd)
kl_div = function("kl_div", ops.kl_div)
layer_norm = function("layer_norm", F.layer_norm)
rms_norm = function("rms_norm", F.rms_norm)
rope = function("rope", ops.rope)
softmax = function("softmax", activations.softmax)
swiglu = function("swiglu", ops.swiglu)
