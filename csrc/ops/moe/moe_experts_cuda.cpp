// moe_experts on CUDA. The kernels and what they compute: liger_ops/kernels/moe/{moe_experts,moe_rows,moe_adapters}.py.

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "core/cuda.h"
#include "kernels/geglu.h"
#include "kernels/lora_products.h"
#include "kernels/moe_adapters.h"
#include "kernels/moe_rows.h"
#include "ops/moe/moe_experts.h"
#include "runtime/loader.h"

namespace liger::ops::moe_experts {
namespace {

using core::address;
namespace flags = kernels::constants::moe_experts;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// On compute capability 9.0 PyTorch's grouped GEMM makes 550 to 690 TFLOP/s at the shapes of benchmarks/moe_experts.py, and
// our kernels 290 to 490. It needs copies: gathered rows, and activations in a pass of their own. For gradients of weights
// it was always faster, for other products from about this number of rows per expert, and for the first product if
// experts are wide too.
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
    std::string error;
    const auto* info = runtime::device_info(device_.index(), error);
    if (!info || !K::kernel.spec().supports(info->capability)) return false;
    return runtime::is_trial(variant) || runtime::loads(K::kernel, variant, device_.index()) == runtime::Loads::Yes;
  }

  at::Device device_ = call.x.device();
};

int32_t words_of(const Tensor& index) { return index.scalar_type() == at::kLong ? 2 : 1; }

/// Experts' matrices with contiguous rows.
Tensor with_rows(const Tensor& w) { return w.stride(2) == 1 || w.size(2) == 1 ? w : w.contiguous(); }
Tensor rows_of(const Tensor& t) { return t.stride(1) == 1 || t.size(1) == 1 ? t : t.contiguous(); }

Tensor fp32_or_undefined(const Tensor& t) { return t.defined() ? t.to(at::kFloat).contiguous() : t; }

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
Tensor columns_last(const Tensor& w, bool columns_second) { return columns_second ? w : w.transpose(1, 2); }

void route(const Kernels& k, const Tensor& index) {
  const Routing& r = k.routing;
  const auto ints = k.call.x.options().dtype(at::kInt);
  const bool sorted = k.call.is_sorted();
  const int32_t blocks = sorted ? 0 : int32_t(ceil_div(k.pairs, flags::ROUTE_BLOCK)), words = words_of(index);
  const int64_t programs = ceil_div(k.pairs, flags::ROUTE_BLOCK);
  Tensor totals = sorted ? index.to(at::kInt) : at::zeros({k.experts}, ints), counts;
  if (!sorted) {
    using Count = kernels::moe_experts_count;
    counts = at::empty({k.experts, blocks}, ints);
    k.start_simple<Count>(
        1, false, programs, {address(counts), address(totals), address(index), k.pairs, k.experts, blocks, words}, 0);
  }
  using Scan = kernels::moe_experts_scan;
  const auto& config = runtime::first_fit<Scan>(k.experts, false);
  k.start<Scan>(
      runtime::variant_index<Scan>(config, runtime::point_of<Scan>(0)), k.experts,
      {address(r.offsets), address(r.tiles), address(counts), address(totals), k.pairs, k.experts, blocks});
  using Place = kernels::moe_experts_place;
  k.start_simple<Place>(
      1, false, programs,
      {address(r.tokens), address(r.order), address(r.position), address(counts), address(r.offsets), address(index),
       k.pairs, k.choices, k.experts, blocks, sorted ? 0 : words},
      0);
}

// ---- Adapters

bool is_narrow(at::ScalarType dtype) { return dtype != at::kFloat; }

