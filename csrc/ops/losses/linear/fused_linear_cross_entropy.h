#pragma once

// Shared by the files of fused_linear_cross_entropy: the caller's request, the plan, and the results.

#include "core/aten.h"
#include "ops/losses/cross_entropy.h"
#include "ops/losses/linear/gradients.h"
#include "ops/losses/linear/plan.h"

namespace liger::ops::fused_linear_cross_entropy {

using namespace cross_entropy;
using namespace linear;

/// Bits of `wanted` above those of the gradients.
constexpr int64_t kMetrics = 1 << 5, kLogProbs = 1 << 6;

/// What the caller requests besides the loss.
struct Wanted : WantedGradients {
  bool metrics = false, log_probs = false;

  constexpr int64_t bits() const {
    return WantedGradients::bits() | (metrics ? kMetrics : 0) | (log_probs ? kLogProbs : 0);
  }
  static constexpr Wanted from_bits(int64_t bits) {
    return {WantedGradients::from_bits(bits), bool(bits & kMetrics), bool(bits & kLogProbs)};
  }
  constexpr const char* op() const {
    return metrics  ? "fused_linear_cross_entropy_with_metrics"
        : log_probs ? "fused_linear_cross_entropy_with_log_probs"
                    : "fused_linear_cross_entropy";
  }
};

/// A call's checked arguments. op: its name in messages. Tensors that are not given are undefined. sequence_dim: the
/// dimension along which input is split over the ranks of the group.
struct Call {
  const char* op;
  Tensor input, weight, target, bias, ce_weight, token_weight, low_rank_input, low_rank_weight;
  Options o;
  double logits_scale;
  std::optional<int64_t> memory_budget, sequence_dim;

  bool is_split() const { return o.vocabulary.is_split(); }
  HeadTensors trained() const { return {input, weight, bias, low_rank_input, low_rank_weight}; }
};

/// deferred_scale: factors that backward applies, (of the tokens' gradients, of the head's); undefined: 1.
struct Forward {
  Results rows;
  Tensor log_probs, entropy, deferred_scale;
  Gradients gradients;

  auto tie() {
    return std::tuple_cat(
        std::tie(rows.loss, rows.z_loss, rows.accuracy, rows.predicted, log_probs, entropy), gradients.tie(),
        std::tie(rows.stats, rows.totals, deferred_scale));
  }
};

/// True if the gradients of true logits are kept apart from d logits. One chunk per call does not need that for d
/// weight (see liger_ops/kernels/losses/fused_linear_cross_entropy.py), but if classes are split, a rank's factor may
/// be too small for the true logit's gradient (see exponentials.h).
bool takes_targets(at::ScalarType dtype, int64_t chunks, const Wanted& wanted, bool is_split);

/// classes: the most of any rank, so that all ranks have the same plan.
Plan make_plan(
    const char* op, int64_t tokens, int64_t classes, at::ScalarType dtype, const Wanted& wanted,
    std::optional<int64_t> memory_budget, bool is_split);

Forward empty_forward(const Call& call, Wanted wanted);

/// (classes in ascending order, the row of each), like the kernel order_targets.
std::tuple<Tensor, Tensor> sort_targets(const Tensor& target, const Shard& shard, const Options& o);

/// totals: the divisors of a mean, if they are not those of the targets.
using ForwardOn = Forward(const Call& call, const Tensor& totals, Wanted wanted);
/// For reduction="none".
using BackwardOn =
    Gradients(const Call& call, const Tensor& grad, const Tensor& stats, const Tensor& totals, Wanted wanted);

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
