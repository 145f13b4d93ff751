#pragma once

// Large half-precision GEMMs by cuBLAS, in a tile that we choose. cuBLAS's first proposal is not the fastest if the GPU
// is power-limited and the sum over k is short: tiles whose epilogue overlaps with the next tile's main loop take up to
// a third less time. If cuBLAS may split the sum over k, whose parts it rounds to 16 bits, we choose its first proposal
// that does not. We never choose an algorithm that splits the sum.

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
  int64_t alignment;  // of all addresses, in bytes; at most 256
  // One of many GEMMs that keep the GPU busy for 10 ms or more, as in the layers of a model or a long loss.
  bool sustained = false;
};

/// GEMMs with fewer multiplications are left to cuBLAS. From this size on, the cost of a launch does not matter.
constexpr double kMinMultiplications = double(int64_t(1) << 35);

/// An algorithm for a Problem on one device.
class Plan;

/// Null if cuBLAS's own choice is as good, or not known to be worse: smaller GEMMs, other devices, tiles that were not
/// measured. The caller's current device must be `device`.
LIGER_RUNTIME_API std::shared_ptr<const Plan> plan(const Problem& problem, int device);

LIGER_RUNTIME_API size_t workspace_bytes(const Plan& plan);

/// False if cuBLAS refused: then nothing was written, and the log says so. `error` is set if no other way can work
/// either. runtime::gemms() counts the GEMMs that ran.
LIGER_RUNTIME_API bool run(
    const Plan& plan, void* stream, double alpha, const void* a, const void* b, double beta, void* c, void* workspace,
    std::string& error);

}  // namespace liger::gemm
