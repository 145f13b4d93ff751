#pragma once

// The logits-free path of fused_linear_cross_entropy, for one chunk of tokens. Its first GEMM writes exponentials and
// their sums instead of logits. Losses and gradients follow from these by one factor per row.
// liger_ops/kernels/losses/exponentials.py explains the method.
// Requires compute capability 9.0, bf16, and a loss without smoothing, softcap, bias and metrics.
//
// If the classes are split over ranks, the steps of a chunk are start(), share of the true logits, multiply(),
// add_sums(), share of the sums, weigh(), and rescale(). A row's exponentials have another base on each rank where they
// would overflow. Gradients of true logits are kept apart then: relative to the rank's factor they may overflow.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/aten.h"
#include "core/cuda.h"
#include "kernels/exponentials.h"
#include "ops/losses/cross_entropy.h"
#include "runtime/device.h"
#include "runtime/loader.h"
#include "runtime/tensor_map.h"

namespace liger::ops::fused_linear_cross_entropy {

using namespace core;

class Exponentials {
  using ExpLogits = kernels::fused_linear_cross_entropy_exp_logits;
  static constexpr const ExpLogits::Config& kConfig = ExpLogits::configs[0];
  static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
  static constexpr int64_t kPairRows = 2 * kConfig.TILE_M;  // of a cluster, which shares tiles of the weight
  // Size of a group of rows of x. All tiles of classes use one group before the next, so that the group stays in the L2
  // cache.
  static constexpr int64_t kGroupBytes = 16 << 20;
  static constexpr int64_t kMinLogits = 1 << 25;

 public:
  /// What the steps of one chunk hand on.
  struct Chunk {
    int64_t first, rows;
    at::Tensor numbers, raised, sums;  // numbers: (4, rows), see Number

    /// The logit of each row's true class.
    at::Tensor base() const { return numbers.select(0, kBase); }
  };

  /// True if this path applies: GEMMs of `rows` tokens and `classes` are large enough, and the device has the kernel.
  static bool applies(const at::Tensor& x, int64_t classes, int64_t rows) {
    if (!x.is_cuda() || x.scalar_type() != at::kBFloat16 || x.size(1) % 8 != 0) return false;
    // Padding to full tiles may add at most one eighth to the rows. If there are few logits, a pass over them costs
    // less than the additional launches.
    const bool pays = rows * classes >= kMinLogits && ceil_div(rows, kPairRows) * kPairRows * 8 <= rows * 9;
    return pays && is_available(x.device().index());
  }

  /// True if the kernel supports the layout of a matrix.
  static bool fits(const at::Tensor& t) {
    return t.stride(1) == 1 && t.stride(0) >= t.size(1) && t.stride(0) % 8 == 0 && t.size(1) % 8 == 0 &&
        aligned16(address(t));
  }

  /// True if rows of x are long enough to hold the sums of their exponentials.
  static bool sums_fit(const at::Tensor& x, const at::Tensor& weight) { return sums_fit(x.size(1), weight.size(0)); }

  /// Per token.
  static constexpr int64_t bytes_of_sums(int64_t classes) { return 4 * tiles(classes); }

  /// gradients: true if any are requested; the sums may then be stored in the rows of `weighed`.
  Exponentials(
      const char* op, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& target,
      const at::Tensor& class_weight, const cross_entropy::Shard& shard, const cross_entropy::Options& o,
      double logits_scale, bool gradients)
      : op_(op),
        x_(x),
        weight_(weight),
        target_(target.contiguous()),
        class_weight_(class_weight.defined() ? class_weight.to(at::kFloat).contiguous() : class_weight),
        shard_(shard),
        o_(o),
        scale_(logits_scale),
        mean_(o.mean() && gradients),
        has_sums_(shard.is_split() || !gradients || !sums_fit(x, weight)) {}

  /// Memory for a chunk of `rows` tokens.
  Chunk chunk(int64_t rows) const {
    auto floats = x_.options().dtype(at::kFloat);
    Chunk c{0, rows, at::empty({4, rows}, floats), {}, {}};
    c.raised = at::empty({1 + ceil_div(rows, kPairRows)}, x_.options().dtype(at::kInt));
    if (has_sums_) c.sums = at::empty({rows, tiles(weight_.size(0))}, floats);
    return c;
  }

  /// Computes the exponentials of the tokens from `first` on into e (rows x classes), their losses into `out`, and
  /// their factors. The gradients of the true logits go into `taken`, or into e if `taken` is undefined.
  /// weighed (as x, contiguous): overwritten in any case. If wants_weighed, it receives x times the factors.
  void compute(
      Chunk& c, at::Tensor& e, const at::Tensor& weighed, int64_t first, const cross_entropy::RowsOut& out,
      const at::Tensor& totals, const at::Tensor& grad, const at::Tensor& taken, bool wants_weighed) const {
    c.first = first;
    c.rows = e.size(0);
    start(c);
    multiply(c, e, weighed);
    weigh(c, e, weighed, {}, out, totals, grad, taken, wants_weighed);
  }

