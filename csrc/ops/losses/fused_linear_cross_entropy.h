#pragma once

// Shared by the files of fused_linear_cross_entropy: the caller's request, the plan, and the results.

#include "core/aten.h"
#include "ops/losses/cross_entropy.h"
#include "ops/losses/linear_chunks.h"

namespace liger::ops::fused_linear_cross_entropy {

using namespace cross_entropy;

/// Results that the caller requests besides the loss.
struct Wanted {
  bool metrics = false, log_probs = false, input = false, weight = false, bias = false, low_rank_input = false,
       low_rank_weight = false;

  constexpr bool any_gradient() const { return input || weight || bias || low_rank_input || low_rank_weight; }
  WantedGradients gradients() const { return {input, weight, bias, low_rank_input, low_rank_weight}; }
  int64_t bits() const { return metrics | log_probs << 1 | gradients().bits() << 2; }
  static Wanted from_bits(int64_t bits) {
    const auto g = WantedGradients::from_bits(bits >> 2);
    return {bool(bits & 1), bool(bits & 2), g.input, g.weight, g.bias, g.low_rank_input, g.low_rank_weight};
  }
  constexpr const char* op() const {
    return metrics  ? "fused_linear_cross_entropy_with_metrics"
        : log_probs ? "fused_linear_cross_entropy_with_log_probs"
                    : "fused_linear_cross_entropy";
  }
};

/// sequence_dim: the dimension along which input is split over the ranks of the group. low_rank_*: undefined without.
struct Settings {
  Options o;
  double logits_scale;
  OptionalTensor token_weight;
  std::optional<int64_t> memory_budget, sequence_dim;
  Tensor low_rank_input, low_rank_weight;

  bool is_split() const { return o.vocabulary.is_split(); }
};

/// deferred_scale: factors that backward applies, (of the tokens' gradients, of the head's); undefined: 1.
struct Forward {
  Results rows;
  Tensor log_probs, entropy, deferred_scale;
  Gradients gradients;
};

/// True if the gradients of true logits are kept apart from d logits. One chunk per call does not need that for d
/// weight (see liger_ops/kernels/losses/fused_linear_cross_entropy.py), but if classes are split, a rank's factor may
/// be too small for the true logit's gradient (see exponentials.h).
bool takes_targets(at::ScalarType dtype, int64_t chunks, const Wanted& wanted, bool is_split);

/// classes: the most of any rank, so that all ranks have the same plan.
Plan make_plan(
    const char* op, int64_t tokens, int64_t classes, at::ScalarType dtype, const Wanted& wanted,
    std::optional<int64_t> memory_budget, bool is_split);

Forward empty_forward(
    const Tensor& input, const Tensor& weight, const Tensor& target, const Tensor& bias, const Settings& s,
    Wanted wanted);

/// (classes in ascending order, the row of each), like the kernel order_targets.
std::tuple<Tensor, Tensor> sort_targets(const Tensor& target, const Shard& shard, const Options& o);

/// totals: the divisors of a mean, if they are not those of `target`.
using ForwardOn = Forward(
    const char* op, const Tensor& input, const Tensor& weight, const Tensor& target, const Tensor& bias,
    const Tensor& ce_weight, const Tensor& totals, const Settings& s, Wanted wanted);
/// For reduction="none".
using BackwardOn = Gradients(
    const char* op, const Tensor& grad, const Tensor& input, const Tensor& weight, const Tensor& target,
    const Tensor& bias, const Tensor& ce_weight, const Tensor& stats, const Tensor& totals, const Settings& s,
    Wanted wanted);

struct Cpu {
  static ForwardOn forward;
  static BackwardOn backward;
};
struct Cuda {
  static ForwardOn forward;
  static BackwardOn backward;
};
struct Meta {
  static ForwardOn forward;
  static BackwardOn backward;
};

}  // namespace liger::ops::fused_linear_cross_entropy
