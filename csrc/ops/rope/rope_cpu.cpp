// rope on CPU.

#include "core/cpu.h"
#include "core/cpu_math.h"
#include "ops/rope/angles_cpu.h"
#include "ops/rope/rope.h"

namespace liger::ops::rope {

namespace {

template <class T>
LIGER_VECTORIZED void rotate_heads(
    T* y, const T* x, const Call& call, int64_t heads, int64_t y_head, int64_t x_head,
    const PairAngles<core::Compute<T>>& angles, core::Compute<T>* stage) {
  const int64_t rotated = 2 * angles.half, first = call.first(), width = call.head_size(), end = first + rotated;
  const bool x_pairs = call.reads_pairs(), y_pairs = call.writes_pairs();
  for (int64_t h = 0; h < heads; ++h, x += x_head, y += y_head) {
    const auto* from = core::widen_all(x + first, stage, rotated);
    auto* to = core::target(y + first, x_pairs == y_pairs ? stage : stage + rotated);
    rotate_row(to, from, angles, x_pairs, y_pairs);
    core::narrow_all(y + first, to, rotated);
    if (x == y) continue;
    std::copy(x, x + first, y);
    std::copy(x + end, x + width, y + end);
  }
}

}  // namespace

void rotate_cpu(const char*, const Call& call) {
  runtime::count_cpu_call();
  if (call.q.numel() + call.k.numel() == 0) return;
  const HeadStrides q(call.q), k(call.k), out_q(call.out_q), out_k(call.out_k);
  const int64_t positions = call.positions(), rows = call.batch() * positions, width = call.head_size();
  const int64_t q_heads = call.q.size(1), k_heads = call.k.size(1), half = call.angles.half;
  core::dispatch_activation_parameter(call.q.scalar_type(), call.angles.cos.scalar_type(), [&](auto t, auto w) {
    using T = decltype(t);
    using C = core::Compute<T>;
    const T *q_at = call.q.const_data_ptr<T>(), *k_at = call.k.const_data_ptr<T>();
    T *out_q_at = call.out_q.data_ptr<T>(), *out_k_at = call.out_k.data_ptr<T>();
    int64_t ranges = core::cpu_ranges(rows, (q_heads + k_heads) * width);
    core::parallel_ranges(rows, ranges, [&](int64_t, int64_t begin, int64_t end) {
      PairAngles<C> angles(half);
      std::vector<C> stage(4 * half);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t b = row / positions, s = row - b * positions;
        angles.template load<decltype(w)>(call.angles, call.inverse, b, s);
        rotate_heads(
            out_q_at + out_q.offset(b, s), q_at + q.offset(b, s), call, q_heads, out_q.head, q.head, angles,
            stage.data());
        rotate_heads(
            out_k_at + out_k.offset(b, s), k_at + k.offset(b, s), call, k_heads, out_k.head, k.head, angles,
            stage.data());
      }
    });
  });
}

}  // namespace liger::ops::rope
