// rms_norm_gated on CPU: statistics in fp32, or fp64 for fp64 rows.

#include "core/cpu.h"
#include "core/cpu_math.h"
#include "core/inverse_rms.h"
#include "core/rows.h"
#include "ops/norms/rms_norm_gated.h"

namespace liger::ops::rms_norm_gated {

namespace {

template <class T, class Y>
struct CpuForward {
  using C = core::Compute<T>;
  const T *x, *gate;
  const C* weight;  // with the offset added, or null
  Y* y;
  C* rstd;
  const core::Rows<3>& walk;  // y, x, gate
  int64_t groups, columns;
  C eps;
  bool round_row, round_product, gate_first, sigmoid;
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

template <class T, class C>
void round_all(C* x, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] = core::round_to<T>(x[i]);
}

/// Stores n results, rounded to T.
template <class T, class C>
void store_all(T* out, const C* values, int64_t n) {
  if constexpr (std::is_same_v<T, C>) {
    std::copy(values, values + n, out);
  } else {
    core::narrow_all(out, values, n);
  }
}

template <class C>
void multiply(C* out, const C* a, const C* b, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] * b[i];
}

template <class T, class Y>
LIGER_VECTORIZED void forward_rows(const CpuForward<T, Y>& a, int64_t begin, int64_t end) {
  using C = core::Compute<T>;
  constexpr int64_t kBlock = core::kColumnsPerSum;
  const int64_t n = a.columns, inner = a.walk.inner_rows;
  std::vector<C> x_stage = core::make_stage<T, C>(n), gate_stage = core::make_stage<T, C>(n), activation(n), product(n);
  C block[kBlock];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t group = 0; group < a.groups; ++group) {
      const int64_t start = group * n;
      const C* x = core::widen_all(a.x + a.walk.strides[1].offset(row, inner) + start, x_stage.data(), n);
      const C* gate = core::widen_all(a.gate + a.walk.strides[2].offset(row, inner) + start, gate_stage.data(), n);
      activate(activation.data(), gate, n, a.sigmoid);
      if (a.gate_first) {
        multiply(product.data(), x, activation.data(), n);
        x = product.data();
      }
      const C scale = core::inverse_rms(x, n, a.eps);
      if (a.rstd) a.rstd[row * a.groups + group] = scale;
      Y* y = a.y + a.walk.strides[0].offset(row, inner) + start;
      for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t count = std::min(kBlock, n - first);
        const C* v = x + first;
        C* out = core::target(y + first, block);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = v[i] * scale;
        if (a.round_row) round_all<T>(out, count);
        if (a.weight) multiply(out, out, a.weight + start + first, count);
        if (a.round_product) round_all<T>(out, count);
        if (!a.gate_first) multiply(out, out, activation.data() + first, count);
        core::narrow_all(y + first, out, count);
      }
    }
  }
}

template <class T, class Y>
struct CpuBackward {
  using C = core::Compute<T>;
  const Y* dy;
  const T *x, *gate;
  const C *weight, *rstd;  // weight: with the offset added
  T *dx, *dgate;
  const core::Rows<6>& walk;  // lead, dx, dgate, dy, x, gate
  int64_t groups, columns;
  bool round_row, round_product, sigmoid;
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
template <class T, class Y, bool kGateFirst>
LIGER_VECTORIZED void backward_rows(const CpuBackward<T, Y>& a, core::Compute<T>* sums, int64_t begin, int64_t end) {
  using C = core::Compute<T>;
  constexpr int64_t kBlock = core::kColumnsPerSum;
  const int64_t n = a.columns, inner = a.walk.inner_rows;
  std::vector<C> stages[3] = {core::make_stage<Y, C>(n), core::make_stage<T, C>(n), core::make_stage<T, C>(n)};
  std::vector<C> activation(n), slope(n), normed(n), grad(n);
  C block[kBlock];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t group = 0; group < a.groups; ++group) {
      const int64_t start = group * n;
      const C* dy = core::widen_all(a.dy + a.walk.strides[3].offset(row, inner) + start, stages[0].data(), n);
      const C* x = core::widen_all(a.x + a.walk.strides[4].offset(row, inner) + start, stages[1].data(), n);
      const C* gate = core::widen_all(a.gate + a.walk.strides[5].offset(row, inner) + start, stages[2].data(), n);
      const C* weight = a.weight + start;
      const C scale = a.rstd[row * a.groups + group];
      activate_with_slope(activation.data(), slope.data(), gate, n, a.sigmoid);
      double dot = 0;
      for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t count = std::min(kBlock, n - first);
        const C *g = dy + first, *v = x + first, *act = activation.data() + first, *w = weight + first;
        C *out = normed.data() + first, *dn = grad.data() + first, part = 0;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) {
          out[i] = (kGateFirst ? v[i] * act[i] : v[i]) * scale;
          dn[i] = kGateFirst ? g[i] : g[i] * act[i];
        }
        if (sums && a.round_row) {
          C* sum = sums + start + first;
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) sum[i] += dn[i] * core::round_to<T>(out[i]);
        } else if (sums) {
          C* sum = sums + start + first;
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) sum[i] += dn[i] * out[i];
        }
