// Attention of new tokens over a cache: rotates their heads, writes their keys and values, and reads
// the keys and values that they see and no others.
//
// `spec_jax/models/attention.py` writes a cache (`write_kv`), `attention_mask.py` says what a token
// sees and `layers.rotate` how heads rotate; `write`, `distance` and `rotate` here say the same.

#pragma once

#include <numeric>

#include "common.h"

namespace {

// Query rows of a task, which share the keys that it transposes; fewer where threads would idle.
constexpr int64_t kLeastRows = 24, kMostRows = 72;
#if defined(__AVX512F__)
constexpr int kMixRows = 6, kMixPanels = 4;
#else
constexpr int kMixRows = 6, kMixPanels = 1;
#endif

constexpr int64_t kUnseen = INT64_MIN;

struct Attend {
  int64_t batch, tokens, heads, group, width;  // queries are [batch, tokens, heads, group, width]
  int64_t slots, recent, window, half;         // a window of 0 sees all; a half of 0 rotates none
  bool ring;
  float scale, cap;                     // of scores; a cap of 0 for none
  const float* queries;
  float *keys, *values;                 // the cache, [batch, heads, slots, width]
  const float *new_keys, *new_values;   // [batch, tokens, heads, width], or null
  const float* rotation;                // cosines and sines [2, batch, tokens, half]
  const float* slopes;                  // [heads, group], or null
  const int32_t *positions, *start, *text, *depths;
  const int32_t* num_tokens;            // [batch], or null for all
  const bool* among;                    // [tokens, recent]
  float* out;                           // as queries

  // Tokens of b that are real; the others are padding.
  int64_t count(int64_t b) const {
    return num_tokens ? std::clamp<int64_t>(num_tokens[b], 0, tokens) : tokens;
  }

  // The rows of a head are these tokens of its first query, then of the next.
  int64_t rows(int64_t b) const { return group * count(b); }
  int64_t token_of(int64_t b, int64_t row) const { return row % count(b); }

  int64_t query_at(int64_t b, int64_t token, int64_t head, int64_t query) const {
    return (((b * tokens + token) * heads + head) * group + query) * width;
  }

  bool sees(int64_t b, int64_t token, int64_t slot) const {
    return distance(b, token, slot) != kUnseen;
  }

  // How far a slot's key stands behind a token that sees it.
  int64_t distance(int64_t b, int64_t token, int64_t slot) const {
    int64_t index = slot, at = positions[b * tokens + token];
    if (ring) {
      int64_t newest = start[b] + tokens - 1;
      index = newest - ((newest - slot) % slots + slots) % slots;
    }
    if (index < 0) return kUnseen;
    int64_t position = index, behind = index - text[b];
    if (!recent) {
      if (index > at) return kUnseen;
    } else if (behind >= 0) {
      if (behind >= recent || !among[token * recent + behind]) return kUnseen;
      position = text[b] + depths[behind];
    }
    return !window || at - position < window ? at - position : kUnseen;
  }
};

// The first `half` numbers of a head against the next, by a token's angles; then all times `scale`.
void rotate(const Attend& call, int64_t b, int64_t token, const float* head, float scale,
            float* out) {
  const int64_t half = call.half, at = (b * call.tokens + token) * half;
  const float *cosines = call.rotation + at;
  const float* sines = cosines + call.batch * call.tokens * half;
  for (int64_t i = 0; i < half; ++i) {
    float first = head[i], second = head[half + i];
    out[i] = (first * cosines[i] - second * sines[i]) * scale;
    out[half + i] = (second * cosines[i] + first * sines[i]) * scale;
  }
  for (int64_t i = 2 * half; i < call.width; ++i) out[i] = head[i] * scale;
}

// Writes a head's new keys and values. A value that is not finite would reach tokens that must not
// see it, because zero times NaN is NaN: it is written as zeros, and its key as NaN.
void write(const Attend& call, int64_t b, int64_t head) {
  const int64_t width = call.width;
  for (int64_t token = 0; token < call.count(b); ++token) {
    int64_t slot = call.start[b] + token;
    if (call.ring) slot %= call.slots;
    if (slot < 0 || slot >= call.slots) continue;
    const int64_t from = ((b * call.tokens + token) * call.heads + head) * width;
    const int64_t to = ((b * call.heads + head) * call.slots + slot) * width;
    const float* value = call.new_values + from;
    float zero = 0;  // or NaN
    for (int64_t i = 0; i < width; ++i) zero += value[i] * 0.0f;
    if (zero == 0) {
      rotate(call, b, token, call.new_keys + from, 1, call.keys + to);
      std::memcpy(call.values + to, value, width * sizeof(float));
    } else {
      std::fill(call.keys + to, call.keys + to + width, NAN);
      std::fill(call.values + to, call.values + to + width, 0.0f);
    }
  }
}

// tanh in absolute terms: 1e-7.
INLINE Part tanh_of(Part x) {
  Part size = x < 0 ? -x : x;
  Part e = exp_of_negative(size * -2.0f);
  Part large = (1.0f - e) / (1.0f + e), square = x * x;
  Part small = size * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15)));
  Part found = size < 0.05f ? small : large;
  return x < 0 ? -found : found;
}

