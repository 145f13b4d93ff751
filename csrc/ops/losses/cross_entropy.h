#pragma once

// Cross entropy of rows of logits on CPU and CUDA, below dispatch and autograd. Shared by the ops that compute it.
//
// logits: (..., V) of any strides, target: (...) int64 or int32, weight: (V,), all checked by check(). Losses and
// statistics are fp32 (fp64 for fp64 logits). A mean divides by the sum of the targets' weights. Its z-loss has no
// weights and is divided by the number of targets. Both divisors stay on the device.
//
// The classes may be split over the ranks of a process group (core/split.h). Each rank then writes facts about its own
// columns of a row; from the facts of all ranks, each computes the same losses and statistics.

#include <algorithm>

#include "core/aten.h"
#include "core/checks.h"
#include "core/cuda/launch.h"
#include "core/private.h"
#include "kernels/cross_entropy.h"
#include "kernels/cross_entropy_results.h"
#include "core/rows/rows_in_order.h"
#include "core/split.h"
#include "ops/losses/reduction.h"

namespace liger::ops::cross_entropy {

using namespace core;

using at::Tensor;

namespace flags = kernels::constants::cross_entropy;

/// The options that follow the tensors in every schema.
struct Options {
  Reduction reduction;
  int64_t ignore_index;
  double label_smoothing, lse_square_scale;
  std::optional<double> softcap;
  Vocabulary vocabulary;

  bool mean() const { return reduction == Reduction::Mean; }
  bool reduced() const { return reduction != Reduction::None; }
  int32_t flags(const Tensor& weight) const {
    return (weight.defined() ? flags::HAS_WEIGHT : 0) | (label_smoothing > 0 ? flags::HAS_SMOOTHING : 0) |
        (softcap ? flags::HAS_SOFTCAP : 0) | (mean() ? flags::MEAN : 0);
  }
};

/// Undefined tensors were not requested. stats: (3, rows), totals: (2,), see the kernels.
struct Results {
  Tensor loss, z_loss, accuracy, predicted, stats, totals;
};

struct Wanted {
  bool metrics = false, stats = false;
};

inline Options parse(
    const char* op, c10::string_view reduction, int64_t ignore_index, double label_smoothing, double lse_square_scale,
    std::optional<double> softcap, c10::string_view group = "", int64_t classes = 0, ClassSizes sizes = {}) {
  const auto kind = parse_reduction(op, reduction);
  LIGER_CHECK(
      label_smoothing >= 0 && label_smoothing <= 1, op, "label_smoothing", "be between 0 and 1", label_smoothing);
  check_finite(op, "lse_square_scale", lse_square_scale);
  check_positive(op, "softcap", softcap);
  return {kind, ignore_index, label_smoothing, lse_square_scale, softcap, parse_vocabulary(op, group, classes, sizes)};
}

template <class... O>
Options check(
    const char* op, const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const O&... options) {
  check_rows(op, "logits", logits);
  check_integers(op, "target", target);
  check_same_device(op, "target", target, "logits", logits);
  Options parsed = parse(op, options...);
  auto row_sizes = logits.sym_sizes().slice(0, logits.dim() - 1);
  LIGER_CHECK(
      target.sym_sizes().equals(row_sizes), op, "target",
      c10::str("have shape ", row_sizes, ", that of logits without its last dimension"), target.sym_sizes());
  if (weight && weight->defined()) {
    check_dense(op, "weight", *weight);
    check_same_device(op, "weight", *weight, "logits", logits);
    check_parameter_dtype(op, "weight", *weight, "logits", logits);
    const auto& v = parsed.vocabulary;
    auto classes = v.is_split() ? c10::SymInt(v.classes) : logits.sym_sizes().back();
    LIGER_CHECK(
        weight->dim() == 1 && weight->sym_size(0) == classes, op, "weight",
        c10::str("have shape [", classes, "], one value per class"), weight->sym_sizes());
  }
  return parsed;
}

/// The incoming gradient of each row's loss, contiguous, or of all rows.
inline Upstream upstream_of(const char* op, const Tensor& grad, const Tensor& logits, bool reduced) {
  const auto sizes = reduced ? at::IntArrayRef() : logits.sizes().slice(0, logits.dim() - 1);
  Upstream out(op, grad, sizes, "logits", logits);
  out.values = out.values.contiguous();
  return out;
}

inline Results empty_results(const Tensor& logits, const Tensor& target, const Options& o, Wanted wanted) {
  auto options = logits.options().dtype(compute_type(logits));
  auto sizes = o.reduced() ? c10::SymIntArrayRef() : target.sym_sizes();
  Results out;
  out.loss = at::empty_symint(sizes, options);
  if (wanted.metrics) {
    out.z_loss = at::empty_symint(sizes, options);
    out.accuracy = at::empty_symint(sizes, options);
    out.predicted = at::empty_symint(target.sym_sizes(), logits.options().dtype(at::kLong));
  }
  if (wanted.stats) out.stats = at::empty_symint({3, target.sym_numel()}, options);
  if (wanted.stats && o.mean()) out.totals = at::empty_symint({2}, options);
  return out;
}

/// What a rank knows about its columns of each row, as (count, rows). See store_facts in
/// liger_ops/kernels/losses/_rows.py. The entropy of its own classes comes last.
struct Facts {
  bool smoothing = false, metrics = false, entropy = false;
  Tensor values;