/// (E, C, pieces, padded ranks). adapter: (E, C, r), of any strides.
Tensor pack(const Kernels& k, const Tensor& adapter, at::ScalarType dtype) {
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
at::ScalarType dtype_of_rows(const Tensor& x, const Tensor& adapter) {
  return x.scalar_type() == at::kHalf ? adapter.scalar_type() : x.scalar_type();
}

/// scale x times an adapter, of the rows of the experts.
struct Narrow {
  Tensor t, v;  // (pairs, r) in fp32, and its pieces for a Step
};

/// adapter: (E, C, r). by_token: whether x has a row per token. t: memory for the result, or undefined.
Narrow narrow(
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
void sum_products(const Kernels& k, const Tensor& out, const Tensor& x, const Tensor& v, bool by_token) {
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
void add_step(const Kernels& k, const Tensor& out, const Step& step) {
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
Tensor by_feature(const Tensor& a) { return a.transpose(1, 2); }

bool has_ranks(const Adapters& adapters) { return adapters.present() && adapters.a.size(1) > 0; }

// ---- Products

/// act (pairs, I). saved: null, or receives the product (pairs, 2 I).
Tensor up_product(const Kernels& k, const Tensor& x, Tensor* saved, const Tensor& bias, const Step& step) {
  const Options& o = k.call.options;
  const Tensor w = with_rows(k.call.gate_up);
  const bool aligned = multiples_of_8(k.hidden, k.inner, x.stride(0), w.stride(0), w.stride(1)) &&
      core::aligned16(address(x), address(w));
  Tensor act, pre;
  if (k.can_group(aligned) && k.has_many_rows() && k.inner >= kWide) {
    pre = k.group(k.gather(x), columns_last(w, o.transposed));
    add_step(k, pre, step);
    act = at::empty({k.pairs, k.inner}, x.options());
    kernels::moe_experts_act::Args args{};
    args.act = address(act);
    args.pre = address(pre);
    args.bias = address(bias);
    args.weight = address(k.weight);
    args.offsets = address(k.routing.offsets);
    args.tiles = address(k.routing.tiles);
    args.order = address(k.routing.order);
    args.inner = k.inner;
    k.set_gate(args);
    args.flags = k.gate_flags() | (bias.defined() ? flags::HAS_BIAS : 0);
    k.start_act<kernels::moe_experts_act>(args);
    if (saved) *saved = pre;
    return act;
  }
  act = at::empty({k.pairs, k.inner}, x.options());
  if (saved) *saved = pre = at::empty({k.pairs, 2 * k.inner}, x.options());
  const int layout = !o.transposed ? flags::SUM_FIRST : o.interleaved ? flags::COLUMNS_FIRST : flags::HALVES_APART;
  auto run = [&](auto kernel, const auto& config, uint32_t variant) {
    using K = decltype(kernel);
    typename K::Args args{};
    args.act = address(act);
    args.pre = address(pre);
    args.x = address(x);
    args.gate_up = address(w);
    args.bias = address(bias);
    args.weight = address(k.weight);
    k.set_routing(args);
    args.tokens = address(k.routing.tokens);
    args.order = address(k.routing.order);
    args.hidden = k.hidden;
    args.inner = k.inner;
    args.x_row = x.stride(0);
    k.set_weights(args, w);
    k.set_gate(args);
    k.set_step(args, step);
    args.flags = k.gate_flags() | (bias.defined() ? flags::HAS_BIAS : 0) | (pre.defined() ? flags::SAVES_PRE : 0);
    k.start<K>(variant, k.tiles * ceil_div(k.inner, config.BLOCK_N / 2), args);
  };
  k.choose<kernels::moe_experts_up, kernels::moe_experts_up_hopper>(step.ranks(), aligned, run, layout, k.gate());
  return act;
}

/// (pairs, H) = a (pairs, depth) times each expert's matrix, of which a dimension is H and the other is summed. Sorted
/// rows beyond those of the experts are 0.
template <class Hopper>
Tensor rows_product(
    const Kernels& k, const Tensor& a, const Tensor& weights, bool sum_first, const Tensor& bias, const Step& step) {
  const Tensor w = with_rows(weights);
  const bool aligned =
      multiples_of_8(k.hidden, a.size(1), w.stride(0), w.stride(1)) && core::aligned16(address(a), address(w));
  if (k.can_group(aligned) && k.has_many_rows() && !bias.defined()) {
    Tensor out = k.group(a, columns_last(w, !sum_first));
    add_step(k, out, step);
    if (k.call.is_sorted()) {
      using K = kernels::moe_experts_clear_rest;
      const auto& config = runtime::first_fit<K>(k.hidden, true);
      k.start<K>(
          runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(core::dtype_of(out)))),
          ceil_div(k.pairs, config.BLOCK_M), {address(out), address(k.routing.offsets), k.experts, k.pairs, k.hidden});
    }
    return out;
  }
  const auto& options = k.call.x.options();
  Tensor out = k.call.is_sorted() ? at::zeros({k.pairs, k.hidden}, options) : at::empty({k.pairs, k.hidden}, options);
  auto run = [&](auto kernel, const auto& config, uint32_t variant) {
    using K = decltype(kernel);
    typename K::Args args{};
    args.out = address(out);
    args.a = address(a);
    args.w = address(w);
    args.bias = address(bias);
    k.set_routing(args);
    args.depth = int32_t(a.size(1));
    args.n = int32_t(out.size(1));
    k.set_weights(args, w);
    k.set_step(args, step);
    args.flags = bias.defined() ? flags::HAS_BIAS : 0;
    k.start<K>(variant, k.tiles * ceil_div(out.size(1), config.BLOCK_N), args);
  };
  const int layout = sum_first ? flags::SUM_FIRST : flags::COLUMNS_FIRST;
  k.choose<kernels::moe_experts_rows, Hopper>(step.ranks(), aligned, run, layout);
  return out;
}

/// Writes dpre. act: what the gradient of down multiplies d out with; shares: of d weight, (column tiles, pairs). Each
/// if wanted.
struct ActGradients {
  Tensor act, shares;
};

ActGradients act_backward(
    const Kernels& k, ByToken& douts, const Tensor& pre, const Tensor& dpre, bool wants_act, bool wants_weight,
    const Step& step) {
  const Tensor w = with_rows(k.call.down), &dout = douts.tokens;
  const bool aligned = multiples_of_8(k.hidden, k.inner, dout.stride(0), w.stride(0), w.stride(1)) &&
      core::aligned16(address(dout), address(w), address(pre), address(dpre));
  Tensor act, shares;
  auto empty_shares = [&](int64_t columns) {
    if (wants_weight) shares = at::empty({columns, k.pairs}, k.call.x.options().dtype(at::kFloat));
  };
  const int32_t all_flags = k.gate_flags() | (k.weight.defined() ? flags::HAS_WEIGHT : 0) |
      (wants_act ? flags::SAVES_ACT : 0) | (wants_weight ? flags::WANTS_WEIGHT : 0);
  if (k.can_group(aligned) && k.has_many_rows()) {
    act = k.group(douts.gathered(k), columns_last(w, !k.call.options.transposed));
    add_step(k, act, step);
    using K = kernels::moe_experts_act_rows_bwd;
    empty_shares(ceil_div(k.inner, runtime::first_fit<K>(k.inner, true).BLOCK_N));
    K::Args args{};
    args.dpre = address(dpre);
    args.act = args.dact = address(act);
    args.shares = address(shares);
    args.pre = address(pre);
    args.weight = address(k.weight);
    args.offsets = address(k.routing.offsets);
    args.tiles = address(k.routing.tiles);
    args.order = address(k.routing.order);
    args.pairs = k.pairs;
    args.inner = k.inner;
    k.set_gate(args);
    args.flags = all_flags;
    k.start_act<K>(args);
    return {act, shares};
  }
  if (wants_act) act = at::empty({k.pairs, k.inner}, k.call.x.options());
  auto run = [&](auto kernel, const auto& config, uint32_t variant) {
    using K = decltype(kernel);
    const int64_t columns = ceil_div(k.inner, config.BLOCK_N);
    empty_shares(columns);
    typename K::Args args{};
    args.dpre = address(dpre);
    args.act = address(act);
    args.shares = address(shares);
    args.pre = address(pre);
    args.dout = address(dout);
    args.down = address(w);
    args.weight = address(k.weight);
    k.set_routing(args);
    args.tokens = address(k.routing.tokens);
    args.order = address(k.routing.order);
    args.pairs = k.pairs;
    args.hidden = k.hidden;
    args.inner = k.inner;
    args.dout_row = dout.stride(0);
    k.set_weights(args, w);
    k.set_gate(args);
    k.set_step(args, step);
    args.flags = all_flags;
    k.start<K>(variant, k.tiles * columns, args);
  };
  const int layout = k.call.options.transposed ? flags::SUM_FIRST : flags::COLUMNS_FIRST;
  k.choose<kernels::moe_experts_act_bwd, kernels::moe_experts_act_bwd_hopper>(
      step.ranks(), aligned, run, layout, k.gate());
  return {act, shares};
}

/// (E, m, n): of every expert, the sum over its rows of left^T right. tokens (T, .): one of the two; by_row (pairs, .):
/// the other.
template <class Hopper>
Tensor weights_product(const Kernels& k, const Tensor& like, ByToken& tokens, const Tensor& by_row, bool token_left) {
  const Tensor &left = token_left ? tokens.tokens : by_row, &right = token_left ? by_row : tokens.tokens;
  const bool aligned = multiples_of_8(like.size(1), like.size(2), left.stride(0), right.stride(0)) &&
      core::aligned16(address(left), address(right));
  if (k.can_group(aligned)) {
    const Tensor& rows = tokens.gathered(k);
    return token_left ? k.group(rows.t(), by_row) : k.group(by_row.t(), rows);
  }
  Tensor out = gradient_like(like);
  auto run = [&](auto kernel, const auto& config, uint32_t variant) {
    using K = decltype(kernel);
    typename K::Args args{};
    args.out = address(out);
    args.left = address(left);
    args.right = address(right);
    args.offsets = address(k.routing.offsets);
    args.tokens = address(k.routing.tokens);
    args.m = int32_t(out.size(1));
    args.n = int32_t(out.size(2));
    args.left_row = left.stride(0);
    args.right_row = right.stride(0);
    k.start<K>(
        variant, k.experts * ceil_div(out.size(1), config.BLOCK_M) * ceil_div(out.size(2), config.BLOCK_N), args);
  };
  k.choose<kernels::moe_experts_weights, Hopper>(0, aligned, run, int(token_left));
  return out;
}

/// (T, H): the sum of each token's rows. Sorted rows are their tokens' already.
Tensor combine(const Kernels& k, const Tensor& rows, bool weighted) {
  if (k.call.is_sorted()) return rows;
  using K = kernels::moe_experts_combine;
  Tensor out = at::empty({k.call.tokens(), k.hidden}, rows.options());
  const bool aligned = multiples_of_8(k.hidden) && core::aligned16(address(out), address(rows));
  k.start_simple<K>(
      k.hidden, aligned, k.call.tokens(),
      {address(out), address(rows), address(k.routing.position), address(k.weight), k.choices, k.hidden,
       weighted ? flags::HAS_WEIGHT : 0},
      K::dtype(core::dtype_of(rows)));
  return out;
}

/// (E, n): sums over each expert's rows, or over the weighted rows of their tokens.
Tensor bias_gradient(const Kernels& k, const Tensor& rows, bool of_tokens, bool weighted) {
  using K = kernels::moe_experts_bias_bwd;
  const auto n = int32_t(rows.size(1));
  Tensor out = at::empty({k.experts, n}, rows.options().dtype(at::kFloat));
  k.start_simple<K>(
      n, false, k.experts,
      {address(out), address(rows), address(k.routing.offsets), address(k.routing.tokens), address(k.routing.order),
       address(k.weight), n, rows.stride(0), (of_tokens ? flags::GATHERS : 0) | (weighted ? flags::HAS_WEIGHT : 0)},
      K::dtype(core::dtype_of(rows)));
  return out.to(rows.scalar_type());
}

Tensor weight_gradient(const Kernels& k, const Tensor& shares, const Tensor& dout, const Tensor& index) {
  using K = kernels::moe_experts_route_bwd;
  const Tensor bias = k.call.options.weight_before ? Tensor() : fp32_or_undefined(k.call.down_bias);
  Tensor out = at::empty({k.call.tokens(), k.choices}, k.weight.options());
  const auto& config = runtime::first_fit<K>(1, false);
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(dout)));
  k.start<K>(
      runtime::variant_index<K>(config, point), ceil_div(k.pairs, config.BLOCK_P),
      {address(out), address(shares), address(k.routing.position), address(dout), address(bias), address(index),
       k.pairs, k.choices, k.hidden, dout.stride(0), int32_t(shares.size(0)), k.experts, words_of(index),
       bias.defined() ? flags::HAS_BIAS : 0});
  return out.to(k.call.weight.scalar_type());
}

