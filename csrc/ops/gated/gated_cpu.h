#pragma once

// CPU loops of gated activations.

#include "core/cpu/math.h"
#include "core/rows/elements.h"

namespace liger::ops::gated {

using namespace core;
using at::Tensor;

// dgate may be gate, and dup may be up. product may be dout, or null if it is not needed.
template <class C, class Math>
void gated_backward(
    const Math& math, Output<C> dgate, Output<C> dup, Output<C> product, Input<C> dout, Input<C> gate, Input<C> up,
    int64_t n) {
  C stages[6][kStage];
  for (int64_t first = 0; first < n; first += kStage) {
    const int64_t count = std::min(kStage, n - first);
    const C *d = widen_all(dout + first, stages[0], count), *g = widen_all(gate + first, stages[1], count);
    const C* u = widen_all(up + first, stages[2], count);
    C *dg = target(dgate + first, stages[3]), *du = target(dup + first, stages[4]);
    C* p = product ? target(product + first, stages[5]) : stages[5];
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const C upstream = d[i], other = math.up(u[i]);
      const auto act = math.value_and_slope(g[i]);
      dg[i] = upstream * other * act.slope;
      du[i] = math.up_gradient(u[i], upstream * act.value);
      p[i] = act.value * other;
    }
    narrow_all(dgate + first, dg, count);
    narrow_all(dup + first, du, count);
    if (product) narrow_all(product + first, p, count);
  }
}

/// out is dense with unit stride in the last dimension, and so are the gradients of an unpacked call. product is
/// undefined or has the layout of dout.
template <class Activation>
struct Cpu {
  static void forward(const Activation& activation, Tensor out, Tensor gate, Tensor up) {
    runtime::count_cpu_call();
    activation.with_math([&](auto math) {
      map_elements(Activation::kOp, [math](auto g, auto u) { return math.value(g) * math.up(u); }, out, gate, up);
    });
  }

  static void backward(
      const Activation& activation, Tensor dgate, Tensor dup, const Tensor& product, Tensor dout, Tensor gate,
      Tensor up) {
    runtime::count_cpu_call();
    if (dout.numel() == 0) return;
    const auto walk = walk_elements<5>(Activation::kOp, {&dout, &dgate, &dup, &gate, &up});
    dispatch_compute(gate.scalar_type(), [&](auto c) {
      using C = decltype(c);
      const auto dgate_at = output<C>(dgate), dup_at = output<C>(dup), product_at = output<C>(product);
      const auto dout_at = input<C>(dout), gate_at = input<C>(gate), up_at = input<C>(up);
      activation.with_math([&](auto math) {
        parallel_spans(walk, [&](int64_t row, int64_t first, int64_t n) {
          auto at = [&](size_t tensor) { return walk.offset(tensor, row) + first; };
          vectorized<C>([&] {
            gated_backward<C>(
                math, dgate_at + at(1), dup_at + at(2), product_at + at(0), dout_at + at(0), gate_at + at(3),
                up_at + at(4), n);
          });
        });
      });
    });
  }
};

}  // namespace liger::ops::gated
