#pragma once

// What starts the kernels of moe_experts: those of routing, and those of adapters.

#include <c10/core/impl/LocalDispatchKeySet.h>
#include "core/cuda.h"
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

  const at::Device& device() const { return device_; }

  template <class K>
  void start(uint32_t variant, int64_t programs, const typename K::Args& args) const {
    LIGER_CHECK(
        programs <= std::numeric_limits<int32_t>::max(), call.op, "x",
        "be small enough for fewer than 2^31 programs of a kernel", programs);
    if (programs > 0) core::launch<K>(call.op, device_, variant, {uint32_t(programs)}, args);
  }

  /// Launches a kernel whose only axis is the dtype, or has one point.
  template <class K, class... Choices>
  void start_simple(int64_t n, bool aligned, int64_t rows, const typename K::Args& args, Choices... choices) const {
    const auto& config = runtime::first_fit<K>(n, aligned);
    int64_t programs = rows;
    if constexpr (has_block_n<K>) programs *= ceil_div(n, config.BLOCK_N);
    start<K>(runtime::variant_index<K>(config, runtime::point_of<K>(choices...)), programs, args);
  }

  /// Calls f(kernel, config, variant) for the device's own kernel if there is one, else for the general one. ranks: of
  /// the adapters that the kernel adds.
  template <class General, class Hopper, class F, class... Choices>
  void choose(int64_t ranks, bool aligned, const F& f, Choices... choices) const {
    const auto dtype = core::dtype_of(call.x);
    if (dtype != runtime::DType::F32 && attempt(Hopper{}, true, ranks, aligned, f, Hopper::dtype(dtype), choices...)) {
      return;
    }
    attempt(General{}, false, ranks, aligned, f, General::dtype(dtype), choices...);
  }

  static uint32_t gather_variant(at::ScalarType dtype) {
    using K = kernels::moe_experts_gather;
    const auto& config = runtime::first_fit<K>(1, true);
    return runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(core::dtype_of(dtype))));
  }

  /// PyTorch's grouped GEMM copies sizes to the host for other dtypes and devices. The kernels beside it come from one
  /// pack: all of them load, or none.
  bool can_group(bool aligned) const {
    constexpr int32_t kMostGroups = 1024;
    return aligned && call.x.scalar_type() == at::kBFloat16 && experts < kMostGroups &&
        can_run<kernels::moe_experts_gather>(gather_variant(at::kBFloat16));
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
    using K = kernels::moe_experts_gather;
    const auto n = int32_t(by_token.size(1));
    Tensor out = at::empty({pairs, n}, by_token.options());
    const auto& config = runtime::first_fit<K>(n, true);
    start<K>(
        gather_variant(out.scalar_type()), ceil_div(pairs, config.BLOCK_M) * ceil_div(n, config.BLOCK_N),
        {address(out), address(by_token), address(routing.tokens), address(routing.offsets), experts, n,
         by_token.stride(0)});
    return out;
  }

  /// Launches a kernel over the parts of all tiles and over columns of `inner`.
  template <class K>
  void start_act(const typename K::Args& args) const {
    const auto& config = runtime::first_fit<K>(inner, true);
    start<K>(
        runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(core::dtype_of(call.x)), gate())),
        tiles * int64_t(flags::TILE_ROWS / config.BLOCK_M) * ceil_div(inner, config.BLOCK_N), args);
  }

  int32_t gate_flags() const {
    const Options& o = call.options;
    return (o.activation == "gelu_tanh" ? kernels::constants::geglu::TANH : 0) |
        (o.interleaved ? flags::INTERLEAVED : 0) | (o.weight_before ? flags::WEIGHT_FIRST : 0);
  }
  int gate() const { return call.options.is_silu() ? flags::SILU : flags::GELU; }

  template <class Args>
  void set_gate(Args& args) const {
    args.alpha = float(call.options.alpha);
    args.limit = float(call.options.limit_or_infinity());
    args.up_offset = float(call.options.up_offset);
  }

  template <class Args>
  void set_routing(Args& args) const {
    args.offsets = address(routing.offsets);
    args.tiles = address(routing.tiles);
    args.most_tiles = tiles;
  }

  template <class Args>
  void set_step(Args& args, const Step& step) const {
    args.v = address(step.v);
    args.packed = address(step.packed);
    args.padded = step.ranks();
  }

  template <class Args>
  void set_weights(Args& args, const Tensor& w) const {
    args.w_expert = w.stride(0);
    args.w_row = w.stride(1);
  }

 private:
  template <class K, class = void>
  struct HasBlockN : std::false_type {};
  template <class K>
  struct HasBlockN<K, std::void_t<decltype(K::configs[0].BLOCK_N)>> : std::true_type {};
  template <class K>
  static constexpr bool has_block_n = HasBlockN<K>::value;

  template <class K, class F, class... Choices>
  bool attempt(K kernel, bool optional, int64_t ranks, bool aligned, const F& f, Choices... choices) const {
    const auto point = runtime::point_of<K>(choices...);
    const auto& config = runtime::first_fit<K>(ranks, aligned, point);
    const uint32_t variant = runtime::variant_index<K>(config, point);
    if (optional && !can_run<K>(variant)) return false;
    f(kernel, config, variant);
    return true;
  }

  template <class K>
  bool can_run(uint32_t variant) const {
    if (!core::is_for<K>(device_)) return false;
    return runtime::is_trial(variant) || runtime::loads(K::kernel, variant, device_.index()) == runtime::Loads::Yes;
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

template <class... Numbers>
bool multiples_of_8(Numbers... numbers) {
  return ((int64_t(numbers) | ...) & 7) == 0;
}

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
  const Routing& r = k.routing;
  const auto ints = k.call.x.options().dtype(at::kInt);
  const bool sorted = k.call.is_sorted();
  const int32_t blocks = sorted ? 0 : int32_t(ceil_div(k.pairs, flags::ROUTE_BLOCK)), words = words_of(index);
  const int64_t programs = ceil_div(k.pairs, flags::ROUTE_BLOCK);
  Tensor totals = index, counts;
  if (!sorted) {
    totals = at::zeros({k.experts}, ints);
    using Count = kernels::moe_experts_count;
    counts = at::empty({k.experts, blocks}, ints);
    k.start_simple<Count>(
        1, false, programs, {address(counts), address(totals), address(index), k.pairs, k.experts, blocks, words}, 0);
  }
  using Scan = kernels::moe_experts_scan;
  const auto& config = runtime::first_fit<Scan>(k.experts, false);
  k.start<Scan>(
      runtime::variant_index<Scan>(config, runtime::point_of<Scan>(0)), k.experts,
      {address(r.offsets), address(r.tiles), address(counts), address(totals), k.pairs, k.experts, blocks,
       sorted ? words : 1});
  using Place = kernels::moe_experts_place;
  k.start_simple<Place>(
      1, false, programs,
      {address(r.tokens), address(r.order), address(r.position), address(counts), address(r.offsets), address(index),
       k.pairs, k.choices, k.experts, blocks, sorted ? 0 : words},
      0);
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
  const auto& config = runtime::first_fit<K>(1, false);
  k.start<K>(
      runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(core::dtype_of(dtype), core::dtype_of(adapter)))),
      ceil_div(features * padded, config.BLOCK_P) * ceil_div(k.experts, config.BLOCK_E),
      {address(out), address(adapter), k.experts, int32_t(features), int32_t(ranks), int32_t(padded), adapter.stride(0),
       adapter.stride(1), adapter.stride(2)});
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
  const bool aligned = multiples_of_8(x.size(1), x.stride(0)) && core::aligned16(address(x), address(t));
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(packed)));
  const auto& config = runtime::first_fit<K>(padded, aligned, point);
  k.start<K>(
      runtime::variant_index<K>(config, point),
      k.tiles * int64_t(flags::TILE_ROWS / config.BLOCK_T) * ceil_div(padded, config.BLOCK_R),
      {address(t), address(v), address(x), address(packed), address(k.routing.offsets), address(k.routing.tiles),
       address(k.routing.tokens), int32_t(x.size(1)), ranks, int32_t(padded), x.stride(0), float(scale),
       by_token ? flags::GATHERS : 0});
  return {t, v};
}

