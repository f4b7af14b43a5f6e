// Draws of random rows: the published words of threefry2x32, and counts of tokens. Run by sanitize.sh.

#include "../../../spec_jax/kernels/cpu/draw.cpp"

#include "pool.h"

namespace {

// Of the test vectors of Random123 (Salmon et al. 2011), with 20 rounds.
void check_words() {
  const uint32_t ones = 0xffffffff;
  const Pair vectors[][3] = {
      {{0, 0}, {0, 0}, {0x6b200159, 0x99ba4efe}},
      {{ones, ones}, {ones, ones}, {0x1cb996fc, 0xbb002be7}},
      {{0x13198a2e, 0x03707344}, {0x243f6a88, 0x85a308d3}, {0xc4923a9c, 0x483df7a0}},
  };
  for (const auto& [key, counter, expected] : vectors) {
    const Pair found = threefry(key, counter);
    if (found.first != expected.first) fail("words", found.first, expected.first);
    if (found.second != expected.second) fail("words", found.second, expected.second);
  }
}

void check(Pool& pool, uint32_t seed) {
  std::mt19937 random(seed);
  auto below = [&](int64_t n) { return (int64_t)(random() % n); };

  const int64_t rows = 1 + below(200), size = 1 + below(60);
  std::vector<float> one(size), probs;
  for (float& each : one) each = below(3) ? 0 : (float)below(5) / 8;
  for (int64_t row = 0; row < rows; ++row) probs.insert(probs.end(), one.begin(), one.end());
  std::vector<uint32_t> keys(2 * rows);
  for (uint32_t& each : keys) each = (uint32_t)random();
  std::vector<int32_t> tokens(rows, 7);
  const int32_t num_tokens = (int32_t)below(rows + 1);
  run(pool, DrawCall{rows, size, 1 + below(size), keys.data(), probs.data(), tokens.data()},
      real_rows(&num_tokens, 1, rows));

  double sum = 0;
  for (float each : one) sum += each;
  std::vector<double> counts(size);
  for (int64_t row = 0; row < rows; ++row) {
    if ((tokens[row] < 0) != (row >= num_tokens || sum == 0)) fail("missing", tokens[row], 0);
    if (tokens[row] >= 0) counts[tokens[row]] += 1;
  }
  for (int64_t i = 0; i < size; ++i) {
    const double mean = sum ? num_tokens * one[i] / sum : 0;  // six standard deviations are allowed
    if (std::abs(counts[i] - mean) > 6 * std::sqrt(mean) + (mean > 0)) fail("count", counts[i], mean);
  }
}

}  // namespace

int main() {
  check_words();
  on_threads(4, 100, check);
  std::puts("draw: 400 calls draw what their rows say");
}
