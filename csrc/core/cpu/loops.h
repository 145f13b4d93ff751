#pragma once

// CPU loops: parallel over rows, vectorized over columns.

#include <ATen/Parallel.h>

#include <tuple>
#include <utility>

#include "core/aten.h"
#include "core/cpu/storage.h"
#include "runtime/status.h"

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define LIGER_VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), flatten))
#else
#define LIGER_VECTORIZED
#endif

namespace liger::core {

/// Calls f(C{}) with the arithmetic type of numbers of this dtype: double for double, float for everything narrower.
template <class F>
decltype(auto) dispatch_compute(at::ScalarType dtype, const F& f) {
  return dtype == at::kDouble ? f(double{}) : f(float{});
}

namespace detail {

template <class F>
LIGER_VECTORIZED auto cloned_per_cpu(const F& f) {
  return f();
}

}  // namespace detail

/// f(), with GCC on x86-64 compiled for several instruction sets with all that it calls: the loader picks the widest
/// one that the CPU supports. fp64 serves gradcheck and gets one.
template <class C, class F>
auto vectorized(const F& f) {
  if constexpr (std::is_same_v<C, double>) {
    return f();
  } else {
    return detail::cloned_per_cpu(f);
  }
}

/// out = f(inputs...) for n numbers. `out` may be one of the inputs: the same place and dtype. f holds values, no
/// references, which could alias `out`.
template <class C, class F, class... Inputs>
void transform(Output<C> out, int64_t n, const F& f, const Inputs&... inputs) {
  vectorized<C>([&] {
    constexpr size_t kInputs = sizeof...(Inputs);
    const F copy = f;
    const bool converts = out.storage != Storage::compute || (... || (inputs.storage != Storage::compute));
    C stages[kInputs + 1][kStage];
    for (int64_t first = 0; first < n; first += converts ? kStage : n) {
      const int64_t count = converts ? std::min(kStage, n - first) : n;
      C *stage = stages[0], *to = target(out + first, stages[kInputs]);
      auto write = [&](const auto*... v) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) to[i] = copy(v[i]...);
      };
      std::apply(write, std::tuple{widen_all(inputs + first, std::exchange(stage, stage + kStage), count)...});
      narrow_all(out + first, to, count);
    }
  });
}

template <class T>
T* data_or_null(const at::Tensor& t) {
  return t.defined() ? t.data_ptr<T>() : nullptr;
}

/// Of a tensor that is only read. data_ptr() of a copy-on-write tensor makes the copy.
template <class T>
const T* const_data_or_null(const at::Tensor& t) {
  return t.defined() ? t.const_data_ptr<T>() : nullptr;
}

/// Splits rows into `ranges` ranges and calls f(range, begin, end) in parallel. Which rows are a range does not depend
/// on scheduling.
template <class F>
void parallel_ranges(int64_t rows, int64_t ranges, const F& f) {
  at::parallel_for(0, ranges, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i, rows * i / ranges, rows * (i + 1) / ranges);
  });
}

/// Number of ranges, at most one per thread. Small work gets fewer, because waking a thread takes longer than the work.
inline int64_t cpu_ranges(int64_t rows, int64_t n) {
  constexpr int64_t kElementsPerThread = 16384;
  int64_t wanted = std::max<int64_t>(1, rows * n / kElementsPerThread);
  return std::max<int64_t>(1, std::min<int64_t>({wanted, rows, int64_t(at::get_num_threads())}));
}

/// Calls f(row) for all rows of n elements in parallel.
template <class F>
void parallel_rows(int64_t rows, int64_t n, const F& f) {
  parallel_ranges(rows, cpu_ranges(rows, n), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

/// Number of ranges for an fp32 sum over rows. Ranges are short and their partial sums are added pairwise, so that the
/// error of a gradient over thousands of rows is as small as in eager PyTorch.
inline int64_t cpu_sum_ranges(int64_t rows, int64_t n) {
  constexpr int64_t kRowsPerSum = 64;
  return std::max(cpu_ranges(rows, n), (rows + kRowsPerSum - 1) / kRowsPerSum);
}

/// A gradient summed over rows, in the compute type: one partial sum per range, added up by sum(). Undefined if not
/// needed.
class PartialColumnSums {
 public:
  PartialColumnSums(bool needed, int64_t ranges, int64_t n, const at::TensorOptions& options) : n_(n) {
    // With one range, its partial sum is the result.
    if (needed) partials_ = ranges == 1 ? at::zeros({n}, options) : at::zeros({ranges, n}, options);
  }
  template <class C>
  C* of(int64_t range) const {
    return partials_.defined() ? partials_.data_ptr<C>() + range * n_ : nullptr;
  }
  at::Tensor sum(at::ScalarType type) const {
    if (!partials_.defined()) return {};
    return (partials_.dim() == 1 ? partials_ : partials_.sum(0)).to(type);
  }

 private:
  int64_t n_;
  at::Tensor partials_;
};

/// Columns per fp32 sum. Longer rows add several such sums in double, to keep the error small.
constexpr int64_t kColumnsPerSum = 1024;

}  // namespace liger::core
