// qk_norm_rope on CPU: statistics in fp32, or fp64 for fp64 heads. One token's heads share its angles.

#include "core/cpu.h"
#include "core/cpu_math.h"
#include "core/inverse_rms.h"
#include "ops/rope/angles_cpu.h"
#include "ops/rope/qk_norm_rope.h"

namespace liger::ops::qk_norm_rope {

namespace {

using rope::HeadStrides;
using rope::PairAngles;

// The weight in the compute type, with the offset added; ones if it is absent.
Tensor scaled(const Tensor& weight, const Forward& call) {
  const auto options = call.q.options().dtype(core::compute_type(call.q));
  return weight.defined() ? weight.to(options).add(call.offset) : at::ones({call.head_size()}, options);
}

// The heads of q or of k.
template <class T>
struct Heads {
  using C = core::Compute<T>;
  Heads(const Tensor& out, const Tensor& x, const Tensor& scaled, bool round_first)
      : heads(x.size(1)),
        n(x.size(3)),
        out_strides(out.defined() ? HeadStrides(out) : HeadStrides(x)),
        strides(x),
        out(core::data_or_null<T>(out)),
        x(x.const_data_ptr<T>()),
        weight(scaled.const_data_ptr<C>()),
        round_first(round_first) {}
  int64_t heads, n;
  HeadStrides out_strides, strides;
  T* out;
  const T* x;
  const C* weight;
  bool round_first;
};

// y may be x.
template <class C>
void rotate_head(C* y, const C* x, int64_t n, const PairAngles<C>& angles, bool interleaved) {
  rope::rotate_row(y, x, angles, interleaved, interleaved);
  if (y != x) std::copy(x + 2 * angles.half, x + n, y + 2 * angles.half);
}

template <class T>
LIGER_VECTORIZED void forward_heads(
    const Heads<T>& a, int64_t b, int64_t s, const PairAngles<core::Compute<T>>& angles, bool interleaved,
    core::Compute<T> eps, core::Compute<T>* wide, core::Compute<T>* normed) {
  using C = core::Compute<T>;
  const T* x = a.x + a.strides.offset(b, s);
  T* out = a.out + a.out_strides.offset(b, s);
  for (int64_t h = 0; h < a.heads; ++h, x += a.strides.head, out += a.out_strides.head) {
    const C* v = core::widen_all(x, wide, a.n);
    const C scale = core::inverse_rms(v, a.n, eps);
    if (a.round_first) {
#pragma omp simd
      for (int64_t i = 0; i < a.n; ++i) {
        normed[i] = core::round_to<T>(core::round_to<T>(v[i] * scale) * a.weight[i]);
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < a.n; ++i) normed[i] = core::round_to<T>(v[i] * scale * a.weight[i]);
    }
    C* y = core::target(out, normed);
    rotate_head(y, normed, a.n, angles, interleaved);
    core::narrow_all(out, y, a.n);
  }
}

// sums: this range's partial sum of the weight's gradient, or null. grad may be a.out.
template <class T>
LIGER_VECTORIZED void backward_heads(
    const Heads<T>& a, const T* grad, const HeadStrides& grad_strides, int64_t b, int64_t s,
    const PairAngles<core::Compute<T>>& inverse, bool interleaved, core::Compute<T> eps, core::Compute<T>* sums,
    core::Compute<T>* wide, core::Compute<T>* turned) {
  using C = core::Compute<T>;
  const T* x = a.x + a.strides.offset(b, s);
  grad += grad_strides.offset(b, s);
  T* out = a.out ? a.out + a.out_strides.offset(b, s) : nullptr;
  for (int64_t h = 0; h < a.heads; ++h, x += a.strides.head, grad += grad_strides.head) {
    rotate_head(turned, core::widen_all(grad, turned, a.n), a.n, inverse, interleaved);
    const C* v = core::widen_all(x, wide, a.n);
    const C scale = core::inverse_rms(v, a.n, eps);
    if (sums && a.round_first) {
#pragma omp simd
      for (int64_t i = 0; i < a.n; ++i) sums[i] += turned[i] * core::round_to<T>(v[i] * scale);
    } else if (sums) {
#pragma omp simd
      for (int64_t i = 0; i < a.n; ++i) sums[i] += turned[i] * v[i] * scale;
    }
    if (!out) continue;
    // Two loops: compilers do not vectorize a sum in a loop that also stores.
#pragma omp simd
    for (int64_t i = 0; i < a.n; ++i) turned[i] *= a.weight[i];
    C dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < a.n; ++i) dot += turned[i] * v[i];
    const C mean = dot * scale * scale / a.n;
    C* dx = core::target(out, turned);
#pragma omp simd
    for (int64_t i = 0; i < a.n; ++i) dx[i] = (turned[i] - v[i] * mean) * scale;
    core::narrow_all(out, dx, a.n);
    out += a.out_strides.head;
  }
}

// Calls f(T{}, load) where load(angles, token) reads one token's angles.
template <class F>
void dispatch(const Forward& call, bool inverse, const F& f) {
  core::dispatch_activation_parameter(call.q.scalar_type(), call.angles.cos.scalar_type(), [&](auto t, auto w) {
    const int64_t positions = call.positions();
    f(t, [&, positions](auto& angles, int64_t token) {
      const int64_t b = token / positions, s = token - b * positions;
      angles.template load<decltype(w)>(call.angles, inverse, b, s);
      return std::make_pair(b, s);
    });
  });
}

}  // namespace