  Facts(const Options& o, bool with_metrics, bool with_entropy)
      : smoothing(o.label_smoothing > 0), metrics(with_metrics), entropy(with_entropy) {}

  int64_t count() const { return 3 + smoothing + 2 * metrics + entropy; }
  char* at(int64_t fact) const { return static_cast<char*>(values.select(0, fact).mutable_data_ptr()); }

  void allocate(int64_t rows, const at::TensorOptions& options) { values = at::empty({count(), rows}, options); }

  /// Of a rank that has no classes.
  void fill_empty() {
    values.zero_();
    values.select(0, 0).fill_(std::numeric_limits<float>::lowest());
    values.select(0, 2).fill_(-std::numeric_limits<float>::infinity());
    if (metrics) values.select(0, 3 + smoothing).fill_(std::numeric_limits<float>::lowest());
  }
};

/// Addresses for the results of rows; null if not requested. facts: written instead of losses and metrics.
struct RowsOut {
  char *loss = nullptr, *z_loss = nullptr, *accuracy = nullptr, *stats = nullptr;
  int64_t* predicted = nullptr;
  const Facts* facts = nullptr;

  /// Addresses for the rows from `row` on, without statistics.
  RowsOut from(int64_t row, size_t element) const {
    RowsOut out = *this;
    const int64_t bytes = row * int64_t(element);
    for (char** at : {&out.loss, &out.z_loss, &out.accuracy}) *at += *at ? bytes : 0;
    out.stats = nullptr;
    if (predicted) out.predicted += row;
    return out;
  }
};

/// Memory for the losses, z-losses and accuracies of rows: the results if those are not reduced, else scratch memory.
struct RowBuffers {
  Tensor scratch;
  RowsOut out;

  RowBuffers(const Results& results, int64_t rows, const Options& o, Wanted wanted) {
    auto at = [](const Tensor& t) { return t.defined() ? static_cast<char*>(t.mutable_data_ptr()) : nullptr; };
    out = {at(results.loss), at(results.z_loss), at(results.accuracy), at(results.stats)};
    out.predicted = reinterpret_cast<int64_t*>(at(results.predicted));
    if (!o.reduced()) return;
    const bool z_rows = wanted.metrics || o.lse_square_scale != 0;
    scratch = at::empty({1 + z_rows + wanted.metrics, rows}, results.loss.options());
    const int64_t bytes = rows * int64_t(scratch.element_size());
    out.loss = at(scratch);
    out.z_loss = z_rows ? out.loss + bytes : nullptr;
    out.accuracy = wanted.metrics ? out.loss + 2 * bytes : nullptr;
  }
};

/// Multiplies gradients in place, or a copy of them. op: the operator's name in messages.
struct Scale : core::Private<Scale, Tensor(const Tensor&, const Tensor&, c10::string_view), core::Overwrites<0>> {
  static constexpr const char* kName = "_cross_entropy_scale";
  static constexpr const char* kArguments = "dlogits, grad, op";

