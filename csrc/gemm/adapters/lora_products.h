#pragma once

// The products of low-rank adapters on CUDA, by the kernels of liger_ops/kernels/linear/lora_products.py.
//
// Shapes: x and y (T, C), t and u (T, R) in fp32, adapters (R, C). T: tokens, C: features. The ranks of each adapter
// are padded to `rank`.

#include <algorithm>
#include <vector>

#include "core/aten.h"
#include "core/cuda/launch.h"
#include "gemm/adapters/lora_dropout.h"
#include "kernels/lora_linear.h"
#include "kernels/lora_products.h"

namespace liger::gemm {

/// Adapters whose elements are dropped with one probability. Nothing is dropped if it is 0.
struct Dropped {
  at::Tensor seeds;  // one per adapter
  double rate = 0;
};

namespace lora_detail {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int32_t size_of(const char* op, const char* name, int64_t size) {
  LIGER_CHECK(size <= INT32_MAX - 256, op, name, "be below 2^31 - 256", size);
  return int32_t(size);
}

template <class K>
void start(
    const char* op, const at::Tensor& on, const core::Choice<K>& choice, int64_t programs,
    const typename K::Args& args) {
  LIGER_CHECK(programs <= INT32_MAX, op, "x", "be small enough for fewer than 2^31 programs of a kernel", programs);
  if (programs > 0) core::launch(op, on.device(), choice, {uint32_t(programs)}, args);
}

/// A block of ranks must belong to one adapter if each has a mask of its own: the largest power of two that divides
/// rank.
inline int64_t ranks_of_block(int64_t ranks, int64_t rank, bool drops) { return drops ? rank & -rank : ranks; }

/// Splits a sum so that the programs of a kernel fill the GPU `waves` times.
inline int64_t splits_for(const at::Tensor& on, int64_t programs, int64_t steps, int64_t waves) {
  const int64_t wanted = waves * std::max(runtime::multiprocessors(on.device().index()), 1);
  return std::clamp<int64_t>(wanted / std::max<int64_t>(programs, 1), 1, std::max<int64_t>(steps / 4, 1));
}

inline bool pads(const std::vector<at::Tensor>& adapters, int64_t rank) {
  return std::any_of(adapters.begin(), adapters.end(), [&](const at::Tensor& t) { return t.size(0) != rank; });
}

}  // namespace lora_detail

// ---- Pieces of fp32 numbers, see liger_ops/kernels/linear/lora_linear.py

enum class Use { Rows, Weight };

/// fp32 numbers (rows, columns), each the sum of `parts` summands at a distance of `part_stride`.
struct Numbers {
  at::Tensor first;
  int64_t parts = 1, part_stride = 0;
};

/// Stores the pieces of numbers times scale at `out` (rows, columns) and three times further at a distance of
/// `distance`, and the numbers at `total`, if that is defined.
inline void store_pieces(
    const char* op, Use use, const at::Tensor& out, int64_t distance, const Numbers& numbers, double scale = 1,
    const at::Tensor& total = {}) {
  using K = kernels::lora_pieces;
  namespace constants = kernels::constants::lora_linear;
  const int64_t rows = numbers.first.size(0), columns = numbers.first.size(1), count = rows * columns;
  if (count == 0) return;
  // Indices of the last program must not overflow.
  LIGER_CHECK(count <= INT32_MAX - constants::BLOCK, op, "rows times rank", "be below 2^31 - 1024", count);
  const bool has_total = total.defined();
  const K::Args args{
      .pieces = core::address(out),
      .total = core::address(total),
      .numbers = core::address(numbers.first),
      .count = int32_t(count),
      .columns = int32_t(columns),
      .parts = int32_t(numbers.parts),
      .row_stride = numbers.first.stride(0),
      .column_stride = numbers.first.stride(1),
      .part_stride = numbers.part_stride,
      .total_row = has_total ? total.stride(0) : 0,
      .out_row = out.stride(0),
      .out_piece = distance,
      .scale = float(scale),
      .flags = has_total ? constants::HAS_TOTAL : 0};
  const auto choice = core::choose<K>(columns, args, runtime::point_of<K>(use == Use::Weight ? 1 : 0));
  core::launch(op, out.device(), choice, {core::programs_for(count, constants::BLOCK)}, args);
}

/// A bf16 tensor, with zeros where padding is never written.
inline at::Tensor space(at::IntArrayRef sizes, const at::Tensor& like, bool padded) {
  const auto options = like.options().dtype(at::kBFloat16);
  return padded ? at::zeros(sizes, options) : at::empty(sizes, options);
}

/// The pieces of adapters (r, C): (4, R, C). The first three are all digits, the last three those of a product with
/// pieces of rows.
inline at::Tensor pieces_of(const char* op, const std::vector<at::Tensor>& adapters, int64_t rank) {
  const int64_t ranks = int64_t(adapters.size()) * rank, features = adapters[0].size(1);
  const at::Tensor out = space({4, ranks, features}, adapters[0], lora_detail::pads(adapters, rank));
  int64_t first = 0;
  for (const at::Tensor& adapter : adapters) {
    store_pieces(op, Use::Weight, out[0].narrow(0, first, rank), out.stride(0), {adapter.to(at::kFloat)});
    first += rank;
  }
  return out;
}

// ---- Products

/// An adapter or several, stacked along their ranks: (R, C) in x's dtype. For fp32 the highest pieces; the next ones
/// are `piece` after them, and the last ones `piece` before them.
struct Adapter {
  at::Tensor weight;
  int64_t piece = 0;

