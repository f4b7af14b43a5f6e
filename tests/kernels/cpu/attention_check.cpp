// Attention over random caches, against sums in double precision. Run by sanitize.sh.

#include "../../../spec_jax/kernels/cpu/attention.cpp"

#include "pool.h"

namespace {

void check(Pool& pool, uint32_t seed) {
  std::mt19937 random(seed);
  auto below = [&](int64_t n) { return (int64_t)(random() % n); };
  auto normal = [&] { return std::normal_distribution<float>()(random); };

  Attend call{};
  call.batch = 1 + below(3), call.heads = 1 + below(3), call.tokens = 1 + below(9);
  call.rows = call.tokens * (1 + below(4)), call.width = 1 + below(70);
  call.window = below(2) ? 1 + below(30) : 0;
  call.ring = call.window && below(2);
  const bool tree = !call.ring && below(2);
  call.recent = tree ? call.tokens : 0;
  call.slots = call.ring ? call.window + call.tokens + below(9) : call.tokens + 1 + below(80);

  call.cap = below(2) ? 2 : 0;
  std::vector<float> slopes(call.heads * call.rows / call.tokens);
  for (float& each : slopes) each = std::abs(normal()) / 8;
  if (below(2)) call.slopes = slopes.data();

  const int64_t cached = call.batch * call.heads * call.slots * call.width;
  std::vector<float> queries(call.batch * call.heads * call.rows * call.width);
  std::vector<float> keys(cached), values(cached), out(queries.size());
  for (auto* part : {&queries, &keys, &values}) {
    for (float& each : *part) each = normal();
  }
  std::vector<int32_t> positions(call.batch * call.tokens), start(call.batch), text(call.batch);
  std::vector<int32_t> depths(call.recent);
  std::unique_ptr<bool[]> among(new bool[call.tokens * call.recent + 1]);
  for (int64_t i = 0; i < call.recent; ++i) depths[i] = (int32_t)(i ? below(i + 1) : 0);
  for (int64_t t = 0; t < call.tokens; ++t) {
    for (int64_t i = 0; i < call.recent; ++i) {
      among[t * call.recent + i] = i == t || (i < t && below(2));
    }
  }
  for (int64_t b = 0; b < call.batch; ++b) {
    start[b] = (int32_t)(call.ring ? below(200) : below(call.slots - call.tokens + 1));
    text[b] = start[b];
    for (int64_t t = 0; t < call.tokens; ++t) {
      positions[b * call.tokens + t] = start[b] + (tree ? depths[t] : (int32_t)t);
    }
  }
  call.queries = queries.data(), call.keys = keys.data(), call.values = values.data();
  call.positions = positions.data(), call.start = start.data(), call.text = text.data();
  call.depths = depths.data(), call.among = among.get(), call.out = out.data();
  // A slot that no token sees may hold anything.
  for (int64_t b = 0; b < call.batch; ++b) {
    for (int64_t slot = 0; slot < call.slots; ++slot) {
      bool any = false;
      for (int64_t t = 0; t < call.tokens; ++t) any |= call.sees(b, t, slot);
      if (any) continue;
      for (int64_t h = 0; h < call.heads; ++h) {
        keys[((b * call.heads + h) * call.slots + slot) * call.width] = NAN;
        values[((b * call.heads + h) * call.slots + slot) * call.width] = NAN;
      }
    }
  }
  run(pool, call);

  for (int64_t row = 0; row < call.batch * call.heads * call.rows; ++row) {
    const int64_t b = row / call.rows / call.heads, token = row % call.rows % call.tokens;
    const float* query = &queries[row * call.width];
    std::vector<std::pair<double, const float*>> seen;
    double most = -INFINITY, total = 0;
    for (int64_t slot = 0; slot < call.slots; ++slot) {
      if (!call.sees(b, token, slot)) continue;
      const int64_t at = (row / call.rows * call.slots + slot) * call.width;
      double score = 0;
      for (int64_t d = 0; d < call.width; ++d) score += (double)query[d] * keys[at + d];
      if (call.cap) score = call.cap * std::tanh(score / call.cap);
      if (call.slopes) {
        const int64_t of_head = row % call.rows / call.tokens, group = call.rows / call.tokens;
        const int64_t head = row / call.rows % call.heads;
        score -= (double)slopes[head * group + of_head] * call.distance(b, token, slot);
      }
      seen.push_back({score, &values[at]});
      most = std::max(most, score);
    }
    for (auto& each : seen) total += each.first = std::exp(each.first - most);
    for (int64_t d = 0; d < call.width; ++d) {
      double sum = 0;
      for (auto& each : seen) sum += each.first / total * each.second[d];
      double found = out[row * call.width + d];
      if (!(std::abs(found - sum) <= 1e-4)) fail("attention", found, sum);
    }
  }
}

}  // namespace

int main() {
  on_threads(4, 200, check);
  std::puts("attention: 800 calls equal sums in double precision");
}
