#pragma once

// Launches the kernels of gated activations, in liger_ops/kernels/gated.

#include "core/rows/elements.h"
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
    const auto walk = walk_elements<3>(Activation::kOp, {&out, &gate, &up});
    typename K::Args args{
        .out = address(out),
        .gate = address(gate),
        .up = address(up),
        .out_strides = walk.strides[0],
        .gate_strides = walk.strides[1],
        .up_strides = walk.strides[2]};
    start<K>(activation, gate, walk, args);
  }

  static void backward(
      const Activation& activation, Tensor dgate, Tensor dup, const Tensor& product, Tensor dout, Tensor gate,
      Tensor up) {
    using K = typename Activation::Backward;
    c10::DeviceGuard guard(gate.device());
    if (dout.numel() == 0) return;
    const auto walk = walk_elements<5>(Activation::kOp, {&dout, &dgate, &dup, &gate, &up});
    typename K::Args args{
        .dgate = address(dgate),
        .dup = address(dup),
        .product = address(product),
        .dout = address(dout),
        .gate = address(gate),
        .up = address(up),
        .dgate_strides = walk.strides[1],
        .dup_strides = walk.strides[2],
        .dout_strides = walk.strides[0],
        .gate_strides = walk.strides[3],
        .up_strides = walk.strides[4],
        .flags = product.defined() ? kernels::constants::swiglu::PRODUCT : 0};
    start<K>(activation, gate, walk, args);
  }

 private:
  template <class K, size_t N>
  static void start(const Activation& activation, const Tensor& gate, const Rows<N>& walk, typename K::Args& args) {
    activation.set(args);
    launch_tiles<K>(Activation::kOp, gate.device(), walk, args, runtime::point_of<K>(K::dtype(dtype_of(gate))));
  }
};

}  // namespace liger::ops::gated
