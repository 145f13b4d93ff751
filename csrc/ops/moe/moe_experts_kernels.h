#pragma once

// Launches of moe_experts: how kernels are chosen, and those of routing and of adapters.

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <bit>

#include "core/cuda/launch.h"
#include "kernels/geglu.h"
#include "kernels/lora_products.h"
#include "kernels/moe_adapters.h"
#include "kernels/moe_rows.h"
#include "ops/moe/moe_experts.h"
#include "runtime/loader.h"

namespace liger::ops::moe_experts {

using core::address;
namespace flags = kernels::constants::moe_experts;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// On compute capability 9.0 PyTorch's grouped GEMM makes 550 to 690 TFLOP/s at the shapes of benchmarks/moe_experts.py,
// and our kernels 290 to 490. It needs copies: gathered rows, and activations in a pass of their own. For gradients of
// weights it was always faster, for other products from about this number of rows per expert, and for the first product
// if experts are wide too.
constexpr int64_t kManyRows = 1024, kWide = 1024;

/// The addend of a product: v (pairs, pieces, padded ranks) times each expert's packed adapter. Undefined: none.
struct Step {
  Tensor v, packed;

  int32_t ranks() const { return v.defined() ? int32_t(v.size(2)) : 0; }
};

struct Kernels {
  const Call& call;
  const Routing& routing;
  Tensor weight;  // (T, K) fp32, or undefined
  int32_t pairs = int32_t(call.pairs()), choices = int32_t(call.choices()), experts = int32_t(call.experts());
  int32_t hidden = int32_t(call.hidden()), inner = int32_t(call.inner());
  // Tiles of rows that a grid covers: each expert's last tile may be partly filled, and a tile has at least one row.
  int32_t tiles = int32_t(std::min<int64_t>(pairs, most_tiles<int64_t>(pairs, experts)));

  Kernels(const Call& call, const Routing& routing) : call(call), routing(routing) {
    if (!call.is_sorted()) weight = call.weight.to(at::kFloat).contiguous();
  }

  /// Sets the arguments that mean the same in all kernels. `tiles` of moe_experts_route_bwd, a number, is none of them.
  template <class Args>
  void complete(Args& args) const {
    if constexpr (requires { args.offsets; }) args.offsets = address(routing.offsets);
    if constexpr (requires { args.tiles = address(routing.tiles); }) args.tiles = address(routing.tiles);
    if constexpr (requires { args.most_tiles; }) args.most_tiles = tiles;
    if constexpr (requires { args.tokens; }) args.tokens = address(routing.tokens);
    if constexpr (requires { args.order; }) args.order = address(routing.order);
    if constexpr (requires { args.position; }) args.position = address(routing.position);
    if constexpr (requires { args.weight; }) args.weight = address(weight);
    if constexpr (requires { args.pairs; }) args.pairs = pairs;
    if constexpr (requires { args.choices; }) args.choices = choices;
    if constexpr (requires { args.experts; }) args.experts = experts;
    if constexpr (requires { args.hidden; }) args.hidden = hidden;
    if constexpr (requires { args.inner; }) args.inner = inner;
    if constexpr (requires { args.alpha; }) {
      args.alpha = float(call.options.alpha);
      args.limit = float(call.options.limit_or_infinity());
      args.up_offset = float(call.options.up_offset);
    }
  }

  /// Launches programs(config) programs of a kernel. args: those that complete() does not set. facts: as in
  /// core::choose.
  template <class K, class F, class... Facts>
  void start(int64_t n, typename K::Args args, const F& programs, Facts... facts) const {
    complete(args);
    const auto choice = core::choose<K>(n, args, facts...);
    launch(choice, programs(choice.config), args);
  }

  /// Launches the device's own kernel of a product if there is one, else the general one. Both take the same arguments;
  /// `args` is complete, but programs(config) may set those that depend on the config. ranks: of the adapters that the
  /// kernel adds. choices: on the axes after the dtype.
  template <class General, class Hopper, class F, class... Choices>
  void start_product(int64_t ranks, const typename General::Args& args, const F& programs, Choices... choices) const {
    const auto dtype = core::dtype_of(call.x);
    auto attempt = [&]<class K>(K, bool optional) {
      auto given = [&] { return std::bit_cast<typename K::Args>(args); };
      const auto choice = core::choose<K>(ranks, given(), runtime::point_of<K>(K::dtype(dtype), choices...));
      if (optional && !can_run(choice)) return false;
      const int64_t count = programs(choice.config);
      launch(choice, count, given());
      return true;
    };
    if (dtype == runtime::DType::F32 || !attempt(Hopper(), true)) attempt(General(), false);
  }

  /// Launches a kernel over the parts of all tiles and over columns of `inner`.
  template <class K>
  void start_act(const typename K::Args& args) const {
    auto programs = [&](const auto& config) {
      return tiles * int64_t(flags::TILE_ROWS / config.BLOCK_M) * ceil_div(inner, config.BLOCK_N);
    };
    start<K>(inner, args, programs, act_point<K>());
  }
  template <class K>
  runtime::Point act_point() const {
    return runtime::point_of<K>(K::dtype(core::dtype_of(call.x)), gate());
  }

