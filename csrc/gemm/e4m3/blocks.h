#pragma once

// Matrices in e4m3 with an fp32 scale for each block, or one for all, as rows and as a transposed copy from one read.

#include "core/aten.h"

namespace liger::gemm::e4m3::blocks {

constexpr int64_t kBlock = 128;

// What shares a scale: kBlock numbers of a row, and in the transposed copy of a column; kBlock x kBlock; all.
enum class By { rows, squares, tensor };

/// Of a matrix (T, n), or several that are stacked: q (T, n) and q_t (n, T). Undefined where they are not wanted.
/// rows: scale (T, blocks of n) and scale_t (n, blocks of T), with neighbouring rows side by side. squares: scale
/// (blocks of T, blocks of n), and its transpose. tensor: both are the same number, (1,).
/// padded, for GEMMs: T is a multiple of kBlock, by rows of zeros. Of squares: rows of scales are padded to multiples
/// of 4.
struct Quantized {
  at::Tensor q, scale, q_t, scale_t;
};

struct Wanted {
  bool q, q_t, padded;
};

// scale: of the tensor, from an earlier call, or undefined.
struct Cpu {
  static Quantized quantize(const char* op, at::TensorList xs, By by, Wanted wanted, const at::Tensor& scale = {});
};
struct Cuda {
  static Quantized quantize(const char* op, at::TensorList xs, By by, Wanted wanted, const at::Tensor& scale = {});
};
struct Meta {
  static Quantized quantize(const char* op, at::TensorList xs, By by, Wanted wanted, const at::Tensor& scale = {});
};

}  // namespace liger::gemm::e4m3::blocks
