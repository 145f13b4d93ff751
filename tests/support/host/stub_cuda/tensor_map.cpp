// Prints one line per case: the arguments of cuTensorMapEncodeTiled, or the error.

#include <cstdio>
#include <string>

#include "runtime/tensor_map.h"

using namespace liger::runtime;

namespace {

alignas(16) char memory[32];

void show(const void* address, int64_t row_bytes, int tile_rows, int tile_columns) {
  TensorMap map{};
  const std::string error = map_tiles(map, address, 300, 1000, row_bytes, tile_rows, tile_columns);
  if (!error.empty()) {
    std::puts(error.c_str());
    return;
  }
  std::printf("%d", map.words[0] == reinterpret_cast<uintptr_t>(address));
  for (int i = 1; i < 7; ++i) std::printf(" %d", int(map.words[i]));
  std::puts("");
}

}  // namespace

int main() {
  std::printf("%d\n", maps_tiles());
  show(memory, 2048, 128, 64);
  show(memory, 2048, 96, 32);
  show(memory + 2, 2048, 128, 64);
  show(memory, 2002, 128, 64);
}
