#pragma once

// The products of low-rank adapters on CUDA, by the kernels of liger_ops/kernels/gemm/lora_products.py.
//
// Shapes: x and y (T, C), a and b as in lora_linear.cpp, t and u (T, R) in fp32. T: tokens, C: features. The ranks of each
// adapter are padded to `rank` columns.

#include <ATen/ATen.h>

#include <algorithm>

#include "core/cuda.h"
#include "gemm/lora_dropout.h"
#include "kernels/lora_products.h"

namespace liger::gemm {

/// Adapters whose elements are dropped with one probability. Nothing is dropped if it is 0.
struct Dropped {
  at::Tensor seeds;  // one per adapter
  double rate = 0;
};

/// An adapter or several, stacked along their ranks: (R, C), or (C, R) by feature.
struct Adapter {
  at::Tensor weight;
  bool by_feature = false;

  int64_t ranks() const { return weight.size(by_feature ? 1 : 0); }
  int64_t step() const { return weight.stride(0); }
};

namespace lora_detail {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int32_t size_of(const char* op, const char* name, int64_t size) {
  LIGER_CHECK(size <= INT32_MAX - 256, op, name, "be below 2^31 - 256", size);
  return int32_t(size);
}

template <class K>
void start(const char* op, const at::Tensor& on, uint32_t variant, int64_t programs, const typename K::Args& args) {
  LIGER_CHECK(programs <= INT32_MAX, op, "x", "be small enough for fewer than 2^31 programs of a kernel", programs);
  if (programs > 0) core::launch<K>(op, on.device(), variant, {uint32_t(programs)}, args);
}

/// Whether a tensor's address and rows are aligned to 16 bytes.
inline bool is_aligned(const at::Tensor& t) {
  const int64_t step = t.dim() > 1 ? t.stride(0) : 0;
  return core::aligned16(core::address(t)) && step % 8 == 0;
}

/// A block of ranks must belong to one adapter if each has a mask of its own: the largest power of two that divides rank.
inline int64_t ranks_of_block(int64_t ranks, int64_t rank, bool drops) { return drops ? rank & -rank : ranks; }

/// Splits a sum so that the programs of a kernel fill the GPU `waves` times.
inline int64_t splits_for(const at::Tensor& on, int64_t programs, int64_t steps, int64_t waves) {
  const int64_t wanted = waves * std::max(runtime::multiprocessors(on.device().index()), 1);
  return std::clamp<int64_t>(wanted / std::max<int64_t>(programs, 1), 1, std::max<int64_t>(steps / 4, 1));
}

inline int adapter_point(bool by_feature, bool drops) { return by_feature ? 1 : drops ? 2 : 0; }

}  // namespace lora_detail

/// out (T, R) = scale * dropped(x) w^T. Columns of padding become 0.
inline void rows_product(
    const char* op, const at::Tensor& out, const at::Tensor& x, const Adapter& w, int64_t rank, double scale,
    const Dropped& dropped = {}) {
  using namespace lora_detail;
  using K = kernels::lora_rows;
  const bool drops = dropped.rate > 0;
  const int64_t tokens = x.size(0), features = x.size(1), padded = out.size(1);
  const bool aligned = is_aligned(x) && is_aligned(w.weight) && features % 8 == 0 && w.ranks() % 8 == 0;
  const auto point =
      runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(w.weight)), adapter_point(w.by_feature, drops));
  const auto& config = runtime::first_fit<K>(ranks_of_block(padded, rank, drops), aligned, point);
  const int64_t programs = ceil_div(tokens, config.BLOCK_T) * ceil_div(padded, config.BLOCK_R);
  const int64_t splits = splits_for(x, programs, ceil_div(features, config.BLOCK_C), 3);
  const at::Tensor to = splits == 1 ? out : at::empty({splits, tokens, padded}, out.options());
  K::Args args{
      core::address(to),
      core::address(x),
      core::address(w.weight),
      core::address(dropped.seeds),
      size_of(op, "rows of x", tokens),
      size_of(op, "features", features),
      int32_t(w.ranks()),
      int32_t(padded),
      int32_t(rank),
      int32_t(splits),
      x.stride(0),
      w.step(),
      to.stride(-2),
      splits == 1 ? 0 : to.stride(0),
      float(scale),
      threshold_of(dropped.rate)};
  start<K>(op, x, runtime::variant_index<K>(config, point), programs * splits, args);
  if (splits > 1) {
    at::Tensor result = out;
    at::sum_out(result, to, 0);
  }
}

