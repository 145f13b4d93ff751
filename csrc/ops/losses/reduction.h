#pragma once

// How a loss reduces what it computes for rows or elements, and the incoming gradient of the result.

#include <algorithm>

#include "core/aten.h"
#include "core/checks.h"

namespace liger::ops {

enum class Reduction { None, Sum, Mean, BatchMean };

inline Reduction parse_reduction(const char* op, c10::string_view given, bool has_batch_mean = false) {
  if (given == "none") return Reduction::None;
  if (given == "sum") return Reduction::Sum;
  if (given == "mean") return Reduction::Mean;
  const char* rule = has_batch_mean ? "be 'mean', 'batchmean', 'sum' or 'none'" : "be 'mean', 'sum' or 'none'";
  LIGER_CHECK(has_batch_mean && given == "batchmean", op, "reduction", rule, "'", given, "'");
  return Reduction::BatchMean;
}

/// One number for each row or element, or one for all: then the stride is 0.
struct Upstream {
  at::Tensor values;  // in the compute type; undefined: 1
  int64_t stride = 0;

  /// One number per row, contiguous and in the compute type, or undefined.
  explicit Upstream(const at::Tensor& rows) : values(rows), stride(1) {}

  /// sizes: of the result. like: gives the device and the compute type; name: of it.
  Upstream(const char* op, const at::Tensor& grad, at::IntArrayRef sizes, const char* name, const at::Tensor& like) {
    LIGER_CHECK(grad.sizes().equals(sizes), op, "the gradient", c10::str("have shape ", sizes), grad.sizes());
    core::check_same_device(op, "the gradient", grad, name, like);
    const auto strides = grad.strides();
    // As a sum's backward makes it.
    const bool is_one = grad.numel() > 0 && std::all_of(strides.begin(), strides.end(), [](auto s) { return s == 0; });
    values = (is_one ? grad.as_strided({}, {}) : grad).to(core::compute_type(like));
    stride = is_one ? 0 : 1;
  }

  bool is_one() const { return stride == 0; }
};

}  // namespace liger::ops
