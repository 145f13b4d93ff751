#pragma once

// Shared by the files of rope.

#include <ATen/ATen.h>

#include <optional>

namespace liger::ops::rope {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct HeadStrides {
  explicit HeadStrides(const Tensor& t) : batch(t.stride(0)), head(t.stride(1)), position(t.stride(2)) {}
  int64_t batch, head, position;

  int64_t offset(int64_t b, int64_t s) const { return b * batch + s * position; }
  bool aligned() const { return ((batch | head | position) & 7) == 0; }
};

struct Angles {
  Tensor cos, sin;
  int64_t half;
  int64_t batch = 0, position = 0, section = 0;  // strides of cos and sin
  int64_t section_1, section_2;  // index of the first pair of sections 1 and 2
  bool is_complex;
};

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
