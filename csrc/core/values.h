#pragma once

// Checks of what tensors of integers hold: indices, classes, counts, ends of samples. They run where reading numbers
// waits for nothing, on a CPU. On a GPU they would wait for its work, so there only with LIGER_OPS_CHECK_VALUES=1.

#include <cstdlib>
#include <string_view>

#include "core/aten.h"
#include "core/checks.h"

namespace liger::core {

inline bool reads_values(const at::Tensor& t) {
  static const bool always = [] {
    const char* value = std::getenv("LIGER_OPS_CHECK_VALUES");
    return value && std::string_view(value) == "1";
  }();
  return t.defined() && (t.is_cpu() || (always && t.is_cuda()));
}

/// All of t's numbers, on a CPU. t: integers.
inline at::Tensor values_of(const at::Tensor& t) { return t.to(at::kCPU, at::kLong).contiguous().view(-1); }

/// Throws unless all numbers of t lie in [first, end).
inline void check_range(const char* op, const char* name, const at::Tensor& t, int64_t first, int64_t end) {
  if (!reads_values(t)) return;
  const at::Tensor values = values_of(t);
  const int64_t* numbers = values.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < values.numel(); ++i) {
    TORCH_CHECK_INDEX(
        numbers[i] >= first && numbers[i] < end, op, ": ", name, " must lie in [", first, ", ", end, ") (got ",
        numbers[i], ")");
  }
}

/// Throws unless the counts are those of at most `rows` rows of x. Their sum may overflow, so each is compared with the
/// rows that are left.
inline void check_counts(const char* op, const char* name, const at::Tensor& counts, int64_t rows) {
  if (!reads_values(counts)) return;
  const at::Tensor values = values_of(counts);
  const int64_t* numbers = values.const_data_ptr<int64_t>();
  int64_t left = rows;
  for (int64_t i = 0; i < values.numel(); ++i) {
    LIGER_CHECK(numbers[i] >= 0, op, name, "not be negative", numbers[i]);
    LIGER_CHECK(
        numbers[i] <= left, op, name, c10::str("have a sum of at most ", rows, ", the rows of x"), numbers[i],
        " after ", rows - left);
    left -= numbers[i];
  }
}

/// Throws unless the ends are 0, ..., size in ascending order.
inline void check_ends(const char* op, const char* name, const at::Tensor& ends, int64_t size) {
  if (!reads_values(ends)) return;
  const at::Tensor values = values_of(ends);
  const int64_t* numbers = values.const_data_ptr<int64_t>();
  const int64_t last = values.numel() - 1;
  LIGER_CHECK(numbers[0] == 0, op, name, "begin with 0", numbers[0]);
  for (int64_t i = 1; i <= last; ++i) {
    LIGER_CHECK(numbers[i] >= numbers[i - 1], op, name, "not descend", numbers[i], " after ", numbers[i - 1]);
  }
  LIGER_CHECK(numbers[last] == size, op, name, c10::str("end with ", size, ", the number of rows"), numbers[last]);
}

/// t as contiguous int64. Avoids conversions that change nothing, because even their dispatch slows down a small loss.
inline at::Tensor class_indices(const at::Tensor& t) {
  if (!t.defined()) return t;
  return (t.scalar_type() == at::kLong ? t : t.to(at::kLong)).contiguous();
}

/// o: options that have an ignore_index. name: of the argument in messages.
template <class Options>
void check_classes(
    const char* op, const int64_t* y, int64_t count, int64_t classes, const Options& o, const char* name = "target") {
  for (int64_t i = 0; i < count; ++i) {
    LIGER_CHECK(
        y[i] == o.ignore_index || (y[i] >= 0 && y[i] < classes), op, name,
        c10::str("lie in [0, ", classes, ") or be ignore_index, ", o.ignore_index), y[i]);
  }
}

}  // namespace liger::core
