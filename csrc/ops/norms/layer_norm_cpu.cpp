// layer_norm on CPU: statistics in fp32, or fp64 for fp64 rows.

#include "core/cpu/loops.h"
#include "core/cpu/math.h"
#include "ops/norms/layer_norm.h"

namespace liger::ops::layer_norm {
namespace {

template <class C>
struct CpuForward {
  core::Input<C> x, weight, bias;
  core::Output<C> y;
  C *means, *scales;
  const core::Rows<2>& walk;  // y, x
  C eps;
};

// A half-precision row is widened once. Its results are narrowed one block of columns at a time.
template <class C>
void forward_rows(const CpuForward<C>& a, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = core::kColumnsPerSum;
  const int64_t n = a.walk.n;
  std::vector<C> row_stage = core::make_stage<C>(a.x.storage, n);
  std::vector<C> weight_stage = core::make_stage<C>(a.weight.storage, n);
  std::vector<C> bias_stage = core::make_stage<C>(a.bias.storage, n);
  const C* weight = core::widen_all(a.weight, weight_stage.data(), n);
  const C* bias = core::widen_all(a.bias, bias_stage.data(), n);
  C block[kBlock];
  for (int64_t row = begin; row < end; ++row) {
    const C* x = core::widen_all(a.x + a.walk.offset(1, row), row_stage.data(), n);
    double total = 0, squares = 0, drift = 0;
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      const C* v = x + first;
      C part = 0;
#pragma omp simd reduction(+ : part)
      for (int64_t i = 0; i < count; ++i) part += v[i];
      total += part;
    }
    // If values are much larger than their deviations, this mean is wrong in its last digits. The sum of the centred
    // values corrects it.
    const C near = C(total / n);
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      const C* v = x + first;
      C squares_part = 0, drift_part = 0;
#pragma omp simd reduction(+ : squares_part, drift_part)
      for (int64_t i = 0; i < count; ++i) {
        const C centred = v[i] - near;
        squares_part += centred * centred;
        drift_part += centred;
      }
      squares += squares_part;
      drift += drift_part;
    }
    const C mean = C(near + drift / n);
    squares -= drift * drift / n;
    const C scale = C(1 / std::sqrt(squares / n + a.eps));
    if (a.means) {
      a.means[row] = mean;
      a.scales[row] = scale;
    }
    const auto y = a.y + a.walk.offset(0, row);
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      const C *v = x + first, *w = weight + first, *b = bias + first;
      C* out = core::target(y + first, block);
      if (weight && bias) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = (v[i] - mean) * scale * w[i] + b[i];
      } else if (weight) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = (v[i] - mean) * scale * w[i];
      } else if (bias) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = (v[i] - mean) * scale + b[i];
      } else {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = (v[i] - mean) * scale;
      }
      core::narrow_all(y + first, out, count);
    }
  }
}

template <class C>
struct CpuBackward {
  core::Input<C> dy, x;
  const C *weight, *means, *scales;
  core::Output<C> dx;
  const core::Rows<3>& walk;  // dx, dy, x
};