// scores[j] = function(scores[j], lane) for `padded` scores, a register at a time.
template <class Function>
INLINE void for_parts(float* scores, int64_t padded, Function function) {
  constexpr int kStep = kLanes / kParts;
  for (int64_t j = 0; j < padded; j += kLanes) {
#pragma GCC unroll 4
    for (int n = 0; n < kParts; ++n) {
      Part each = function(load<Part>(scores + j + n * kStep), n);
      std::memcpy(scores + j + n * kStep, &each, sizeof(each));
    }
  }
}

#define LOW(lane, step) ((lane) & (step) ? kLanes + (lane) - (step) : (lane))
#define HIGH(lane, step) ((lane) & (step) ? kLanes + (lane) : (lane) + (step))
#define EACH(side, step)                                                                  \
  side(0, step), side(1, step), side(2, step), side(3, step), side(4, step), side(5, step), \
      side(6, step), side(7, step), side(8, step), side(9, step), side(10, step),           \
      side(11, step), side(12, step), side(13, step), side(14, step), side(15, step)

template <int Step>
INLINE void swap_blocks(Floats (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & Step) continue;
    Floats low = __builtin_shufflevector(rows[i], rows[i + Step], EACH(LOW, Step));
    rows[i + Step] = __builtin_shufflevector(rows[i], rows[i + Step], EACH(HIGH, Step));
    rows[i] = low;
  }
}

INLINE void transpose(Floats (&rows)[kLanes]) {
  swap_blocks<8>(rows);
  swap_blocks<4>(rows);
  swap_blocks<2>(rows);
  swap_blocks<1>(rows);
}

// Sums of values weighted by `R` rows of scores, `P` panels of 16 features from `feature` on.
template <int R, int P>
void mix(const float* weights, int64_t stride, const float* values, const int32_t* slots,
         int64_t count, int64_t width, int64_t feature, const float* scales, float* const* out,
         int64_t out_width) {
  constexpr int N = P * kParts;
  Part sums[R][N] = {};
  for (int64_t j = 0; j < count; ++j) {
    const float* from = values + (slots ? slots[j] : j) * width + feature;
    Part value[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) value[n] = load<Part>((const Part*)from + n);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      float weight = weights[r * stride + j];
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sums[r][n] += value[n] * weight;
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      Floats sum = load<Floats>(&sums[r][p * kParts]) * scales[r];
      int64_t at = feature + p * kLanes;
      int64_t lanes = std::min<int64_t>(kLanes, out_width - at);
      if (lanes > 0) std::memcpy(out[r] + at, &sum, lanes * sizeof(float));
    }
  }
}

// Moves a token's path in a tree to where it would stand if there were no other. Its sums are then, bit
// by bit, the sums of the token decoded by itself. `scores` are of the `used` slots from `first` on;
// `order` gets which of these slots has each score.
void follow_path(const Attend& call, int64_t b, int64_t token, int64_t first, int64_t used,
                 float* scores, int32_t* order) {
  std::iota(order, order + used, 0);
  auto place = [&](int64_t index) { return (call.ring ? index % call.slots : index) - first; };
  struct Ancestor {
    int64_t from, to;
    float score;
  };
  std::vector<Ancestor> path;
  int64_t depth = -1;
  for (int64_t behind = 0; behind < call.recent; ++behind) {
    const int64_t from = place(call.text[b] + behind);
    if (from < 0 || from >= used || !call.sees(b, token, first + from)) continue;
    if (call.depths[behind] <= depth || call.depths[behind] > behind) return;  // not a path
    depth = call.depths[behind];
    path.push_back({from, place(call.text[b] + depth), scores[from]});
  }
  for (const Ancestor& each : path) scores[each.from] = -INFINITY;
  for (const Ancestor& each : path) scores[each.to] = each.score, order[each.to] = each.from;
}