#pragma omp simd reduction(+ : part)
        for (int64_t i = 0; i < count; ++i) {
          dn[i] *= w[i];
          part += dn[i] * out[i];
        }
        dot += part;
      }
      const C mean = C(dot / n);
      T* dx = a.dx ? a.dx + a.walk.strides[1].offset(row, inner) + start : nullptr;
      T* dgate = a.dgate ? a.dgate + a.walk.strides[2].offset(row, inner) + start : nullptr;
      for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t count = std::min(kBlock, n - first);
        const C *g = dy + first, *v = x + first, *act = activation.data() + first, *w = weight + first;
        C *norm = normed.data() + first, *dn = grad.data() + first, *by = slope.data() + first;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) dn[i] = (dn[i] - norm[i] * mean) * scale;
        if (dgate) {
          if (kGateFirst) {
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) block[i] = dn[i] * v[i] * by[i];
          } else {
            if (a.round_row) round_all<T>(norm, count);
            multiply(norm, norm, w, count);
            if (a.round_product) round_all<T>(norm, count);
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) block[i] = g[i] * norm[i] * by[i];
          }
          store_all(dgate + first, block, count);
        }
        if (dx) {
          if (kGateFirst) multiply(dn, dn, act, count);
          store_all(dx + first, dn, count);
        }
      }
    }
  }
}

/// weight + offset in the dtype of sums, or undefined.
Tensor scaled_weight(const Tensor& weight, const Tensor& x, const Options& options) {
  return weight.defined() ? weight.contiguous().to(core::compute_type(x)).add(options.offset) : Tensor();
}

/// Calls f(x_type{}, y_type{}).
template <class F>
void dispatch(const Tensor& x, const Tensor& y, const F& f) {
  core::dispatch_activation_parameter(x.scalar_type(), y.scalar_type(), f);
}

}  // namespace

Forward Cpu::forward(
    const Tensor& x_in, const Tensor& gate_in, const Tensor& weight, const Options& options,
    const c10::SymInt& groups_in, const c10::SymInt& columns_in, bool save_rstd) {
  Tensor x = x_in, gate = gate_in;
  runtime::count_cpu_call();
  Forward out = allocate(x, weight, options, groups_in, columns_in, save_rstd);
  if (x.numel() == 0) return out;
  const int64_t groups = groups_in.expect_int(), columns = columns_in.expect_int();
  const Tensor scaled = scaled_weight(weight, x, options);
  auto walk = core::walk_rows<3>(kOp, {&out.y, &x, &gate});
  dispatch(x, out.y, [&](auto t, auto y) {
    using T = decltype(t);
    using Y = decltype(y);
    using C = core::Compute<T>;
    CpuForward<T, Y> a{
        x.const_data_ptr<T>(),
        gate.const_data_ptr<T>(),
        core::data_or_null<C>(scaled),
        out.y.data_ptr<Y>(),
        core::data_or_null<C>(out.rstd),
        walk,
        groups,
        columns,
        C(options.eps),
        options.rounds_row(),
        options.rounds_product(x, weight),
        options.gate_first,
        options.sigmoid};
    core::parallel_ranges(walk.rows, core::cpu_ranges(walk.rows, walk.n), [&](int64_t, int64_t begin, int64_t end) {
      forward_rows(a, begin, end);
    });
  });
  return out;
}

Gradients Cpu::backward(
    const Tensor& dy_in, const Tensor& x_in, const Tensor& gate_in, const Tensor& weight, const Tensor& rstd_in,
    const Options& options, const Tensor& dx_in, const Tensor& dgate_in, bool needs_dweight) {
  Tensor dy = dy_in, x = x_in, gate = gate_in, dx = dx_in, dgate = dgate_in;
  runtime::count_cpu_call();
  if (x.numel() == 0) return {dx, dgate, needs_dweight ? at::zeros_like(weight) : Tensor()};
  const int64_t groups = rstd_in.size(-1), columns = x.size(-1) / groups;
  Tensor lead = dx.defined() ? dx : dgate.defined() ? dgate : core::empty_rows_like(x);
  Tensor rstd = core::per_row(rstd_in, by_group(lead, groups, columns));
  auto walk = core::walk_rows<6>(kBackward, {&lead, &dx, &dgate, &dy, &x, &gate});
  int64_t ranges = needs_dweight ? core::cpu_sum_ranges(walk.rows, walk.n) : core::cpu_ranges(walk.rows, walk.n);
  core::PartialColumnSums dweight(needs_dweight, ranges, walk.n, rstd.options());
  Tensor scaled = scaled_weight(weight, x, options);
  if (!scaled.defined()) scaled = at::ones({walk.n}, rstd.options());
  dispatch(x, dy, [&](auto t, auto y) {
    using T = decltype(t);
    using Y = decltype(y);
    using C = core::Compute<T>;
    CpuBackward<T, Y> a{
        dy.const_data_ptr<Y>(),
        x.const_data_ptr<T>(),
        gate.const_data_ptr<T>(),
        scaled.const_data_ptr<C>(),
        rstd.const_data_ptr<C>(),
        core::data_or_null<T>(dx),
        core::data_or_null<T>(dgate),
        walk,
        groups,
        columns,
        options.rounds_row(),
        options.rounds_product(x, weight),
        options.sigmoid};
    core::parallel_ranges(walk.rows, ranges, [&](int64_t range, int64_t begin, int64_t end) {
      C* sums = dweight.of<C>(range);
      options.gate_first ? backward_rows<T, Y, true>(a, sums, begin, end)
                         : backward_rows<T, Y, false>(a, sums, begin, end);
    });
  });
  return {dx, dgate, needs_dweight ? dweight.sum(weight.scalar_type()) : Tensor()};
}

}  // namespace liger::ops::rms_norm_gated
