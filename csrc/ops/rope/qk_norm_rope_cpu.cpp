// qk_norm_rope on CPU: statistics in fp32, or fp64 for fp64 heads. One token's heads share its angles.

#include "core/checks.h"
#include "core/cpu/loops.h"
#include "core/cpu/rms.h"
#include "ops/rope/angles_cpu.h"
#include "ops/rope/qk_norm_rope.h"

namespace liger::ops::qk_norm_rope {

namespace {

using rope::for_tokens;
using rope::HeadStrides;
using rope::PairAngles;

// The weight in the compute type, with the offset added; ones if it is absent.
Tensor scaled(const Tensor& weight, const Forward& call) {
  const auto options = call.q.options().dtype(core::compute_type(call.q));
  return weight.defined() ? weight.to(options).add(call.offset) : at::ones({call.head_size()}, options);
}

// The heads of q or of k. scaled: as above. grad: in backward.
template <class C>
struct Normed {
  Normed(
      const Forward& call, const Tensor& out, const Tensor& x, const Tensor& grad, const Tensor& weight,
      const Tensor& scaled)
      : heads(x.size(1)),
        n(x.size(3)),
        out_strides(out.defined() ? out : x),
        strides(x),
        grad_strides(grad),
        out(core::output<C>(out)),
        x(core::input<C>(x)),
        grad(core::input<C>(grad)),
        weight(scaled.const_data_ptr<C>()),
        eps(call.eps),
        round_first(call.round_first && weight.defined()),
        interleaved(call.interleaved) {}
  int64_t heads, n;
  HeadStrides out_strides, strides, grad_strides;
  core::Output<C> out;
  core::Input<C> x, grad;
  const C* weight;
  C eps;
  bool round_first, interleaved;
};

// y may be x.
template <class C>
void rotate_head(C* y, const C* x, int64_t n, const PairAngles<C>& angles, bool interleaved) {
  rope::rotate_row(y, x, angles, interleaved, interleaved);
  if (y != x) std::copy(x + 2 * angles.half, x + n, y + 2 * angles.half);
}

template <class C>
void forward_heads(const Normed<C>& a, int64_t b, int64_t s, const PairAngles<C>& angles, C* stage) {
  const int64_t n = a.n;
  const C* weight = a.weight;
  C *wide = stage, *normed = stage + n;
  auto x = a.x + a.strides.offset(b, s);
  auto out = a.out + a.out_strides.offset(b, s);
  for (int64_t h = 0; h < a.heads; ++h, x = x + a.strides.head, out = out + a.out_strides.head) {
    const C* v = core::widen_all(x, wide, n);
    const C scale = core::inverse_rms(v, n, a.eps);
    if (a.round_first && a.x.storage != core::Storage::compute) {
      core::scale_and_round(a.x.storage, normed, v, scale, n);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) normed[i] *= weight[i];
    } else {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) normed[i] = v[i] * scale * weight[i];
    }
    core::round_all(a.x.storage, normed, n);
    C* y = core::target(out, normed);
    rotate_head(y, normed, n, angles, a.interleaved);
    core::narrow_all(out, y, n);
  }
}

// sums: this range's partial sum of the weight's gradient, or null. a.grad may be a.out.
template <class C>
void backward_heads(const Normed<C>& a, int64_t b, int64_t s, const PairAngles<C>& inverse, C* sums, C* stage) {
  const int64_t n = a.n;
  const C* weight = a.weight;
  C *wide = stage, *turned = stage + n, *rounded = stage + 2 * n;
  auto x = a.x + a.strides.offset(b, s), grad = a.grad + a.grad_strides.offset(b, s);
  auto out = a.out + a.out_strides.offset(b, s);
  for (int64_t h = 0; h < a.heads; ++h, x = x + a.strides.head, grad = grad + a.grad_strides.head) {
    rotate_head(turned, core::widen_all(grad, turned, n), n, inverse, a.interleaved);
    const C* v = core::widen_all(x, wide, n);
    const C scale = core::inverse_rms(v, n, a.eps);
    if (sums && a.round_first) {
      core::scale_and_round(a.x.storage, rounded, v, scale, n);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) sums[i] += turned[i] * rounded[i];
    } else if (sums) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) sums[i] += turned[i] * v[i] * scale;
    }
    if (!out) continue;
    // Two loops: compilers do not vectorize a sum in a loop that also stores.
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) turned[i] *= weight[i];
    C dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < n; ++i) dot += turned[i] * v[i];
    const C mean = dot * scale * scale / n;
    C* dx = core::target(out, turned);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) dx[i] = (turned[i] - v[i] * mean) * scale;
    core::narrow_all(out, dx, n);
    out = out + a.out_strides.head;
  }
}

}  // namespace

void Cpu::forward(const Forward& call) {
  runtime::count_cpu_call();
  if (call.empty()) return;
  const Tensor q_weight = scaled(call.q_weight, call), k_weight = scaled(call.k_weight, call);
  const int64_t n = call.head_size(), tokens = call.tokens(), heads = call.q.size(1) + call.k.size(1);
  core::dispatch_compute(call.q.scalar_type(), [&](auto c) {
    using C = decltype(c);
    const Normed<C> both[] = {
        {call, call.out_q, call.q, call.q, call.q_weight, q_weight},
        {call, call.out_k, call.k, call.k, call.k_weight, k_weight}};
    core::parallel_ranges(tokens, core::cpu_ranges(tokens, heads * n), [&](int64_t, int64_t begin, int64_t end) {
      std::vector<C> stage(2 * n);
      for_tokens<C>(call, false, begin, end, [&](const auto& angles, int64_t b, int64_t s) {
        for (const auto& a : both) forward_heads(a, b, s, angles, stage.data());
      });
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
    core::dispatch_compute(call.q.scalar_type(), [&](auto c) {
      using C = decltype(c);
      const Normed<C> both[] = {
          {call, call.out_q, call.q, call.grad_q, call.q_weight, q_weight},
          {call, call.out_k, call.k, call.grad_k, call.k_weight, k_weight}};
      core::parallel_ranges(tokens, ranges, [&](int64_t range, int64_t begin, int64_t end) {
        C* const sums[] = {dq_weight.of<C>(range), dk_weight.of<C>(range)};
        std::vector<C> stage(3 * n);
        for_tokens<C>(call, true, begin, end, [&](const auto& angles, int64_t b, int64_t s) {
          for (int i : {0, 1}) backward_heads(both[i], b, s, angles, sums[i], stage.data());
        });
      });
    });
  }
  return {dq_weight.sum(call.q_weight.scalar_type()), dk_weight.sum(call.k_weight.scalar_type())};
}

}  // namespace liger::ops::qk_norm_rope
