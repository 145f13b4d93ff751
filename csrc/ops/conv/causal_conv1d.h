#pragma once

// Shared by the files of causal_conv1d, causal_conv1d_split and short_conv.

#include <array>

#include "core/aten.h"
#include "kernels/causal_conv1d.h"

namespace liger::ops::causal_conv1d {

using at::Tensor;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kOp = "causal_conv1d";
constexpr const char* kBackward = "causal_conv1d backward";
constexpr int64_t kMaxWidth = kernels::constants::causal_conv1d::MAX_WIDTH;

/// The tensors that y consists of: one for causal_conv1d.
constexpr size_t kParts = 3;
using Parts = std::array<Tensor, kParts>;

/// Where the channels are in x. Its columns are `groups` times [part 0, part 1, part 2, columns of no part]: sizes[i]
/// columns of part i, and `pitch` columns in all.
struct Columns {
  int64_t groups, pitch;
  std::array<int64_t, kParts> sizes;

  int64_t part(size_t i) const { return groups * sizes[i]; }
  int64_t convolved() const { return sizes[0] + sizes[1] + sizes[2]; }
  /// x, whose columns are the channels in order.
  bool whole() const { return groups == 1 && sizes[1] == 0 && sizes[2] == 0 && pitch == sizes[0]; }
};

/// What an operator is called with.
struct Arguments {
  const char *op, *name;  // of the operator and of x, in messages
  const Tensor &x, &weight;
  OptionalTensor bias, seq_idx, cu_seqlens, state{};
  c10::string_view activation = "none";
  int64_t dilation = 1;
};

struct Inputs {
  const char *op, *name;  // of the operator and of x, in messages
  Tensor x;  // (B, S, groups * pitch), contiguous along the last dimension
  Tensor weight;  // (C, W), contiguous
  Tensor bias;  // (C,), contiguous; may be undefined
  Tensor samples;  // (B, S), int32, contiguous: rows of one number see each other; may be undefined
  Tensor state;  // (B, (W - 1) * dilation, C), contiguous; may be undefined
  int64_t dilation = 1;
  bool silu = true;
  Columns columns;

  int64_t channels() const { return weight.size(0); }
  int64_t width() const { return weight.size(1); }
  int64_t past() const { return (width() - 1) * dilation; }
  bool rounds() const { return silu && weight.scalar_type() == x.scalar_type(); }
};

struct Gradients {
  Tensor dx, dweight, dbias, dstate;  // undefined unless requested

  void zero() const {
    for (const Tensor* t : {&dx, &dweight, &dbias, &dstate}) {
      if (t->defined()) t->zero_();
    }
  }
};

/// Throws unless the arguments fit `channels` columns of x.
void check(const Arguments& a, const c10::SymInt& channels);
/// Throws unless t, the gradient of a result, has this shape and x's dtype.
void check_gradient(const Arguments& a, const char* name, const Tensor& t, c10::SymIntArrayRef shape);
Inputs inputs_of(const Arguments& a, const Columns& columns);
/// New tensors for the gradients that are wanted: of x, the weight, the bias and the state.
Gradients gradients_of(const Arguments& a, int64_t wanted);
/// t, copied unless its columns are adjacent.
Tensor adjacent_columns(const Tensor& t);

/// Writes the parts of y, which are contiguous.
using ForwardOn = void(const Inputs& in, const Parts& y);
/// Writes the gradients that are defined; of x, which is contiguous, the columns of the parts. dy: contiguous along the
/// last dimension.
using BackwardOn = void(const Parts& dy, const Inputs& in, const Gradients& out);

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
