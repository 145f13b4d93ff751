#pragma once

// Results of log_probs for the logits of a head, from the fp32 sums of the GEMM: nothing of (tokens, classes) is
// written, unless 16-bit logits are needed for gradients. On compute capability 9.0. See
// liger_ops/kernels/losses/linear_statistics.py. Elsewhere, logits are written in fp32.

#include "kernels/linear_statistics.h"
#include "ops/losses/linear/head.h"
#include "ops/losses/linear/products.h"
#include "ops/losses/log_probs.h"

namespace liger::ops::linear {

class Statistics {
  using Gemm = kernels::linear_statistics;
  using Chosen = kernels::linear_chosen;

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
  static int64_t bytes(int64_t classes) {
    return Products<Gemm>::tiles(classes) * kernels::constants::log_probs::SHARE * int64_t(sizeof(float));
  }

  /// Of the tokens from `row` on. index: (rows, K). logits: (rows, V) in 16 bits, written too, or undefined.
  static void compute(
      const char* op, const Head& head, int64_t row, const at::Tensor& index, const log_probs::Options& o,
      const log_probs::Columns& columns, const at::Tensor& logits, log_probs::Results& out) {
    using Combine = kernels::linear_statistics_combine;
    namespace flags = kernels::constants::log_probs;
    const int64_t rows = index.size(0), ids = index.size(1), n = head.weight.size(0), tiles = Products<Gemm>::tiles(n);
    const at::Tensor x = head.x().narrow(0, row, rows);
    const auto numbers = x.options().dtype(at::kFloat);
    const at::Tensor shares = at::empty({rows, tiles, flags::SHARE}, numbers), given = at::empty({rows, ids}, numbers);
    const int index_words = index.scalar_type() == at::kLong ? 2 : 1;
    const bool extras = out.has_extras();
    const auto factor = float(1.4426950408889634 / o.temperature);
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
        .index_words = index_words,
        .ignore_index = o.ignore_index,
        .scale = float(head.scale)};
    core::launch(op, x.device(), core::choose<Chosen>(x.size(1), of_ids), {uint32_t(rows * ids)}, of_ids);
    Gemm::Args products{};
    const uint32_t programs = Products<Gemm>::prepare(op, products, x, head.weight);
    if (logits.defined()) {
      constexpr auto& config = Products<Gemm>::kConfig;
      Products<Gemm>::map(op, "the logits", products.logits, logits, config.TILE_M, config.PUT_N);
    }
    products.shares = core::address(shares);
    products.tiles = int32_t(tiles);
    products.scale = float(head.scale);
    products.factor = factor;
    const auto form = runtime::point_of<Gemm>(0, (logits.defined() ? 2 : 0) + (extras ? 1 : 0));
    core::launch(op, x.device(), core::choose<Gemm>(x.size(1), products, form), {programs}, products);
    Combine::Args all{
        .shares = core::address(shares),
        .index = core::address(index),
        .given = core::address(given),
        .n = int32_t(n),
        .tiles = int32_t(tiles),
        .count = int32_t(ids),
        .first_class = int32_t(columns.first),
        .classes = int32_t(columns.classes),
        .index_words = index_words,
        .ignore_index = o.ignore_index,
        .factor = factor,
        .inverse = float(1 / o.temperature),
        .softcap = 1,
        .flags = log_probs::flags_of(out)};
    log_probs::pass_results(all, out);
    const auto point = runtime::point_of<Combine>(extras ? 1 : 0);
    core::launch(op, x.device(), core::choose<Combine>(x.size(1), all, point), {uint32_t(rows)}, all);
  }

 private:
  /// True if the kernels support the layout of a matrix.
  static bool fits(const at::Tensor& t) {
    return t.stride(1) == 1 && t.stride(0) >= t.size(1) &&
        Chosen::is_aligned({.x = core::address(t), .columns = int32_t(t.size(1)), .x_row = t.stride(0)});
  }
};

}  // namespace liger::ops::linear