  Adapter narrow(int64_t dim, int64_t start, int64_t count) const { return {weight.narrow(dim, start, count), piece}; }
  int pieces() const { return piece == 0 ? 1 : 3; }
};

/// adapters: (r, C), with any strides. dtype: fp32, or that of x.
inline Adapter stacked(const char* op, std::vector<at::Tensor> adapters, int64_t rank, at::ScalarType dtype) {
  if (dtype == at::kFloat) {
    const at::Tensor pieces = pieces_of(op, adapters, rank);
    return {pieces[1], pieces.stride(0)};
  }
  for (at::Tensor& adapter : adapters) {
    adapter = adapter.to(dtype);
    if (adapter.size(0) < rank) adapter = at::constant_pad_nd(adapter, {0, 0, 0, rank - adapter.size(0)});
  }
  const at::Tensor all = adapters.size() == 1 ? adapters[0] : at::cat(adapters);
  return {all.stride(1) == 1 ? all : all.contiguous()};
}

/// out (T, R) = scale * dropped(x) w^T.
inline void rows_product(
    const char* op, const at::Tensor& out, const at::Tensor& x, const Adapter& w, int64_t rank, double scale,
    const Dropped& dropped = {}) {
  using namespace lora_detail;
  using K = kernels::lora_rows;
  const bool drops = dropped.rate > 0;
  const int64_t tokens = x.size(0), features = x.size(1), padded = out.size(1);
  K::Args args{
      .out = core::address(out),
      .x = core::address(x),
      .w = core::address(w.weight),
      .seeds = core::address(dropped.seeds),
      .tokens = size_of(op, "rows of x", tokens),
      .features = size_of(op, "features", features),
      .padded = int32_t(padded),
      .rank = int32_t(rank),
      .x_row = x.stride(0),
      .w_row = w.weight.stride(0),
      .w_piece = w.piece,
      .out_row = out.stride(0),
      .scale = float(scale),
      .threshold = threshold_of(dropped.rate)};
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x), w.pieces()), drops);
  const auto choice = core::choose<K>(ranks_of_block(padded, rank, drops), args, point);
  const int64_t programs = ceil_div(tokens, choice.config.BLOCK_T) * ceil_div(padded, choice.config.BLOCK_R);
  const int64_t splits = splits_for(x, programs, ceil_div(features, choice.config.BLOCK_C), 1);
  const at::Tensor to = splits == 1 ? out : at::empty({splits, tokens, padded}, out.options());
  args.out = core::address(to);
  args.splits = int32_t(splits);
  args.out_row = to.stride(-2);
  args.out_split = splits == 1 ? 0 : to.stride(0);
  start(op, x, choice, programs * splits, args);
  if (splits > 1) {
    at::Tensor result = out;
    at::sum_out(result, to, 0);
  }
}

