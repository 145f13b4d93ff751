#pragma once

// Shared by the files of rope.

#include "ops/rope/angles.h"

namespace liger::ops::rope {

struct Call : Heads {
  Columns columns;
  bool inverse;

  bool in_place() const { return out_q.is_same(q); }
  bool reads_pairs() const { return inverse ? columns.writes_pairs() : columns.reads_pairs(); }
  bool writes_pairs() const { return inverse ? columns.reads_pairs() : columns.writes_pairs(); }
  /// The first column that is rotated.
  int64_t first() const { return columns.trailing ? head_size() - 2 * angles.half : 0; }
};

using Rotate = void(const char* op, const Call& call);
Rotate rotate_cpu, rotate_cuda;

}  // namespace liger::ops::rope
