#include "runtime/tensor_map.h"

#include "runtime/driver.h"

namespace liger::runtime {
namespace {

constexpr int kBFloat16 = 9, kNotInterleaved = 0, kSwizzle64 = 2, kSwizzle128 = 3, kPromote256 = 3, kZeros = 0;

}  // namespace

bool maps_tiles() {
  const Driver* driver = Driver::get();
  return driver && driver->cuTensorMapEncodeTiled;
}

std::string map_tiles(
    TensorMap& map, const void* address, int64_t rows, int64_t columns, int64_t row_bytes, int tile_rows,
    int tile_columns) {
  std::string reason = "the CUDA driver lacks cuTensorMapEncodeTiled";
  const Driver* driver = Driver::get(&reason);
  if (!driver || !driver->cuTensorMapEncodeTiled) return reason;
  const uint64_t sizes[] = {uint64_t(columns), uint64_t(rows)}, strides[] = {uint64_t(row_bytes)};
  const uint32_t tile[] = {uint32_t(tile_columns), uint32_t(tile_rows)}, every[] = {1, 1};
  const CuResult result = driver->cuTensorMapEncodeTiled(
      &map, kBFloat16, 2, const_cast<void*>(address), sizes, strides, tile, every, kNotInterleaved,
      tile_columns * 2 == 64 ? kSwizzle64 : kSwizzle128, kPromote256, kZeros);
  return result == kCuSuccess ? std::string() : driver->failure("cuTensorMapEncodeTiled", result);
}

}  // namespace liger::runtime
