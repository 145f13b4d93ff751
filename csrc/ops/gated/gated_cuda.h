#pragma once

// Launches the kernels of gated activations, in liger_ops/kernels/gated.

#include "core/elements.h"
#include "kernels/swiglu.h"

namespace liger::ops::gated {

using namespace core;
using at::Tensor;

template <class Activation>
struct Cuda {
  static void forward(const Activation& activation, Tensor out, Tensor gate, Tensor up) {
    using K = typename Activation::Forward;
    c10::DeviceGuard guard(gate.device());
    if (out.numel() == 0) return;
    auto walk = walk_elements<3>(Activation::kOp, {&out, &gate, &up});
    bool aligned = walk.aligned_strides() && aligned16(address(out), address(gate), address(up));
    const auto point = runtime::point_of<K>(K::dtype(dtype_of(gate)));
    const auto& config = runtime::first_fit<K>(walk.n, aligned, point, walk.rows);
    const auto& [o, g, u] = walk.strides;
    typename K::Args args{address(out), address(gate),
                          address(up),  int32_t(walk.rows),
                          walk.n,       walk.kernel_inner_rows(),
                          o.outer,      o.inner,
                          g.outer,      g.inner,
                          u.outer,      u.inner};
    activation.set(args);
    auto variant = runtime::variant_index<K>(config, point);
    launch<K>(Activation::kOp, gate.device(), variant, tile_grid(config, walk), args);
  }

  static void backward(
      const Activation& activation, Tensor dgate, Tensor dup, const Tensor& product, Tensor dout, Tensor gate,
      Tensor up) {
    using K = typename Activation::Backward;
    c10::DeviceGuard guard(gate.device());
    if (dout.numel() == 0) return;
    auto walk = walk_elements<5>(Activation::kOp, {&dout, &dgate, &dup, &gate, &up});
    bool aligned = walk.aligned_strides() &&
        aligned16(address(dout), address(dgate), address(dup), address(gate), address(up), address(product));
    const auto point = runtime::point_of<K>(K::dtype(dtype_of(gate)));
    const auto& config = runtime::first_fit<K>(walk.n, aligned, point, walk.rows);
    const auto& [d, dg, du, g, u] = walk.strides;
    typename K::Args args{
        address(dgate),
        address(dup),
        address(product),
        address(dout),
        address(gate),
        address(up),
        int32_t(walk.rows),
        walk.n,
        walk.kernel_inner_rows(),
        dg.outer,
        dg.inner,
        du.outer,
        du.inner,
        d.outer,
        d.inner,
        g.outer,
        g.inner,
        u.outer,
        u.inner};
    activation.set(args);
    if (product.defined()) args.flags |= kernels::constants::swiglu::PRODUCT;
    auto variant = runtime::variant_index<K>(config, point);
    launch<K>(Activation::kOp, gate.device(), variant, tile_grid(config, walk), args);
  }
};

}  // namespace liger::ops::gated