// dweight, dbias: partial sums of this range; both or neither may be null.
template <class C>
void backward_rows(const CpuBackward<C>& a, C* dweight, C* dbias, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = core::kColumnsPerSum;
  const int64_t n = a.walk.n;
  C blocks[2][kBlock];
  // Process several rows of a block of columns together, so that the block's sums over rows stay in the L1 cache.
  constexpr int64_t kRowsAtATime = 8;
  for (int64_t group = begin; group < end; group += kRowsAtATime) {
    const int64_t rows = std::min(kRowsAtATime, end - group);
    double dots[kRowsAtATime] = {}, totals[kRowsAtATime] = {};
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      const C* w = a.weight + first;
      C *dw = dweight + first, *db = dbias + first;
      for (int64_t r = 0; r < rows; ++r) {
        const C* g = core::widen_all(a.dy + a.walk.offset(1, group + r) + first, blocks[0], count);
        const C* v = core::widen_all(a.x + a.walk.offset(2, group + r) + first, blocks[1], count);
        const C mean = a.means[group + r], scale = a.scales[group + r];
        C dot = 0, total = 0;
        if (dweight) {
#pragma omp simd reduction(+ : dot, total)
          for (int64_t i = 0; i < count; ++i) {
            const C grad = g[i], product = grad * (v[i] - mean);
            dw[i] += product * scale;
            db[i] += grad;
            dot += product * w[i];
            total += grad * w[i];
          }
        } else {
#pragma omp simd reduction(+ : dot, total)
          for (int64_t i = 0; i < count; ++i) {
            const C grad = g[i] * w[i];
            dot += grad * (v[i] - mean);
            total += grad;
          }
        }
        dots[r] += dot;
        totals[r] += total;
      }
    }
    if (!a.dx) continue;
    for (int64_t r = 0; r < rows; ++r) {
      const auto dy = a.dy + a.walk.offset(1, group + r);
      const auto x = a.x + a.walk.offset(2, group + r);
      const auto dx = a.dx + a.walk.offset(0, group + r);
      const C mean = a.means[group + r], scale = a.scales[group + r];
      const C slope = C(dots[r] * scale * scale / n), shift = C(totals[r] / n);
      for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t count = std::min(kBlock, n - first);
        const C *g = core::widen_all(dy + first, blocks[0], count), *v = core::widen_all(x + first, blocks[1], count);
        const C* w = a.weight + first;
        C* out = core::target(dx + first, blocks[0]);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = (g[i] * w[i] - shift - (v[i] - mean) * slope) * scale;
        core::narrow_all(dx + first, out, count);
      }
    }
  }
}

}  // namespace

void Cpu::forward(
    Tensor y, const Tensor& statistics, Tensor x, const OptionalTensor& weight_in, const OptionalTensor& bias_in,
    double eps) {
  runtime::count_cpu_call();
  if (x.numel() == 0) return;
  const Tensor weight = contiguous_or_undefined(weight_in), bias = contiguous_or_undefined(bias_in);
  auto walk = core::walk_rows<2>(kOp, {&y, &x});
  core::dispatch_compute(x.scalar_type(), [&](auto c) {
    using C = decltype(c);
    C* means = core::data_or_null<C>(statistics);
    const CpuForward<C> a{
        core::input<C>(x),
        core::input<C>(weight),
        core::input<C>(bias),
        core::output<C>(y),
        means,
        means ? means + walk.rows : nullptr,
        walk,
        C(eps)};
    core::parallel_ranges(walk.rows, core::cpu_ranges(walk.rows, walk.n), [&](int64_t, int64_t begin, int64_t end) {
      core::vectorized<C>([&] { forward_rows(a, begin, end); });
    });
  });
}

Gradients Cpu::backward(
    const Tensor& dx, Tensor dy, Tensor x, const OptionalTensor& weight_in, const Tensor& statistics_in,
    bool needs_dweight, bool needs_dbias, at::ScalarType parameters) {
  runtime::count_cpu_call();
  Tensor lead = core::lead_of(dx, x), statistics = core::per_row(statistics_in, lead);
  auto walk = core::walk_rows<3>(kOp, {&lead, &dy, &x});
  bool needs_parameters = needs_dweight || needs_dbias;
  int64_t ranges = needs_parameters ? core::cpu_sum_ranges(walk.rows, walk.n) : core::cpu_ranges(walk.rows, walk.n);
  // backward_rows() fills both or neither.
  core::PartialColumnSums dweight(needs_parameters, ranges, walk.n, statistics.options());
  core::PartialColumnSums dbias(needs_parameters, ranges, walk.n, statistics.options());
  if (x.numel() > 0) {
    Tensor weight = contiguous_or_undefined(weight_in);
    weight = weight.defined() ? weight.to(statistics.scalar_type()) : at::ones({walk.n}, statistics.options());
    core::dispatch_compute(x.scalar_type(), [&](auto c) {
      using C = decltype(c);
      const C *w = weight.const_data_ptr<C>(), *means = statistics.const_data_ptr<C>();
      CpuBackward<C> a{core::input<C>(dy), core::input<C>(x), w, means, means + walk.rows, core::output<C>(dx), walk};
      core::parallel_ranges(walk.rows, ranges, [&](int64_t range, int64_t begin, int64_t end) {
        core::vectorized<C>([&] { backward_rows(a, dweight.of<C>(range), dbias.of<C>(range), begin, end); });
      });
    });
  }
  return {dx, needs_dweight ? dweight.sum(parameters) : Tensor(), needs_dbias ? dbias.sum(parameters) : Tensor()};
}

}  // namespace liger::ops::layer_norm
