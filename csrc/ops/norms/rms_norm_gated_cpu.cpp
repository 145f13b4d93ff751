// rms_norm_gated on CPU: statistics in fp32, or fp64 for fp64 rows.

#include "core/cpu/loops.h"
#include "core/cpu/math.h"
#include "core/cpu/rms.h"
#include "ops/norms/rms_norm_gated.h"

namespace liger::ops::rms_norm_gated {

namespace {

// What the normalised row and its product with the weight are rounded to. Storage::compute: they are not.
struct Rounding {
  Rounding(const Options& options, const Tensor& x, const Tensor& weight) {
    const auto storage = core::storage_of(x.scalar_type());
    if (options.rounds_row()) row = storage;
    if (options.rounds_product(x, weight)) product = storage;
  }
  core::Storage row = core::Storage::compute, product = core::Storage::compute;
};

template <class C>
struct CpuForward {
  core::Input<C> x, gate;
  const C* weight;  // with the offset added, or null
  core::Output<C> y;
  C* rstd;
  const core::Rows<3>& walk;  // y, x, gate
  int64_t groups, columns;
  C eps;
  Rounding round;
  bool gate_first, sigmoid;
};

template <class C>
void activate(C* out, const C* gate, int64_t n, bool sigmoid) {
  if (sigmoid) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = core::vector_sigmoid(gate[i]);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = gate[i] * core::vector_sigmoid(gate[i]);
  }
}

template <class C>
void multiply(C* out, const C* a, const C* b, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] * b[i];
}

template <class C>
void forward_rows(const CpuForward<C>& a, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = core::kColumnsPerSum;
  const int64_t n = a.columns;
  std::vector<C> x_stage = core::make_stage<C>(a.x.storage, n), gate_stage = core::make_stage<C>(a.gate.storage, n);
  std::vector<C> activation(n), product(n);
  C block[kBlock];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t group = 0; group < a.groups; ++group) {
      const int64_t start = group * n;
      const C* x = core::widen_all(a.x + a.walk.offset(1, row) + start, x_stage.data(), n);
      const C* gate = core::widen_all(a.gate + a.walk.offset(2, row) + start, gate_stage.data(), n);
      activate(activation.data(), gate, n, a.sigmoid);
      if (a.gate_first) {
        multiply(product.data(), x, activation.data(), n);
        x = product.data();
      }
      const C scale = core::inverse_rms(x, n, a.eps);
      if (a.rstd) a.rstd[row * a.groups + group] = scale;
      const auto y = a.y + a.walk.offset(0, row) + start;
      for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t count = std::min(kBlock, n - first);
        C* out = core::target(y + first, block);
        core::scale_and_round(a.round.row, out, x + first, scale, count);
        if (a.weight) multiply(out, out, a.weight + start + first, count);
        core::round_all(a.round.product, out, count);
        if (!a.gate_first) multiply(out, out, activation.data() + first, count);
        core::narrow_all(y + first, out, count);
      }
    }
  }
}

template <class C>
struct CpuBackward {
  core::Input<C> dy, x, gate;
  const C *weight, *rstd;  // weight: with the offset added
  core::Output<C> dx, dgate;
  const core::Rows<6>& walk;  // lead, dx, dgate, dy, x, gate
  int64_t groups, columns;
  Rounding round;
  bool gate_first, sigmoid;
};

template <class C>
void activate_with_slope(C* out, C* slope, const C* gate, int64_t n, bool sigmoid) {
  if (sigmoid) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const auto s = core::vector_sigmoid_and_slope(gate[i]);
      out[i] = s.value, slope[i] = s.slope;
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const auto s = core::vector_sigmoid_and_slope(gate[i]);
      out[i] = gate[i] * s.value, slope[i] = s.value + gate[i] * s.slope;
    }
  }
}

// sums: this range's partial sum for dweight, or null.
template <class C>
void backward_rows(const CpuBackward<C>& a, C* sums, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = core::kColumnsPerSum;
  const int64_t n = a.columns;
  std::vector<C> dy_stage = core::make_stage<C>(a.dy.storage, n), x_stage = core::make_stage<C>(a.x.storage, n);
  std::vector<C> gate_stage = core::make_stage<C>(a.gate.storage, n);
  std::vector<C> activation(n), slope(n), normed(n), grad(n);
  C block[kBlock];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t group = 0; group < a.groups; ++group) {
      const int64_t start = group * n;
      const C* dy = core::widen_all(a.dy + a.walk.offset(3, row) + start, dy_stage.data(), n);
      const C* x = core::widen_all(a.x + a.walk.offset(4, row) + start, x_stage.data(), n);
      const C* gate = core::widen_all(a.gate + a.walk.offset(5, row) + start, gate_stage.data(), n);
      const C* weight = a.weight + start;
      const C scale = a.rstd[row * a.groups + group];
      activate_with_slope(activation.data(), slope.data(), gate, n, a.sigmoid);
      double dot = 0;
      for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t count = std::min(kBlock, n - first);
        const C *g = dy + first, *v = x + first, *act = activation.data() + first, *w = weight + first;
        C *out = normed.data() + first, *dn = grad.data() + first, part = 0;
        if (a.gate_first) {
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) out[i] = v[i] * act[i] * scale, dn[i] = g[i];
        } else {
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) out[i] = v[i] * scale, dn[i] = g[i] * act[i];
        }
        if (sums) {
          C *sum = sums + start + first, *rounded = a.round.row == core::Storage::compute ? out : block;
          if (rounded != out) core::scale_and_round(a.round.row, rounded, out, C(1), count);  // a rounded copy
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) sum[i] += dn[i] * rounded[i];
        }
