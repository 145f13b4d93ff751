#pragma once

// Dropout of adapters on the CPU. An element is kept if a hash of the adapter's seed, its row and its column says so:
// then backward needs no masks, and all devices drop the same elements. liger_ops/kernels/linear/lora_products.py has
// the same hash.

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <cmath>

#include "core/aten.h"

namespace liger::gemm {

constexpr int64_t kNumbersPerThread = 32768;

inline uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352d;
  x ^= x >> 15;
  x *= 0x846ca68b;
  return x ^ (x >> 16);
}

/// Of a row's key and a column: one hash serves two columns. Keys are mixed, so columns need not be.
inline int32_t hash_of(uint32_t key, uint32_t column) {
  uint32_t x = (key ^ (column / 2 * 0x9e3779b1u)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return int32_t(column % 2 ? x * 0x9e3779b1u : x);
}

/// Hashes below it are dropped.
inline int32_t threshold_of(double rate) {
  return int32_t(std::min(std::round(std::ldexp(rate, 32)) - std::ldexp(1, 31), double(INT32_MAX)));
}

/// What kept elements are multiplied by.
inline double gain_of(double rate) { return rate < 1 ? 1 / (1 - rate) : 0; }

/// x (T, C) with dropout, in a new tensor.
inline at::Tensor dropped_on_cpu(const at::Tensor& x, int64_t seed, double rate) {
  at::Tensor out = at::empty(x.sizes(), x.options());
  const int64_t rows = x.size(0), columns = x.size(1), row_stride = x.stride(0), stride = x.stride(1);
  const int32_t threshold = threshold_of(rate);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "lora_linear", [&] {
    const auto gain = at::opmath_type<scalar_t>(gain_of(rate));
    const scalar_t* from = x.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    const uint32_t first_word = mixed(uint32_t(seed)), second_word = mixed(first_word + uint32_t(uint64_t(seed) >> 32));
    at::parallel_for(0, rows, kNumbersPerThread / std::max<int64_t>(columns, 1) + 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const uint32_t key = mixed(uint32_t(row) ^ first_word) + second_word;
        for (int64_t c = 0; c < columns; ++c) {
          const bool keep = hash_of(key, uint32_t(c)) >= threshold;
          to[row * columns + c] = keep ? scalar_t(from[row * row_stride + c * stride] * gain) : scalar_t(0);
        }
      }
    });
  });
  return out;
}

}  // namespace liger::gemm
