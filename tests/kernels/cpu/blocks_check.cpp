// Random blocks of each type, unpacked into memory of exactly their size and packed into words that
// must say the same values. Run by sanitize.sh.

#include "../../../spec_jax/kernels/cpu/blocks.cpp"

#include "pool.h"

namespace {

struct Type {
  int kind, bytes, inputs, bits, offset;
  int scale_bytes, minimum_bytes;  // of a block
  bool units;
};

constexpr Type kTypes[] = {
    {kQ4_0, 18, 32, 4, 8, 2, 0, false}, {kQ4_1, 20, 32, 4, 0, 2, 2, false},
    {kQ5_0, 22, 32, 5, 16, 2, 0, false}, {kQ8_0, 34, 32, 8, 0, 2, 0, false},
    {kQ4_K, 144, 256, 4, 0, 8, 8, true}, {kQ5_K, 176, 256, 5, 0, 8, 8, true},
    {kQ6_K, 210, 256, 6, 32, 16, 0, true},
};

// The value of an input, out of the words of its output.
int value(const Type& type, const std::vector<uint32_t>& words, int64_t first, int64_t input) {
  auto word = [&](int64_t w) { return words[first + w * kLanes]; };
  if (type.bits == 8) return (word(input / 4) >> (8 * (input % 4))) & 255;
  const int64_t width = type.bits - 4;
  const int64_t eights = width ? 4 / width : 1, lines = width ? eights + 1 : 1;
  const int64_t group = input / 8 / eights, eight = input / 8 % eights, i = input % 8;
  int out = word(group * lines + eight) >> (4 * i) & 15;
  if (width) {
    const int64_t bit = 8 * (i / 2) + width * (2 * eight + i % 2);
    out |= (word(group * lines + eights) >> bit & ((1 << width) - 1)) << 4;
  }
  return out;
}

void check(uint32_t seed) {
  std::mt19937 random(seed);
  const Type& type = kTypes[random() % std::size(kTypes)];
  const int64_t rows = kLanes * (1 + random() % 3), blocks = 1 + random() % 3;
  const int64_t inputs = blocks * type.inputs, count = rows * blocks;
  std::vector<uint8_t> data(count * type.bytes), values(rows * inputs);
  for (uint8_t& each : data) each = (uint8_t)random();
  std::vector<uint8_t> scales(count * type.scale_bytes), minima(count * type.minimum_bytes);
  std::vector<uint8_t> scale_units(type.units ? 2 * count : 0);
  std::vector<uint8_t> minimum_units(minima.empty() ? 0 : scale_units.size());
  auto part = [](std::vector<uint8_t>& each) { return each.empty() ? nullptr : each.data(); };
  spec_jax_unpack(type.kind, data.data(), count, type.bytes, values.data(), scales.data(),
                  part(minima), part(scale_units), part(minimum_units));
  std::vector<uint32_t> words(rows * inputs / 32 * type.bits);
  spec_jax_pack(values.data(), rows / kLanes, inputs, type.bits, type.offset, words.data());
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = row / kLanes * (inputs / 32 * type.bits) * kLanes + row % kLanes;
    for (int64_t i = 0; i < inputs; ++i) {
      const int expected = (uint8_t)(values[row * inputs + i] + type.offset);
      const int actual = value(type, words, first, i);
      if (actual != expected) fail("value", actual, expected);
    }
  }
}

}  // namespace

int main() {
  for (uint32_t seed = 0; seed < 300; ++seed) check(seed);
  std::puts("blocks are unpacked and packed");
}
