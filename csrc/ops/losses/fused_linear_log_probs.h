#pragma once

// Shared by the files of fused_linear_log_probs: the caller's request, the plans and the results.

#include <ATen/ATen.h>

#include "ops/losses/linear_chunks.h"
#include "ops/losses/log_probs.h"

namespace liger::ops::fused_linear_log_probs {

using namespace core;

using at::Tensor;
using cross_entropy::ClassSizes;
using cross_entropy::Shard;
using cross_entropy::Vocabulary;
using OptionalTensor = std::optional<Tensor>;

/// sequence_dim: the dimension along which input is split over the ranks of the group.
struct Settings {
  double logits_scale;
  log_probs::Options o;
  bool entropy, entropy_grad, mean_logits, log_sum_sq_probs, is_top1;
  std::optional<int64_t> memory_budget;
  Vocabulary vocabulary;
  std::optional<int64_t> sequence_dim;

  auto tie() {
    return std::tuple_cat(
        std::tie(logits_scale), o.tie(),
        std::tie(entropy, entropy_grad, mean_logits, log_sum_sq_probs, is_top1, memory_budget, sequence_dim),
        vocabulary.tie());
  }
};

/// Results that are not asked for are empty. graph: (..., 3) and (..., K), see log_probs. of_*: products of weight and
/// the gradients of logits, as input has them: backward multiplies each row by its upstream gradient.
struct Forward {
  log_probs::Results rows;
  Tensor of_log_probs, of_entropy;
};

/// Gradients that a call computes.
struct Wanted {
  bool input = false, weight = false, bias = false;

  bool head() const { return weight || bias; }
  bool any() const { return input || head(); }
  int64_t bits() const { return wanted_bits(input, weight, bias); }
  static Wanted from_bits(int64_t bits) {
    return {bool(bits & kWantInput), bool(bits & kWantWeight), bool(bits & kWantBias)};
  }
};

struct Gradients {
  Tensor input, weight, bias;
};

/// The parts of log_probs that differ between devices.
struct Device {
  log_probs::ForwardOn* forward;
  log_probs::BackwardOn* backward;
};

/// Several ids per token make a dimension of their own.
inline bool has_several_ids(const Tensor& input, const Tensor& target) { return target.dim() == input.dim(); }

}  // namespace liger::ops::fused_linear_log_probs
