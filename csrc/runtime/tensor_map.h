#pragma once

// Tensor maps, by which the copy engine of compute capability 9.0 knows a matrix's layout and the tiles to read it in.

#include <cstdint>
#include <string>

#include "runtime/export.h"

namespace liger::runtime {

struct alignas(64) TensorMap {
  uint64_t words[16];
};

/// True if the driver supports tensor maps.
LIGER_RUNTIME_API bool maps_tiles();

/// Maps a bf16 matrix whose rows have unit stride. The address and row_bytes must be multiples of 16. A tile's rows are
/// 64 or 128 bytes and are swizzled in shared memory. Elements of a tile beyond the matrix are 0.
/// Empty on success, else the driver's error.
LIGER_RUNTIME_API std::string map_tiles(
    TensorMap& map, const void* address, int64_t rows, int64_t columns, int64_t row_bytes, int tile_rows,
    int tile_columns);

}  // namespace liger::runtime