  template <class Device>
  static Tensor run(const Into& into, const Tensor& dlogits, const Tensor& grad, c10::string_view op) {
    Tensor out = into[0].defined() ? into[0] : dlogits.clone();
    Device::scale(std::string(op).c_str(), out, grad);
    return out;
  }
};

// ---- On each device

/// out: from empty_results().
using ForwardOn = void(
    const char* op, Tensor logits, const Tensor& target, const Tensor& weight, const Tensor& totals, const Options& o,
    const Results& out);
/// dlogits may be logits.
using BackwardOn = void(
    const char* op, Tensor& dlogits, Tensor logits, const Tensor& target, const Tensor& weight, const Tensor& stats,
    const Tensor& totals, const Tensor& grad, const Options& o);
/// Overwrites the logits with their gradient.
using ForwardBackwardOn = void(
    const char* op, Tensor& logits, const Tensor& target, const Tensor& weight, const Options& o, const Results& out);
using ScaleOn = void(const char* op, Tensor& dlogits, const Tensor& grad);
using TotalsOn =
    void(const Tensor& totals, const Tensor& target, const Tensor& weight, const Options& o, int64_t classes);

struct Cpu {
  static ForwardOn forward;
  static BackwardOn backward;
  static ForwardBackwardOn forward_backward;
  static ScaleOn scale;
  static TotalsOn totals;
};
struct Cuda {
  static ForwardOn forward;
  static BackwardOn backward;
  static ForwardBackwardOn forward_backward;
  static ScaleOn scale;
  static TotalsOn totals;
};

// ---- CPU

/// `to` may be undefined.
void write_scalars(const Tensor& to, std::initializer_list<double> values);

void forward_rows_cpu(
    const char* op, const Shard& shard, Tensor logits, const Tensor& target, const Tensor& weight, const Options& o,
    const RowsOut& out);

/// Losses, metrics and statistics from the facts of all ranks (ranks, facts, rows). log_prob, entropy: null if not
/// requested.
void combine_rows_cpu(
    const Shard& shard, const Facts& facts, const Tensor& gathered, const Tensor& target, const Tensor& weight,
    const Options& o, const RowsOut& out, char* log_prob, char* entropy);

/// (sum of w_y, number of targets)
std::array<double, 2> count_targets(const Tensor& target_in, const Tensor& weight_in, const Options& o);

/// `totals` if they are defined, else those of `target`.
std::array<double, 2> known_or_counted(
    const Tensor& totals, const Tensor& target, const Tensor& weight, const Options& o);

/// Reduces losses and metrics of all rows to the call's results. Stores `totals` if out.totals is defined.
void sum_rows_cpu(const RowBuffers& rows, const std::array<double, 2>& totals, const Options& o, const Results& out);

/// dlogits may be logits. totals: undefined unless the loss is a mean.
void backward_rows_cpu(
    const char* op, const Shard& shard, Tensor& dlogits, Tensor logits, const Tensor& target, const Tensor& weight,
    const char* stats, const Tensor& totals, const Upstream& upstream, const Options& o);

/// log p_y and the entropy of every row with a target, from the statistics of forward. log_prob: null if the target's
/// column is not here.
void describe_rows_cpu(
    const char* op, const Shard& shard, Tensor logits, const Tensor& target, const char* stats, const Options& o,
    char* log_prob, char* entropy);

// ---- CUDA

/// Arguments that all launches of one call share.
struct CudaCall {
  const char* op;
  at::Device device;
  Shard shard;
  int64_t n;
  // Of all classes. rank_weights: the sum of each rank's weights, for smoothing.
  Tensor target, weight, weight_sum, rank_weights;
  int32_t target_words, flags;
  bool extras;