  /// PyTorch's grouped GEMM copies sizes to the host for other dtypes and devices. The kernels beside it come from one
  /// pack: all of them load, or none.
  bool can_group(bool aligned) const {
    constexpr int32_t kMostGroups = 1024;
    return aligned && call.x.scalar_type() == at::kBFloat16 && experts < kMostGroups &&
        can_run(core::choose<kernels::moe_experts_gather>(1, {}));
  }
  bool has_many_rows() const { return pairs >= kManyRows * experts; }

  /// a (rows, .) times each expert's matrix, or the products of each expert's columns of a and rows of b.
  Tensor group(const Tensor& a, const Tensor& b) const {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return at::_grouped_mm(a, b, routing.offsets.narrow(0, 1, experts));
  }

  /// The rows of the experts. Rows that are sorted already need no copy.
  Tensor gather(const Tensor& by_token) const {
    if (call.is_sorted()) return by_token;
    const auto n = int32_t(by_token.size(1));
    Tensor out = at::empty({pairs, n}, by_token.options());
    start<kernels::moe_experts_gather>(
        n, {.out = address(out), .rows = address(by_token), .n = n, .rows_row = by_token.stride(0)},
        [&](const auto& config) { return ceil_div(pairs, config.BLOCK_M) * ceil_div(n, config.BLOCK_N); });
    return out;
  }

  int32_t gate_flags() const {
    const Options& o = call.options;
    return (o.activation == "gelu_tanh" ? kernels::constants::geglu::TANH : 0) |
        (o.interleaved ? flags::INTERLEAVED : 0) | (o.weight_before ? flags::WEIGHT_FIRST : 0);
  }
  int gate() const { return call.options.is_silu() ? flags::SILU : flags::GELU; }

 private:
  template <class K>
  void launch(const core::Choice<K>& choice, int64_t programs, const typename K::Args& args) const {
    LIGER_CHECK(
        programs <= std::numeric_limits<int32_t>::max(), call.op, "x",
        "be small enough for fewer than 2^31 programs of a kernel", programs);
    if (programs > 0) core::launch(call.op, device_, choice, {uint32_t(programs)}, args);
  }

  template <class K>
  bool can_run(const core::Choice<K>& choice) const {
    if (!core::is_for<K>(device_)) return false;
    return runtime::is_trial(choice.variant) ||
        runtime::loads(K::kernel, choice.variant, device_.index()) == runtime::Loads::Yes;
  }

  at::Device device_ = call.x.device();
};

inline int32_t words_of(const Tensor& index) { return index.scalar_type() == at::kLong ? 2 : 1; }

/// Whether rows are contiguous, and do not overlap as those of expanded tensors do: grouped GEMMs refuse these.
inline bool has_rows(const Tensor& t) {
  const int64_t columns = t.size(-1);
  return (t.stride(-1) == 1 || columns == 1) && (t.stride(-2) >= columns || t.size(-2) <= 1);
}
inline Tensor rows_of(const Tensor& t) { return has_rows(t) ? t : t.contiguous(); }
/// Experts' matrices.
inline Tensor with_rows(const Tensor& w) {
  return has_rows(w) && (w.stride(0) != 0 || w.size(0) == 1) ? w : w.contiguous();
}

inline Tensor fp32_or_undefined(const Tensor& t) { return t.defined() ? t.to(at::kFloat).contiguous() : t; }

/// Rows of tokens, which become rows of experts once for all grouped GEMMs.
struct ByToken {
  Tensor tokens, rows{};