  void start(const Chunk& c) const {
    using K = kernels::fused_linear_cross_entropy_true_logits;
    const at::Tensor x = x_.narrow(0, c.first, c.rows);
    K::Args args{number(c, kBase),   number(c, kClass),     number(c, kHighest),     address(c.raised),
                 address(x),         address(weight_),      target_at(c.first),      int32_t(weight_.size(0)),
                 int32_t(x.size(1)), x.stride(0),           weight_.stride(0),       target_words(),
                 o_.ignore_index,    int32_t(shard_.first), int32_t(shard_.classes), float(scale_)};
    launch_rows<K>(x, c.rows, args);
  }

  /// (2, rows): the base of a row's exponentials, and their sum.
  at::Tensor add_sums(const Chunk& c) const {
    using K = kernels::fused_linear_cross_entropy_add_sums;
    at::Tensor facts = at::empty({2, c.rows}, c.numbers.options());
    if (weight_.size(0) == 0) {
      facts.select(0, 0).copy_(c.base());
      facts.select(0, 1).zero_();
      return facts;
    }
    const auto tiles_here = int32_t(tiles(weight_.size(0)));
    K::Args args{address(facts),  address(c.sums), number(c, kBase), number(c, kHighest),
                 int32_t(c.rows), tiles_here,      tiles_here};
    const auto variant = runtime::variant_index<K>(runtime::first_fit<K>(1, false), runtime::point_of<K>(0));
    launch<K>(op_, x_.device(), variant, {uint32_t(c.rows)}, args);
    return facts;
  }

  /// gathered: the facts of all ranks (ranks, 2, rows), if classes are split.
  void weigh(
      const Chunk& c, const at::Tensor& e, const at::Tensor& weighed, const at::Tensor& gathered,
      const cross_entropy::RowsOut& out, const at::Tensor& totals, const at::Tensor& grad, const at::Tensor& taken,
      bool wants_weighed) const {
    using K = kernels::fused_linear_cross_entropy_weigh;
    const at::Tensor x = x_.narrow(0, c.first, c.rows);
    const int32_t flags = (mean_ ? cross_entropy::flags::MEAN : 0) |
        (grad.defined() ? cross_entropy::flags::HAS_GRAD : 0) |
        (class_weight_.defined() ? cross_entropy::flags::HAS_WEIGHT : 0) |
        (out.z_loss ? cross_entropy::flags::SAVE_Z_LOSS : 0) | (o_.reduced() ? 0 : cross_entropy::flags::ADD_Z_LOSS) |
        (taken.defined() ? kernels::constants::exponentials::TAKES : 0) |
        (wants_weighed ? kernels::constants::exponentials::WEIGHS : 0);
    K::Args args{
        out.loss,
        out.z_loss,
        number(c, kFactor),
        taken.defined() ? taken.const_data_ptr<float>() + c.first : nullptr,
        address(weighed),
        address(e),
        address(x),
        sums(c, weighed),
        address(gathered),
        number(c, kBase),
        number(c, kClass),
        number(c, kHighest),
        target_at(c.first),
        address(class_weight_),
        address(grad),
        address(totals),
        int32_t(c.rows),
        int32_t(x.size(1)),
        int32_t(tiles(weight_.size(0))),
        sums_row(c),
        gathered.defined() ? int32_t(gathered.size(0)) : 0,
        e.stride(0),
        x.stride(0),
        target_words(),
        1,
        float(o_.lse_square_scale),
        flags};
    launch_rows<K>(x, c.rows, args);
  }

  /// Turns dx (rows x columns, contiguous) from logits_scale * e @ weight into the gradient.
  void rescale(const Chunk& c, const at::Tensor& dx, const at::Tensor& taken) const {
    using K = kernels::fused_linear_cross_entropy_rescale;
    K::Args args{
        address(dx),       number(c, kFactor), taken.defined() ? taken.const_data_ptr<float>() + c.first : nullptr,
        number(c, kClass), address(weight_),   int32_t(dx.size(1)),
        weight_.stride(0), float(scale_),      taken.defined() ? kernels::constants::exponentials::TAKES : 0};
    launch_rows<K>(dx, dx.size(0), args);
  }

