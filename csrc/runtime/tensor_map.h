#pragma once

// What the copy engine of compute capability 9.0 knows of a matrix: how it lies in memory, and the tiles it is read in.

#include <cstdint>
#include <string>

#include "runtime/export.h"

namespace liger::runtime {

struct alignas(64) TensorMap {
  uint64_t words[16];
};

/// Whether the driver knows such maps.
LIGER_RUNTIME_API bool maps_tiles();

/// A matrix of bf16, in rows of unit stride; bytes from one row to the next are a multiple of 16, as is the address.
/// A tile's rows are 64 or 128 bytes, which are swizzled in shared memory; what it has beyond the matrix is 0.
/// Empty on success, else the driver's error.
LIGER_RUNTIME_API std::string map_tiles(
    TensorMap& map, const void* address, int64_t rows, int64_t columns, int64_t row_bytes, int tile_rows,
    int tile_columns);

}  // namespace liger::runtime
