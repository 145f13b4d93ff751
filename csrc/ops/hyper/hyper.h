#pragma once

// Shared by hyper_pre and hyper_post.

#include "core/cuda/launch.h"
#include "core/operator.h"
#include "kernels/hyper_pre.h"

namespace liger::ops::hyper {

using at::Tensor;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using core::value_or_undefined;

/// The number of streams that kernels serve.
constexpr int64_t kStreams = kernels::constants::hyper_pre::STREAMS;

/// A kernel counts the numbers of padded pieces of fn in 32 bits.
constexpr int64_t kMostColumns = std::numeric_limits<int32_t>::max() /
    (kStreams * kernels::constants::hyper_pre::PIECES * kernels::constants::hyper_pre::WIDEST);

inline bool has_kernel(const Tensor& streams) { return streams.size(-2) == kStreams && streams.numel() > 0; }

inline int32_t tokens_of(const char* op, const Tensor& streams) {
  const int64_t n = streams.size(-1), tokens = streams.numel() / (kStreams * n);
  LIGER_CHECK(
      tokens <= std::numeric_limits<int32_t>::max() && n <= kMostColumns, op, "streams",
      c10::str("have fewer than 2^31 tokens, and streams of at most ", kMostColumns, " columns"), tokens, " tokens of ",
      n, " columns");
  return int32_t(tokens);
}

// Kernels read and write numbers beside the streams in fp32.

inline Tensor wide(const Tensor& t) { return t.defined() ? t.to(at::kFloat).contiguous() : t; }

/// The result itself, or memory of the size of `input` that `narrow` rounds to it.
inline Tensor wide_result(const Tensor& result, const Tensor& input) {
  return result.defined() && result.scalar_type() == at::kFloat ? result : at::empty_like(input);
}

inline void narrow(const Tensor& result, const Tensor& wide) {
  if (result.defined() && !result.is_same(wide)) result.copy_(wide);
}

inline Tensor empty_of(const Tensor& like) { return at::empty_symint(like.sym_sizes(), like.options()); }

/// Chooses for a kernel that takes `tokens` and `n`.
template <class K>
core::Choice<K> choose(const Tensor& streams, const typename K::Args& args) {
  return core::choose<K>(args.n, args, runtime::point_of<K>(K::dtype(core::dtype_of(streams))), args.tokens);
}

inline void check_streams(const char* op, const Tensor& streams) {
  core::check_activation(op, "streams", streams);
  LIGER_CHECK(streams.dim() >= 2, op, "streams", "have at least two dimensions", streams.sym_sizes());
}

inline void check_shape(const char* op, const char* name, const Tensor& t, c10::SymIntArrayRef shape) {
  LIGER_CHECK(t.sym_sizes().equals(shape), op, name, c10::str("have shape ", shape), t.sym_sizes());
}

inline void check_numbers(const char* op, const char* name, const Tensor& t, const Tensor& streams) {
  core::check_same_device(op, name, t, "streams", streams);
  core::check_dense(op, name, t);
  core::check_parameter_dtype(op, name, t, "streams", streams);
}

}  // namespace liger::ops::hyper
