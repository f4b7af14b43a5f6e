// Quantized weights as they are loaded: GGUF's blocks to values and scales, and values to the words
// of panels. Python calls these functions for some rows at a time.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = 16;

uint64_t eight_bytes(const uint8_t* from) {
  uint64_t bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return bytes;
}

// The four bytes with even numbers.
uint32_t even_bytes(uint64_t bytes) {
  bytes &= 0x00ff00ff00ff00ffu;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffu;
  return (uint32_t)(bytes | bytes >> 16);
}

// 32 values of `Bits` bits in `Bits` words, as `_words_of` in packed_weight.py describes them.
template <int Bits>
void words_of(const uint8_t* values, uint32_t* words) {
  if (Bits == 8) {
    std::memcpy(words, values, 32);
    return;
  }
  constexpr int kWidth = Bits - 4;            // of the highest bits
  constexpr int kEights = Bits == 6 ? 2 : 4;  // words before a word of these
  for (int first = 0; first < 4; first += kEights) {
    uint32_t high = 0;
    for (int e = 0; e < kEights; ++e) {
      const uint64_t bytes = eight_bytes(values + 8 * (first + e));
      const uint64_t low = bytes & 0x0f0f0f0f0f0f0f0fu;
      *words++ = even_bytes(low | low >> 4);
      if (kWidth) {
        const uint64_t others = bytes >> 4 & 0x0101010101010101u * ((1 << kWidth) - 1);
        const uint32_t pairs = even_bytes(others | others >> (8 - kWidth));
        high |= (pairs & 0x01010101u * ((1 << 2 * kWidth) - 1)) << (2 * kWidth * e);
      }
    }
    if (kWidth) *words++ = high;
  }
}

template <int Bits>
void pack(const uint8_t* values, int64_t panels, int64_t inputs, int offset, uint32_t* out) {
  const int64_t words = inputs / 32 * Bits;
  for (int64_t p = 0; p < panels; ++p, out += words * kLanes) {
    for (int lane = 0; lane < kLanes; ++lane, values += inputs) {
      uint32_t* to = out + lane;
      for (int64_t i = 0; i < inputs; i += 32) {
        uint8_t some[32];
        for (int j = 0; j < 32; ++j) some[j] = (uint8_t)(values[i + j] + offset);
        uint32_t packed[8];
        words_of<Bits>(some, packed);
        for (int w = 0; w < Bits; ++w, to += kLanes) *to = packed[w];
      }
    }
  }
}

// GGUF's types by their numbers in ggml.h.
enum Kind { kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14 };

// Where the parts of a matrix are written; signed values and scales as their bytes.
struct Parts {
  uint8_t* values;
  uint8_t* scales;
  uint8_t* minima;
  uint8_t* scale_units;
  uint8_t* minimum_units;
};

void copy(uint8_t*& to, const uint8_t* from, int64_t size) {
  std::memcpy(to, from, size);
  to += size;
}

// The low halves of `count` bytes, then the high ones, and `offset` added.
void nibbles(uint8_t*& to, const uint8_t* from, int count, int offset = 0) {
  for (int i = 0; i < count; ++i) to[i] = (uint8_t)((from[i] & 15) + offset);
  for (int i = 0; i < count; ++i) to[count + i] = (uint8_t)((from[i] >> 4) + offset);
  to += 2 * count;
}

// The eight scales and minima of 6 bits of a block of Q4_K or Q5_K, and their units.
void k_scales(const uint8_t* block, Parts& to) {
  const uint8_t* a = block + 4;
  for (int i = 0; i < 4; ++i) {
    to.scales[i] = a[i] & 63;
    to.scales[4 + i] = (a[8 + i] & 15) | (a[i] >> 2 & 48);
    to.minima[i] = a[4 + i] & 63;
    to.minima[4 + i] = a[8 + i] >> 4 | (a[4 + i] >> 2 & 48);
  }
  to.scales += 8, to.minima += 8;
  copy(to.scale_units, block, 2);
  copy(to.minimum_units, block + 2, 2);
  to.minimum_units[-1] ^= 0x80;  // minima are subtracted
}

void unpack(Kind kind, const uint8_t* block, Parts& to) {
  switch (kind) {
    case kQ4_0:
      copy(to.scales, block, 2);
      return nibbles(to.values, block + 2, 16, -8);
    case kQ4_1:
      copy(to.scales, block, 2);
      copy(to.minima, block + 2, 2);
      return nibbles(to.values, block + 4, 16);
    case kQ5_0: {
      copy(to.scales, block, 2);
      uint32_t high;
      std::memcpy(&high, block + 2, 4);
      uint8_t* values = to.values;
      nibbles(to.values, block + 6, 16);
      for (int i = 0; i < 32; ++i) {
        values[i] = (uint8_t)((values[i] | (high >> i & 1) << 4) - 16);
      }
      return;
    }
    case kQ8_0:
      copy(to.scales, block, 2);
      return copy(to.values, block + 2, 32);
    case kQ4_K:
      k_scales(block, to);
      for (int part = 0; part < 4; ++part) nibbles(to.values, block + 16 + 32 * part, 32);
      return;
    case kQ5_K: {
      k_scales(block, to);
      uint8_t* values = to.values;
      for (int part = 0; part < 4; ++part) nibbles(to.values, block + 48 + 32 * part, 32);
      for (int part = 0; part < 8; ++part) {
        for (int i = 0; i < 32; ++i) values[32 * part + i] |= (block[16 + i] >> part & 1) << 4;
      }
      return;
    }
    case kQ6_K:
      copy(to.scales, block + 192, 16);
      copy(to.scale_units, block + 208, 2);
      for (int half = 0; half < 2; ++half) {
        uint8_t* values = to.values;
        nibbles(to.values, block + 64 * half, 64);
        for (int part = 0; part < 4; ++part) {
          for (int i = 0; i < 32; ++i) {
            uint8_t& value = values[32 * part + i];
            value |= (block[128 + 32 * half + i] >> 2 * part & 3) << 4;
            value -= 32;
          }
        }
      }
  }
}

}  // namespace

extern "C" {

// Values [16 panels, inputs] of 4, 5, 6 or 8 bits, after `offset` is added, as words [panels, inputs /
// 32 * bits, 16]; inputs are a multiple of 32.
void spec_jax_pack(const uint8_t* values, int64_t panels, int64_t inputs, int bits, int offset,
                   uint32_t* words) {
  const auto function = bits == 4 ? pack<4> : bits == 5 ? pack<5> : bits == 6 ? pack<6> : pack<8>;
  function(values, panels, inputs, offset, words);
}

// Neighbouring blocks of a type as values, scales, minima and their units; null where a type has none.
void spec_jax_unpack(int kind, const uint8_t* blocks, int64_t count, int64_t block_bytes,
                     uint8_t* values, uint8_t* scales, uint8_t* minima, uint8_t* scale_units,
                     uint8_t* minimum_units) {
  Parts to{values, scales, minima, scale_units, minimum_units};
  for (int64_t i = 0; i < count; ++i) unpack((Kind)kind, blocks + i * block_bytes, to);
}

}  // extern "C"
