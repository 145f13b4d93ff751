#pragma once

// Shared by the files of rope.

#include "ops/rope/angles.h"

namespace liger::ops::rope {

struct Call {
  Tensor out_q, out_k, q, k;
  Angles angles;
  bool interleaved, inverse;

  int64_t batch() const { return q.size(0); }
  int64_t positions() const { return q.size(2); }
  int64_t head_size() const { return q.size(3); }
  bool in_place() const { return out_q.is_same(q); }
};

using Rotate = void(const char* op, const Call& call);
Rotate rotate_cpu, rotate_cuda;

}  // namespace liger::ops::rope
