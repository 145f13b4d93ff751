// causal_conv1d on CPU: sums in fp32, or fp64 for fp64 rows.

#include "core/checks.h"
#include "core/cpu/loops.h"
#include "core/cpu/math.h"
#include "ops/conv/causal_conv1d.h"

namespace liger::ops::causal_conv1d {

namespace {

template <class C>
struct Rows {
  core::Input<C> x, state;  // state may be null
  const C *weight, *bias;  // (W, C); bias may be null
  const int32_t* samples;  // may be null
  int64_t length, columns, width, past, dilation, x_batch, x_row;
  bool silu, rounds;

  /// Row t of a batch, which may be one of the state; null if it is zero or of another sample than row `from`.
  core::Input<C> row(int64_t batch, int64_t t, int64_t from) const {
    if (t >= length) return {};
    if (samples) {
      const int32_t* of = samples + batch * length;
      if (of[std::max<int64_t>(t, 0)] != of[std::max<int64_t>(from, 0)]) return {};
    }
    if (t >= 0) return x + (batch * x_batch + t * x_row);
    return state + (batch * past + t + past) * columns;
  }
};

template <class C>
void add_product(C* out, const C* a, const C* b, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] += a[i] * b[i];
}

/// The convolution at row t, rounded if it is.
template <class C>
void convolve(const Rows<C>& a, C* out, C* stage, int64_t batch, int64_t t) {
  const int64_t n = a.columns;
  a.bias ? std::copy_n(a.bias, n, out) : std::fill_n(out, n, C(0));
  for (int64_t j = 0; j < a.width; ++j) {
    const auto row = a.row(batch, t - (a.width - 1 - j) * a.dilation, t);
    if (row) add_product(out, a.weight + j * n, core::widen_all(row, stage, n), n);
  }
  if (a.rounds) core::round_all(a.x.storage, out, n);
}

template <class C>
void forward_rows(const Rows<C>& a, core::Output<C> y, int64_t begin, int64_t end) {
  const int64_t n = a.columns;
  std::vector<C> stage = core::make_stage<C>(a.x.storage, n), sums(n);
  for (int64_t i = begin; i < end; ++i) {
    C* v = sums.data();
    convolve(a, v, stage.data(), i / a.length, i % a.length);
    if (a.silu) {
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) v[c] *= core::vector_sigmoid(v[c]);
    }
    core::store_all(y + i * n, v, n);
  }
}

/// dv, the gradient of the convolution, and this range's share of those of the weight, (W, C), and the bias, which may
/// be null.
template <class C>
void upstream_rows(
    const Rows<C>& a, core::Input<C> dy, int64_t dy_batch, int64_t dy_row, C* dv, C* dweight, C* dbias, int64_t begin,
    int64_t end) {
  const int64_t n = a.columns;
  std::vector<C> stage = core::make_stage<C>(a.x.storage, n), sums(n);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t batch = i / a.length, t = i % a.length;
    C *out = dv + i * n, *v = sums.data();
    const C* grad = core::widen_all(dy + (batch * dy_batch + t * dy_row), stage.data(), n);
    std::copy_n(grad, n, out);
    if (a.silu) {
      convolve(a, v, stage.data(), batch, t);
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) {
        const auto s = core::vector_sigmoid_and_slope(v[c]);
        out[c] *= s.value + v[c] * s.slope;
      }
    }
    for (int64_t j = 0; dweight && j < a.width; ++j) {
      const auto row = a.row(batch, t - (a.width - 1 - j) * a.dilation, t);
      if (row) add_product(dweight + j * n, out, core::widen_all(row, stage.data(), n), n);
    }
    if (dbias) {
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) dbias[c] += out[c];
    }
  }
}

/// The gradient of row t of a batch: of x, or of the state if t is negative.
template <class C>
void gradient_row(const Rows<C>& a, const C* dv, C* sums, core::Output<C> out, int64_t batch, int64_t t) {
  const int64_t n = a.columns;
  std::fill_n(sums, n, C(0));
  for (int64_t j = 0; j < a.width; ++j) {
    const int64_t later = t + (a.width - 1 - j) * a.dilation;
    if (later < 0 || !a.row(batch, later, t)) continue;
    add_product(sums, a.weight + j * n, dv + (batch * a.length + later) * n, n);
  }
  core::store_all(out, sums, n);
}

/// Calls f(Rows<C>).
template <class F>
void with_rows(const Inputs& in, const F& f) {
  const auto type = core::compute_type(in.x);
  const Tensor weight = in.weight.to(type).t().contiguous();
  const Tensor bias = in.bias.defined() ? in.bias.to(type) : in.bias;
  core::dispatch_compute(type, [&](auto c) {
    using C = decltype(c);
    f(Rows<C>{
        core::input<C>(in.x), core::input<C>(in.state), weight.const_data_ptr<C>(), core::const_data_or_null<C>(bias),
        core::const_data_or_null<int32_t>(in.samples), in.x.size(1), in.x.size(2), in.width(), in.past(), in.dilation,
        in.x.stride(0), in.x.stride(1), in.silu, in.rounds()});
  });
}

