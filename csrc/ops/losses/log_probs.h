#pragma once

// Log-probabilities of ids in rows of logits, and entropies, on CPU and CUDA, below dispatch and autograd.
//
// logits: (..., V) of any strides, index: (...) or (..., K) int64 or int32, all checked by check(). Results are fp32 (fp64
// for fp64 logits).

#include "core/checks.h"
#include "core/rows.h"
#include "kernels/log_probs.h"

namespace liger::ops::log_probs {

using namespace core;

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct Options {
  double temperature;
  int64_t ignore_index;
  std::optional<double> softcap;

  auto tie() { return std::tie(temperature, ignore_index, softcap); }
};

/// entropy: (..., 0) if it is not wanted. stats: (..., 3), chosen: like log_probs; see the kernels. They are undefined if
/// there is no graph.
struct Results {
  Tensor log_probs, entropy, stats, chosen;
};

/// Upstream gradients, contiguous and in the compute type; undefined ones are zero.
struct Upstream {
  Tensor log_probs, entropy;
};

/// Numbers of ids per row.
inline int64_t ids_per_row(const Tensor& logits, const Tensor& index) {
  return index.dim() == logits.dim() ? index.size(-1) : 1;
}

void forward_cpu(const char* op, Tensor logits, Tensor index, const Options& o, bool entropy, Results& out);
void forward_cuda(const char* op, Tensor logits, Tensor index, const Options& o, bool entropy, Results& out);

/// dlogits may be logits.
void backward_cpu(
    const char* op, Tensor& dlogits, const Upstream& upstream, Tensor logits, Tensor index, const Tensor& stats,
    const Tensor& chosen, const Options& o);
void backward_cuda(
    const char* op, Tensor& dlogits, const Upstream& upstream, Tensor logits, Tensor index, const Tensor& stats,
    const Tensor& chosen, const Options& o);

}  // namespace liger::ops::log_probs
