#pragma once

// Heads and the angles that rotate them: checks and strides, shared by the rotary operators.

#include <optional>

#include "core/aten.h"

namespace liger::ops::rope {

using at::Tensor;
using Sections = at::OptionalIntArrayRef;

struct HeadStrides {
  explicit HeadStrides(const Tensor& t) : batch(t.stride(0)), head(t.stride(1)), position(t.stride(2)) {}
  int64_t batch, head, position;

  int64_t offset(int64_t b, int64_t s) const { return b * batch + s * position; }
  /// Passes them to a kernel.
  void pass(int64_t& to_batch, int64_t& to_head, int64_t& to_position) const {
    to_batch = batch, to_head = head, to_position = position;
  }
};

struct Angles {
  Tensor cos, sin;
  int64_t half;
  int64_t batch = 0, position = 0, section = 0;  // strides of cos and sin
  int64_t section_1, section_2;  // index of the first pair of sections 1 and 2
  // Columns from the angle of a pair's first column to that of its second column, and to the next pair's.
  int64_t second, next;
  bool is_complex;
};

/// Which columns of a head are rotated, and how they form pairs.
struct Columns {
  bool interleaved = false;  // pairs are columns (2 i, 2 i + 1), not (i, i + R / 2)
  bool trailing = false;  // the last R columns, interleaved, with one angle a pair
  bool halves_out = false;  // pairs are read as interleaved, and written to columns (i, i + R / 2)

  bool reads_pairs() const { return interleaved || trailing || halves_out; }
  bool writes_pairs() const { return reads_pairs() && !halves_out; }
};

/// q: (B, Hq, S, D), k: (B, Hk, S, D), cos and sin: as in rope. sin is absent if cos holds cos + i sin.
void check_heads_and_angles(
    const char* op, const Tensor& q, const Tensor& k, const Tensor& cos, const OptionalTensor& sin,
    const Sections& sections, const Columns& columns);

/// Heads of q and k, and what rotates them.
struct Heads {
  Tensor out_q, out_k, q, k;
  Angles angles;

  int64_t positions() const { return q.size(2); }
  int64_t tokens() const { return q.size(0) * q.size(2); }
  int64_t head_size() const { return q.size(3); }
  bool empty() const { return q.numel() + k.numel() == 0; }

  /// Sets the arguments that kernels have for q, k and the angles, but for the pointers to q and k.
  template <class Args>
  void pass(Args& args) const {
    args.cos = angles.cos.const_data_ptr();
    args.sin = angles.sin.const_data_ptr();
    args.positions = int32_t(positions());
    args.q_heads = int32_t(q.size(1));
    args.k_heads = int32_t(k.size(1));
    args.half = int32_t(angles.half);
    args.section_1 = int32_t(angles.section_1);
    args.section_2 = int32_t(angles.section_2);
    args.angle_batch = angles.batch;
    args.angle_position = angles.position;
    args.angle_section = angles.section;
    HeadStrides(q).pass(args.q_batch, args.q_head, args.q_position);
    HeadStrides(k).pass(args.k_batch, args.k_head, args.k_position);
  }
};

Angles make_angles(Tensor cos, const OptionalTensor& sin, const Sections& sections, const Columns& columns);

/// t, or a copy of it, with contiguous heads.
Tensor with_unit_columns(const Tensor& t);

}  // namespace liger::ops::rope
