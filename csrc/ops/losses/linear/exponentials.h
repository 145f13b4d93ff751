#pragma once

// The logits-free path of fused_linear_cross_entropy, for one chunk of tokens. Its first GEMM writes exponentials and
// their sums instead of logits. Losses and gradients follow from these by one factor per row.
// liger_ops/kernels/losses/exponentials.py explains the method.
// Requires compute capability 9.0, bf16, and a loss without smoothing, softcap, bias and metrics.
//
// If the classes are split over ranks, the steps of a chunk are start(), share of the true logits, multiply(),
// add_sums(), share of the sums, weigh(), and rescale(). A row's exponentials have another base on each rank where they
// would overflow. Gradients of true logits are kept apart then: relative to the rank's factor they may overflow.

#include <cstdlib>
#include <cstring>

#include "core/aten.h"
#include "core/cuda/launch.h"
#include "kernels/exponentials.h"
#include "ops/losses/cross_entropy.h"
#include "ops/losses/linear/products.h"

namespace liger::ops::fused_linear_cross_entropy {

using namespace core;

class Exponentials {
  using ExpLogits = kernels::fused_linear_cross_entropy_exp_logits;
  using Gemm = linear::Products<ExpLogits>;
  static constexpr int64_t kPairRows = Gemm::kPairRows;
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
    const bool pays = rows * classes >= kMinLogits && linear::ceil_div(rows, kPairRows) * kPairRows * 8 <= rows * 9;
    return pays && is_available(x.device().index());
  }

  /// True if the kernel supports the layout of a matrix.
  static bool fits(const at::Tensor& t) {
    using K = kernels::fused_linear_cross_entropy_true_logits;
    return t.stride(1) == 1 && t.stride(0) >= t.size(1) &&
        K::is_aligned({.x = address(t), .columns = int32_t(t.size(1)), .x_row = t.stride(0)});
  }

  /// True if rows of x are long enough to hold the sums of their exponentials.
  static bool sums_fit(const at::Tensor& x, const at::Tensor& weight) {
    return bytes_of_sums(weight.size(0)) <= x.size(1) * x.element_size();
  }

  /// Per token.
  static constexpr int64_t bytes_of_sums(int64_t classes) { return 4 * tiles(classes); }