  CudaCall(const char* name, Shard part, const Tensor& target_in, const Tensor& weight_in, const Options& o)
      : op(name), device(target_in.device()), shard(std::move(part)), n(shard.n), target(target_in.contiguous()) {
    if (weight_in.defined()) weight = weight_in.to(at::kFloat).contiguous();
    if (weight.defined() && o.label_smoothing > 0) weight_sum = weight.sum();
    if (shard.is_split() && o.label_smoothing > 0) {
      rank_weights = at::empty({shard.ranks()}, target.options().dtype(at::kFloat));
      for (int64_t rank = 0; rank < shard.ranks(); ++rank) {
        Tensor to = rank_weights.select(0, rank);
        const int64_t from = shard.firsts[rank], count = shard.firsts[rank + 1] - from;
        weight.defined() ? to.copy_(weight.narrow(0, from, count).sum()) : to.fill_(count);
      }
    }
    target_words = target.scalar_type() == at::kLong ? 2 : 1;
    flags = o.flags(weight);
    extras = flags & (flags::HAS_WEIGHT | flags::HAS_SMOOTHING | flags::HAS_SOFTCAP);
  }

  /// The weights of this rank's classes, and their sum.
  const void* local_weight() const { return weight.defined() ? weight.const_data_ptr<float>() + shard.first : nullptr; }
  const void* local_weight_sum() const {
    if (!rank_weights.defined()) return address(weight_sum);
    return rank_weights.const_data_ptr<float>() + shard.group->rank();
  }

  const void* target_at(int64_t row) const {
    return static_cast<const char*>(address(target)) + row * int64_t(target.element_size());
  }

  /// Sets the arguments that kernels share: the targets of rows from `first` on, and options.
  template <class Args>
  void pass(Args& args, const Options& o, int64_t first) const {
    args.target = target_at(first);
    args.ignore_index = o.ignore_index;
    args.flags = flags;
    if constexpr (requires { args.target_words; }) args.target_words = target_words;
    if constexpr (requires { args.first_class; }) args.first_class = int32_t(shard.first);
    if constexpr (requires { args.classes; }) args.classes = int32_t(shard.classes);
    if constexpr (requires { args.softcap; }) args.softcap = float(o.softcap.value_or(1));
    if constexpr (requires { args.label_smoothing; }) {
      args.label_smoothing = float(o.label_smoothing);
      args.lse_square_scale = float(o.lse_square_scale);
    }
  }

  /// Sets also where results go.
  template <class Args>
  void pass(Args& args, const Options& o, int64_t first, const RowsOut& out) const {
    pass(args, o, first);
    args.loss = out.loss;
    args.z_loss = out.z_loss;
    args.accuracy = out.accuracy;
    args.predicted = out.predicted;
    if constexpr (requires { args.stats; }) args.stats = out.stats;
    args.flags |= (out.stats ? flags::SAVE_STATS : 0) | (out.z_loss ? flags::SAVE_Z_LOSS : 0) |
        (out.predicted || (out.facts && out.facts->metrics) ? flags::SAVE_METRICS : 0) |
        (out.facts ? flags::LOCAL : 0) | (o.reduced() ? 0 : flags::ADD_Z_LOSS);
  }
};

/// Reduces losses and metrics of all rows to the call's results. Without out.loss it only computes the totals of a
/// mean. divisors: these totals, if they were computed before.
void sum_rows_cuda(
    const CudaCall& call, const Options& o, const RowsOut& rows_of, const Results& out, const Tensor& divisors = {});

/// `logits` holds the rows of the call from `first` on, here and in the functions below.
void forward_rows_cuda(const CudaCall& call, const Options& o, Tensor logits, int64_t first, const RowsOut& out);

/// See combine_rows_cpu.
void combine_rows_cuda(
    const CudaCall& call, const Options& o, const Facts& facts, const Tensor& gathered, int64_t first,
    const RowsOut& out, const void* log_prob, const void* entropy);

/// dlogits may be logits. totals: undefined unless the loss is a mean.
void backward_rows_cuda(
    const CudaCall& call, const Options& o, Tensor& dlogits, Tensor logits, int64_t first, const void* stats,
    const Tensor& totals, const Upstream& upstream);

/// Overwrites the logits with their gradient.
void forward_backward_rows_cuda(
    const CudaCall& call, const Options& o, Tensor& logits, int64_t first, const RowsOut& out, const Tensor& totals,
    const Upstream& upstream);

/// See describe_rows_cpu. logits: (rows, n), unit stride.
void describe_rows_cuda(
    const CudaCall& call, const Options& o, const Tensor& logits, int64_t first, const void* stats,
    const void* log_prob, const void* entropy);

}  // namespace liger::ops::cross_entropy