  /// e: the exponentials of the chunk.
  void multiply(const Chunk& c, at::Tensor& e, const at::Tensor& weighed) const {
    if (weight_.size(0) == 0) return;
    const at::Tensor x = x_.narrow(0, c.first, c.rows);
    const int64_t rows = e.size(0), classes = e.size(1), columns = x.size(1);
    auto row_bytes = [](const at::Tensor& t) { return t.stride(0) * int64_t(t.element_size()); };
    ExpLogits::Args args{};
    auto map = [&](auto& to, const char* name, const at::Tensor& t, int tile_rows, int tile_columns) {
      std::string error =
          runtime::map_tiles(to, address(t), t.size(0), t.size(1), row_bytes(t), tile_rows, tile_columns);
      TORCH_CHECK(error.empty(), op_, ": tensor map of ", name, " ", t.sizes(), " failed: ", error);
    };
    map(args.e, "the logits", e, kConfig.TILE_M, kConfig.PUT_N);
    map(args.x, "input", x, kConfig.TILE_M, kConfig.TILE_K);
    map(args.weight, "weight", weight_, kConfig.TILE_N / 2, kConfig.TILE_K);
    const int64_t pairs = ceil_div(rows, kPairRows);
    args.sums = sums(c, weighed);
    args.sums_row = sums_row(c);
    args.base = number(c, kBase);
    args.classes = number(c, kClass);
    args.highest = number(c, kHighest);
    args.raised = address(c.raised);
    args.rows = int32_t(rows);
    args.n = int32_t(classes);
    args.columns = int32_t(columns);
    args.group = int32_t(std::clamp<int64_t>(kGroupBytes / (kPairRows * columns * 2), 1, pairs));
    args.scale = float(scale_);
    const int64_t clusters = persistent_programs(x.device(), 2 * pairs * tiles(classes), 1) / 2;
    for (args.again = 0; args.again < 2; ++args.again) {
      launch<ExpLogits>(op_, x.device(), 0, {uint32_t(2 * std::max<int64_t>(1, clusters))}, args);
    }
  }

 private:
  static constexpr int64_t tiles(int64_t classes) { return ceil_div(classes, kConfig.TILE_N); }

  /// True if the fp32 sums of a row fit into a bf16 row of x.
  static constexpr bool sums_fit(int64_t columns, int64_t classes) { return bytes_of_sums(classes) <= 2 * columns; }

  enum Number { kBase, kClass, kHighest, kFactor };

  static const void* number(const Chunk& c, Number which) {
    return c.numbers.const_data_ptr<float>() + which * c.numbers.size(1);
  }

  // Without memory of their own, the sums are in `weighed`: a row's program reads them before it writes.
  const void* sums(const Chunk& c, const at::Tensor& weighed) const { return address(has_sums_ ? c.sums : weighed); }
  int32_t sums_row(const Chunk& c) const { return int32_t(has_sums_ ? c.sums.size(1) : x_.size(1) / 2); }

  const void* target_at(int64_t row) const {
    return static_cast<const char*>(address(target_)) + row * int64_t(target_.element_size());
  }
  int32_t target_words() const { return target_.scalar_type() == at::kLong ? 2 : 1; }

  /// Launches one program per row. applies() has checked what an aligned config requires.
  template <class K>
  void launch_rows(const at::Tensor& like, int64_t rows, const typename K::Args& args) const {
    const auto& config = runtime::first_fit<K>(like.size(1), true);
    auto variant = runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(dtype_of(like))));
    launch<K>(op_, like.device(), variant, {uint32_t(rows)}, args);
  }

  /// True if the device has the kernel and the environment allows it. Cached, unless loading failed for a transient
  /// reason.
  static bool is_available(int device) {
    static std::array<std::atomic<int>, runtime::kMaxDevices> known{};  // 0: unknown
    if (device < 0 || device >= runtime::kMaxDevices) return false;
    int answer = known[device].load(std::memory_order_relaxed);
    if (answer == 0) {
      std::string error;
      const char* value = std::getenv("LIGER_OPS_EXPONENTIALS");
      const bool wanted = !value || std::strcmp(value, "0") != 0;
      const auto* info = runtime::device_info(device, error);
      const bool can = wanted && info && ExpLogits::kernel.spec().supports(info->capability) && runtime::maps_tiles();
      const auto loads = can ? runtime::loads(ExpLogits::kernel, 0, device) : runtime::Loads::No;
      if (loads == runtime::Loads::NotNow) return false;
      answer = loads == runtime::Loads::Yes ? 1 : -1;
      known[device].store(answer, std::memory_order_relaxed);
    }
    return answer > 0;
  }

  const char* op_;
  const at::Tensor x_, weight_, target_, class_weight_;
  const cross_entropy::Shard shard_;
  const cross_entropy::Options o_;
  const double scale_;
  const bool mean_, has_sums_;
};

}  // namespace liger::ops::fused_linear_cross_entropy