// Some neighbouring rows of one key/value head.
void attend(const Attend& call, int64_t b, int64_t head, int64_t row, int64_t count) {
  const int64_t width = call.width, where = b * call.heads + head;
  const float* keys = call.keys + where * call.slots * width;
  const float* values = call.values + where * call.slots * width;
  float* out[kMostRows];
  std::vector<float> queries(count * width);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t token = call.token_of(b, row + r);
    const int64_t at = call.query_at(b, token, head, (row + r) / call.count(b));
    rotate(call, b, token, call.queries + at, call.scale, &queries[r * width]);
    out[r] = call.out + at;
  }

  int64_t lowest = INT64_MAX, highest = 0;
  for (int64_t r = row; r < row + count; ++r) {
    int64_t at = call.positions[b * call.tokens + call.token_of(b, r)];
    lowest = std::min(lowest, at), highest = std::max(highest, at);
  }
  // Slots from `first` to `end` are looked at; all rows see those below `whole`.
  int64_t first = 0, whole = 0, end = std::min<int64_t>(call.slots, call.start[b] + call.tokens);
  if (!call.ring) {
    if (!call.recent) end = std::min(end, highest + 1);
    // A key's lane, and so the order of a row's sums, depends on its slot alone.
    if (call.window) first = std::max<int64_t>(0, lowest - call.window + 1) / kLanes * kLanes;
    if (!call.window) whole = std::min<int64_t>(end, call.recent ? call.text[b] : lowest + 1);
  }
  std::vector<int32_t> slots;
  std::vector<uint8_t> seen;  // by slot from `whole` on, then by row; empty if a row sees all
                              // slots up to its position
  const bool in_order = !call.ring && !call.recent && !call.window;
  if (in_order) whole = end;
  for (int64_t slot = 0; slot < whole; ++slot) slots.push_back(slot);
  int32_t any_seen = 0;
  for (int64_t slot = std::max(first, whole); slot < end; ++slot) {
    bool any = false;
    for (int64_t r = row; r < row + count; ++r) {
      bool one = call.sees(b, call.token_of(b, r), slot);
      seen.push_back(one), any |= one;
    }
    if (any) any_seen = slot;
    slots.push_back(any ? slot : -1);
  }
  // What nobody sees may hold anything, a NaN too: another slot is read in its place.
  for (int32_t& slot : slots) slot = slot < 0 ? any_seen : slot;
  const int64_t used = slots.size(), padded = (used + kLanes - 1) / kLanes * kLanes;

  std::vector<float> scores(count * padded);
  std::unique_ptr<Floats[]> turned(new Floats[width + kLanes]);
  for (int64_t j = 0; j < padded; j += kLanes) {
    for (int64_t d = 0; d < width; d += kLanes) {
      Floats part[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        part[i] = j + i < used ? load_some(keys + slots[j + i] * width + d, width - d) : Floats{};
      }
      transpose(part);
      std::memcpy(&turned[d], part, sizeof(part));
    }
    in_tiles<kTileRows>(count, [&](int64_t begin, int64_t tile_rows) {
      with_count(
          tile_rows,
          [&](auto rows) {
            constexpr int R = decltype(rows)::value;
            Floats found[1][R];
            // One sum a row, so that a row's score does not depend on how many rows there are.
            tile<FloatStep, R, 1, 1>(turned.get(), 0, &queries[begin * width], width, width, found);
            for (int r = 0; r < R; ++r) {
              std::memcpy(&scores[(begin + r) * padded + j], &found[0][r], sizeof(Floats));
            }
          },
          std::make_integer_sequence<int, kTileRows>());
    });
  }

  float inverse[kMostRows];
  std::vector<int32_t> orders(call.recent ? count * used : 0);  // of each row of a tree
  for (int64_t r = 0; r < count; ++r) {
    float* own = &scores[r * padded];
    if (call.cap) {
      for_parts(own, padded, [&](Part each, int) INLINE_LAMBDA {
        return tanh_of(each / call.cap) * call.cap;
      });
    }
    if (call.slopes) {
      int64_t token = call.token_of(b, row + r);
      float slope = call.slopes[head * call.group + (row + r) / call.count(b)];
      for (int64_t j = 0; j < used; ++j) {
        int64_t distance = call.distance(b, token, slots[j]);
        if (distance != kUnseen) own[j] -= slope * distance;
      }
    }
    for (int64_t j = whole; j < used; ++j) {
      if (!seen[(j - whole) * count + r]) own[j] = -INFINITY;
    }
    int64_t last = in_order ? call.positions[b * call.tokens + call.token_of(b, row + r)] : used;
    for (int64_t j = std::min(last + 1, used); j < padded; ++j) own[j] = -INFINITY;
    if (call.recent) {
      follow_path(call, b, call.token_of(b, row + r), first, used, own, &orders[r * used]);
    }
    Part best[kParts], total[kParts] = {};
    for (Part& each : best) each = Part{} - INFINITY;
    for_parts(own, padded, [&](Part each, int n) INLINE_LAMBDA {
      best[n] = each > best[n] ? each : best[n];
      return each;
    });
    float most = -INFINITY, sum = 0;
    for (const Part& each : best) {
      for (int i = 0; i < kLanes / kParts; ++i) most = std::max(most, each[i]);
    }
    for_parts(own, padded, [&](Part each, int n) INLINE_LAMBDA {
      each = exp_of_negative(each - most);
      total[n] += each;
      return each;
    });
    for (const Part& each : total) {
      for (int i = 0; i < kLanes / kParts; ++i) sum += each[i];
    }
    inverse[r] = 1 / sum;
  }

  const int32_t* listed = slots.data();
  int64_t value_width = width;
  std::vector<float> copied;
  if (width % kLanes) {  // vectors that end with a row's features
    value_width = (width + kLanes - 1) / kLanes * kLanes;
    copied.assign(used * value_width, 0);
    for (int64_t j = 0; j < used; ++j) {
      std::memcpy(&copied[j * value_width], values + slots[j] * width, width * sizeof(float));
    }
    values = copied.data(), listed = nullptr;
  }
  auto mix_rows = [&](int64_t begin, int64_t tile_rows, const int32_t* listed) {
    with_count(
        tile_rows,
        [&](auto rows) {
          constexpr int R = decltype(rows)::value;
          int64_t at = 0;
          auto some = [&](auto panels) {
            constexpr int P = decltype(panels)::value;
            for (; at + P * kLanes <= value_width; at += P * kLanes) {
              mix<R, P>(&scores[begin * padded], padded, values, listed, used, value_width, at,
                        inverse + begin, out + begin, width);
            }
          };
          some(std::integral_constant<int, kMixPanels>());
          some(std::integral_constant<int, 1>());
        },
        std::make_integer_sequence<int, kMixRows>());
  };
  if (!call.recent) {
    return in_tiles<kMixRows>(
        count, [&](int64_t begin, int64_t tile_rows) { mix_rows(begin, tile_rows, listed); });
  }
  for (int64_t r = 0; r < count; ++r) {
    int32_t* order = &orders[r * used];
    for (int64_t j = 0; listed && j < used; ++j) order[j] = slots[order[j]];
    mix_rows(r, 1, order);
  }
}