  /// gradients: true if any are requested; the sums may then be stored in the rows of `weighed`.
  Exponentials(
      const char* op, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& target,
      const at::Tensor& class_weight, const core::Shard& shard, const cross_entropy::Options& o, double logits_scale,
      bool gradients)
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
    c.raised = at::empty({1 + linear::ceil_div(rows, kPairRows)}, x_.options().dtype(at::kInt));
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
    K::Args args{
        .weight = address(weight_),
        .weight_row = weight_.stride(0),
        .ignore_index = o_.ignore_index,
        .first_class = int32_t(shard_.first),
        .all_classes = int32_t(shard_.classes)};
    launch_rows<K>(args, c);
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
    K::Args args{.facts = address(facts)};
    launch_rows<K>(args, c);
    return facts;
  }

  /// gathered: the facts of all ranks (ranks, 2, rows), if classes are split.
  void weigh(
      const Chunk& c, const at::Tensor& e, const at::Tensor& weighed, const at::Tensor& gathered,
      const cross_entropy::RowsOut& out, const at::Tensor& totals, const at::Tensor& grad, const at::Tensor& taken,
      bool wants_weighed) const {
    using K = kernels::fused_linear_cross_entropy_weigh;
    const int32_t flags = (mean_ ? cross_entropy::flags::MEAN : 0) |
        (grad.defined() ? cross_entropy::flags::HAS_GRAD : 0) |
        (class_weight_.defined() ? cross_entropy::flags::HAS_WEIGHT : 0) |
        (out.z_loss ? cross_entropy::flags::SAVE_Z_LOSS : 0) | (o_.reduced() ? 0 : cross_entropy::flags::ADD_Z_LOSS) |
        (taken.defined() ? kernels::constants::exponentials::TAKES : 0) |
        (wants_weighed ? kernels::constants::exponentials::WEIGHS : 0);
    K::Args args{
        .loss = out.loss,
        .z_loss = out.z_loss,
        .factor = number(c, kFactor),
        .taken = taken.defined() ? taken.const_data_ptr<float>() + c.first : nullptr,
        .weighed = address(weighed),
        .e = address(e),
        .gathered = address(gathered),
        .class_weight = address(class_weight_),
        .grad = address(grad),
        .totals = address(totals),
        .ranks = gathered.defined() ? int32_t(gathered.size(0)) : 0,
        .e_row = e.stride(0),
        .grad_stride = 1,
        .lse_square_scale = float(o_.lse_square_scale),
        .flags = flags};
    launch_rows<K>(args, c, weighed);
  }

  /// Turns dx (rows x columns, contiguous) from logits_scale * e @ weight into the gradient.
  void rescale(const Chunk& c, const at::Tensor& dx, const at::Tensor& taken) const {
    using K = kernels::fused_linear_cross_entropy_rescale;
    const K::Args args{
        .dx = address(dx),
        .factor = number(c, kFactor),
        .taken = taken.defined() ? taken.const_data_ptr<float>() + c.first : nullptr,
        .classes = number(c, kClass),
        .weight = address(weight_),
        .columns = int32_t(dx.size(1)),
        .weight_row = weight_.stride(0),
        .scale = float(scale_),
        .flags = taken.defined() ? kernels::constants::exponentials::TAKES : 0};
    launch(op_, dx.device(), choose<K>(dx.size(1), args), {uint32_t(dx.size(0))}, args);
  }

  /// e: the exponentials of the chunk.
  void multiply(const Chunk& c, at::Tensor& e, const at::Tensor& weighed) const {
    if (weight_.size(0) == 0) return;
    const at::Tensor x = x_.narrow(0, c.first, c.rows);
    ExpLogits::Args args{};
    const uint32_t programs = Gemm::prepare(op_, args, x, weight_);
    Gemm::map(op_, "the logits", args.e, e, Gemm::kConfig.TILE_M, Gemm::kConfig.PUT_N);
    pass(args, c, weighed);
    for (args.again = 0; args.again < 2; ++args.again) {
      launch(op_, x.device(), Choice<ExpLogits>{Gemm::kConfig, 0}, {programs}, args);
    }
  }

 private:
  static constexpr int64_t tiles(int64_t classes) { return Gemm::tiles(classes); }

  enum Number { kBase, kClass, kHighest, kFactor };

  static const void* number(const Chunk& c, Number which) {
    return c.numbers.const_data_ptr<float>() + which * c.numbers.size(1);
  }

  /// Sets the arguments that kernels share.
  template <class Args>
  void pass(Args& args, const Chunk& c, const at::Tensor& weighed) const {
    args.base = number(c, kBase);
    args.highest = number(c, kHighest);
    if constexpr (requires { args.rows; }) args.rows = int32_t(c.rows);
    if constexpr (requires { args.n; }) args.n = int32_t(weight_.size(0));
    if constexpr (requires { args.columns; }) args.columns = int32_t(x_.size(1));
    if constexpr (requires { args.scale; }) args.scale = float(scale_);
    if constexpr (requires { args.tiles; }) args.tiles = int32_t(tiles(weight_.size(0)));
    if constexpr (requires { args.x_row; }) {
      args.x = address(x_.narrow(0, c.first, c.rows));
      args.x_row = x_.stride(0);
    }
    // Without memory of their own, the sums are in `weighed`: a row's program reads them before it writes.
    if constexpr (requires { args.sums; }) {
      args.sums = address(has_sums_ ? c.sums : weighed);
      args.sums_row = int32_t(has_sums_ ? c.sums.size(1) : x_.size(1) / 2);
    }
    if constexpr (requires { args.classes; }) args.classes = number(c, kClass);
    if constexpr (requires { args.raised; }) args.raised = address(c.raised);
    if constexpr (requires { args.target; }) {
      args.target = static_cast<const char*>(address(target_)) + c.first * int64_t(target_.element_size());
      args.target_words = target_.scalar_type() == at::kLong ? 2 : 1;
    }
  }

  /// Launches a kernel that has a program per row.
  template <class K>
  void launch_rows(typename K::Args& args, const Chunk& c, const at::Tensor& weighed = {}) const {
    pass(args, c, weighed);
    launch(op_, x_.device(), choose<K>(x_.size(1), args), {uint32_t(c.rows)}, args);
  }

  static bool is_available(int device) {
    const char* value = std::getenv("LIGER_OPS_EXPONENTIALS");
    return Gemm::is_available(device, !value || std::strcmp(value, "0") != 0);
  }

  const char* op_;
  const at::Tensor x_, weight_, target_, class_weight_;
  const core::Shard shard_;
  const cross_entropy::Options o_;
  const double scale_;
  const bool mean_, has_sums_;
};

}  // namespace liger::ops::fused_linear_cross_entropy
