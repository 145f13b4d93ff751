#pragma once

// Checks of the arguments that linear losses share.

#include <ATen/WrapDimUtils.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/checks.h"
#include "core/split.h"
#include "ops/losses/linear/gradients.h"

namespace liger::ops::linear {

/// The types of what an operator's check(op, ...) takes: the first N, which are tensors, and the others.
template <size_t N, class Check>
struct Split;
template <size_t N, class R, class... A>
struct Split<N, R(const char*, A...)> {
  template <size_t First, size_t... I>
  static auto types(std::index_sequence<I...>) -> void (*)(std::tuple_element_t<First + I, std::tuple<A...>>...);
  using Tensors = std::remove_pointer_t<decltype(types<0>(std::make_index_sequence<N>()))>;
  using Options = std::remove_pointer_t<decltype(types<N>(std::make_index_sequence<sizeof...(A) - N>()))>;
};

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

inline void check_memory_budget(const char* op, std::optional<int64_t> budget) {
  LIGER_CHECK(!budget || *budget > 0, op, "memory_budget", "be a positive number of bytes", *budget);
}

/// Checks target (...), or a tensor with a dimension more if `may_have_ids`, for an input (..., H). Along sequence_dim
/// only the ranks together know the size. Returns the sizes of the tokens.
inline std::vector<c10::SymInt> check_target(
    const char* op, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target,
    std::optional<int64_t> sequence_dim, bool may_have_ids) {
  core::check_integers(op, "target", target);
  core::check_same_device(op, "target", target, "input", input);
  const int64_t dims = input.dim() - 1;
  auto tokens = input.sym_sizes().slice(0, dims).vec();
  const bool fits = target.dim() == dims || (may_have_ids && target.dim() == dims + 1);
  if (sequence_dim && fits) tokens[*sequence_dim] = target.sym_size(*sequence_dim);
  LIGER_CHECK(
      fits && target.sym_sizes().slice(0, dims).equals(tokens), op, "target",
      c10::str(
          "have shape ", c10::SymIntArrayRef(tokens),
          may_have_ids ? ", or that with one dimension more" : ", that of input without its last dimension"),
      target.sym_sizes(), core::hint_if_swapped("input", input, "weight", weight, target));
  return tokens;
}

/// token_weight: one number per token, if defined. like, x: an input and its name. more: ends the rule for its shape.
inline void check_token_weight(
    const char* op, const at::Tensor& t, const char* like, const at::Tensor& x, c10::SymIntArrayRef tokens,
    const char* more = "") {
  if (!t.defined()) return;
  core::check_dense(op, "token_weight", t);
  core::check_same_device(op, "token_weight", t, like, x);
  LIGER_CHECK(at::isFloatingType(t.scalar_type()), op, "token_weight", "be floating point", t.scalar_type());
  LIGER_CHECK(
      t.sym_sizes().equals(tokens), op, "token_weight",
      c10::str("have shape ", tokens, ", that of ", like, " without its last dimension", more), t.sym_sizes());
}

/// The tensors of a head. first: the input whose device all of a call have, and its name. swapped: a tensor that the
/// caller may have swapped with one of them. may_be_narrow: weight and bias may have 16 bits beside an input of 32.
struct HeadCheck {
  const char* op;
  std::string prefix;  // of the arguments' names
  const HeadTensors& t;
  const char* first_name;
  const at::Tensor& first;

  void operator()(const at::Tensor& swapped, std::optional<int64_t> sequence_dim, bool may_be_narrow = false) const {
    const std::string input = prefix + "input", weight = prefix + "weight";
    core::check_activation(op, input.c_str(), t.input);
    core::check_same_device(op, input.c_str(), t.input, first_name, first);
    check_parameter(weight, t.weight, may_be_narrow);
    check_weight_shape(op, input.c_str(), t.input, weight.c_str(), t.weight, swapped);
    if (t.bias.defined()) {
      check_parameter(prefix + "bias", t.bias, may_be_narrow);
      check_per_class(op, (prefix + "bias").c_str(), t.bias, t.weight.sym_size(0));
    }
    check_low_rank(sequence_dim);
  }

 private:
  void check_place(const std::string& name, const at::Tensor& of) const {
    core::check_dense(op, name.c_str(), of);
    core::check_same_device(op, name.c_str(), of, first_name, first);
  }

  void check_parameter(const std::string& name, const at::Tensor& of, bool may_be_narrow) const {
    check_place(name, of);
    const auto dtype = t.input.scalar_type();
    may_be_narrow &= dtype == at::kFloat;
    LIGER_CHECK(
        of.scalar_type() == dtype || (may_be_narrow && at::isReducedFloatingType(of.scalar_type())), op, name.c_str(),
        c10::str("have the dtype of ", prefix, "input, ", dtype, may_be_narrow ? ", or be float16 or bfloat16" : ""),
        of.scalar_type());
  }

  /// An addend t b^T of the logits: both t and b are given, or none of them.
  void check_low_rank(std::optional<int64_t> sequence_dim) const {
    const at::Tensor &left = t.low_rank_input, &right = t.low_rank_weight;
    const std::string t_name = prefix + "low_rank_input", b_name = prefix + "low_rank_weight", input = prefix + "input";
    LIGER_CHECK(
        left.defined() == right.defined(), op, b_name, "be given if and only if " + t_name + " is",
        right.defined() ? "a tensor" : "None");
    if (!left.defined()) return;
    for (const auto& [name, of] : {std::pair<const std::string&, const at::Tensor&>(t_name, left), {b_name, right}}) {
      check_place(name, of);
      core::check_parameter_dtype(op, name.c_str(), of, input.c_str(), t.input);
    }
    auto rows = [](const at::Tensor& of) { return of.sym_sizes().slice(0, of.dim() - 1); };
    LIGER_CHECK(
        left.dim() == t.input.dim() && rows(left).equals(rows(t.input)), op, t_name,
        c10::str("have the shape of ", input, ", ", t.input.sym_sizes(), ", except for the last dimension"),
        left.sym_sizes());
    const auto classes = t.weight.sym_size(0), ranks = left.sym_sizes().back();
    LIGER_CHECK(
        right.dim() == 2 && right.sym_size(0) == classes && right.sym_size(1) == ranks, op, b_name,
        c10::str("have shape [", classes, ", ", ranks, "], the classes and the last dimension of ", t_name),
        right.sym_sizes());
    LIGER_CHECK(!sequence_dim, op, t_name, "be None with sequence_dim", "both");
  }
};

}  // namespace liger::ops::linear
