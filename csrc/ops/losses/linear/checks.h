#pragma once

// Checks of a linear head's tensors.

#include <ATen/WrapDimUtils.h>

#include <optional>
#include <string>

#include "core/checks.h"
#include "core/split.h"

namespace liger::ops::linear {

/// weight: (V, H), in a call with input (..., H). other: a tensor that the caller may have swapped with one of them.
inline void check_weight_shape(
    const char* op, const char* input_name, const at::Tensor& input, const char* weight_name, const at::Tensor& weight,
    const at::Tensor& other) {
  LIGER_CHECK(
      weight.dim() == 2 && weight.sym_size(1) == input.sym_sizes().back(), op, weight_name,
      c10::str("have shape [classes, ", input.sym_sizes().back(), "], the last dimension of ", input_name),
      weight.sym_sizes(), core::hint_if_swapped(input_name, input, weight_name, weight, other));
}

inline void check_per_class(const char* op, const char* name, const at::Tensor& t, const c10::SymInt& classes) {
  LIGER_CHECK(
      t.dim() == 1 && t.sym_size(0) == classes, op, name, c10::str("have shape [", classes, "], one value per class"),
      t.sym_sizes());
}

/// `dim` of an input that is split along a sequence, counted from the first. name: of the input.
inline std::optional<int64_t> check_sequence_dim(
    const char* op, const char* name, const at::Tensor& input, std::optional<int64_t> dim,
    const core::Vocabulary& vocabulary) {
  if (!dim) return dim;
  LIGER_CHECK(vocabulary.is_split(), op, "sequence_dim", "be None without a group", *dim);
  const int64_t dims = input.dim();
  LIGER_CHECK(
      *dim >= -dims && *dim < dims && at::maybe_wrap_dim(*dim, dims) < dims - 1, op, "sequence_dim",
      c10::str("be a dimension of ", name, " other than the last"), *dim);
  return at::maybe_wrap_dim(*dim, dims);
}

/// A low-rank addend t b^T of a head's logits: both t and b are given, or none of them. prefix: of the arguments'
/// names.
inline void check_low_rank(
    const char* op, const std::string& prefix, const at::Tensor& input, const at::Tensor& weight,
    const at::Tensor& low_rank_input, const at::Tensor& low_rank_weight, std::optional<int64_t> sequence_dim) {
  const std::string t_name = prefix + "low_rank_input", b_name = prefix + "low_rank_weight";
  LIGER_CHECK(
      low_rank_input.defined() == low_rank_weight.defined(), op, b_name, "be given if and only if " + t_name + " is",
      low_rank_weight.defined() ? "a tensor" : "None");
  if (!low_rank_input.defined()) return;
  const std::string like = prefix + "input";
  auto check = [&](const std::string& name, const at::Tensor& t) {
    core::check_dense(op, name.c_str(), t);
    core::check_same_device(op, name.c_str(), t, like.c_str(), input);
    core::check_parameter_dtype(op, name.c_str(), t, like.c_str(), input);
  };
  check(t_name, low_rank_input);
  check(b_name, low_rank_weight);
  auto rows = [](const at::Tensor& t) { return t.sym_sizes().slice(0, t.dim() - 1); };
  LIGER_CHECK(
      low_rank_input.dim() == input.dim() && rows(low_rank_input).equals(rows(input)), op, t_name,
      c10::str("have the shape of ", prefix, "input, ", input.sym_sizes(), ", except for the last dimension"),
      low_rank_input.sym_sizes());
  const auto classes = weight.sym_size(0), ranks = low_rank_input.sym_sizes().back();
  LIGER_CHECK(
      low_rank_weight.dim() == 2 && low_rank_weight.sym_size(0) == classes && low_rank_weight.sym_size(1) == ranks, op,
      b_name, c10::str("have shape [", classes, ", ", ranks, "], the classes and the last dimension of ", t_name),
      low_rank_weight.sym_sizes());
  LIGER_CHECK(!sequence_dim, op, t_name, "be None with sequence_dim", "both");
}

}  // namespace liger::ops::linear