/// out (E, C, r), the gradient of an adapter: of every expert, the sum over its rows of x^T v. v: (pairs, r) in fp32.
inline void sum_products(const Kernels& k, const Tensor& out, const Tensor& x, const Tensor& v, bool by_token) {
  using K = kernels::moe_adapters_columns;
  const int64_t features = out.size(1), ranks = out.size(2);
  const bool aligned = multiples_of_8(features, ranks, x.stride(0)) && core::aligned16(address(x), address(v));
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(out)));
  const auto& config = runtime::first_fit<K>(ranks, aligned, point);
  k.start<K>(
      runtime::variant_index<K>(config, point),
      k.experts * ceil_div(features, config.BLOCK_C) * ceil_div(ranks, config.BLOCK_R),
      {address(out), address(x), address(v), address(k.routing.offsets), address(k.routing.tokens), int32_t(features),
       int32_t(ranks), x.stride(0), out.stride(0), out.stride(1), out.stride(2), by_token ? flags::GATHERS : 0});
}

/// out (pairs, n) += the step, of a result of PyTorch's grouped GEMM.
inline void add_step(const Kernels& k, const Tensor& out, const Step& step) {
  if (!step.v.defined()) return;
  using K = kernels::moe_adapters_add;
  const auto n = int32_t(out.size(1));
  const auto& config = runtime::first_fit<K>(n, true);
  k.start<K>(
      runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(core::dtype_of(out)))),
      k.tiles * ceil_div(n, config.BLOCK_N),
      {address(out), address(step.v), address(step.packed), address(k.routing.offsets), address(k.routing.tiles),
       k.tiles, n, step.ranks()});
}

/// (E, in, r)
inline Tensor by_feature(const Tensor& a) { return a.transpose(1, 2); }

inline bool has_ranks(const Adapters& adapters) { return adapters.present() && adapters.a.size(1) > 0; }

}  // namespace liger::ops::moe_experts
