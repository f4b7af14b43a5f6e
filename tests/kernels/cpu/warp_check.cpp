// Distributions and likeliest tokens of random rows, against sorts in double precision. Run by
// sanitize.sh.

#include "../../../spec_jax/kernels/cpu/warp.cpp"

#include "pool.h"

namespace {

void check(Pool& pool, uint32_t seed) {
  std::mt19937 random(seed);
  auto below = [&](int64_t n) { return (int64_t)(random() % n); };
  auto normal = [&] { return std::normal_distribution<float>()(random); };

  const int64_t rows = 1 + below(9), size = 1 + below(400);
  std::vector<float> logits(rows * size), temperature(rows), top_p(rows), min_p(rows);
  std::vector<float> out(logits.size());
  std::vector<int32_t> top_k(rows);
  for (float& each : logits) each = below(9) ? normal() : (float)below(2);
  for (int64_t row = 0; row < rows; ++row) {
    temperature[row] = below(3) * 0.7f, top_k[row] = (int32_t)(below(2) * below(2 * size));
    top_p[row] = below(2) ? 1 : 0.001f * (1 + below(998)), min_p[row] = below(2) * 0.05f;
    if (!below(5)) logits[row * size + below(size)] = below(2) ? NAN : -INFINITY;
  }
  const WarpCall call{rows,         size,         logits.data(), temperature.data(), top_p.data(),
                      min_p.data(), top_k.data(), out.data()};
  // The first rows of two are real, or all.
  const int32_t num_tokens[] = {(int32_t)below(rows + 1), (int32_t)below(rows + 1)};
  const int64_t batch = rows % 2 ? below(2) : 2 * below(2);
  const std::vector<int64_t> real = real_rows(num_tokens, batch, rows);
  std::vector<int32_t> tokens(rows, 7);
  run(pool, call, real);
  std::vector<float> confidence(rows, 7);
  float* const asked = below(3) ? confidence.data() : nullptr;
  run(pool, LikeliestCall{rows, size, logits.data(), tokens.data(), asked}, real);

  for (int64_t row = 0; row < rows; ++row) {
    const float *from = &logits[row * size], *to = &out[row * size];
    const float best = *std::max_element(from, from + size);
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += to[i];
    if (std::find(real.begin(), real.end(), row) == real.end()) {
      if (sum != 0 || tokens[row] != -1) fail("padding", sum, tokens[row]);
      if (asked && asked[row] != 0) fail("confidence of padding", asked[row], 0);
      continue;
    }
    const bool has_nan = std::any_of(from, from + size, [](float x) { return std::isnan(x); });
    const bool has_any = !has_nan && std::isfinite(best);
    if (!(std::abs(sum - has_any) <= 1e-5)) fail("sum", sum, has_any);
    const int64_t first = has_any ? std::max_element(from, from + size) - from : -1;
    if (tokens[row] != first) fail("likeliest", tokens[row], first);
    double all = 0;
    for (int64_t i = 0; i < size; ++i) all += std::exp((double)from[i] - best);
    const double expected = has_any ? 1 / all : 0;
    if (asked && !(std::abs(asked[row] - expected) <= 2e-6)) fail("confidence", asked[row], expected);
    if (!has_any || temperature[row] == 0) continue;

    std::vector<double> weights(size);
    for (int64_t i = 0; i < size; ++i) {
      weights[i] = std::exp(((double)from[i] - best) / temperature[row]);
    }
    float cut = -INFINITY;  // of top-k
    // The sum of the weights of larger logits.
    auto above = [&](float x) {
      double sum = 0;
      for (int64_t i = 0; i < size; ++i) sum += from[i] > x ? weights[i] : 0;
      return sum;
    };
    if (top_k[row] > 0 && top_k[row] < size) {
      std::vector<float> order(from, from + size);
      std::nth_element(order.begin(), order.begin() + top_k[row] - 1, order.end(), std::greater<>());
      cut = order[top_k[row] - 1];
    }
    double total = 0;
    for (int64_t i = 0; i < size; ++i) total += from[i] >= cut ? weights[i] : 0;
    auto stays = [&](int64_t i, double slack) {
      return from[i] >= cut && (top_p[row] == 1 || above(from[i]) < top_p[row] * total + slack) &&
             weights[i] >= min_p[row] - slack;
    };
    for (int64_t i = 0; i < size; ++i) {
      // At a cut, rounding decides.
      if ((to[i] > 0) != stays(i, 1e-5 * total) && (to[i] > 0) != stays(i, -1e-5 * total)) {
        fail("support", to[i], weights[i]);
      }
    }
  }
}

}  // namespace

int main() {
  on_threads(4, 100, check);
  std::puts("warp: 400 calls equal sorts in double precision");
}
