#pragma once

// Shared by the files of qk_norm_rope.

#include "ops/rope/angles.h"

namespace liger::ops::qk_norm_rope {

using at::Tensor;

constexpr const char* kOp = "qk_norm_rope";
constexpr const char* kBackward = "qk_norm_rope backward";

struct Forward : rope::Heads {
  Tensor q_weight, k_weight;  // contiguous, or undefined
  double eps, offset;
  bool round_first, interleaved;
};

/// out_q and out_k receive the gradients of q and k. They may be grad_q and grad_k, or undefined if not needed.
struct Backward : Forward {
  Tensor grad_q, grad_k;
  bool needs_weights;
};

/// Gradients of q_weight and k_weight. Undefined for an absent weight, or if not needed.
using WeightGradients = std::tuple<Tensor, Tensor>;

struct Cpu {
  static void forward(const Forward& call);
  static WeightGradients backward(const Backward& call);
};
struct Cuda {
  static void forward(Forward& call);
  static WeightGradients backward(Backward& call);
};

}  // namespace liger::ops::qk_norm_rope
