// Tokens drawn from rows of probabilities by two races, as `draw` in sampling/draw.py describes them,
// with the random numbers that JAX makes of the same keys. A row is computed alone.

#include "rows.h"

namespace {

// Two words: a key of threefry2x32, or what it makes of a counter.
struct Pair {
  uint32_t first, second;
};

// Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3": 20 rounds.
INLINE Pair threefry(Pair key, Pair counter) {
  static constexpr int kTurns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key.first, key.second, key.first ^ key.second ^ 0x1BD11BDA};
  uint32_t a = counter.first + keys[0], b = counter.second + keys[1];
#pragma GCC unroll 5
  for (uint32_t i = 0; i < 5; ++i) {
#pragma GCC unroll 4
    for (int turn : kTurns[i % 2]) {
      a += b;
      b = (b << turn | b >> (32 - turn)) ^ a;
    }
    a += keys[(i + 1) % 3];
    b += keys[(i + 2) % 3] + i + 1;
  }
  return {a, b};
}

// Random words of `jax.random.bits(key, [racers, 5])`.
INLINE uint32_t random_word(Pair key, int64_t racer, int word) {
  const Pair both = threefry(key, {0, (uint32_t)(racer * 5 + word)});
  return both.first ^ both.second;
}

// A number of `uniform` in sampling/draw.py: its mantissa is the first word of a racer, and its exponent
// the leading zeros of the others.
INLINE float uniform(Pair key, int64_t racer) {
  uint32_t zeros = 0;
  for (int word = 1; word < 5; ++word) {
    const uint32_t bits = random_word(key, racer, word);
    if (bits) {
      zeros += __builtin_clz(bits);
      break;
    }
    zeros += 32;
  }
  const uint32_t exponent = 126 - std::min(zeros, 125u);
  return to_float(exponent << 23 | random_word(key, racer, 0) >> 9);
}

// The first of exponential variables with these rates, or -1 if no rate is positive.
template <class Number>
int64_t first_of(Pair key, const Number* rates, int64_t count) {
  int64_t first = -1;
  double best = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!(rates[i] > 0)) continue;
    const double speed = rates[i] / -std::log1p(-(double)uniform(key, i));
    if (speed > best) first = i, best = speed;
  }
  return first;
}

struct DrawCall {
  int64_t rows, size, block;
  const uint32_t* keys;  // [rows, 2]
  const float* probs;    // [rows, size]
  int32_t* out;          // [rows]
};

// A block of the row, then a token inside of it; -1 if the probabilities are zeros.
int32_t draw_row(const DrawCall& call, int64_t row) {
  const Pair key = {call.keys[2 * row], call.keys[2 * row + 1]};
  const float* probs = call.probs + row * call.size;
  std::vector<double> sums;
  for (int64_t begin = 0; begin < call.size; begin += call.block) {
    sums.push_back(sum_of(probs + begin, std::min(call.block, call.size - begin)));
  }
  const int64_t block = first_of(threefry(key, {0, 0}), sums.data(), sums.size());
  if (block < 0) return -1;
  const int64_t begin = block * call.block, count = std::min(call.block, call.size - begin);
  return (int32_t)(begin + first_of(threefry(key, {0, 1}), probs + begin, count));
}

// Padding is not computed, and holds -1.
template <class Pool>
void run(Pool& pool, const DrawCall& call, const std::vector<int64_t>& rows) {
  std::fill(call.out, call.out + call.rows, -1);
  for_rows(pool, rows, call.size, [&](int64_t row) { call.out[row] = draw_row(call, row); });
}

namespace ffi = xla::ffi;

ffi::Error Draw(ffi::ThreadPool pool, int64_t block, ffi::Buffer<ffi::U32> keys,
                ffi::Buffer<ffi::F32> probs, ffi::Buffer<ffi::S32> num_tokens,
                ffi::ResultBuffer<ffi::S32> out) {
  const auto shape = probs.dimensions();
  const int64_t batch = num_tokens.element_count();
  if (shape.size() != 2 || (int64_t)keys.element_count() != 2 * shape[0] || block < 1 ||
      (batch && shape[0] % batch)) {
    return ffi::Error::InvalidArgument("spec_jax_draw: sizes do not match");
  }
  const DrawCall call{shape[0],          shape[1],           block,
                      keys.typed_data(), probs.typed_data(), out->typed_data()};
  run(pool, call, real_rows(num_tokens.typed_data(), batch, call.rows));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxDraw, Draw,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("block")
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());
