// rms_norm and fused_add_rms_norm on CPU: statistics in fp32, or fp64 for fp64 rows.

#include "core/cpu/loops.h"
#include "core/cpu/math.h"
#include "core/cpu/rms.h"
#include "ops/norms/rms_norm.h"

namespace liger::ops::rms_norm {

namespace {

template <class C>
struct CpuForward {
  core::Input<C> x, residual, weight;
  core::Output<C> y, s;
  C* rstd;
  const core::Rows<4>& walk;  // y, s, x, residual
  C eps, offset;
  bool round;
};

// A half-precision row is widened once. Its results are narrowed one block of columns at a time.
template <class C>
void forward_rows(const CpuForward<C>& a, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = core::kColumnsPerSum;
  const int64_t n = a.walk.n;
  std::vector<C> row_stage = core::make_stage<C>(a.x.storage, n), weights(a.weight ? n : 0);
  C block[kBlock];
  if (a.weight) {
    const C* wide = core::widen_all(a.weight, weights.data(), n);
    for (int64_t i = 0; i < n; ++i) weights[i] = wide[i] + a.offset;
  }
  for (int64_t row = begin; row < end; ++row) {
    const C* x = core::widen_all(a.x + a.walk.offset(2, row), row_stage.data(), n);
    if (a.residual) {
      const auto residual = a.residual + a.walk.offset(3, row);
      const auto s = a.s + a.walk.offset(1, row);
      C* sums = core::target(s, row_stage.data());
      for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t count = std::min(kBlock, n - first);
        const C *v = x + first, *r = core::widen_all(residual + first, block, count);
        C* sum = sums + first;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) sum[i] = v[i] + r[i];
        core::round_all(s.storage, sum, count);
        core::narrow_all(s + first, sum, count);
      }
      x = sums;
    }
    const C scale = core::inverse_rms(x, n, a.eps);
    if (a.rstd) a.rstd[row] = scale;
    const auto y = a.y + a.walk.offset(0, row);
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      const C *v = x + first, *w = weights.data() + first;
      C* out = core::target(y + first, block);
      if (!a.weight) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = v[i] * scale;
      } else if (a.round) {
        core::with_rounded(a.y.storage, v, scale, block, count, [&](auto rounded) {
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) out[i] = rounded(i) * w[i];
        });
      } else {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = v[i] * scale * w[i];
      }
      core::narrow_all(y + first, out, count);
    }
  }
}

template <class C>
struct CpuBackward {
  core::Input<C> dy, ds, x;
  const C *weight, *rstd;  // weight: with the offset added
  core::Output<C> dx;
  const core::Rows<4>& walk;  // dx, dy, ds, x
  bool round;
};

// sums: this range's partial sum for dweight, or null.
template <class C>
void backward_rows(const CpuBackward<C>& a, C* sums, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = core::kColumnsPerSum;
  const int64_t n = a.walk.n;
  C blocks[3][kBlock];
  for (int64_t row = begin; row < end; ++row) {
    const auto dy = a.dy + a.walk.offset(1, row), x = a.x + a.walk.offset(3, row);
    const C scale = a.rstd[row];
    double dot = 0;
    // One pass computes both sums, so that the row is read from cache once.
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      const C *g = core::widen_all(dy + first, blocks[0], count), *v = core::widen_all(x + first, blocks[1], count);
      const C* w = a.weight + first;
      C *sum = sums + first, part = 0;
      if (sums && a.round) {
        core::with_rounded(a.x.storage, v, scale, blocks[2], count, [&](auto rounded) {
#pragma omp simd reduction(+ : part)
          for (int64_t i = 0; i < count; ++i) {
            sum[i] += g[i] * rounded(i);
            part += g[i] * w[i] * v[i];
          }
        });
      } else if (sums) {
#pragma omp simd reduction(+ : part)
        for (int64_t i = 0; i < count; ++i) {
          const C product = g[i] * v[i];
          sum[i] += product * scale;
          part += product * w[i];
        }
      } else {
#pragma omp simd reduction(+ : part)
        for (int64_t i = 0; i < count; ++i) part += g[i] * w[i] * v[i];
      }
      dot += part;
    }
    if (!a.dx) continue;
    const auto dx = a.dx + a.walk.offset(0, row);
    const auto ds = a.ds + a.walk.offset(2, row);
    const C mean = C(dot * scale * scale / n);
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      const C *g = core::widen_all(dy + first, blocks[0], count), *v = core::widen_all(x + first, blocks[1], count);
      const C* w = a.weight + first;
      C* out = core::target(dx + first, blocks[0]);
      if (ds) {
        const C* r = core::widen_all(ds + first, blocks[2], count);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = (g[i] * w[i] - v[i] * mean) * scale + r[i];
      } else {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = (g[i] * w[i] - v[i] * mean) * scale;
      }
      core::narrow_all(dx + first, out, count);
    }
  }
}

}  // namespace

void Cpu::forward(
    const char* op, Forward& out, Tensor x, Tensor residual, Tensor weight, double eps, double offset,
    std::string_view casting_mode) {
  runtime::count_cpu_call();
  if (x.numel() == 0) return;
  if (weight.defined()) weight = weight.contiguous();
  auto walk = core::walk_rows<4>(op, {&out.y, &out.s, &x, &residual});
  core::dispatch_compute(x.scalar_type(), [&](auto c) {
    using C = decltype(c);
    const CpuForward<C> a{
        core::input<C>(x),
        core::input<C>(residual),
        core::input<C>(weight),
        core::output<C>(out.y),
        core::output<C>(out.s),
        core::data_or_null<C>(out.rstd),
        walk,
        C(eps),
        C(offset),
        core::rounds_first(casting_mode)};
    core::parallel_ranges(walk.rows, core::cpu_ranges(walk.rows, walk.n), [&](int64_t, int64_t begin, int64_t end) {
      core::vectorized<C>([&] { forward_rows(a, begin, end); });
    });
  });
}

std::tuple<Tensor, Tensor> Cpu::backward(
    const Tensor& dx, Tensor dy, Tensor ds, Tensor x, Tensor weight, Tensor rstd, double offset,
    std::string_view casting_mode, bool needs_dweight) {
  runtime::count_cpu_call();
  if (weight.defined()) weight = weight.contiguous();
  Tensor lead = core::lead_of(dx, x);
  rstd = core::per_row(rstd, lead);
  auto walk = core::walk_rows<4>("rms_norm backward", {&lead, &dy, &ds, &x});
  int64_t ranges = needs_dweight ? core::cpu_sum_ranges(walk.rows, walk.n) : core::cpu_ranges(walk.rows, walk.n);
  core::PartialColumnSums dweight(needs_dweight, ranges, walk.n, rstd.options());
  if (x.numel() > 0) {
    Tensor scaled = weight.defined() ? weight.to(rstd.scalar_type()).add(offset) : at::ones({walk.n}, rstd.options());
    core::dispatch_compute(x.scalar_type(), [&](auto c) {
      using C = decltype(c);
      const CpuBackward<C> a{
          core::input<C>(dy),
          core::input<C>(ds),
          core::input<C>(x),
          scaled.const_data_ptr<C>(),
          rstd.const_data_ptr<C>(),
          core::output<C>(dx),
          walk,
          core::rounds_first(casting_mode) && weight.defined()};
      core::parallel_ranges(walk.rows, ranges, [&](int64_t range, int64_t begin, int64_t end) {
        core::vectorized<C>([&] { backward_rows(a, dweight.of<C>(range), begin, end); });
      });
    });
  }
  return {dx, dweight.sum(weight.scalar_type())};
}

}  // namespace liger::ops::rms_norm
