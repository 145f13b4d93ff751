#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace liger::runtime {

/// Decodes a raw DEFLATE stream (RFC 1951) of known decoded size. False if the stream is malformed. The stream may
/// refer to the dictionary as if its bytes had been decoded first.
bool inflate(const uint8_t* data, size_t size, size_t decoded_size, std::string& out, std::string_view dictionary = {});

/// CRC-32 as in zlib. before: the CRC-32 of the preceding bytes.
uint32_t crc32(const uint8_t* data, size_t size, uint32_t before = 0);

}  // namespace liger::runtime