/// scale * v^T dropped(x) as (R, C), or by feature (C, R), of v's first `ranks` columns: parts along the first dimension,
/// whose sum is the product.
inline at::Tensor columns_product(
    const char* op, const at::Tensor& x, const at::Tensor& v, int64_t ranks, int64_t rank, bool by_feature,
    bool all_digits, double scale, const Dropped& dropped = {}) {
  using namespace lora_detail;
  using K = kernels::lora_columns;
  const bool drops = dropped.rate > 0;
  const int pieces = all_digits && x.scalar_type() != at::kHalf ? 3 : 2;
  const int64_t tokens = x.size(0), features = x.size(1);
  const bool aligned = is_aligned(x) && is_aligned(v) && features % 8 == 0 && ranks % 8 == 0;
  const auto point = runtime::point_of<K>(K::pieces(core::dtype_of(x), pieces), drops);
  const auto& config = runtime::first_fit<K>(ranks_of_block(ranks, rank, drops), aligned, point);
  const int64_t programs = ceil_div(features, config.BLOCK_C) * ceil_div(ranks, config.BLOCK_R);
  const int64_t splits = splits_for(x, programs, ceil_div(tokens, config.BLOCK_T), 2);
  const auto options = x.options().dtype(at::kFloat);
  const at::Tensor out =
      by_feature ? at::empty({splits, features, ranks}, options) : at::empty({splits, ranks, features}, options);
  K::Args args{
      core::address(out),
      core::address(x),
      core::address(v),
      core::address(dropped.seeds),
      size_of(op, "rows of x", tokens),
      size_of(op, "features", features),
      int32_t(ranks),
      int32_t(rank),
      int32_t(splits),
      x.stride(0),
      v.stride(0),
      out.stride(0),
      out.stride(by_feature ? 2 : 1),
      out.stride(by_feature ? 1 : 2),
      float(scale),
      threshold_of(dropped.rate)};
  start<K>(op, x, runtime::variant_index<K>(config, point), programs * splits, args);
  return out;
}

/// out (T, C) = addend + dropped(scale * v w). addend: undefined, a row, or as large as out, which it may be.
inline void expand(
    const char* op, const at::Tensor& out, const at::Tensor& v, const Adapter& w, int64_t rank,
    const at::Tensor& addend, double scale, const Dropped& dropped = {}) {
  using namespace lora_detail;
  using K = kernels::lora_expand;
  const bool drops = dropped.rate > 0, adds = addend.defined();
  const int64_t tokens = out.size(0), features = out.size(1), padded = v.size(1);
  const bool aligned = is_aligned(out) && is_aligned(v) && is_aligned(w.weight) && features % 8 == 0 &&
      w.ranks() % 8 == 0 && (!adds || is_aligned(addend));
  const auto point =
      runtime::point_of<K>(K::dtype(core::dtype_of(out), core::dtype_of(w.weight)), adapter_point(w.by_feature, drops));
  const auto& config = runtime::first_fit<K>(ranks_of_block(padded, rank, drops), aligned, point);
  K::Args args{
      core::address(out),
      core::address(v),
      core::address(w.weight),
      core::address(addend),
      core::address(dropped.seeds),
      size_of(op, "rows of x", tokens),
      size_of(op, "features", features),
      int32_t(w.ranks()),
      int32_t(padded),
      int32_t(rank),
      v.stride(0),
      w.step(),
      out.stride(0),
      adds && addend.dim() > 1 ? addend.stride(0) : 0,
      float(scale),
      threshold_of(dropped.rate),
      adds ? kernels::constants::lora_products::HAS_ADDEND : 0};
  const int64_t programs = ceil_div(tokens, config.BLOCK_T) * ceil_div(features, config.BLOCK_C);
  start<K>(op, out, runtime::variant_index<K>(config, point), programs, args);
}

/// x (T, C) in fp32 with dropout, in a new tensor.
inline at::Tensor dropped_on_cuda(const char* op, const at::Tensor& x, const Dropped& dropped) {
  using namespace lora_detail;
  using K = kernels::lora_drop;
  const at::Tensor rows = x.stride(1) == 1 ? x : x.contiguous();
  const at::Tensor out = at::empty(x.sizes(), x.options());
  const int64_t tokens = x.size(0), features = x.size(1);
  const auto& config = runtime::first_fit<K>(features, false);
  K::Args args{
      core::address(out),
      core::address(rows),
      core::address(dropped.seeds),
      size_of(op, "rows of x", tokens),
      size_of(op, "features", features),
      rows.stride(0),
      features,
      float(gain_of(dropped.rate)),
      threshold_of(dropped.rate)};
  const int64_t programs = ceil_div(tokens, config.BLOCK_T) * ceil_div(features, config.BLOCK_C);
  start<K>(op, x, runtime::variant_index<K>(config, runtime::point_of<K>(0)), programs, args);
  return out;
}

}  // namespace liger::gemm
