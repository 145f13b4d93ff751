#pragma once

// Heads and the angles that rotate them: checks and strides, shared by the rotary operators.

#include <optional>

#include "core/aten.h"

namespace liger::ops::rope {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sections = at::OptionalIntArrayRef;

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
  // Columns from the angle of a pair's first column to that of its second column, and to the next pair's.
  int64_t second, next;
  bool is_complex;

  bool aligned() const { return ((half | section_1 | section_2 | batch | position | section) & 7) == 0; }
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

Angles make_angles(Tensor cos, const OptionalTensor& sin, const Sections& sections, const Columns& columns);

/// t, or a copy of it, with contiguous heads.
Tensor with_unit_columns(const Tensor& t);

}  // namespace liger::ops::rope