void forward_on(const Inputs& in, const Tensor& y) {
  const int64_t rows = in.x.size(0) * in.x.size(1), n = in.x.size(2);
  with_rows(in, [&](const auto& a) {
    using C = std::decay_t<decltype(*a.weight)>;
    const auto out = core::output<C>(y);
    core::parallel_ranges(rows, core::cpu_ranges(rows, n), [&](int64_t, int64_t begin, int64_t end) {
      core::vectorized<C>([&] { forward_rows(a, out, begin, end); });
    });
  });
}

void backward_on(const Tensor& dy, const Inputs& in, const Gradients& out) {
  const int64_t batches = in.x.size(0), length = in.x.size(1), rows = batches * length, n = in.x.size(2);
  with_rows(in, [&](const auto& a) {
    using C = std::decay_t<decltype(*a.weight)>;
    const auto options = in.x.options().dtype(c10::CppTypeToScalarType<C>::value);
    const bool adds_up = out.dweight.defined() || out.dbias.defined();
    const int64_t ranges = adds_up ? core::cpu_sum_ranges(rows, n) : core::cpu_ranges(rows, n);
    const Tensor dv = at::empty({rows, n}, options);
    core::PartialColumnSums dweight(out.dweight.defined(), ranges, a.width * n, options);
    core::PartialColumnSums dbias(out.dbias.defined(), ranges, n, options);
    C* dv_at = dv.template data_ptr<C>();
    core::parallel_ranges(rows, ranges, [&](int64_t range, int64_t begin, int64_t end) {
      core::vectorized<C>([&] {
        upstream_rows(
            a, core::input<C>(dy), dy.stride(0), dy.stride(1), dv_at, dweight.template of<C>(range),
            dbias.template of<C>(range), begin, end);
      });
    });
    auto write = [&](const Tensor& grad, int64_t count, int64_t first) {
      if (!grad.defined()) return;
      const auto to = core::output<C>(grad);
      const int64_t all = batches * count;
      core::parallel_ranges(all, core::cpu_ranges(all, n), [&](int64_t, int64_t begin, int64_t end) {
        std::vector<C> sums(n);
        core::vectorized<C>([&] {
          for (int64_t i = begin; i < end; ++i) {
            gradient_row<C>(a, dv_at, sums.data(), to + i * n, i / count, i % count + first);
          }
        });
      });
    };
    write(out.dx, length, 0);
    write(out.dstate, a.past, -a.past);
    const auto type = in.weight.scalar_type();
    if (out.dweight.defined()) out.dweight.copy_(dweight.sum(type).view({a.width, n}).t());
    if (out.dbias.defined()) out.dbias.copy_(dbias.sum(type));
  });
}

/// The columns of the parts in a tensor of x's shape: (B, S, groups, size) each.
std::vector<Tensor> columns_of_parts(const Tensor& t, const Columns& columns) {
  const auto& [first, second, third] = columns.sizes;
  const Tensor groups = t.unflatten(2, {columns.groups, columns.pitch}).narrow(3, 0, columns.convolved());
  return groups.split_with_sizes({first, second, third}, 3);
}

Inputs with_channels_in_order(const Inputs& in) {
  std::vector<Tensor> parts = columns_of_parts(in.x, in.columns);
  for (Tensor& part : parts) part = part.flatten(2);
  Inputs ordered = in;
  ordered.x = at::cat(parts, 2);
  ordered.columns = {1, in.channels(), {in.channels(), 0, 0}};
  return ordered;
}

}  // namespace

void Cpu::forward(const Inputs& in, const Parts& y) {
  if (in.columns.whole()) return forward_on(in, y[0]);
  const Inputs ordered = with_channels_in_order(in);
  const Tensor all = at::empty_like(ordered.x);
  forward_on(ordered, all);
  for (int64_t i = 0, first = 0; i < int64_t(kParts); first += in.columns.part(i++)) {
    y[i].copy_(all.narrow(2, first, in.columns.part(i)));
  }
}

void Cpu::backward(const Parts& dy, const Inputs& in, const Gradients& out) {
  if (in.columns.whole()) return backward_on(dy[0], in, out);
  const Inputs ordered = with_channels_in_order(in);
  Gradients found = out;
  if (out.dx.defined()) found.dx = at::empty_like(ordered.x);
  backward_on(at::cat(dy, 2), ordered, found);
  if (!out.dx.defined()) return;
  const std::vector<Tensor> to = columns_of_parts(out.dx, in.columns);
  for (int64_t i = 0, first = 0; i < int64_t(kParts); first += in.columns.part(i++)) {
    to[i].copy_(found.dx.narrow(2, first, in.columns.part(i)).view(to[i].sizes()));
  }
}

}  // namespace liger::ops::causal_conv1d
