#pragma once

// Log-probabilities of ids in rows of logits, and entropies, on CPU and CUDA, below dispatch and autograd.
//
// logits: (..., V) of any strides, index: (...) or (..., K) int64 or int32, all checked by check(). Results are fp32
// (fp64 for fp64 logits).

#include "core/checks.h"
#include "core/cuda/launch.h"
#include "core/rows/rows.h"
#include "kernels/log_probs.h"

namespace liger::ops::log_probs {

using namespace core;

using at::Tensor;

struct Options {
  double temperature;
  int64_t ignore_index;
  std::optional<double> softcap;
};

/// Which of all classes the columns of logits are. classes: 0 if they are all. ids: the name of index in messages.
struct Columns {
  int64_t first = 0, classes = 0;
  const char* ids = "index";

  int64_t classes_of(const Tensor& logits) const { return classes ? classes : logits.size(-1); }
};

/// All contiguous. Results that are not wanted are undefined. stats: (..., 3), chosen: like log_probs; see the kernels.
struct Results {
  Tensor log_probs, entropy, stats, chosen;
  Tensor mean_logits, log_sum_sq_probs, is_top1;

  bool has_extras() const { return mean_logits.defined() || log_sum_sq_probs.defined() || is_top1.defined(); }
};

/// Of the kernels that write results.
inline int32_t flags_of(const Results& out) {
  namespace flags = kernels::constants::log_probs;
  auto flag = [](const Tensor& t, int32_t bit) { return t.defined() ? bit : 0; };
  return flag(out.entropy, flags::WITH_ENTROPY) | flag(out.stats, flags::WITH_GRAPH) |
      flag(out.mean_logits, flags::WITH_MEAN_LOGITS) | flag(out.log_sum_sq_probs, flags::WITH_SQUARES) |
      flag(out.is_top1, flags::WITH_TOP1);
}

/// Sets the arguments that kernels share. index: contiguous.
template <class Args>
void pass_options(Args& args, const Tensor& index, const Options& o, const Columns& columns, int64_t classes) {
  args.index = address(index);
  args.first_class = int32_t(columns.first);
  args.classes = int32_t(classes);
  args.index_words = index.scalar_type() == at::kLong ? 2 : 1;
  args.ignore_index = o.ignore_index;
  args.factor = float(1.4426950408889634 / o.temperature);
  args.inverse = float(1 / o.temperature);
  args.softcap = float(o.softcap.value_or(1));
}

template <class Args>
void pass_results(Args& args, const Results& out) {
  args.log_probs = address(out.log_probs);
  args.entropy = address(out.entropy);
  args.stats = address(out.stats);
  args.chosen = address(out.chosen);
  args.mean_logits = address(out.mean_logits);
  args.log_squares = address(out.log_sum_sq_probs);
  args.is_top1 = address(out.is_top1);
  args.flags = flags_of(out);
}

/// Upstream gradients, contiguous and in the compute type; undefined ones are zero. of_others: instead of these, the
/// gradient of minus the log of the sum of exponentials, but 0 in the columns of ids.
struct ResultGradients {
  Tensor log_probs, entropy, log_sum_exp;
  bool of_others = false;
};

/// Sets the arguments of kernels that write gradients.
template <class Args>
void pass_gradients(Args& args, const ResultGradients& upstream, const Tensor& stats, const Tensor& chosen) {
  namespace flags = kernels::constants::log_probs;
  args.stats = address(stats);
  args.chosen = address(chosen);
  args.grad = address(upstream.log_probs);
  args.grad_entropy = address(upstream.entropy);
  args.grad_log_sum_exp = address(upstream.log_sum_exp);
  args.flags = (upstream.log_probs.defined() ? flags::OF_LOG_PROBS : 0) |
      (upstream.entropy.defined() ? flags::OF_ENTROPY : 0) |
      (upstream.log_sum_exp.defined() ? flags::OF_LOG_SUM_EXP : 0) | (upstream.of_others ? flags::OF_OTHERS : 0);
}

/// Numbers of ids per row.
inline int64_t ids_per_row(const Tensor& logits, const Tensor& index) {
  return index.dim() == logits.dim() ? index.size(-1) : 1;
}

using ForwardOn =
    void(const char* op, Tensor logits, Tensor index, const Options& o, Results& out, const Columns& columns);
/// dlogits may be logits, or of a narrower dtype than these.
using BackwardOn = void(
    const char* op, Tensor& dlogits, const ResultGradients& upstream, Tensor logits, Tensor index, const Tensor& stats,
    const Tensor& chosen, const Options& o, const Columns& columns);

ForwardOn forward_cpu, forward_cuda;
BackwardOn backward_cpu, backward_cuda;

}  // namespace liger::ops::log_probs