  const Tensor& gathered(const Kernels& k) {
    if (!rows.defined()) rows = k.gather(tokens);
    return rows;
  }
};

/// Experts' matrices (E, ., columns of the product).
inline Tensor columns_last(const Tensor& w, bool columns_second) { return columns_second ? w : w.transpose(1, 2); }

inline void route(const Kernels& k, const Tensor& index) {
  const bool sorted = k.call.is_sorted();
  const int64_t all_blocks = ceil_div(k.pairs, flags::ROUTE_BLOCK);
  const int32_t blocks = sorted ? 0 : int32_t(all_blocks), words = words_of(index);
  auto programs = [&](const auto&) { return all_blocks; };
  Tensor totals = index, counts;
  if (!sorted) {
    const auto ints = k.call.x.options().dtype(at::kInt);
    totals = at::zeros({k.experts}, ints);
    counts = at::empty({k.experts, blocks}, ints);
    k.start<kernels::moe_experts_count>(
        1,
        {.counts = address(counts),
         .totals = address(totals),
         .index = address(index),
         .blocks = blocks,
         .words = words},
        programs);
  }
  k.start<kernels::moe_experts_scan>(
      k.experts, {.counts = address(counts), .totals = address(totals), .blocks = blocks, .words = sorted ? words : 1},
      [&](const auto&) { return k.experts; });
  k.start<kernels::moe_experts_place>(
      1, {.firsts = address(counts), .index = address(index), .blocks = blocks, .words = sorted ? 0 : words}, programs);
}

// ---- Adapters

inline bool is_narrow(at::ScalarType dtype) { return dtype != at::kFloat; }

/// (E, C, pieces, padded ranks). adapter: (E, C, r), of any strides.
inline Tensor pack(const Kernels& k, const Tensor& adapter, at::ScalarType dtype) {
  using K = kernels::moe_adapters_pack;
  constexpr int64_t kStep = kernels::constants::lora_products::RANK_STEP;
  const int64_t features = adapter.size(1), ranks = adapter.size(2), padded = ceil_div(ranks, kStep) * kStep;
  const int64_t pieces = is_narrow(dtype) ? int64_t(flags::ADAPTER_PIECES) : 1;
  Tensor out = at::empty({k.experts, features, pieces, padded}, adapter.options().dtype(dtype));
  const K::Args args{
      .out = address(out),
      .adapter = address(adapter),
      .features = int32_t(features),
      .ranks = int32_t(ranks),
      .padded = int32_t(padded),
      .a_expert = adapter.stride(0),
      .a_feature = adapter.stride(1),
      .a_rank = adapter.stride(2)};
  k.start<K>(
      1, args,
      [&](const auto& config) {
        return ceil_div(features * padded, config.BLOCK_P) * ceil_div(k.experts, config.BLOCK_E);
      },
      runtime::point_of<K>(K::dtype(core::dtype_of(dtype), core::dtype_of(adapter))));
  return out;
}

/// The dtype in which rows are multiplied with an adapter. Pieces in fp16 cannot hold small numbers.
inline at::ScalarType dtype_of_rows(const Tensor& x, const Tensor& adapter) {
  return x.scalar_type() == at::kHalf ? adapter.scalar_type() : x.scalar_type();
}

/// scale x times an adapter, of the rows of the experts.
struct Narrow {
  Tensor t, v;  // (pairs, r) in fp32, and its pieces for a Step
};

/// adapter: (E, C, r). by_token: whether x has a row per token. t: memory for the result, or undefined.
inline Narrow narrow(
    const Kernels& k, const Tensor& x, const Tensor& adapter, double scale, bool by_token, Tensor t = Tensor()) {
  using K = kernels::moe_adapters_rows;
  const auto ranks = int32_t(adapter.size(2));
  const Tensor packed = pack(k, adapter, dtype_of_rows(x, adapter));
  const int64_t padded = packed.size(3), pieces = is_narrow(x.scalar_type()) ? 2 : 1;
  if (!t.defined()) t = at::empty({k.pairs, ranks}, x.options().dtype(at::kFloat));
  const Tensor v = at::empty({k.pairs, pieces, padded}, x.options());
  const K::Args args{
      .out = address(t),
      .pieces = address(v),
      .x = address(x),
      .packed = address(packed),
      .features = int32_t(x.size(1)),
      .ranks = ranks,
      .padded = int32_t(padded),
      .x_row = x.stride(0),
      .scale = float(scale),
      .flags = by_token ? flags::GATHERS : 0};
  k.start<K>(
      padded, args,
      [&](const auto& config) {
        return k.tiles * int64_t(flags::TILE_ROWS / config.BLOCK_T) * ceil_div(padded, config.BLOCK_R);
      },
      runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(packed))));
  return {t, v};
}

/// out (E, C, r), the gradient of an adapter: of every expert, the sum over its rows of x^T v. v: (pairs, r) in fp32.
inline void sum_products(const Kernels& k, const Tensor& out, const Tensor& x, const Tensor& v, bool by_token) {
  using K = kernels::moe_adapters_columns;
  const int64_t features = out.size(1), ranks = out.size(2);
  const K::Args args{
      .out = address(out),
      .x = address(x),
      .v = address(v),
      .features = int32_t(features),
      .ranks = int32_t(ranks),
      .x_row = x.stride(0),
      .out_expert = out.stride(0),
      .out_feature = out.stride(1),
      .out_rank = out.stride(2),
      .flags = by_token ? flags::GATHERS : 0};
  k.start<K>(
      ranks, args,
      [&](const auto& config) {
        return k.experts * ceil_div(features, config.BLOCK_C) * ceil_div(ranks, config.BLOCK_R);
      },
      runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(out))));
}

/// out (pairs, n) += the step, of a result of PyTorch's grouped GEMM.
inline void add_step(const Kernels& k, const Tensor& out, const Step& step) {
  if (!step.v.defined()) return;
  const auto n = int32_t(out.size(1));
  k.start<kernels::moe_adapters_add>(
      n, {.out = address(out), .v = address(step.v), .packed = address(step.packed), .n = n, .padded = step.ranks()},
      [&](const auto& config) { return k.tiles * ceil_div(n, config.BLOCK_N); });
}

/// (E, in, r)
inline Tensor by_feature(const Tensor& a) { return a.transpose(1, 2); }

inline bool has_ranks(const Adapters& adapters) { return adapters.present() && adapters.a.size(1) > 0; }

}  // namespace liger::ops::moe_experts