void check_sizes(const Call& call) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  LIGER_CHECK(
      call.pairs() <= kMost && call.hidden() <= kMost && 2 * call.inner() <= kMost, call.op, "x",
      "have fewer than 2^31 rows of experts and columns", call.pairs(), " and ", call.hidden());
  LIGER_CHECK(
      call.experts() <= flags::MAX_EXPERTS, call.op, "gate_up",
      c10::str("have at most ", int(flags::MAX_EXPERTS), " experts on CUDA"), call.experts());
}

}  // namespace

Tensor Cuda::forward(const Call& call, const Tensor& routing, Saved* saved) {
  c10::DeviceGuard guard(call.x.device());
  if (saved) saved->t = empty_t(call);
  if (call.is_empty()) {
    if (saved) saved->pre = empty_pre(call);
    return at::zeros_like(call.x, at::MemoryFormat::Contiguous);
  }
  check_sizes(call);
  const Options& o = call.options;
  const Routing parts(routing, call.pairs(), call.experts());
  const Kernels k(call, parts);
  route(k, call.index.contiguous());
  const Tensor x = rows_of(call.x);
  Step step;
  if (const auto& adapters = call.gate_up_adapters; has_ranks(adapters)) {
    step.v = narrow(k, x, by_feature(adapters.a), o.gate_up_scale, true, saved ? saved->t : Tensor()).v;
    step.packed = pack(k, adapters.b, x.scalar_type());
  }
  Tensor act = up_product(k, x, saved ? &saved->pre : nullptr, fp32_or_undefined(call.gate_up_bias), step);
  step = Step();
  if (const auto& adapters = call.down_adapters; has_ranks(adapters)) {
    step.v = narrow(k, act, by_feature(adapters.a), o.down_scale, false).v;
    step.packed = pack(k, adapters.b, x.scalar_type());
  }
  const Tensor y = rows_product<kernels::moe_experts_rows_hopper>(
      k, act, call.down, !o.transposed, fp32_or_undefined(call.down_bias), step);
  act = Tensor();
  step = Step();
  return combine(k, y, !o.weight_before);
}

