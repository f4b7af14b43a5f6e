// Products of activations that are rounded to 8 bits, with weights of 4 or 8 bits.
//
// Neighbouring inputs of a row share a scale, 32 or the 16 that share one in the weights: a block.
// The products of a block are added as integers, which is exact in any order. A block then adds one
// float product to the sum of its row, and blocks follow one another in the order of the inputs. So
// a row's product is the same, bit for bit, with any rows beside it and on any number of threads.

#pragma once

#include "call.h"

namespace {

constexpr int kIntegerRows = 8;  // of a tile: they share a pass over the weights
constexpr int64_t kTileBytes = 1 << 19;  // of activations that stay in the second-level cache

// Rows in tiles of at most kIntegerRows. The numbers of a tile lie in the order of their use: by
// block, then by word, then by row.
struct Rounded {
  std::vector<uint32_t> words;  // [blocks, words, rows] of a tile; a word has four activations
  std::vector<float> scales;    // [blocks, rows] of a tile
  std::vector<float> sums;      // the same: the sum of a block's rounded activations
  std::vector<int32_t> starts;  // the same: what corrects weights that are stored with an offset
  std::vector<float> row_sums;  // [rows]
};

// The order of eight activations that meets words of eight 4-bit weights: of the even inputs, which
// are the low halves of the words' bytes, then of the odd ones.
INLINE void even_then_odd(const int8_t* from, uint32_t& even, uint32_t& odd) {
  const uint32_t a = load<uint32_t>(from), b = load<uint32_t>(from + 4);
  auto pick = [](uint32_t a, uint32_t b) {
    return (a & 0xff) | (a >> 8 & 0xff00) | (b & 0xff) << 16 | (b & 0xff0000) << 8;
  };
  even = pick(a, b), odd = pick(a >> 8, b >> 8);
}

INLINE PartInts nearest(Part x) {
#if defined(__AVX512F__)
  return (PartInts)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (PartInts)_mm256_cvtps_epi32((__m256)x);
#elif defined(__x86_64__)
  return (PartInts)_mm_cvtps_epi32((__m128)x);
#else
  return (PartInts)vcvtnq_s32_f32((float32x4_t)x);
#endif
}

constexpr int kPartLanes = sizeof(Part) / sizeof(float);
typedef int8_t PartBytes __attribute__((vector_size(kPartLanes)));

// Rounds a block to multiples of a 127th of its largest number; returns that scale. A block with a
// NaN has the scale NaN. In a block with infinities, infinities become 1 and numbers 0.
template <int B>
INLINE float round_block(const float* x, int8_t (&rounded)[B]) {
  // Without its sign, a float's bits grow with its size: NaN is above infinity.
  PartInts largest = {};
#pragma GCC unroll 8
  for (int i = 0; i < B; i += kPartLanes) {
    PartInts bits = load<PartInts>(x + i) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  int32_t lanes[kPartLanes], most = 0;
  std::memcpy(lanes, &largest, sizeof(largest));
  for (int i = 0; i < kPartLanes; ++i) most = std::max(most, lanes[i]);

  const float size = to_float(most);
  std::memset(rounded, 0, B);
  if (!std::isfinite(size)) {
    for (int i = 0; i < B; ++i) rounded[i] = std::isinf(x[i]) ? (x[i] < 0 ? -1 : 1) : 0;
    return size;
  }
  if (size < 0x1p-118f) return 0;  // its inverse would overflow
  const float inverse = 127.0f / size;
#pragma GCC unroll 8
  for (int i = 0; i < B; i += kPartLanes) {
    PartBytes bytes = __builtin_convertvector(nearest(load<Part>(x + i) * inverse), PartBytes);
    std::memcpy(rounded + i, &bytes, sizeof(bytes));
  }
  return size / 127.0f;
}

// Rounds `count` rows from `row` on, a tile.
template <int B>
void round_tile(const Call& call, Rounded& to, int64_t row, int64_t count) {
  const int64_t blocks = call.inputs / B;
  for (int64_t r = 0; r < count; ++r) {
    const float* x = call.x + (row + r) * call.inputs;
    uint32_t* words = to.words.data() + row * call.inputs / 4 + r;
    float row_sum = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      int8_t rounded[B];
      const float scale = round_block(x + b * B, rounded);
      int32_t sum = 0;
      for (int i = 0; i < B; ++i) sum += rounded[i];
      for (int i = 0; i < B; i += 8, words += 2 * count) {
        if (call.format == kInt4) {
          even_then_odd(rounded + i, words[0], words[count]);
        } else {
          words[0] = load<uint32_t>(rounded + i), words[count] = load<uint32_t>(rounded + i + 4);
        }
      }
      const int64_t at = row * blocks + b * count + r;
      to.scales[at] = scale;
      to.sums[at] = scale * sum;
      to.starts[at] = -128 * sum;
      row_sum += scale * sum;
    }
    to.row_sums[row + r] = row_sum;
  }
}

template <class Pool>
void round(Pool& pool, const Call& call, Rounded& to) {
  const int64_t blocks = call.inputs / call.block();
  to.words.resize(call.rows * call.inputs / 4);
  to.scales.resize(call.rows * blocks);
  to.sums.resize(call.rows * blocks);
  to.starts.resize(call.rows * blocks);
  to.row_sums.resize(call.rows);
  const int64_t tiles = (call.rows + kIntegerRows - 1) / kIntegerRows;
  parallel(pool, tiles, [&](int64_t tile) {
    const int64_t begin = call.rows * tile / tiles, end = call.rows * (tile + 1) / tiles;
    call.block() == 32 ? round_tile<32>(call, to, begin, end - begin)
                       : round_tile<16>(call, to, begin, end - begin);
  });
}

// Sums of products of four bytes in each lane. `add_4` takes weights of 0 to 15, `add_8` weights
// that `prepare_8` made of -128 to 127, which start from `start_8`.

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
// One instruction multiplies unsigned with signed bytes. Weights of 8 bits get an offset of 128.
struct Dot {
  using Sums = PartInts;
  using Bytes = PartWords;
  static INLINE Sums add_4(Sums sums, PartWords weights, uint32_t x) {
#if defined(__AVX512VNNI__)
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32((int)x));
#else
    return (Sums)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights,
                                         _mm256_set1_epi32((int)x));
#endif
  }
  static INLINE PartInts ints_4(Sums sums) { return sums; }
  static INLINE PartInts start_8(int32_t correction) { return PartInts{} + correction; }
  static INLINE Bytes prepare_8(PartWords weights) { return weights ^ 0x80808080u; }
  static INLINE PartInts add_8(PartInts sums, Bytes weights, uint32_t x) {
    return add_4(sums, weights, x);
  }
};
#elif defined(__ARM_FEATURE_DOTPROD)
// One instruction multiplies signed bytes.
struct Dot {
  using Sums = PartInts;
  using Bytes = PartWords;
  static INLINE Sums add_4(Sums sums, PartWords weights, uint32_t x) {
    return (Sums)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, (int8x16_t)vdupq_n_u32(x));
  }
  static INLINE PartInts ints_4(Sums sums) { return sums; }
  static INLINE PartInts start_8(int32_t) { return {}; }
  static INLINE Bytes prepare_8(PartWords weights) { return weights; }
  static INLINE PartInts add_8(PartInts sums, Bytes weights, uint32_t x) {
    return add_4(sums, weights, x);
  }
};
#elif defined(__AVX512BW__) || defined(__AVX2__)
// Sums of two products have 16 bits: with weights of 4 bits they hold 16 inputs of a block,
// 16 * 15 * 127 = 30,480, and with 8 bits two inputs, 2 * 128 * 127 = 32,512.
struct Dot {
#if defined(__AVX512BW__)
  typedef __m512i Register;
  static INLINE Register all(uint32_t x) { return _mm512_set1_epi32((int)x); }
  static INLINE Register pairs(Register a, Register b) { return _mm512_maddubs_epi16(a, b); }
  static INLINE Register add_16(Register a, Register b) { return _mm512_add_epi16(a, b); }
  static INLINE PartInts add_pairs(Register a) {
    return (PartInts)_mm512_madd_epi16(a, _mm512_set1_epi16(1));
  }
  struct Bytes {
    Register sizes;
    __mmask64 negative;
  };
  static INLINE Bytes prepare_8(PartWords weights) {
    return {_mm512_abs_epi8((__m512i)weights), _mm512_movepi8_mask((__m512i)weights)};
  }
  static INLINE Register with_signs(Register x, const Bytes& weights) {
    return _mm512_mask_sub_epi8(x, weights.negative, _mm512_setzero_si512(), x);
  }
#else
  typedef __m256i Register;
  static INLINE Register all(uint32_t x) { return _mm256_set1_epi32((int)x); }
  static INLINE Register pairs(Register a, Register b) { return _mm256_maddubs_epi16(a, b); }
  static INLINE Register add_16(Register a, Register b) { return _mm256_add_epi16(a, b); }
  static INLINE PartInts add_pairs(Register a) {
    return (PartInts)_mm256_madd_epi16(a, _mm256_set1_epi16(1));
  }
  struct Bytes {
    Register sizes, signs;
  };
  static INLINE Bytes prepare_8(PartWords weights) {
    return {_mm256_abs_epi8((__m256i)weights), (__m256i)weights};
  }
  static INLINE Register with_signs(Register x, const Bytes& weights) {
    return _mm256_sign_epi8(x, weights.signs);
  }
#endif
  using Sums = Register;
  static INLINE Sums add_4(Sums sums, PartWords weights, uint32_t x) {
    return add_16(sums, pairs((Register)weights, all(x)));
  }
  static INLINE PartInts ints_4(Sums sums) { return add_pairs(sums); }
  static INLINE PartInts start_8(int32_t) { return PartInts{}; }
  static INLINE PartInts add_8(PartInts sums, const Bytes& weights, uint32_t x) {
    return sums + add_pairs(pairs(weights.sizes, with_signs(all(x), weights)));
  }
};
#else
// The same sums of 16 bits in the compiler's vectors: bytes 0 and 2 of each lane, then 1 and 3.
struct Dot {
  typedef int16_t Shorts __attribute__((vector_size(16)));
  using Sums = Shorts;
  struct Bytes {
    Shorts even, odd;
  };
  static INLINE Bytes prepare_8(PartWords bytes) {
    return {(Shorts)((Shorts)(bytes << 8) >> 8), (Shorts)((Shorts)bytes >> 8)};
  }
  static INLINE Shorts pairs(const Bytes& weights, uint32_t x) {
    const Bytes activations = prepare_8(PartWords{} + x);
    return weights.even * activations.even + weights.odd * activations.odd;
  }
  static INLINE Sums add_4(Sums sums, PartWords weights, uint32_t x) {
    return sums + pairs(prepare_8(weights), x);
  }
  static INLINE PartInts ints_4(Sums sums) {
    return ((PartInts)((PartWords)sums << 16) >> 16) + ((PartInts)sums >> 16);
  }
  static INLINE PartInts start_8(int32_t) { return PartInts{}; }
  static INLINE PartInts add_8(PartInts sums, const Bytes& weights, uint32_t x) {
    return sums + ints_4(pairs(weights, x));
  }
};
#endif

