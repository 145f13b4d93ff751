"""Bits of the argument `wanted` of private operators."""

# Gradients, as in csrc/core/autograd.h.
WANT_INPUT, WANT_WEIGHT, WANT_BIAS = 1, 2, 4

# Besides, of rms_norm_gated, as in csrc/ops/norms/rms_norm_gated.cpp.
WANT_GATE = 4

# Besides, of delta_gates, as in csrc/ops/gated/delta_gates.cpp.
WANT_STEP = 8

# Gradients of adapters, as in csrc/ops/gemm/lora_linear_forms.h.
LORA_A, LORA_B = 8, 16

# Of fused_linear_cross_entropy: results, and gradients, as in csrc/ops/losses/fused_linear_cross_entropy.h.
CE_METRICS, CE_LOG_PROBS, CE_INPUT, CE_WEIGHT, CE_BIAS = 1, 2, 4, 8, 16