Gradients Cuda::backward(
    const Call& call, const Tensor& dout_given, const Tensor& routing, const Saved& saved, const Tensor& dpre,
    int64_t wanted) {
  c10::DeviceGuard guard(call.x.device());
  const Options& o = call.options;
  const auto &first = call.gate_up_adapters, &second = call.down_adapters;
  auto wants = [&](int64_t bits) { return (wanted & bits) != 0; };
  auto zeros = [&](int64_t bit, const Tensor& like) {
    return !wants(bit) ? Tensor() : bit < kGateUpA ? gradient_like(like, true) : adapter_gradient(like, true);
  };
  if (call.is_empty()) {
    auto bias = [&](int64_t bit, int64_t n) {
      return wants(bit) ? at::zeros({call.experts(), n}, call.x.options()) : Tensor();
    };
    return gradients_like(call, zeros, bias(kGateUpBias, 2 * call.inner()), bias(kDownBias, call.hidden()));
  }
  const Routing parts(routing.contiguous(), call.pairs(), call.experts());
  const Kernels k(call, parts);
  const Tensor pre = saved.pre.contiguous();
  const bool weighted = !call.is_sorted() && !o.weight_before;
  Gradients out;
  // Large buffers live as briefly as possible: the rows of d out, of act and of d x are gone before d gate_up exists.
  if (wants(~kDownBias)) {
    ByToken dout{rows_of(dout_given)};
    Narrow u;
    Step step;
    if (has_ranks(second)) {
      u = narrow(k, dout.tokens, second.b, o.down_scale, true);
      step = {u.v, pack(k, by_feature(second.a), dout.tokens.scalar_type())};
    }
    const auto [act, shares] = act_backward(k, dout, pre, dpre, wants(kDown | kDownA | kDownB), wants(kWeight), step);
    step = Step();
    if (wants(kWeight)) out.weight = weight_gradient(k, shares, dout.tokens, call.index.contiguous());
    if (wants(kDown)) {
      out.down = weights_product<kernels::moe_experts_weights_down_hopper>(k, call.down, dout, act, !o.transposed);
    }
    if (wants(kDownA)) {
      out.down_a = adapter_gradient(second.a);
      sum_products(k, by_feature(out.down_a), act, u.t, false);
    }
    if (wants(kDownB)) {
      out.down_b = adapter_gradient(second.b);
      const Narrow t = has_ranks(second) ? narrow(k, act, by_feature(second.a), o.down_scale, false) : Narrow();
      sum_products(k, out.down_b, dout.tokens, t.t, true);
    }
  }
  if (wants(kDownBias)) out.down_bias = bias_gradient(k, rows_of(dout_given), true, weighted);
  if (wants(kGateUpBias)) out.gate_up_bias = bias_gradient(k, dpre, false, false);
  Narrow u;
  if (has_ranks(first) && wants(kX | kGateUpA)) u = narrow(k, dpre, first.b, o.gate_up_scale, false);
  if (wants(kGateUpB)) {
    out.gate_up_b = adapter_gradient(first.b);
    sum_products(k, out.gate_up_b, dpre, saved.t.contiguous(), false);
  }
  if (wants(kGateUpA)) {
    out.gate_up_a = adapter_gradient(first.a);
    sum_products(k, by_feature(out.gate_up_a), rows_of(call.x), u.t, true);
  }
  if (wants(kX)) {
    Step step;
    if (has_ranks(first)) step = {u.v, pack(k, by_feature(first.a), call.x.scalar_type())};
    const Tensor rows =
        rows_product<kernels::moe_experts_rows_bwd_hopper>(k, dpre, call.gate_up, o.transposed, {}, step);
    out.x = combine(k, rows, false);
  }
  if (wants(kGateUp)) {
    ByToken x{rows_of(call.x)};
    out.gate_up = weights_product<kernels::moe_experts_weights_gate_up_hopper>(k, call.gate_up, x, dpre, o.transposed);
  }
  return out;
}

}  // namespace liger::ops::moe_experts