// Keeps a sum in its register: GCC 12 reorders sums of several rows and spills them.
template <class Sums>
INLINE Sums pinned(Sums sums) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(sums));
#elif defined(__x86_64__)
  asm volatile("" : "+x"(sums));
#else
  asm volatile("" : "+w"(sums));
#endif
  return sums;
}

// Weights of one format: 64 bytes hold `kInputs` inputs of 16 outputs.

struct Nibbles {  // each output's word has eight inputs, the lowest bits first
  static constexpr int kInputs = 8;
  using Sums = typename Dot::Sums;
  static INLINE Sums start(int32_t) { return Sums{}; }
  static INLINE PartInts ints(Sums sums) { return Dot::ints_4(sums); }
  template <int R>
  static INLINE void add(Sums (&sums)[R], PartWords weights, const uint32_t* x) {
    const PartWords halves[] = {weights & 0x0f0f0f0fu, weights >> 4 & 0x0f0f0f0fu};
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        sums[r] = pinned(Dot::add_4(sums[r], halves[h], x[h * R + r]));
      }
    }
  }
};

struct Bytes {  // each output's word has four inputs
  static constexpr int kInputs = 4;
  using Sums = PartInts;
  static INLINE Sums start(int32_t correction) { return Dot::start_8(correction); }
  static INLINE PartInts ints(Sums sums) { return sums; }
  template <int R>
  static INLINE void add(Sums (&sums)[R], PartWords weights, const uint32_t* x) {
    const auto bytes = Dot::prepare_8(weights);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] = pinned(Dot::add_8(sums[r], bytes, x[r]));
  }
};

