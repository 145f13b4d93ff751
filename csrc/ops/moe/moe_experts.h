#pragma once

// One call of moe_experts on a device. Letters: T tokens, K choices, E experts, H hidden, I inner.

#include <limits>
#include <optional>
#include <tuple>

#include "core/aten.h"
#include "core/checks.h"
#include "kernels/moe_experts.h"

namespace liger::ops::moe_experts {

using at::Tensor;

constexpr const char* kOp = "moe_experts";
constexpr const char* kSortedOp = "moe_experts_sorted";
constexpr const char* kBackward = "moe_experts backward";

struct Options {
  c10::string_view activation;
  bool interleaved, transposed;
  std::optional<double> limit;
  double alpha, up_offset;
  bool weight_before;
  double gate_up_scale, down_scale;  // of adapters

  bool is_silu() const { return activation == "silu"; }
  double limit_or_infinity() const { return limit.value_or(std::numeric_limits<double>::infinity()); }
};

/// One value for each gradient, in the order in which a backward returns them.
template <class T>
struct EachGradient {
  T x, gate_up, down, weight, gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a, down_b;

  auto all() const {
    return std::make_tuple(x, gate_up, down, weight, gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a, down_b);
  }
};
using Wanted = EachGradient<bool>;
using Gradients = EachGradient<Tensor>;  // undefined: not wanted

/// Low-rank adapters of one weight of all experts. a: (E, r, in), b: (E, out, r), of any strides, or undefined.
struct Adapters {
  Tensor a, b;

  bool present() const { return a.defined(); }
  c10::SymInt rank() const { return present() ? a.sym_size(1) : c10::SymInt(0); }
};

struct Call {
  const char* op;
  // x: (T, H); gate_up: (E, 2 I, H), or (E, H, 2 I) if transposed; down: (E, H, I), or (E, I, H). Biases: (E, 2 I) and
  // (E, H), or undefined. index and weight: (T, K). Rows that are sorted already have no weight, and index is
  // tokens_per_expert (E), undefined in backward.
  Tensor x, gate_up, down, index, weight, gate_up_bias, down_bias;
  Adapters gate_up_adapters, down_adapters;
  Options options;

  bool is_sorted() const { return !weight.defined(); }
  int64_t tokens() const { return x.size(0); }
  int64_t choices() const { return is_sorted() ? 1 : index.size(1); }
  int64_t pairs() const { return tokens() * choices(); }
  int64_t experts() const { return gate_up.size(0); }
  int64_t hidden() const { return x.size(1); }
  int64_t inner() const { return down.size(options.transposed ? 1 : 2); }
  bool is_empty() const { return pairs() == 0 || experts() == 0 || hidden() == 0; }
};

inline c10::SymInt pairs_of(const Call& call) {
  return call.is_sorted() ? call.x.sym_size(0) : call.x.sym_size(0) * call.index.sym_size(1);
}

/// Most tiles that rows of all experts can have.
template <class Int>
Int most_tiles(const Int& pairs, const Int& experts) {
  return pairs / kernels::constants::moe_experts::TILE_ROWS + experts;
}

/// Routing data as parts of one int32 tensor. liger_ops/kernels/moe/moe_rows.py says what they mean.
struct Routing {
  Tensor offsets, tiles, tokens, order, position;

  Routing(const Tensor& all, int64_t pairs, int64_t experts) {
    int64_t at = 0;
    auto part = [&](int64_t size) {
      at += size;
      return all.narrow(0, at - size, size);
    };
    offsets = part(experts + 1);
    tiles = part(1 + 2 * most_tiles(pairs, experts));
    tokens = part(pairs);
    order = part(pairs);
    position = part(pairs);
  }

  static c10::SymInt size(const Call& call) {
    const c10::SymInt pairs = pairs_of(call), experts = call.gate_up.sym_size(0);
    return experts + 2 + most_tiles(pairs, experts) * 2 + pairs * 3;
  }
};

/// (pairs, r): x A^T of the rows of the experts, times the scale.
inline Tensor empty_t(const Call& call) {
  return at::empty_symint(
      {pairs_of(call), call.gate_up_adapters.rank()}, call.x.options().dtype(core::compute_type(call.x)));
}

/// 2 I
inline c10::SymInt gate_up_columns(const Call& call) { return call.gate_up.sym_size(call.options.transposed ? 2 : 1); }

inline Tensor empty_pre(const Call& call) {
  return at::empty_symint({pairs_of(call), gate_up_columns(call)}, call.x.options());
}

/// What forward saves: the first product (pairs, 2 I), and t of the adapters of gate_up (pairs, r), which is empty
/// without.
struct Saved {
  Tensor pre, t;
};

/// forward: `routing` receives the routing data, and `saved`, unless it is null, new tensors.
/// backward: dpre may be saved.pre. index and sizes: as in Call.
struct Cpu {
  static Tensor forward(const Call& call, const Tensor& routing, Saved* saved);
  static Gradients backward(
      const Call& call, const Tensor& dout, const Tensor& routing, const Saved& saved, const Tensor& dpre,
      const Wanted& wants);
};

struct Cuda {
  static Tensor forward(const Call& call, const Tensor& routing, Saved* saved);
  static Gradients backward(
      const Call& call, const Tensor& dout, const Tensor& routing, const Saved& saved, const Tensor& dpre,
      const Wanted& wants);
};

/// A gradient of t's shape, contiguous.
inline Tensor gradient_like(const Tensor& t, bool zero = false) {
  return zero ? at::zeros_symint(t.sym_sizes(), t.options()) : at::empty_symint(t.sym_sizes(), t.options());
}

/// Of an adapter: as it lies, so that it needs no copy if it is a view of a parameter.
inline Tensor adapter_gradient(const Tensor& t, bool zero = false) {
  return zero ? at::zeros_like(t) : at::empty_like(t);
}

/// Memory for the gradients that are wanted, filled with zeros or not at all.
inline Gradients new_gradients(const Call& call, const Wanted& wants, bool zero) {
  const auto &g = call.gate_up_adapters, &d = call.down_adapters;
  auto like = [&](bool wanted, const Tensor& t) { return wanted ? gradient_like(t, zero) : Tensor(); };
  auto adapter = [&](bool wanted, const Tensor& t) { return wanted ? adapter_gradient(t, zero) : Tensor(); };
  auto bias = [&](bool wanted, const c10::SymInt& n) {
    const c10::SymInt sizes[] = {call.gate_up.sym_size(0), n};
    if (!wanted) return Tensor();
    return zero ? at::zeros_symint(sizes, call.x.options()) : at::empty_symint(sizes, call.x.options());
  };
  return {
      like(wants.x, call.x),
      like(wants.gate_up, call.gate_up),
      like(wants.down, call.down),
      like(wants.weight, call.weight),
      bias(wants.gate_up_bias, gate_up_columns(call)),
      bias(wants.down_bias, call.x.sym_size(1)),
      adapter(wants.gate_up_a, g.a),
      adapter(wants.gate_up_b, g.b),
      adapter(wants.down_a, d.a),
      adapter(wants.down_b, d.b)};
}

}  // namespace liger::ops::moe_experts
