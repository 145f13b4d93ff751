#pragma once

// Large GEMMs of half precision by cuBLAS, in a tile that we choose. Of the algorithms that its heuristics propose, the
// first is not the fastest where the GPU is power-limited and the sum over k is short: tiles whose epilogue overlaps with
// the next tile's sum take up to a third less time. Where cuBLAS may split a sum over k, whose parts it rounds to 16 bits,
// we take its first proposal that does not. None that we choose is split.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/export.h"
#include "runtime/kernel.h"

namespace liger::gemm {

/// Column-major, as in BLAS: c (m x n) = alpha * op(a) (m x k) * op(b) (k x n) + beta * c.
struct Problem {
  runtime::DType dtype;
  bool transpose_a, transpose_b;
  int64_t m, n, k, lda, ldb, ldc;
  int64_t alignment;  // bytes that divide every address, at most 256
  bool sustained = false;  // one of many that keep the GPU busy for 10 ms or more: a training's layers, a long loss
};

/// GEMMs of fewer multiplications are left to cuBLAS: at this size the cost of a launch no longer matters.
constexpr double kLeastMultiplications = double(int64_t(1) << 35);

/// An algorithm for a Problem on one device.
class Plan;

/// Null where cuBLAS's own choice is as good or not known to be worse: smaller GEMMs, other devices, tiles that were not
/// measured. The caller's current device must be `device`.
LIGER_RUNTIME_API std::shared_ptr<const Plan> plan(const Problem& problem, int device);

LIGER_RUNTIME_API size_t workspace_bytes(const Plan& plan);

/// False if cuBLAS refused, which has been logged: nothing was written. `error` is set if no other way can work, either.
/// runtime::gemms() counts those that ran.
LIGER_RUNTIME_API bool run(
    const Plan& plan, void* stream, double alpha, const void* a, const void* b, double beta, void* c, void* workspace,
    std::string& error);

}  // namespace liger::gemm
