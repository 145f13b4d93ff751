#pragma once

// Large matrix products of half precision by cuBLAS, in a tile that we choose. Of the algorithms that its heuristics
// propose, the first is not the fastest where the chip runs at its power limit and the sum over k is short: tiles whose
// epilogue overlaps with the next one's sum take up to a third less time. Where cuBLAS may split a sum
// over k, whose parts it rounds to 16 bits, we take its first proposal that does not. None that we choose sums in parts.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/export.h"
#include "runtime/kernel.h"

namespace liger::runtime {

/// As BLAS has it, columns first: c (m x n) = alpha * op(a) (m x k) * op(b) (k x n) + beta * c.
struct Product {
  DType dtype;
  bool transpose_a, transpose_b;
  int64_t m, n, k, lda, ldb, ldc;
  int64_t alignment;  // bytes that divide every address, at most 256
  bool sustained = false;  // one of many that keep the chip busy, for ten ms and more: a training's layers, a long loss
};

/// Products of fewer multiplications are cuBLAS's own choice: those that were measured take longer than a launch matters.
constexpr double kLeastMultiplications = double(int64_t(1) << 35);

/// An algorithm for a Product on one device.
class ProductPlan;

/// Null where cuBLAS's own choice is as good or not known to be worse: smaller products, other devices, tiles that were
/// not measured. The caller's current device must be `device`.
LIGER_RUNTIME_API std::shared_ptr<const ProductPlan> plan_product(const Product& product, int device);

LIGER_RUNTIME_API size_t workspace_bytes(const ProductPlan& plan);

/// False if cuBLAS refused, which has been logged: nothing was written. `error` is set if no other way can work, either.
LIGER_RUNTIME_API bool multiply(
    const ProductPlan& plan, void* stream, double alpha, const void* a, const void* b, double beta, void* c,
    void* workspace, std::string& error);

/// Products that multiply() ran: beside the launches of kernels, so that tests can tell which path ran.
LIGER_RUNTIME_API uint64_t products_run() noexcept;
LIGER_RUNTIME_API void reset_products_run() noexcept;

}  // namespace liger::runtime
