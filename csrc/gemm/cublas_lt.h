#pragma once

// The part of cuBLASLt that plan.cpp calls, found by dlopen in the copy that torch has loaded. Constants and layouts
// follow its ABI, unchanged since CUDA 11.

#include <cstddef>
#include <cstdint>
#include <string>

namespace liger::gemm {

using LtStatus = int;
constexpr LtStatus kLtSuccess = 0, kLtNotInitialized = 1, kLtAllocFailed = 3, kLtExecutionFailed = 13,
                   kLtInternalError = 14;
constexpr int kLtComputeF32 = 68;
constexpr int kLtF32 = 0, kLtF16 = 2, kLtBF16 = 14;
constexpr int kLtDescTransposeA = 3, kLtDescTransposeB = 4;
constexpr int kLtPreferenceWorkspace = 1, kLtPreferenceAlignmentA = 5;  // followed by B, C and D
constexpr int kLtConfigTile = 1, kLtConfigSplitK = 2, kLtConfigCluster = 8;

struct LtAlgorithm {
  uint64_t opaque[8];
};

struct LtHeuristic {
  LtAlgorithm algorithm;
  size_t workspace;
  LtStatus state;
  float waves;
  int reserved[4];
};

struct CublasLt {
  LtStatus (*cublasLtCreate)(void**);
  LtStatus (*cublasLtMatmulDescCreate)(void**, int, int);
  LtStatus (*cublasLtMatmulDescDestroy)(void*);
  LtStatus (*cublasLtMatmulDescSetAttribute)(void*, int, const void*, size_t);
  LtStatus (*cublasLtMatrixLayoutCreate)(void**, int, uint64_t, uint64_t, int64_t);
  LtStatus (*cublasLtMatrixLayoutDestroy)(void*);
  LtStatus (*cublasLtMatmulPreferenceCreate)(void**);
  LtStatus (*cublasLtMatmulPreferenceDestroy)(void*);
  LtStatus (*cublasLtMatmulPreferenceSetAttribute)(void*, int, const void*, size_t);
  LtStatus (*cublasLtMatmulAlgoGetHeuristic)(void*, void*, void*, void*, void*, void*, void*, int, LtHeuristic*, int*);
  LtStatus (*cublasLtMatmulAlgoConfigGetAttribute)(const LtAlgorithm*, int, void*, size_t, size_t*);
  LtStatus (*cublasLtMatmulAlgoConfigSetAttribute)(LtAlgorithm*, int, const void*, size_t);
  LtStatus (*cublasLtMatmulAlgoCheck)(void*, void*, void*, void*, void*, void*, const LtAlgorithm*, LtHeuristic*);
  LtStatus (*cublasLtMatmul)(
      void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*,
      const LtAlgorithm*, void*, size_t, void*);

  /// Null before CUDA 11.4.
  const char* (*cublasLtGetStatusName)(LtStatus);

  /// "<call> returned <name of the status>"
  std::string failure(const char* call, LtStatus status) const;

  /// Null if this process has not loaded cuBLASLt.
  static const CublasLt* get();
};

}  // namespace liger::gemm
