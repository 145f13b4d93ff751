#pragma once

// Elementwise operations on tensors of one shape, on CPU and CUDA.

#include <utility>

#include "core/cpu/loops.h"
#include "core/cuda/launch.h"
#include "core/rows/rows.h"

namespace liger::core {

// Tensors of one dense layout become one long row, whatever their shape; others are walked by rows. tensors[0] leads,
// as in walk_rows.
template <size_t N>
Rows<N> walk_elements(const char* op, const std::array<at::Tensor*, N>& tensors) {
  const at::Tensor& lead = *tensors[0];
  bool alike = lead.is_non_overlapping_and_dense();
  for (at::Tensor* t : tensors) alike = alike && same_strides(lead, *t);
  if (!alike) return walk_rows<N>(op, tensors);
  Rows<N> out;
  out.rows = 1;
  out.n = lead.numel();
  return out;
}

/// Columns of a span.
constexpr int64_t kSpan = 8192;

/// Spans of a row.
template <size_t N>
int64_t spans_of(const Rows<N>& walk) {
  return (walk.n + kSpan - 1) / kSpan;
}

// Splits rows into short spans and calls f(row, first column, columns) on them in parallel.
template <size_t N, class F>
void parallel_spans(const Rows<N>& walk, const F& f) {
  const int64_t spans = spans_of(walk), blocks = walk.rows * spans;
  parallel_rows(blocks, std::min(walk.n, kSpan), [&](int64_t block) {
    int64_t row = block / spans, first = (block - row * spans) * kSpan;
    f(row, first, std::min(kSpan, walk.n - first));
  });
}

namespace detail {

template <class F, size_t... I, class... Inputs>
void map_elements(const char* op, const F& f, at::Tensor out, std::index_sequence<I...>, Inputs... inputs) {
  const auto walk = walk_elements<1 + sizeof...(Inputs)>(op, {&out, &inputs...});
  dispatch_compute(out.scalar_type(), [&](auto c) {
    using C = decltype(c);
    parallel_spans(walk, [&](int64_t row, int64_t first, int64_t n) {
      auto at = [&](size_t tensor) { return walk.offset(tensor, row) + first; };
      transform(output<C>(out) + at(0), n, f, input<C>(inputs) + at(I + 1)...);
    });
  });
}

}  // namespace detail

/// On a CPU, out = f(inputs...), element by element. f is called with numbers of the arithmetic type. `out` may be one
/// of the inputs.
template <class F, class... Inputs>
void map_elements(const char* op, const F& f, const at::Tensor& out, const Inputs&... inputs) {
  if (out.numel() > 0) detail::map_elements(op, f, out, std::index_sequence_for<Inputs...>(), at::Tensor(inputs)...);
}

/// The number of tiles.
template <class Config, size_t N>
int64_t tiles_of(const Config& config, const Rows<N>& walk) {
  return (walk.rows + config.BLOCK_M - 1) / config.BLOCK_M * ((walk.n + config.BLOCK_N - 1) / config.BLOCK_N);
}

/// Launches kernel K, which takes the walk's rows, with a program per tile.
template <class K, size_t N>
void launch_tiles(
    const char* op, const at::Device& device, const Rows<N>& walk, typename K::Args& args, runtime::Point point) {
  walk.pass(args);
  const auto choice = choose<K>(walk.n, args, point, walk.rows);
  launch(op, device, choice, {uint32_t(tiles_of(choice.config, walk))}, args);
}

}  // namespace liger::core
