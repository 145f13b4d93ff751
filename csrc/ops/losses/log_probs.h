#pragma once

// Log-probabilities of ids in rows of logits, and entropies, on CPU and CUDA, below dispatch and autograd.
//
// logits: (..., V) of any strides, index: (...) or (..., K) int64 or int32, all checked by check(). Results are fp32
// (fp64 for fp64 logits).

#include "core/checks.h"
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

/// ResultGradients gradients, contiguous and in the compute type; undefined ones are zero. of_others: instead of
/// log-probabilities, the gradient of minus the log of the sum of exponentials, but 0 in the columns of ids.
struct ResultGradients {
  Tensor log_probs, entropy;
  bool of_others = false;
};

/// Numbers of ids per row.
inline int64_t ids_per_row(const Tensor& logits, const Tensor& index) {
  return index.dim() == logits.dim() ? index.size(-1) : 1;
}

using ForwardOn =
    void(const char* op, Tensor logits, Tensor index, const Options& o, Results& out, const Columns& columns);
/// dlogits may be logits.
using BackwardOn = void(
    const char* op, Tensor& dlogits, const ResultGradients& upstream, Tensor logits, Tensor index, const Tensor& stats,
    const Tensor& chosen, const Options& o, const Columns& columns);

ForwardOn forward_cpu, forward_cuda;
BackwardOn backward_cpu, backward_cuda;

}  // namespace liger::ops::log_probs