constexpr int64_t kTaskProducts = 1 << 15;  // fewer are not worth a second thread
constexpr int64_t kTaskNumbers = 1 << 14;   // of keys to write: the same

template <class Pool, class Task>
void for_each(Pool& pool, bool alone, int64_t count, const Task& task) {
  if (!alone) return parallel(pool, count, task);
  for (int64_t i = 0; i < count; ++i) task(i);
}

template <class Pool>
void run(Pool& pool, const Attend& call) {
  const int64_t heads = call.batch * call.heads;
  if (call.new_keys) {
    const bool few = heads * call.tokens * call.width < kTaskNumbers;
    for_each(pool, few, heads, [&](int64_t i) { write(call, i / call.heads, i % call.heads); });
  }
  int64_t rows = 0, products = 0;
  for (int64_t b = 0; b < call.batch; ++b) {
    rows = std::max(rows, call.rows(b));
    const int64_t used = std::min<int64_t>(call.slots, call.start[b] + call.tokens);
    products += used * call.heads * call.rows(b) * call.width;
    float* padding = call.out + call.query_at(b, call.count(b), 0, 0);
    std::fill(padding, call.out + call.query_at(b + 1, 0, 0, 0), 0.0f);
  }
  const int64_t share = heads * rows / (4 * pool.num_threads());
  const int64_t most = std::clamp(share, kLeastRows, kMostRows);
  const int64_t chunks = (rows + most - 1) / most;
  for_each(pool, products < kTaskProducts, heads * chunks, [&](int64_t i) {
    int64_t chunk = i % chunks, head = i / chunks % call.heads, b = i / chunks / call.heads;
    int64_t begin = call.rows(b) * chunk / chunks, end = call.rows(b) * (chunk + 1) / chunks;
    if (begin < end) attend(call, b, head, begin, end - begin);
  });
}

}  // namespace
