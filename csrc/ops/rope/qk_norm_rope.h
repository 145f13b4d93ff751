#pragma once

// Shared by the files of qk_norm_rope.

#include "ops/rope/angles.h"

namespace liger::ops::qk_norm_rope {

using at::Tensor;

constexpr const char* kOp = "qk_norm_rope";
constexpr const char* kBackward = "qk_norm_rope backward";

struct Forward {
  Tensor out_q, out_k, q, k;
  Tensor q_weight, k_weight;  // contiguous, or undefined
  rope::Angles angles;
  double eps, offset;
  bool round_first, interleaved;

  int64_t positions() const { return q.size(2); }
  int64_t tokens() const { return q.size(0) * q.size(2); }
  int64_t head_size() const { return q.size(3); }
  bool empty() const { return q.numel() + k.numel() == 0; }
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
  static void forward(const Forward& call);
  static WeightGradients backward(Backward call);
};

}  // namespace liger::ops::qk_norm_rope
