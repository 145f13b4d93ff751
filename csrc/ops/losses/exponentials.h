#pragma once

// A chunk of fused_linear_cross_entropy whose logits nobody reads: its first GEMM hands out exponentials and their
// sums, from which losses and gradients follow by a factor a row. What that takes, and why it is right:
// liger_ops/kernels/losses/exponentials.py. Compute capability 9.0 and bf16, losses
// without smoothing, softcap, bias and metrics.

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

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
  static constexpr int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }
  static constexpr int64_t kPairRows = 2 * kConfig.TILE_M;  // those that share a tile of the weight
  // Rows of x that all tiles of classes pass by before the next ones do: they stay in the L2 cache.
  static constexpr int64_t kBytesOfGroup = 16 << 20;
  static constexpr int64_t kLeastLogits = 1 << 25;

 public:
  /// Whether GEMMs of `rows` tokens are large enough, on a device that has the kernel, in a layout that it takes.
  /// may_allocate: a hundredth of what exponentials take, for sums, where rows of x are shorter than those.
  static bool serve(const at::Tensor& x, const at::Tensor& weight, int64_t rows, bool may_allocate) {
    if (!x.is_cuda() || x.scalar_type() != at::kBFloat16) return false;
    auto fits = [](const at::Tensor& t) {
      return t.stride(1) == 1 && t.stride(0) >= t.size(1) && t.stride(0) % 8 == 0 && t.size(1) % 8 == 0 &&
          aligned16(address(t));
    };
    // Fewer rows than fill tiles would be multiplied in vain, and for few logits a pass costs less than more launches.
    const bool pays = rows * weight.size(0) >= kLeastLogits && up(rows, kPairRows) * kPairRows * 8 <= rows * 9;
    const bool has_room = may_allocate || sums_fit(x.size(1), weight.size(0));
    return pays && has_room && fits(x) && fits(weight) && present(x.device().index());
  }

  /// Of a token.
  static constexpr int64_t bytes_of_sums(int64_t classes) { return 4 * tiles(classes); }

  /// rows: of the largest chunk. gradients: whether there are any; make() then gets rows that sums may lie in.
  Exponentials(
      const char* op, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& target,
      const at::Tensor& class_weight, const cross_entropy::Options& o, double logits_scale, int64_t rows,
      bool gradients)
      : op_(op),
        x_(x),
        weight_(weight),
        target_(target.contiguous()),
        class_weight_(class_weight.defined() ? class_weight.to(at::kFloat).contiguous() : class_weight),
        o_(o),
        scale_(logits_scale),
        mean_(o.mean() && gradients) {
    auto floats = x.options().dtype(at::kFloat);
    if (!gradients || !sums_fit(x.size(1), weight.size(0))) sums_ = at::empty({rows, tiles(weight.size(0))}, floats);
    facts_ = at::empty({4, rows}, floats);
    raised_ = at::empty({1 + up(rows, kPairRows)}, x.options().dtype(at::kInt));
  }

  /// Into e (rows x classes) the exponentials of the tokens from `first` on; into `out` their losses; their factors. The
  /// gradients of true logits go into `taken`, or into e where that is undefined; x times the factors, where it is
  /// wanted, into `weighed` (as x, contiguous), which is spent in any case.
  void make(
      at::Tensor& e, const at::Tensor& weighed, int64_t first, const cross_entropy::RowsOut& out,
      const at::Tensor& totals, const at::Tensor& grad, const at::Tensor& taken, bool wants_weighed) const {
    const int64_t rows = e.size(0), classes = e.size(1), columns = x_.size(1);
    const at::Tensor x = x_.narrow(0, first, rows);
    {
      using K = kernels::fused_linear_cross_entropy_true_logits;
      K::Args args{
          fact(kBase),
          fact(kClass),
          fact(kHighest),
          address(raised_),
          address(x),
          address(weight_),
          static_cast<const char*>(address(target_)) + first * int64_t(target_.element_size()),
          int32_t(classes),
          int32_t(columns),
          x.stride(0),
          weight_.stride(0),
          target_.scalar_type() == at::kLong ? 2 : 1,
          o_.ignore_index,
          float(scale_)};
      start<K>(x, rows, args);
    }
    // A row's program has read its sums when it writes.
    const void* sums = address(sums_.defined() ? sums_ : weighed);
    const auto sums_row = int32_t(sums_.defined() ? sums_.size(1) : columns / 2);
    multiply(e, x, sums, sums_row);
    {
      using K = kernels::fused_linear_cross_entropy_weigh;
      const int32_t flags = (mean_ ? cross_entropy::flags::MEAN : 0) |
          (grad.defined() ? cross_entropy::flags::HAS_GRAD : 0) |
          (class_weight_.defined() ? cross_entropy::flags::HAS_WEIGHT : 0) |
          (out.z_loss ? cross_entropy::flags::SAVE_Z_LOSS : 0) | (o_.reduced() ? 0 : cross_entropy::flags::ADD_Z_LOSS) |
          (taken.defined() ? kernels::constants::exponentials::TAKES : 0) |
          (wants_weighed ? kernels::constants::exponentials::WEIGHS : 0);
      K::Args args{
          out.loss,
          out.z_loss,
          fact(kFactor),
          taken.defined() ? taken.const_data_ptr<float>() + first : nullptr,
          address(weighed),
          address(e),
          address(x),
          sums,
          fact(kBase),
          fact(kClass),
          fact(kHighest),
          address(class_weight_),
          address(grad),
          address(totals),
          int32_t(columns),
          int32_t(tiles(classes)),
          sums_row,
          e.stride(0),
          x.stride(0),
          1,
          float(o_.lse_square_scale),
          flags};
      start<K>(x, rows, args);
    }
  }

  /// dx (rows x columns, contiguous), which is logits_scale * e @ weight, becomes the gradient.
  void rescale(const at::Tensor& dx, int64_t first, const at::Tensor& taken) const {
    using K = kernels::fused_linear_cross_entropy_rescale;
    K::Args args{address(dx),       fact(kFactor),    taken.defined() ? taken.const_data_ptr<float>() + first : nullptr,
                 fact(kClass),      address(weight_), int32_t(dx.size(1)),
                 weight_.stride(0), float(scale_),    taken.defined() ? kernels::constants::exponentials::TAKES : 0};
    start<K>(dx, dx.size(0), args);
  }

 private:
  static constexpr int64_t tiles(int64_t classes) { return up(classes, kConfig.TILE_N); }

  /// Sums of a row, in fp32, into a row of bf16.
  static constexpr bool sums_fit(int64_t columns, int64_t classes) { return bytes_of_sums(classes) <= 2 * columns; }

  enum Fact { kBase, kClass, kHighest, kFactor };

  const void* fact(Fact which) const { return facts_.const_data_ptr<float>() + which * facts_.size(1); }

  /// One program a row; what serve() asks of tensors is what an aligned config asks.
  template <class K>
  void start(const at::Tensor& like, int64_t rows, const typename K::Args& args) const {
    const auto& config = runtime::first_fit<K>(like.size(1), true);
    auto variant = runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(dtype_of(like))));
    launch<K>(op_, like.device(), variant, {uint32_t(rows)}, args);
  }

  void multiply(at::Tensor& e, const at::Tensor& x, const void* sums, int32_t sums_row) const {
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
    const int64_t pairs = up(rows, kPairRows);
    args.sums = sums;
    args.sums_row = sums_row;
    args.base = fact(kBase);
    args.classes = fact(kClass);
    args.highest = fact(kHighest);
    args.raised = address(raised_);
    args.rows = int32_t(rows);
    args.n = int32_t(classes);
    args.columns = int32_t(columns);
    args.group = int32_t(std::clamp<int64_t>(kBytesOfGroup / (kPairRows * columns * 2), 1, pairs));
    args.scale = float(scale_);
    const int64_t clusters = persistent_programs(x.device(), 2 * pairs * tiles(classes), 1) / 2;
    for (args.again = 0; args.again < 2; ++args.again) {
      launch<ExpLogits>(op_, x.device(), 0, {uint32_t(2 * std::max<int64_t>(1, clusters))}, args);
    }
  }

  /// Whether a device has the kernel, asked once: where it does not load, or is not wanted, there is another way.
  static bool present(int device) {
    static std::array<std::atomic<int>, runtime::kMaxDevices> known{};  // 0: not asked
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
  const cross_entropy::Options o_;
  const double scale_;
  const bool mean_;
  at::Tensor sums_, facts_, raised_;  // sums_: undefined where they fit elsewhere
};

}  // namespace liger::ops::fused_linear_cross_entropy
