#pragma once

// CPU loops: rows in parallel, columns in vectors. GCC picks the widest instruction set of the machine at load time.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "runtime/status.h"

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define LIGER_VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), flatten))
#else
#define LIGER_VECTORIZED
#endif

namespace liger::core {

/// Arithmetic type: double for double, float for everything narrower.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
T* data_or_null(const at::Tensor& t) {
  return t.defined() ? t.data_ptr<T>() : nullptr;
}

/// Splits rows into one range a thread; f(range, begin, end). The ranges depend on nothing but the thread count.
template <class F>
void parallel_ranges(int64_t rows, int64_t ranges, const F& f) {
  at::parallel_for(0, ranges, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i, rows * i / ranges, rows * (i + 1) / ranges);
  });
}

/// Threads worth waking: none for work that fits in the time it takes to wake them.
inline int64_t cpu_ranges(int64_t rows, int64_t n) {
  constexpr int64_t kElementsPerThread = 16384;
  int64_t wanted = std::max<int64_t>(1, rows * n / kElementsPerThread);
  return std::max<int64_t>(1, std::min<int64_t>({wanted, rows, int64_t(at::get_num_threads())}));
}

/// Ranges for a sum over rows in fp32: short ones, whose partial sums are then added pairwise, keep the error of a
/// gradient over thousands of rows as small as eager's.
inline int64_t cpu_sum_ranges(int64_t rows, int64_t n) {
  constexpr int64_t kRowsPerSum = 64;
  return std::max(cpu_ranges(rows, n), (rows + kRowsPerSum - 1) / kRowsPerSum);
}

/// A gradient's sum over rows, in the compute type: one share a range, added up in the end. Undefined: not needed.
class ColumnShares {
 public:
  ColumnShares(bool needed, int64_t ranges, int64_t n, const at::TensorOptions& options) : n_(n) {
    // A single share is the sum.
    if (needed) shares_ = ranges == 1 ? at::zeros({n}, options) : at::zeros({ranges, n}, options);
  }
  template <class C>
  C* of(int64_t range) const {
    return shares_.defined() ? shares_.data_ptr<C>() + range * n_ : nullptr;
  }
  at::Tensor sum(at::ScalarType type) const {
    if (!shares_.defined()) return {};
    return (shares_.dim() == 1 ? shares_ : shares_.sum(0)).to(type);
  }

 private:
  int64_t n_;
  at::Tensor shares_;
};

/// Columns that one fp32 sum runs over at a stretch: longer rows add up several in double, for the same reason.
constexpr int64_t kColumnsPerSum = 1024;

/// Calls f(x_type{}, parameter_type{}) for the dtype pairs that the checks admit.
template <class F>
void dispatch_activation_parameter(at::ScalarType x, at::ScalarType parameter, const F& f) {
  bool wide = parameter == at::kFloat;
  switch (x) {
    case at::kDouble: return f(double{}, double{});
    case at::kFloat: return f(float{}, float{});
    case at::kHalf: return wide ? f(at::Half{}, float{}) : f(at::Half{}, at::Half{});
    default: return wide ? f(at::BFloat16{}, float{}) : f(at::BFloat16{}, at::BFloat16{});
  }
}

}  // namespace liger::core
