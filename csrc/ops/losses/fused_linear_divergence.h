#pragma once

// Shared by the files of fused_linear_divergence: the options, and the rows of one chunk of logits.

#include <ATen/ATen.h>

#include "core/checks.h"
#include "kernels/fused_linear_divergence.h"

namespace liger::ops::fused_linear_divergence {

using namespace core;

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

namespace kinds = kernels::constants::fused_linear_divergence;

enum class Reduction { None, Mean, Sum };

/// How the hidden states of a model become logits.
struct Head {
  double scale;
  std::optional<double> softcap;
};

struct Options {
  double beta, temperature;
  Head student, teacher;
  Reduction reduction;
  std::optional<int64_t> memory_budget;

  bool reduced() const { return reduction != Reduction::None; }
  bool mean() const { return reduction == Reduction::Mean; }
  int32_t kind() const { return beta == 0 ? kinds::FORWARD : beta == 1 ? kinds::REVERSE : kinds::MIXTURE; }
};

/// The rows of one part of a chunk. Logits are products of hidden states and weights, without bias and scale, in the
/// compute type; all rows have unit stride in the last dimension.
struct Rows {
  const char* op;
  const Options& o;
  Tensor student, teacher;  // (rows, V); overwritten
  Tensor s_bias, t_bias;  // (V,), in the compute type; undefined: 0
  Tensor mask;  // (rows,) bool; undefined: all rows count
  Tensor grad;  // (rows,), in the compute type; undefined: 1
  Tensor dlogits;  // (rows, V), receives d / d (scale * (logits + bias)); may be `student`; undefined: not wanted
  Tensor stats;  // (5, rows), see the kernel; undefined: not wanted
  bool known = false;  // `stats` is an input, and only dlogits is wanted
  Tensor divergence, entropy;  // (rows,)
};

void rows_cpu(const Rows& rows);
void rows_cuda(const Rows& rows);

}  // namespace liger::ops::fused_linear_divergence
