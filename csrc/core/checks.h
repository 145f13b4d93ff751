#pragma once

// Argument checks, all with messages of the form "<op>: <argument> must <rule> (got <value>)".

#define LIGER_CHECK(condition, op, argument, rule, ...) \
  TORCH_CHECK(condition, op, ": ", argument, " must ", rule, " (got ", __VA_ARGS__, ")")

#include "core/aten.h"

namespace liger::core {

/// Dispatch keys of wrapper tensors, which have no memory of their own.
constexpr c10::DispatchKeySet kWrappers(
    {c10::DispatchKey::Python, c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched,
     c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Batched, c10::DispatchKey::ZeroTensor});

inline at::Tensor value_or_undefined(const std::optional<at::Tensor>& t) { return t ? *t : at::Tensor(); }

/// The dtype of sums and statistics of x.
inline at::ScalarType compute_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// Autograd implementations call this first. Below them, sparse and quantized tensors only get the dispatcher's error.
inline void check_dense(const char* op, const char* name, const at::Tensor& t) {
  LIGER_CHECK(
      t.layout() == at::kStrided && !t.is_quantized(), op, name, "be a dense, unquantized tensor", t.layout(), " of ",
      t.scalar_type());
}
inline void check_dense(const char* op, const char* name, const std::optional<at::Tensor>& t) {
  if (t && t->defined()) check_dense(op, name, *t);
}

/// x: dense, floating point, with at least one dimension. fp64 is supported on CPU only, for gradcheck.
inline void check_activation(const char* op, const char* name, const at::Tensor& x) {
  check_dense(op, name, x);
  auto dtype = x.scalar_type();
  bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  LIGER_CHECK(
      half || dtype == at::kFloat || (dtype == at::kDouble && !x.is_cuda()), op, name,
      (x.is_cuda() ? "be float32, float16 or bfloat16" : "be float32, float16, bfloat16 or float64"), dtype);
  LIGER_CHECK(x.dim() >= 1, op, name, "have at least one dimension", "a scalar");
}

/// An activation whose rows and columns kernels count in 32 bits. Meta tensors are checked too: they plan a call on a
/// device.
inline void check_rows(const char* op, const char* name, const at::Tensor& x) {
  check_activation(op, name, x);
  const auto n = x.sym_sizes().back(), rows = c10::multiply_integers(x.sym_sizes().slice(0, x.dim() - 1));
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  LIGER_CHECK(
      (n.is_symbolic() || n.expect_int() <= kMost) && (rows.is_symbolic() || rows.expect_int() <= kMost), op, name,
      "have fewer than 2^31 rows and columns", rows, " rows of ", n);
}

inline void check_same_device(
    const char* op, const char* name, const at::Tensor& t, const char* like, const at::Tensor& x) {
  LIGER_CHECK(t.device() == x.device(), op, name, c10::str("be on ", x.device(), " like ", like), t.device());
}

/// t: class indices, token ids or the like.
inline void check_integers(const char* op, const char* name, const at::Tensor& t) {
  check_dense(op, name, t);
  const auto dtype = t.scalar_type();
  LIGER_CHECK(dtype == at::kLong || dtype == at::kInt, op, name, "be int64 or int32", dtype);
}

/// t must have the device, dtype and shape of x.
inline void check_same(const char* op, const char* name, const at::Tensor& t, const char* like, const at::Tensor& x) {
  check_same_device(op, name, t, like, x);
  check_dense(op, name, t);
  LIGER_CHECK(
      t.scalar_type() == x.scalar_type(), op, name, c10::str("have the dtype of ", like, ", ", x.scalar_type()),
      t.scalar_type());
  LIGER_CHECK(
      t.sym_sizes().equals(x.sym_sizes()), op, name, c10::str("have the shape of ", like, ", ", x.sym_sizes()),
      t.sym_sizes());
}

/// t must have the dtype of x, or be float32 if x is not wider. `like` is x's name.
inline void check_parameter_dtype(
    const char* op, const char* name, const at::Tensor& t, const char* like, const at::Tensor& x) {
  const auto dtype = x.scalar_type();
  const bool may_be_float = dtype != at::kDouble;
  LIGER_CHECK(
      t.scalar_type() == dtype || (may_be_float && t.scalar_type() == at::kFloat), op, name,
      c10::str(may_be_float ? "be float32 or have the dtype of " : "have the dtype of ", like, ", ", dtype),
      t.scalar_type());
}

/// A parameter with one value per column of x. `like` is x's name.
inline void check_column_parameter(
    const char* op, const char* name, const at::Tensor& w, const at::Tensor& x, const char* like = "x") {
  check_same_device(op, name, w, like, x);
  check_dense(op, name, w);
  check_parameter_dtype(op, name, w, like, x);
  LIGER_CHECK(
      w.dim() == 1 && w.sym_sizes()[0] == x.sym_sizes().back(), op, name,
      c10::str("have shape [", x.sym_sizes().back(), "], the last dimension of ", like), w.sym_sizes());
}

/// Ends messages about the shapes of input (..., n), weight (V, n) and `like`, whose dimensions begin with (...).
inline std::string hint_if_swapped(
    const char* input_name, const at::Tensor& input, const char* weight_name, const at::Tensor& weight,
    const at::Tensor& like) {
  if (input.dim() != 2 || weight.dim() < 1 || weight.sym_sizes().back() != input.sym_sizes().back()) return "";
  const auto rows = weight.sym_sizes().slice(0, weight.dim() - 1);
  const int64_t dims = rows.size(), like_dims = like.dim();
  const bool fits = like_dims == dims || like_dims == dims + 1;
  if (!fits || !like.sym_sizes().slice(0, dims).equals(rows)) return "";
  return c10::str("; ", input_name, " and ", weight_name, " may be swapped");
}

inline void check_finite(const char* op, const char* name, double value) {
  LIGER_CHECK(std::isfinite(value), op, name, "be finite", value);
}

inline void check_positive(const char* op, const char* name, std::optional<double> value) {
  LIGER_CHECK(!value || (*value > 0 && std::isfinite(*value)), op, name, "be positive and finite", *value);
}

inline void check_eps(const char* op, double eps) {
  LIGER_CHECK(eps >= 0 && eps < std::numeric_limits<double>::infinity(), op, "eps", "be finite and not negative", eps);
}

}  // namespace liger::core
