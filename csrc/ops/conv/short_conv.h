#pragma once

// Shared by the files of short_conv.

#include "ops/conv/causal_conv1d.h"

namespace liger::ops::short_conv {

using at::Tensor;

constexpr const char* kOp = "short_conv";
constexpr const char* kBackward = "short_conv backward";

struct Inputs {
  const char* op;  // in messages
  Tensor bcx;  // (B, S, 3 * C), contiguous along the last dimension
  Tensor weight;  // (C, W), contiguous
  Tensor bias;  // (C,), contiguous; may be undefined
  Tensor samples;  // (B, S), int32, contiguous: rows of one number see each other; may be undefined

  int64_t channels() const { return weight.size(0); }
  int64_t width() const { return weight.size(1); }
};

struct Gradients {
  Tensor dbcx, dweight, dbias;  // undefined unless requested; dbcx is contiguous
};

/// Writes y: (B, S, C), contiguous.
using ForwardOn = void(const Inputs& in, const Tensor& y);
/// Writes the gradients that are defined. dy: contiguous along the last dimension.
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

}  // namespace liger::ops::short_conv
