#pragma once

// Shared by the files of fused_linear_divergence: the options, and the rows of a part of the logits.

#include "core/aten.h"
#include "core/checks.h"
#include "kernels/fused_linear_divergence.h"
#include "core/split.h"
#include "ops/losses/reduction.h"

namespace liger::ops::fused_linear_divergence {

using namespace core;

using at::Tensor;

namespace kinds = kernels::constants::fused_linear_divergence;

/// How a model's products become logits.
struct Scaling {
  double scale;
  std::optional<double> softcap;
};

/// sequence_dim: the dimension along which the inputs are split over the ranks of the group.
struct Options {
  double beta, temperature;
  Scaling student, teacher;
  Reduction reduction;
  std::optional<int64_t> memory_budget;
  core::Vocabulary vocabulary;
  std::optional<int64_t> sequence_dim;

  bool reduced() const { return reduction != Reduction::None; }
  bool mean() const { return reduction == Reduction::Mean; }
  int32_t kind() const { return beta == 0 ? kinds::FORWARD : beta == 1 ? kinds::REVERSE : kinds::MIXTURE; }
  bool is_mixture() const { return kind() == kinds::MIXTURE; }
};

/// What the rows compute. All: everything, of rows that have all classes. If a rank has some of the classes, Scan finds
/// facts about them; from the statistics of all classes follow Values, and Write the gradient. Values writes it too, if
/// dlogits is defined, except in a mixture: there the gradient needs the mean that Values adds up.
enum class Phase { All, Scan, Values, Write };

/// The rows of a part of the logits. Logits are products of hidden states and weights, without bias and scale, in the
/// compute type; all rows have unit stride in the last dimension.
struct Rows {
  const char* op;
  const Options& o;
  Phase phase;
  Tensor student, teacher;  // (rows, V); overwritten
  Tensor s_bias, t_bias;  // (V,), in the compute type; undefined: 0
  Tensor mask;  // (rows,) bool; undefined: all rows count
  Tensor grad;  // (rows,), in the compute type; undefined: 1
  Tensor dlogits;  // (rows, V), receives d / d (scale * (logits + bias)); may be `student`; undefined: not wanted
  Tensor stats;  // (5, rows), see the kernel. An output of All, if defined. The mean of a mixture: an output of Values
  Tensor divergence, entropy;  // (rows,)
  Tensor facts;  // (rows, parts, SHARES), an output of Scan; undefined numbers where the mask is false
  bool keeps = false;  // in a mixture, Values may replace the teacher's logits by what Write needs, and Write follows
};

using RowsOn = void(Rows& rows);

RowsOn rows_cpu, rows_cuda;

}  // namespace liger::ops::fused_linear_divergence