/// scale * v^T dropped(x) as (R, C), or by feature (C, R), of v's first `ranks` columns: parts along the first
/// dimension, whose sum is the product.
inline at::Tensor columns_product(
    const char* op, const at::Tensor& x, const at::Tensor& v, int64_t ranks, int64_t rank, bool by_feature,
    bool all_digits, double scale, const Dropped& dropped = {}) {
  using namespace lora_detail;
  using K = kernels::lora_columns;
  const bool drops = dropped.rate > 0;
  const int pieces = all_digits && x.scalar_type() != at::kHalf ? 3 : 2;
  const int64_t tokens = x.size(0), features = x.size(1);
  K::Args args{
      .x = core::address(x),
      .v = core::address(v),
      .seeds = core::address(dropped.seeds),
      .tokens = size_of(op, "rows of x", tokens),
      .features = size_of(op, "features", features),
      .ranks = int32_t(ranks),
      .rank = int32_t(rank),
      .x_row = x.stride(0),
      .v_row = v.stride(0),
      .scale = float(scale),
      .threshold = threshold_of(dropped.rate)};
  const auto point = runtime::point_of<K>(K::pieces(core::dtype_of(x), pieces), drops);
  const auto choice = core::choose<K>(ranks_of_block(ranks, rank, drops), args, point);
  const int64_t programs = ceil_div(features, choice.config.BLOCK_C) * ceil_div(ranks, choice.config.BLOCK_R);
  const int64_t splits = splits_for(x, programs, ceil_div(tokens, choice.config.BLOCK_T), 3);
  const auto options = x.options().dtype(at::kFloat);
  const at::Tensor out =
      by_feature ? at::empty({splits, features, ranks}, options) : at::empty({splits, ranks, features}, options);
  args.out = core::address(out);
  args.splits = int32_t(splits);
  args.out_split = out.stride(0);
  args.out_rank = out.stride(by_feature ? 2 : 1);
  args.out_feature = out.stride(by_feature ? 1 : 2);
  start(op, x, choice, programs * splits, args);
  return out;
}

/// u (T, R) = u_scale * y w^T, and in the same pass over y the parts, along the first dimension, of scale * y^T v as
/// (C, ranks), of v's first `ranks` columns. Returns an undefined tensor, and computes nothing, where two passes are
/// needed.
inline at::Tensor rows_and_columns(
    const char* op, const at::Tensor& u, const at::Tensor& y, const Adapter& w, const at::Tensor& v, int64_t ranks,
    double u_scale, double scale) {
  using namespace lora_detail;
  using K = kernels::lora_rows_columns;
  const int64_t tokens = y.size(0), features = y.size(1), padded = u.size(1);
  K::Args args{
      .x = core::address(y),
      .w = core::address(w.weight),
      .v = core::address(v),
      .tokens = size_of(op, "rows of x", tokens),
      .features = size_of(op, "features", features),
      .ranks = int32_t(ranks),
      .x_row = y.stride(0),
      .w_row = w.weight.stride(0),
      .w_piece = w.piece,
      .v_row = v.stride(0),
      .rows_scale = float(u_scale),
      .columns_scale = float(scale)};
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(y), w.pieces()));
  const auto choice = core::choose<K>(padded, args, point);
  const auto& config = choice.config;
  // With few rows there are few programs, and y may stay in the cache for a second pass.
  if (!K::is_aligned(args) || padded != config.BLOCK_R || tokens < 16 * config.BLOCK_T) return {};
  const int64_t blocks = ceil_div(features, config.BLOCK_C);
  const int64_t splits = splits_for(y, blocks, ceil_div(tokens, config.BLOCK_T), 2);
  const int64_t share = ceil_div(ceil_div(tokens, splits), config.BLOCK_T) * config.BLOCK_T;
  const at::Tensor rows = at::empty({blocks, tokens, padded}, u.options());
  const at::Tensor columns = at::empty({ceil_div(tokens, share), features, ranks}, u.options());
  args.rows = core::address(rows);
  args.columns = core::address(columns);
  args.share = int32_t(share);
  args.rows_part = rows.stride(0);
  args.columns_part = columns.stride(0);
  start(op, y, choice, blocks * columns.size(0), args);
  at::Tensor result = u;
  at::sum_out(result, rows, 0);
  return columns;
}

