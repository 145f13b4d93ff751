// rope on CPU.

#include <cstring>

#include "core/cpu/loops.h"
#include "ops/rope/angles_cpu.h"
#include "ops/rope/rope.h"

namespace liger::ops::rope {

namespace {

// The heads of q or of k.
template <class C>
struct Rotated {
  Rotated(const Call& call, const Tensor& out, const Tensor& in)
      : out(core::output<C>(out)),
        in(core::input<C>(in)),
        out_strides(out),
        in_strides(in),
        heads(in.size(1)),
        width(call.head_size()),
        first(call.first()),
        in_pairs(call.reads_pairs()),
        out_pairs(call.writes_pairs()) {}
  core::Output<C> out;
  core::Input<C> in;
  HeadStrides out_strides, in_strides;
  int64_t heads, width, first;
  bool in_pairs, out_pairs;
};

template <class C>
void rotate_heads(const Rotated<C>& a, int64_t b, int64_t s, const PairAngles<C>& angles, C* stage) {
  const int64_t rotated = 2 * angles.half, first = a.first, end = first + rotated;
  const int64_t bytes = a.in.storage == core::Storage::compute ? sizeof(C) : 2;
  auto x = a.in + a.in_strides.offset(b, s);
  auto y = a.out + a.out_strides.offset(b, s);
  for (int64_t h = 0; h < a.heads; ++h, x = x + a.in_strides.head, y = y + a.out_strides.head) {
    const C* from = core::widen_all(x + first, stage, rotated);
    C* to = core::target(y + first, a.in_pairs == a.out_pairs ? stage : stage + rotated);
    rotate_row(to, from, angles, a.in_pairs, a.out_pairs);
    core::narrow_all(y + first, to, rotated);
    if (x.data == y.data) continue;
    std::memcpy(y.data, x.data, first * bytes);
    std::memcpy((y + end).data, (x + end).data, (a.width - end) * bytes);
  }
}

}  // namespace

void rotate_cpu(const char*, const Call& call) {
  runtime::count_cpu_call();
  if (call.empty()) return;
  const int64_t tokens = call.tokens(), columns = (call.q.size(1) + call.k.size(1)) * call.head_size();
  core::dispatch_compute(call.q.scalar_type(), [&](auto c) {
    using C = decltype(c);
    const Rotated<C> both[] = {{call, call.out_q, call.q}, {call, call.out_k, call.k}};
    core::parallel_ranges(tokens, core::cpu_ranges(tokens, columns), [&](int64_t, int64_t begin, int64_t end) {
      std::vector<C> stage(4 * call.angles.half);
      for_tokens<C>(call, call.inverse, begin, end, [&](const auto& angles, int64_t b, int64_t s) {
        for (const auto& heads : both) rotate_heads(heads, b, s, angles, stage.data());
      });
    });
  });
}

}  // namespace liger::ops::rope