// The tile of `R` rows from `row` on.
template <class Weights, int R>
void integer_rows(const Call& call, const Matrix& to, int64_t panel, int64_t row) {
  const int64_t block = call.block(), blocks = call.inputs / block, lines = block / Weights::kInputs;
  const bool scale_a_block = call.groups == blocks;
  const uint8_t* values = to.values + panel * call.panel_bytes();
  const uint32_t* words = call.rounded->words.data() + row * call.inputs / 4;
  const float* scales = call.rounded->scales.data() + row * blocks;
  const float* sums_of_x = call.rounded->sums.data() + row * blocks;
  const int32_t* starts = call.rounded->starts.data() + row * blocks;
  int64_t group = panel * call.groups;
  Part total[kParts][R] = {}, scale[kParts], minimum[kParts] = {};
  split(splat(1), scale);
  for (int64_t b = 0; b < blocks; ++b) {
    if (scale_a_block) {
      split(load_numbers(to.scales, group, call.half), scale);
      if (to.minima) split(load_numbers(to.minima, group, call.half), minimum);
      ++group;
    }
    for (int n = 0; n < kParts; ++n) {
      typename Weights::Sums sums[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r] = Weights::start(starts[r]);
      const uint8_t* line = values + n * sizeof(Part);
      const uint32_t* word = words;
      for (int64_t i = 0; i < lines; ++i, line += 64, word += R * Weights::kInputs / 4) {
        if (n == 0) __builtin_prefetch(line + 1024);
        Weights::add(sums, load<PartWords>(line), word);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Part numbers = __builtin_convertvector(Weights::ints(sums[r]), Part);
        total[n][r] = fused(scale[n], numbers * scales[r], total[n][r]);
        if (to.minima) total[n][r] = fused(minimum[n], Part{} + sums_of_x[r], total[n][r]);
      }
    }
    values += 64 * lines, words += R * block / 4;
    scales += R, sums_of_x += R, starts += R;
  }
  if (!scale_a_block) {
    split(load_numbers(to.scales, group, call.half), scale);
    if (to.minima) split(load_numbers(to.minima, group, call.half), minimum);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    Part out[kParts];
#pragma GCC unroll 4
    for (int n = 0; n < kParts; ++n) {
      out[n] = total[n][r];
      if (!scale_a_block) {
        out[n] *= scale[n];
        if (to.minima) {
          out[n] = fused(minimum[n], Part{} + call.rounded->row_sums[row + r], out[n]);
        }
      }
    }
    store(to, panel, row + r, load<Floats>(out));
  }
}

// Some neighbouring panels of one weight.
void integer_panels(const Call& call, const Matrix& to, int64_t begin, int64_t end) {
  // Some rows meet all panels before the next rows do, so that both stay in caches.
  const int64_t tiles = (call.rows + kIntegerRows - 1) / kIntegerRows;
  const int64_t together = std::max<int64_t>(1, kTileBytes / (kIntegerRows * call.inputs));
  for (int64_t first = 0; first < tiles; first += together) {
    for (int64_t panel = begin; panel < end; ++panel) {
      for (int64_t tile = first; tile < std::min(first + together, tiles); ++tile) {
        const int64_t row = call.rows * tile / tiles, next = call.rows * (tile + 1) / tiles;
        with_count(
            next - row,
            [&](auto rows) {
              constexpr int R = decltype(rows)::value;
              call.format == kInt4 ? integer_rows<Nibbles, R>(call, to, panel, row)
                                   : integer_rows<Bytes, R>(call, to, panel, row);
            },
            std::make_integer_sequence<int, kIntegerRows>());
      }
    }
  }
}

}  // namespace
