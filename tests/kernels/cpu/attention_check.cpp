// Attention over random caches, against sums in double precision. Run by sanitize.sh.

#include "../../../spec_jax/kernels/cpu/attention.h"

#include "pool.h"

namespace {

void check(Pool& pool, uint32_t seed) {
  std::mt19937 random(seed);
  auto below = [&](int64_t n) { return (int64_t)(random() % n); };
  auto normal = [&] { return std::normal_distribution<float>()(random); };

  Attend call{};
  call.batch = 1 + below(3), call.heads = 1 + below(3), call.tokens = 1 + below(9);
  call.group = 1 + below(4), call.width = 1 + below(70);
  call.window = below(2) ? 1 + below(30) : 0;
  call.ring = call.window && below(2);
  const bool tree = !call.ring && below(2), writes = below(4);
  call.recent = tree ? call.tokens : 0;
  call.slots = call.ring ? call.window + call.tokens + below(9) : call.tokens + 1 + below(80);
  call.half = below(call.width / 2 + 1), call.scale = 0.5;

  call.cap = below(2) ? 2 : 0;
  std::vector<float> slopes(call.heads * call.group);
  for (float& each : slopes) each = std::abs(normal()) / 8;
  if (below(2)) call.slopes = slopes.data();

  const int64_t width = call.width, cached = call.batch * call.heads * call.slots * width;
  const int64_t made = call.batch * call.tokens * call.heads * width;
  std::vector<float> queries(made * call.group), keys(cached), values(cached), out(queries.size(), 1);
  std::vector<float> new_keys(made), new_values(made);
  std::vector<float> rotation(2 * call.batch * call.tokens * call.half);
  for (auto* part : {&queries, &keys, &values, &new_keys, &new_values, &rotation}) {
    for (float& each : *part) each = normal();
  }
  std::vector<int32_t> positions(call.batch * call.tokens), start(call.batch), text(call.batch);
  std::vector<int32_t> depths(call.recent);
  std::unique_ptr<bool[]> among(new bool[call.tokens * call.recent + 1]);
  const bool paths = below(2);  // or any tokens that others see, which stand anywhere
  for (int64_t t = 0; t < call.recent; ++t) {
    const int64_t parent = t ? below(t) : 0;
    depths[t] = (int32_t)(!t ? 0 : paths ? depths[parent] + 1 : below(t + 1));
    for (int64_t i = 0; i < call.recent; ++i) {
      bool before = i < t && (paths ? among[parent * call.recent + i] : below(2));
      among[t * call.recent + i] = i == t || before;
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
  call.rotation = rotation.data();
  if (writes) call.new_keys = new_keys.data(), call.new_values = new_values.data();
  call.positions = positions.data(), call.start = start.data(), call.text = text.data();
  call.depths = depths.data(), call.among = among.get(), call.out = out.data();
  // A slot that no token sees may hold anything.
  for (int64_t b = 0; b < call.batch; ++b) {
    for (int64_t slot = 0; slot < call.slots; ++slot) {
      bool any = false;
      for (int64_t t = 0; t < call.tokens; ++t) any |= call.sees(b, t, slot);
      if (any) continue;
      for (int64_t h = 0; h < call.heads; ++h) {
        keys[((b * call.heads + h) * call.slots + slot) * width] = NAN;
        values[((b * call.heads + h) * call.slots + slot) * width] = NAN;
      }
    }
  }
  auto rotated = [&](const float* head, int64_t b, int64_t t) {
    std::vector<double> found(head, head + width);
    const float* cosines = rotation.data() + (b * call.tokens + t) * call.half;
    const float* sines = cosines + call.batch * call.tokens * call.half;
    for (int64_t i = 0; i < call.half; ++i) {
      double first = head[i], second = head[call.half + i];
      found[i] = first * cosines[i] - second * sines[i];
      found[call.half + i] = second * cosines[i] + first * sines[i];
    }
    return found;
  };
  // What the cache holds afterwards. A row's last tokens may be padding, and a value broken.
  std::vector<int32_t> num_tokens(call.batch, (int32_t)call.tokens);
  auto keys_after = keys, values_after = values;
  if (writes) {
    const bool pads = !tree && below(2);
    if (pads) call.num_tokens = num_tokens.data();
    for (int64_t b = 0; b < call.batch; ++b) {
      if (pads) num_tokens[b] = (int32_t)below(call.tokens + 1);
      for (int64_t t = num_tokens[b]; t < call.tokens; ++t) {
        positions[b * call.tokens + t] = start[b] + std::max(0, num_tokens[b] - 1);
      }
      for (int64_t t = 0; t < num_tokens[b]; ++t) {
        for (int64_t h = 0; h < call.heads; ++h) {
          const int64_t slot = (start[b] + t) % call.slots;
          const int64_t to = ((b * call.heads + h) * call.slots + slot) * width;
          const int64_t from = ((b * call.tokens + t) * call.heads + h) * width;
          auto key = rotated(&new_keys[from], b, t);
          for (int64_t d = 0; d < width; ++d) {
            keys_after[to + d] = (float)key[d], values_after[to + d] = new_values[from + d];
          }
        }
      }
    }
  }
  run(pool, call);
  for (int64_t i = 0; i < cached; ++i) {
    for (auto [name, found, sum] : {std::tuple{"keys", keys[i], keys_after[i]},
                                    std::tuple{"values", values[i], values_after[i]}}) {
      if (std::isnan(sum) ? !std::isnan(found) : !(std::abs(found - sum) <= 1e-5)) {
        fail(name, found, sum);
      }
    }
  }

  for (int64_t i = 0; i < call.batch * call.tokens * call.heads * call.group; ++i) {
    const int64_t of_head = i % call.group, head = i / call.group % call.heads;
    const int64_t token = i / call.group / call.heads % call.tokens;
    const int64_t b = i / call.group / call.heads / call.tokens, place = i * width;
    if (token >= num_tokens[b]) {  // padding
      for (int64_t d = 0; d < width; ++d) {
        if (out[place + d] != 0) fail("padding", out[place + d], 0);
      }
      continue;
    }
    auto query = rotated(&queries[place], b, token);
    std::vector<std::pair<double, const float*>> seen;
    double most = -INFINITY, total = 0;
    for (int64_t slot = 0; slot < call.slots; ++slot) {
      if (!call.sees(b, token, slot)) continue;
      const int64_t at = ((b * call.heads + head) * call.slots + slot) * width;
      double score = 0;
      for (int64_t d = 0; d < width; ++d) score += query[d] * call.scale * keys[at + d];
      if (call.cap) score = call.cap * std::tanh(score / call.cap);
      if (call.slopes) {
        score -= (double)slopes[head * call.group + of_head] * call.distance(b, token, slot);
      }
      seen.push_back({score, &values[at]});
      most = std::max(most, score);
    }
    for (auto& each : seen) total += each.first = std::exp(each.first - most);
    for (int64_t d = 0; d < width; ++d) {
      double sum = 0;
      for (auto& each : seen) sum += each.first / total * each.second[d];
      if (!(std::abs(out[place + d] - sum) <= 1e-4)) fail("attention", out[place + d], sum);
    }
  }
}

}  // namespace

int main() {
  on_threads(4, 200, check);
  std::puts("attention: 800 calls equal sums in double precision");
}
