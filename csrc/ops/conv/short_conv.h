#pragma once

// Shared by the files of short_conv.

#include "ops/conv/causal_conv1d.h"

namespace liger::ops::short_conv {

using namespace causal_conv1d;

constexpr const char* kOp = "short_conv";
constexpr const char* kBackward = "short_conv backward";

/// Writes y: (B, S, C), contiguous. in.x: bcx, (B, S, 3 * C).
using ForwardOn = void(const Inputs& in, const Tensor& y);
/// Writes the gradients that are defined; that of bcx, out.dx, is contiguous. dy: contiguous along the last dimension.
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
