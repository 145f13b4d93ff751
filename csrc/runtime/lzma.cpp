#include "runtime/lzma.h"

#include <algorithm>
#include <vector>

namespace liger::runtime {
namespace {

// A probability that the next bit is 0, in 11 bits.
using Probability = uint16_t;
constexpr Probability kEven = 1 << 10;

template <size_t N>
struct Probabilities {
  Probability at[N];

  Probabilities() { std::fill(at, at + N, kEven); }
  Probability& operator[](size_t i) { return at[i]; }
  Probability* from(size_t i) { return at + i; }
};

class RangeDecoder {
 public:
  RangeDecoder(const uint8_t* data, size_t size) : at_(data), end_(data + size) {
    if (next() != 0) failed_ = true;
    for (int i = 0; i < 4; ++i) code_ = code_ << 8 | next();
  }

  /// The stream ended too early, or is none.
  bool failed() const { return failed_; }

  uint32_t bit(Probability& p) {
    const uint32_t bound = (range_ >> 11) * p;
    uint32_t found;
    if (code_ < bound) {
      range_ = bound;
      p += (2048 - p) >> 5;
      found = 0;
    } else {
      range_ -= bound;
      code_ -= bound;
      p -= p >> 5;
      found = 1;
    }
    normalize();
    return found;
  }

  /// Bits that are equally likely.
  uint32_t direct(int count) {
    uint32_t found = 0;
    for (; count > 0; --count) {
      range_ >>= 1;
      const bool one = code_ >= range_;
      if (one) code_ -= range_;
      found = found << 1 | uint32_t(one);
      normalize();
    }
    return found;
  }

  /// Bits that each depend on those before, the highest first.
  uint32_t tree(Probability* p, int bits) {
    uint32_t node = 1;
    for (int i = 0; i < bits; ++i) node = node << 1 | bit(p[node]);
    return node - (1u << bits);
  }

  /// The same with the lowest first.
  uint32_t reverse_tree(Probability* p, int bits) {
    uint32_t node = 1, found = 0;
    for (int i = 0; i < bits; ++i) {
      const uint32_t b = bit(p[node]);
      node = node << 1 | b;
      found |= b << i;
    }
    return found;
  }

 private:
  uint8_t next() {
    if (at_ == end_) {
      failed_ = true;
      return 0;
    }
    return *at_++;
  }

  void normalize() {
    if (range_ >> 24) return;
    range_ <<= 8;
    code_ = code_ << 8 | next();
  }

  const uint8_t* at_;
  const uint8_t* end_;
  uint32_t range_ = 0xffffffff, code_ = 0;
  bool failed_ = false;
};

constexpr int kStates = 12, kMostPositions = 16;
constexpr uint32_t kShortest = 2;

struct Length {
  Probabilities<2> choice;
  Probabilities<kMostPositions << 3> low, middle;
  Probabilities<256> high;

  uint32_t decode(RangeDecoder& in, uint32_t position) {
    if (!in.bit(choice[0])) return kShortest + in.tree(low.from(position << 3), 3);
    if (!in.bit(choice[1])) return kShortest + 8 + in.tree(middle.from(position << 3), 3);
    return kShortest + 16 + in.tree(high.from(0), 8);
  }
};

// What the last symbols were. Up to 6, the last one was a literal.
uint32_t after_literal(uint32_t state) { return state < 4 ? 0 : state < 10 ? state - 3 : state - 6; }
uint32_t after(uint32_t state, uint32_t following_literal, uint32_t otherwise) {
  return state < 7 ? following_literal : otherwise;
}

class Decoder {
 public:
  Decoder(uint32_t literal_context, uint32_t literal_position, uint32_t position, const uint8_t* data, size_t size)
      : lc_(literal_context),
        lp_(literal_position),
        position_mask_((1u << position) - 1),
        in_(data, size),
        literals_(size_t(0x300) << (lc_ + lp_), kEven) {}