#pragma omp simd reduction(+ : part)
        for (int64_t i = 0; i < count; ++i) {
          dn[i] *= w[i];
          part += dn[i] * out[i];
        }
        dot += part;
      }
      const C mean = C(dot / n);
      const auto dx = a.dx + a.walk.offset(1, row) + start;
      const auto dgate = a.dgate + a.walk.offset(2, row) + start;
      for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t count = std::min(kBlock, n - first);
        const C *g = dy + first, *v = x + first, *act = activation.data() + first, *w = weight + first;
        C *norm = normed.data() + first, *dn = grad.data() + first, *by = slope.data() + first;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) dn[i] = (dn[i] - norm[i] * mean) * scale;
        if (dgate) {
          C* out = core::target(dgate + first, block);
          if (a.gate_first) {
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) out[i] = dn[i] * v[i] * by[i];
          } else {
            core::round_all(a.round.row, norm, count);
            multiply(norm, norm, w, count);
            core::round_all(a.round.product, norm, count);
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) out[i] = g[i] * norm[i] * by[i];
          }
          core::narrow_all(dgate + first, out, count);
        }
        if (dx) {
          if (a.gate_first) multiply(dn, dn, act, count);
          core::store_all(dx + first, dn, count);
        }
      }
    }
  }
}

/// weight + offset in the dtype of sums, or undefined.
Tensor scaled_weight(const Tensor& weight, const Tensor& x, const Options& options) {
  return weight.defined() ? weight.contiguous().to(core::compute_type(x)).add(options.offset) : Tensor();
}

}  // namespace

void Cpu::forward(
    Tensor y, const Tensor& rstd, Tensor x, Tensor gate, Tensor weight, const Options& options,
    std::optional<int64_t> group_size) {
  runtime::count_cpu_call();
  if (x.numel() == 0) return;
  const int64_t columns = group_size.value_or(x.size(-1)), groups = x.size(-1) / columns;
  const Tensor scaled = scaled_weight(weight, x, options);
  auto walk = core::walk_rows<3>(kOp, {&y, &x, &gate});
  core::dispatch_compute(x.scalar_type(), [&](auto c) {
    using C = decltype(c);
    const CpuForward<C> a{
        core::input<C>(x),
        core::input<C>(gate),
        core::data_or_null<C>(scaled),
        core::output<C>(y),
        core::data_or_null<C>(rstd),
        walk,
        groups,
        columns,
        C(options.eps),
        {options, x, weight},
        options.gate_first,
        options.sigmoid};
    core::parallel_ranges(walk.rows, core::cpu_ranges(walk.rows, walk.n), [&](int64_t, int64_t begin, int64_t end) {
      core::vectorized<C>([&] { forward_rows(a, begin, end); });
    });
  });
}

Gradients Cpu::backward(
    Tensor dx, Tensor dgate, Tensor dy, Tensor x, Tensor gate, Tensor weight, Tensor rstd, const Options& options,
    bool needs_dweight) {
  runtime::count_cpu_call();
  if (x.numel() == 0) return {dx, dgate, needs_dweight ? at::zeros_like(weight) : Tensor()};
  const int64_t groups = rstd.size(-1), columns = x.size(-1) / groups;
  Tensor lead = core::lead_of(dx.defined() ? dx : dgate, x);
  rstd = core::per_row(rstd, by_group(lead, groups, columns));
  auto walk = core::walk_rows<6>(kBackward, {&lead, &dx, &dgate, &dy, &x, &gate});
  int64_t ranges = needs_dweight ? core::cpu_sum_ranges(walk.rows, walk.n) : core::cpu_ranges(walk.rows, walk.n);
  core::PartialColumnSums dweight(needs_dweight, ranges, walk.n, rstd.options());
  Tensor scaled = scaled_weight(weight, x, options);
  if (!scaled.defined()) scaled = at::ones({walk.n}, rstd.options());
  core::dispatch_compute(x.scalar_type(), [&](auto c) {
    using C = decltype(c);
    const CpuBackward<C> a{
        core::input<C>(dy),
        core::input<C>(x),
        core::input<C>(gate),
        scaled.const_data_ptr<C>(),
        rstd.const_data_ptr<C>(),
        core::output<C>(dx),
        core::output<C>(dgate),
        walk,
        groups,
        columns,
        {options, x, weight},
        options.gate_first,
        options.sigmoid};
    core::parallel_ranges(walk.rows, ranges, [&](int64_t range, int64_t begin, int64_t end) {
      core::vectorized<C>([&] { backward_rows(a, dweight.of<C>(range), begin, end); });
    });
  });
  return {dx, dgate, dweight.sum(weight.scalar_type())};
}

}  // namespace liger::ops::rms_norm_gated
