#pragma once

// The products of low-rank adapters on CUDA, by the kernels of liger_ops/kernels/gemm/lora_products.py.
//
// Shapes: x and y (T, C), a and b as in lora_linear.cpp, t and u (T, R) in fp32. T: tokens, C: features. The ranks of each
// adapter are padded to `rank` columns.

#include <ATen/ATen.h>

#include "core/cuda.h"
#include "kernels/lora_products.h"

namespace liger::ops::lora_linear {

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

/// out (T, R) = scale * dropped(x) w^T. Columns of padding become 0.
void rows_product(
    const at::Tensor& out, const at::Tensor& x, const Adapter& w, int64_t rank, double scale,
    const Dropped& dropped = {});

/// scale * v^T dropped(x) as (R, C), or by feature (C, R), of v's first `ranks` columns: parts along the first dimension,
/// whose sum is the product.
at::Tensor columns_product(
    const at::Tensor& x, const at::Tensor& v, int64_t ranks, int64_t rank, bool by_feature, bool all_digits,
    double scale, const Dropped& dropped = {});

/// out (T, C) = addend + dropped(scale * v w). addend: undefined, a row, or as large as out, which it may be.
void expand(
    const at::Tensor& out, const at::Tensor& v, const Adapter& w, int64_t rank, const at::Tensor& addend, double scale,
    const Dropped& dropped = {});

/// x (T, C) in fp32 with dropout, in a new tensor.
at::Tensor dropped_on_cuda(const at::Tensor& x, const Dropped& dropped);

}  // namespace liger::ops::lora_linear