void Cpu::forward(const Forward& call) {
  runtime::count_cpu_call();
  if (call.empty()) return;
  const Tensor q_weight = scaled(call.q_weight, call), k_weight = scaled(call.k_weight, call);
  const int64_t n = call.head_size(), tokens = call.tokens(), heads = call.q.size(1) + call.k.size(1);
  dispatch(call, false, [&](auto t, const auto& load) {
    using T = decltype(t);
    using C = core::Compute<T>;
    const Heads<T> q(call.out_q, call.q, q_weight, call.round_first && call.q_weight.defined());
    const Heads<T> k(call.out_k, call.k, k_weight, call.round_first && call.k_weight.defined());
    core::parallel_ranges(tokens, core::cpu_ranges(tokens, heads * n), [&](int64_t, int64_t begin, int64_t end) {
      PairAngles<C> angles(call.angles.half);
      std::vector<C> wide(n), normed(n);
      for (int64_t token = begin; token < end; ++token) {
        const auto [b, s] = load(angles, token);
        forward_heads(q, b, s, angles, call.interleaved, C(call.eps), wide.data(), normed.data());
        forward_heads(k, b, s, angles, call.interleaved, C(call.eps), wide.data(), normed.data());
      }
    });
  });
}

WeightGradients Cpu::backward(const Backward& call) {
  runtime::count_cpu_call();
  const Tensor q_weight = scaled(call.q_weight, call), k_weight = scaled(call.k_weight, call);
  const int64_t n = call.head_size(), tokens = call.tokens(), heads = call.q.size(1) + call.k.size(1);
  const bool sums_q = call.needs_weights && call.q_weight.defined();
  const bool sums_k = call.needs_weights && call.k_weight.defined();
  const int64_t ranges = std::min(
      std::max<int64_t>(tokens, 1),
      call.needs_weights ? core::cpu_sum_ranges(tokens * heads, n) : core::cpu_ranges(tokens, heads * n));
  const core::PartialColumnSums dq_weight(sums_q, ranges, n, q_weight.options());
  const core::PartialColumnSums dk_weight(sums_k, ranges, n, k_weight.options());
  if (!call.empty()) {
    dispatch(call, true, [&](auto t, const auto& load) {
      using T = decltype(t);
      using C = core::Compute<T>;
      const Heads<T> q(call.out_q, call.q, q_weight, call.round_first && call.q_weight.defined());
      const Heads<T> k(call.out_k, call.k, k_weight, call.round_first && call.k_weight.defined());
      const HeadStrides grad_q(call.grad_q), grad_k(call.grad_k);
      const T *grad_q_at = call.grad_q.const_data_ptr<T>(), *grad_k_at = call.grad_k.const_data_ptr<T>();
      core::parallel_ranges(tokens, ranges, [&](int64_t range, int64_t begin, int64_t end) {
        PairAngles<C> angles(call.angles.half);
        std::vector<C> wide(n), turned(n);
        C *q_sums = dq_weight.of<C>(range), *k_sums = dk_weight.of<C>(range);
        for (int64_t token = begin; token < end; ++token) {
          const auto [b, s] = load(angles, token);
          backward_heads(
              q, grad_q_at, grad_q, b, s, angles, call.interleaved, C(call.eps), q_sums, wide.data(), turned.data());
          backward_heads(
              k, grad_k_at, grad_k, b, s, angles, call.interleaved, C(call.eps), k_sums, wide.data(), turned.data());
        }
      });
    });
  }
  return {
      sums_q ? dq_weight.sum(call.q_weight.scalar_type()) : Tensor(),
      sums_k ? dk_weight.sum(call.k_weight.scalar_type()) : Tensor()};
}

}  // namespace liger::ops::qk_norm_rope
