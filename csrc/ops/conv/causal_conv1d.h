#pragma once

// Shared by the files of causal_conv1d.

#include <ATen/ATen.h>

#include "kernels/causal_conv1d.h"

namespace liger::ops::causal_conv1d {

using at::Tensor;

constexpr const char* kOp = "causal_conv1d";
constexpr const char* kBackward = "causal_conv1d backward";
constexpr int64_t kMaxWidth = kernels::constants::causal_conv1d::MAX_WIDTH;

/// A bit of `wanted`, besides those of x, the weight and the bias.
constexpr int64_t kWantState = 8;

struct Inputs {
  Tensor x;  // (B, S, C), contiguous along C
  Tensor weight;  // (C, W), contiguous
  Tensor bias;  // (C,), contiguous; may be undefined
  Tensor samples;  // (B, S), int32, contiguous: rows of one number see each other; may be undefined
  Tensor state;  // (B, (W - 1) * dilation, C), contiguous; may be undefined
  int64_t dilation = 1;
  bool silu = true;

  int64_t width() const { return weight.size(1); }
  int64_t past() const { return (width() - 1) * dilation; }
  bool rounds() const { return silu && weight.scalar_type() == x.scalar_type(); }
};

struct Gradients {
  Tensor dx, dweight, dbias, dstate;  // undefined unless requested
};

/// Writes y, which is contiguous.
using ForwardOn = void(const Inputs& in, const Tensor& y);
/// Writes the gradients that are defined. dy: (B, S, C), contiguous along C.
using BackwardOn = void(const Tensor& dy, const Inputs& in, const Gradients& out);

struct Cpu {
  static constexpr bool kComputes = true;
  static ForwardOn forward;
  static BackwardOn backward;
};
struct Cuda {
  static constexpr bool kComputes = true;
  static ForwardOn forward;
  static BackwardOn backward;
};
struct Meta {
  static constexpr bool kComputes = false;
};

}  // namespace liger::ops::causal_conv1d
