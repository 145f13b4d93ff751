#pragma once

// What the files of fused_linear_cross_entropy share: what callers ask for, how it will be done, and the results.

#include <ATen/ATen.h>

#include "ops/losses/cross_entropy.h"

namespace liger::ops::fused_linear_cross_entropy {

using namespace cross_entropy;

/// What the caller asks for beside the loss.
struct Wanted {
  bool metrics = false, log_probs = false, input = false, weight = false, bias = false;

  bool any_gradient() const { return input || weight || bias; }
  int64_t bits() const { return metrics | log_probs << 1 | input << 2 | weight << 3 | bias << 4; }
  static Wanted from_bits(int64_t bits) {
    auto bit = [&](int i) { return bool(bits >> i & 1); };
    return {bit(0), bit(1), bit(2), bit(3), bit(4)};
  }
  const char* op() const {
    return metrics  ? "fused_linear_cross_entropy_with_metrics"
        : log_probs ? "fused_linear_cross_entropy_with_log_probs"
                    : "fused_linear_cross_entropy";
  }
};

struct Settings {
  Options o;
  double logits_scale;
  OptionalTensor token_weight;
  std::optional<int64_t> memory_budget;
};

struct Gradients {
  Tensor input, weight, bias;
};

/// late: what the gradients have yet to be multiplied by, (that of input, those of weight and bias); undefined: 1.
struct Forward {
  Results rows;
  Tensor log_probs, entropy, late;
  Gradients gradients;
};

struct Plan {
  int64_t chunk = 1, chunks = 0;  // tokens a chunk
  int64_t row;  // elements from one row of logits to the next: whole cache lines, which GEMMs want
  int64_t bytes;  // of everything that lives no longer than the call
};

/// Whether d weight is summed apart from the targets' part, see liger_ops/kernels/losses/fused_linear_cross_entropy.py.
bool takes_targets(at::ScalarType dtype, int64_t chunks, const Wanted& wanted);

Plan make_plan(
    const char* op, int64_t tokens, int64_t classes, at::ScalarType dtype, const Wanted& wanted,
    std::optional<int64_t> memory_budget);

Gradients empty_gradients(const Tensor& input, const Tensor& weight, const Tensor& bias, Wanted wanted);

Forward empty_forward(
    const Tensor& input, const Tensor& weight, const Tensor& target, const Tensor& bias, const Settings& s,
    Wanted wanted);

/// A dense tensor as the fewest rows that the scaling kernel's 32-bit columns admit.
Tensor as_long_rows(const Tensor& t);

/// Targets as classes, int32; -1 where there is none.
Tensor classes_of(const Tensor& target, int64_t n, const Options& o);

/// (classes in ascending order, the row that each belongs to), as order_targets of the kernels finds them.
std::tuple<Tensor, Tensor> sort_targets(const Tensor& target, int64_t n, const Options& o);

using ForwardOn = Forward(
    const char* op, const Tensor& input, const Tensor& weight, const Tensor& target, const Tensor& bias,
    const Tensor& ce_weight, const Settings& s, Wanted wanted);
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