/// out (T, C) = addend + dropped(scale * v w), of v's first `ranks` columns. addend: undefined, a row, or as large as
/// out, which it may be.
inline void expand(
    const char* op, const at::Tensor& out, const at::Tensor& v, const Adapter& w, int64_t ranks, int64_t rank,
    const at::Tensor& addend, double scale, const Dropped& dropped = {}) {
  using namespace lora_detail;
  using K = kernels::lora_expand;
  const bool drops = dropped.rate > 0, adds = addend.defined();
  const int64_t tokens = out.size(0), features = out.size(1), padded = v.size(1);
  const K::Args args{
      .out = core::address(out),
      .v = core::address(v),
      .w = core::address(w.weight),
      .addend = core::address(addend),
      .seeds = core::address(dropped.seeds),
      .tokens = size_of(op, "rows of x", tokens),
      .features = size_of(op, "features", features),
      .ranks = int32_t(ranks),
      .padded = int32_t(padded),
      .rank = int32_t(rank),
      .v_row = v.stride(0),
      .w_row = w.weight.stride(0),
      .w_piece = w.piece,
      .out_row = out.stride(0),
      .addend_row = adds && addend.dim() > 1 ? addend.stride(0) : 0,
      .scale = float(scale),
      .threshold = threshold_of(dropped.rate),
      .flags = adds ? kernels::constants::lora_products::HAS_ADDEND : 0};
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(out), w.pieces()), drops);
  const auto choice = core::choose<K>(ranks_of_block(padded, rank, drops), args, point);
  const int64_t programs = ceil_div(tokens, choice.config.BLOCK_T) * ceil_div(features, choice.config.BLOCK_C);
  start(op, out, choice, programs, args);
}

/// x (T, C) in fp32 with dropout, in a new tensor.
inline at::Tensor dropped_on_cuda(const char* op, const at::Tensor& x, const Dropped& dropped) {
  using namespace lora_detail;
  using K = kernels::lora_drop;
  const at::Tensor rows = x.stride(1) == 1 ? x : x.contiguous();
  const at::Tensor out = at::empty(x.sizes(), x.options());
  const int64_t tokens = x.size(0), features = x.size(1);
  const K::Args args{
      .out = core::address(out),
      .x = core::address(rows),
      .seeds = core::address(dropped.seeds),
      .tokens = size_of(op, "rows of x", tokens),
      .features = size_of(op, "features", features),
      .x_row = rows.stride(0),
      .out_row = features,
      .scale = float(gain_of(dropped.rate)),
      .threshold = threshold_of(dropped.rate)};
  const auto choice = core::choose<K>(features, args);
  const int64_t programs = ceil_div(tokens, choice.config.BLOCK_T) * ceil_div(features, choice.config.BLOCK_C);
  start(op, x, choice, programs, args);
  return out;
}

}  // namespace liger::gemm
