#include "runtime/inflate.h"

#include <array>

namespace liger::runtime {
namespace {

constexpr int kMaxBits = 15;

class BitReader {
 public:
  BitReader(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  // Reading past the end yields zeros and marks the stream as overrun.
  uint32_t bits(int count) {
    while (held_ < count) {
      if (at_ == end_) overrun_ = true;
      buffer_ |= uint64_t(at_ == end_ ? 0 : *at_++) << held_;
      held_ += 8;
    }
    uint32_t value = buffer_ & ((uint64_t(1) << count) - 1);
    buffer_ >>= count;
    held_ -= count;
    return value;
  }

  void align() {
    buffer_ >>= held_ & 7;
    held_ &= ~7;
  }

  bool overrun() const { return overrun_; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
  uint64_t buffer_ = 0;
  int held_ = 0;
  bool overrun_ = false;
};

// Canonical Huffman code: symbols ordered by code, and how many codes each length has.
class Huffman {
 public:
  Huffman(const uint8_t* lengths, int count) {
    for (int i = 0; i < count; ++i) ++counts_[lengths[i]];
    counts_[0] = 0;
    std::array<uint16_t, kMaxBits + 2> next{};
    for (int i = 1; i <= kMaxBits; ++i) next[i + 1] = next[i] + counts_[i];
    for (int i = 0; i < count; ++i) {
      if (lengths[i]) symbols_[next[lengths[i]]++] = i;
    }
  }

  int decode(BitReader& in) const {
    int code = 0, first = 0, index = 0;
    for (int length = 1; length <= kMaxBits; ++length) {
      code |= in.bits(1);
      int count = counts_[length];
      if (code - count < first) return symbols_[index + code - first];
      index += count;
      first = (first + count) << 1;
      code <<= 1;
    }
    return -1;
  }

 private:
  std::array<uint16_t, kMaxBits + 1> counts_{};
  std::array<uint16_t, 288> symbols_{};
};

constexpr uint16_t kLengthBase[29] = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                      31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
constexpr uint8_t kLengthBits[29] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                     2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
constexpr uint16_t kDistanceBase[30] = {1,    2,    3,    4,    5,    7,    9,    13,    17,    25,
                                        33,   49,   65,   97,   129,  193,  257,  385,   513,   769,
                                        1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
constexpr uint8_t kDistanceBits[30] = {0, 0, 0, 0, 1, 1, 2, 2,  3,  3,  4,  4,  5,  5,  6,
                                       6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};

bool copy_block(BitReader& in, const Huffman& literals, const Huffman& distances, size_t limit, std::string& out) {
  for (;;) {
    int symbol = literals.decode(in);
    if (symbol == 256) return !in.overrun();
    if (symbol < 0 || symbol > 285 || in.overrun()) return false;
    if (symbol < 256) {
      if (out.size() >= limit) return false;
      out.push_back(char(symbol));
      continue;
    }
    size_t length = kLengthBase[symbol - 257] + in.bits(kLengthBits[symbol - 257]);
    int code = distances.decode(in);
    if (code < 0 || code > 29) return false;
    size_t distance = kDistanceBase[code] + in.bits(kDistanceBits[code]);
    if (distance > out.size() || out.size() + length > limit) return false;
    // Byte by byte: source and destination overlap when a match repeats itself.
    for (size_t from = out.size() - distance; length--; ++from) out.push_back(out[from]);
  }
}

bool read_tables(BitReader& in, std::array<uint8_t, 320>& lengths, int& literal_count, int& distance_count) {
  static constexpr uint8_t kOrder[19] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
  literal_count = in.bits(5) + 257;
  distance_count = in.bits(5) + 1;
  int code_count = in.bits(4) + 4;
  if (literal_count > 286 || distance_count > 30) return false;
  std::array<uint8_t, 19> code_lengths{};
  for (int i = 0; i < code_count; ++i) code_lengths[kOrder[i]] = in.bits(3);
  Huffman codes(code_lengths.data(), 19);
  for (int i = 0; i < literal_count + distance_count;) {
    int symbol = codes.decode(in);
    if (symbol < 0 || in.overrun()) return false;
    if (symbol < 16) {
      lengths[i++] = symbol;
      continue;
    }
    if (symbol == 16 && i == 0) return false;
    uint8_t value = symbol == 16 ? lengths[i - 1] : 0;
    int repeat = symbol == 16 ? 3 + in.bits(2) : symbol == 17 ? 3 + in.bits(3) : 11 + in.bits(7);
    if (i + repeat > literal_count + distance_count) return false;
    while (repeat--) lengths[i++] = value;
  }
  return true;
}

}  // namespace

bool inflate(const uint8_t* data, size_t size, size_t decoded_size, std::string& out, std::string_view dictionary) {
  BitReader in(data, size);
  const size_t limit = dictionary.size() + decoded_size;
  out.reserve(limit);
  out = dictionary;
  for (bool last = false; !last;) {
    last = in.bits(1);
    uint32_t kind = in.bits(2);
    if (kind == 0) {
      in.align();
      uint32_t length = in.bits(16), complement = in.bits(16);
      if (length != (~complement & 0xffff) || out.size() + length > limit) return false;
      while (length--) out.push_back(char(in.bits(8)));
    } else if (kind == 1 || kind == 2) {
      std::array<uint8_t, 320> lengths{};
      int literals = 288, distances = 30;
      if (kind == 2) {
        if (!read_tables(in, lengths, literals, distances)) return false;
      } else {
        for (int i = 0; i < 288; ++i) lengths[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
        for (int i = 0; i < 30; ++i) lengths[288 + i] = 5;
      }
      if (!copy_block(in, {lengths.data(), literals}, {lengths.data() + literals, distances}, limit, out)) return false;
    } else {
      return false;
    }
    if (in.overrun()) return false;
  }
  out.erase(0, dictionary.size());
  return out.size() == decoded_size;
}

uint32_t crc32(const uint8_t* data, size_t size, uint32_t before) {
  static const auto table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int k = 0; k < 8; ++k) c = (c >> 1) ^ (c & 1 ? 0xedb88320u : 0);
      t[i] = c;
    }
    return t;
  }();
  uint32_t crc = ~before;
  for (size_t i = 0; i < size; ++i) crc = table[(crc ^ data[i]) & 0xff] ^ (crc >> 8);
  return ~crc;
}

}  // namespace liger::runtime
