#pragma once

// Results of log_probs for the logits of a head, and gradients of logits, from the fp32 sums of the GEMM: for results
// alone, nothing of (tokens, classes) is written, and for gradients 16 bits per logit, relative to the tile's largest.
// On compute capability 9.0. See liger_ops/kernels/losses/linear_statistics.py. Elsewhere, logits are written in fp32.

#include "core/rows/rows_in_order.h"
#include "kernels/linear_statistics.h"
#include "ops/losses/linear/head.h"
#include "ops/losses/linear/products.h"
#include "ops/losses/log_probs.h"

namespace liger::ops::linear {

class Statistics {
  using Gemm = kernels::linear_statistics;
  using Chosen = kernels::linear_chosen;
  static constexpr int64_t kShare = kernels::constants::log_probs::SHARE;
  static constexpr int64_t kMostSkew = kernels::constants::log_probs::MOST_SKEW;

 public:
  /// Depends on no number of rows, so that a row's bits do not; nor on layouts where classes are split, so that all
  /// ranks decide alike. plain: the logits are products times a positive scale.
  static bool applies(const at::Tensor& input, const at::Tensor& weight, bool plain, bool is_split) {
    const int64_t columns = input.size(-1);
    return plain && input.is_cuda() && input.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16 &&
        columns > 0 && columns % 8 == 0 && (is_split || (weight.size(0) > 0 && fits(weight))) &&
        Products<Gemm>::is_available(input.device().index());
  }

  /// Gives input and weight the layout that the kernels take.
  static void align(Head& head) {
    if (!fits(head.x())) head.tokens.x = head.x().clone(at::MemoryFormat::Contiguous);
    if (head.weight.size(0) > 0 && !fits(head.weight)) head.weight = head.weight.clone(at::MemoryFormat::Contiguous);
  }

  /// Per token: what tiles of classes leave.
  static int64_t bytes(int64_t classes) { return Products<Gemm>::tiles(classes) * kShare * int64_t(sizeof(float)); }

  static constexpr double bytes_per_logit() {
    return double(kShare * int64_t(sizeof(float))) / Products<Gemm>::kConfig.TILE_N;
  }

  /// Of the tokens from `row` on and the classes that w has rows for: what tiles leave, (rows, tiles, SHARE). logits:
  /// (rows, classes) in 16 bits, written relative to that, or undefined.
  static at::Tensor multiply(
      const char* op, const Head& head, int64_t row, int64_t rows, const at::Tensor& w, double temperature,
      const at::Tensor& logits, bool extras = false) {
    const at::Tensor x = head.x().narrow(0, row, rows);
    const int64_t tiles = Products<Gemm>::tiles(w.size(0));
    const at::Tensor shares = at::empty({rows, tiles, kShare}, x.options().dtype(at::kFloat));
    Gemm::Args products{};
    const uint32_t programs = Products<Gemm>::prepare(op, products, x, w);
    if (logits.defined()) {
      constexpr auto& config = Products<Gemm>::kConfig;
      Products<Gemm>::map(op, "the logits", products.logits, logits, config.TILE_M, config.PUT_N);
    }
    products.shares = core::address(shares);
    products.tiles = int32_t(tiles);
    products.scale = float(head.scale);
    products.factor = float(1.4426950408889634 / temperature);
    const auto form = runtime::point_of<Gemm>(0, (logits.defined() ? 2 : 0) + (extras ? 1 : 0));
    core::launch(op, x.device(), core::choose<Gemm>(x.size(1), products, form), {programs}, products);
    return shares;
  }

  /// Of all classes. index: (rows, K). Returns what multiply() does.
  static at::Tensor compute(
      const char* op, const Head& head, int64_t row, const at::Tensor& index, const log_probs::Options& o,
      const log_probs::Columns& columns, const at::Tensor& logits, log_probs::Results& out) {
    using Combine = kernels::linear_statistics_combine;
    const int64_t rows = index.size(0), ids = index.size(1), n = head.weight.size(0);
    const at::Tensor x = head.x().narrow(0, row, rows);
    const at::Tensor given = at::empty({rows, ids}, x.options().dtype(at::kFloat));
    const Chosen::Args of_ids{
        .given = core::address(given),
        .x = core::address(x),
        .weight = core::address(head.weight),
        .index = core::address(index),
        .n = int32_t(n),
        .columns = int32_t(x.size(1)),
        .count = int32_t(ids),
        .x_row = x.stride(0),
        .weight_row = head.weight.stride(0),
        .first_class = int32_t(columns.first),
        .classes = int32_t(columns.classes),
        .index_words = index.scalar_type() == at::kLong ? 2 : 1,
        .ignore_index = o.ignore_index,
        .scale = float(head.scale)};
    core::launch(op, x.device(), core::choose<Chosen>(x.size(1), of_ids), {uint32_t(rows * ids)}, of_ids);
    const bool extras = out.has_extras();
    const at::Tensor shares = multiply(op, head, row, rows, head.weight, o.temperature, logits, extras);
    Combine::Args all{
        .shares = core::address(shares),
        .given = core::address(given),
        .n = int32_t(n),
        .tiles = int32_t(shares.size(1)),
        .count = int32_t(ids)};
    log_probs::pass_options(all, index, o, columns, columns.classes);
    log_probs::pass_results(all, out);
    const auto point = runtime::point_of<Combine>(extras ? 1 : 0);
    core::launch(op, x.device(), core::choose<Combine>(x.size(1), all, point), {uint32_t(rows)}, all);
    return shares;
  }

  /// Gradients of the logits that multiply() wrote, for the classes from columns.first on. dlogits may be logits.
  static void differentiate(
      const char* op, const at::Tensor& dlogits, const log_probs::ResultGradients& upstream, const at::Tensor& logits,
      const at::Tensor& shares, const at::Tensor& index, const at::Tensor& stats, const at::Tensor& chosen,
      const log_probs::Options& o, const log_probs::Columns& columns) {
    using K = kernels::linear_gradients;
    const int64_t n = logits.size(1);
    K::Args args{
        .dlogits = core::address(dlogits),
        .logits = core::address(logits),
        .shares = core::address(shares),
        .n = int32_t(n),
        .tiles = int32_t(shares.size(1)),
        .count = int32_t(index.size(1)),
        .dlogits_row = dlogits.stride(0),
        .logits_row = logits.stride(0)};
    log_probs::pass_options(args, index, o, columns, columns.classes);
    log_probs::pass_gradients(args, upstream, stats, chosen);
    const auto choice = core::choose<K>(n, args);
    const uint32_t spans = core::programs_for(core::columns_end(choice.config, n, kMostSkew), choice.config.BLOCK_N);
    core::launch(op, logits.device(), choice, {uint32_t(logits.size(0)) * spans}, args);
  }

 private:
  /// True if the kernels support the layout of a matrix.
  static bool fits(const at::Tensor& t) {
    return t.stride(1) == 1 && t.stride(0) >= t.size(1) &&
        Chosen::is_aligned({.x = core::address(t), .columns = int32_t(t.size(1)), .x_row = t.stride(0)});
  }
};

}  // namespace liger::ops::linear
