#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace liger::runtime {

/// Decodes the first `wanted` bytes of an LZMA stream: the byte of its properties, then the range coder's bytes. False
/// if the stream is malformed or ends before.
bool lzma_decode(const uint8_t* data, size_t size, size_t wanted, std::string& out);

}  // namespace liger::runtime