  bool run(uint8_t* out, size_t wanted) {
    size_t at = 0;
    while (at < wanted && !in_.failed()) {
      const uint32_t position = uint32_t(at) & position_mask_;
      if (!in_.bit(is_match_[state_ * kMostPositions + position])) {
        literal(out, at++);
        continue;
      }
      uint32_t length = 0;
      if (!in_.bit(is_repeated_[state_])) {
        std::copy_backward(distances_, distances_ + 3, distances_ + 4);
        length = lengths_.decode(in_, position);
        state_ = after(state_, 7, 10);
        distances_[0] = distance(length);
      } else if (!in_.bit(is_repeated_first_[state_])) {
        if (!in_.bit(is_repeated_long_[state_ * kMostPositions + position])) {
          state_ = after(state_, 9, 11);
          length = 1;
        }
      } else {
        const int which = !in_.bit(is_repeated_second_[state_]) ? 1 : !in_.bit(is_repeated_third_[state_]) ? 2 : 3;
        std::rotate(distances_, distances_ + which, distances_ + which + 1);
      }
      if (length == 0) {
        length = repeated_lengths_.decode(in_, position);
        state_ = after(state_, 8, 11);
      }
      // The marker of the end has the largest distance, which fails too.
      if (in_.failed() || distances_[0] >= at) return false;
      // Byte by byte: source and destination overlap when a match repeats itself. The last one may go on.
      const uint8_t* from = out + at - distances_[0] - 1;
      for (length = std::min<size_t>(length, wanted - at); length > 0; --length) out[at++] = *from++;
    }
    return !in_.failed();
  }

 private:
  void literal(uint8_t* out, size_t at) {
    const uint32_t before = at == 0 ? 0 : out[at - 1];
    const uint32_t context = ((uint32_t(at) & ((1u << lp_) - 1)) << lc_) + (before >> (8 - lc_));
    Probability* p = literals_.data() + size_t(0x300) * context;
    uint32_t symbol = 1;
    if (state_ >= 7 && distances_[0] < at) {
      // The byte at the last distance is the guess, until a bit differs.
      uint32_t guess = out[at - distances_[0] - 1];
      for (bool same = true; symbol < 0x100 && same;) {
        guess <<= 1;
        const uint32_t expected = guess & 0x100, b = in_.bit(p[0x100 + expected + symbol]);
        symbol = symbol << 1 | b;
        same = b == expected >> 8;
      }
    }
    while (symbol < 0x100) symbol = symbol << 1 | in_.bit(p[symbol]);
    out[at] = uint8_t(symbol);
    state_ = after_literal(state_);
  }

  uint32_t distance(uint32_t length) {
    const uint32_t slot = in_.tree(slots_.from(std::min(length - kShortest, 3u) << 6), 6);
    if (slot < 4) return slot;
    const int bits = int(slot >> 1) - 1;
    const uint32_t base = (2 | (slot & 1)) << bits;
    if (slot < 14) return base + in_.reverse_tree(near_.from(base - slot), bits);
    return base + (in_.direct(bits - 4) << 4) + in_.reverse_tree(far_.from(0), 4);
  }

  uint32_t lc_, lp_, position_mask_;
  RangeDecoder in_;
  std::vector<Probability> literals_;
  Probabilities<kStates * kMostPositions> is_match_, is_repeated_long_;
  Probabilities<kStates> is_repeated_, is_repeated_first_, is_repeated_second_, is_repeated_third_;
  Probabilities<4 << 6> slots_;
  Probabilities<128> near_;
  Probabilities<16> far_;
  Length lengths_, repeated_lengths_;
  uint32_t state_ = 0;
  uint32_t distances_[4] = {};  // each less one
};

}  // namespace

bool lzma_decode(const uint8_t* data, size_t size, size_t wanted, std::string& out) {
  if (size == 0) return false;
  const uint32_t context = data[0] % 9, literal_position = data[0] / 9 % 5, position = data[0] / 45;
  // The limits of liblzma.
  if (position > 4 || context + literal_position > 4) return false;
  Decoder decoder(context, literal_position, position, data + 1, size - 1);
  out.assign(wanted, '\0');
  return decoder.run(reinterpret_cast<uint8_t*>(out.data()), wanted);
}

}  // namespace liger::runtime
