// Products of activations that are rounded to 8 bits, with weights of 4 to 8 bits.
//
// Neighbouring inputs of a row share a scale, 32 or the 16 that share one in the weights: a block.
// The products of a block are added as integers, which is exact in any order. A block then adds one
// float product to the sum of its row, and blocks follow one another in the order of the inputs. So
// a row's product is the same, bit for bit, with any rows beside it and on any number of threads.

#pragma once

#include "call.h"

namespace {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int32_t kOffset8 = 128;  // of weights of 8 bits, which the instruction takes without sign
#else
constexpr int32_t kOffset8 = 0;
#endif
constexpr int kIntegerRows = 8;  // of a tile: they share a pass over the weights
constexpr int64_t kTileBytes = 1 << 19;  // of activations that stay in the second-level cache
constexpr int64_t kTaskInputs = 1 << 14;  // that a thread rounds: fewer are not worth a task

// Rows in tiles of at most kIntegerRows. The numbers of a tile lie in the order of their use: by
// block, then by word, then by row.
struct Rounded {
  std::vector<uint32_t> words;  // [blocks, words, rows] of a tile; a word has four activations
  std::vector<float> scales;    // [blocks, rows] of a tile
  std::vector<float> sums;      // the same: the sum of a block's rounded activations
  std::vector<int32_t> starts;  // the same: what corrects weights that have an offset
  std::vector<float> row_sums;  // [rows], if there is one scale for all inputs
};

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

// All lanes together by `combine`, which takes and gives four lanes.
template <class Combine>
INLINE int32_t of_all(PartInts lanes, Combine combine) {
  typedef int32_t Four __attribute__((vector_size(16)));
  Four parts[kPartLanes / 4];
  std::memcpy(parts, &lanes, sizeof(lanes));
  Four all = parts[0];
#pragma GCC unroll 4
  for (int i = 1; i < kPartLanes / 4; ++i) all = combine(all, parts[i]);
  all = combine(all, __builtin_shufflevector(all, all, 2, 3, 0, 1));
  return combine(all, __builtin_shufflevector(all, all, 1, 0, 3, 2))[0];
}

struct RoundedBlock {
  float scale;
  int32_t sum;  // of the rounded numbers
};

// Rounds a block to multiples of a 127th of its largest number, the scale. A block with a NaN has
// the scale NaN. In a block with infinities, infinities become 1 and numbers 0.
template <int B>
INLINE RoundedBlock round_block(const float* x, int8_t (&rounded)[B]) {
  // Without its sign, a float's bits grow with its size: NaN is above infinity.
  PartInts largest = {};
#pragma GCC unroll 8
  for (int i = 0; i < B; i += kPartLanes) {
    PartInts bits = load<PartInts>(x + i) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  const float size = to_float(of_all(largest, [](auto a, auto b) { return a > b ? a : b; }));
  if (!std::isfinite(size)) {
    int32_t sum = 0;
    for (int i = 0; i < B; ++i) {
      sum += rounded[i] = std::isinf(x[i]) ? (x[i] < 0 ? -1 : 1) : 0;
    }
    return {size, sum};
  }
  if (size < 0x1p-118f) {  // its inverse would overflow
    std::memset(rounded, 0, B);
    return {0, 0};
  }
  const float inverse = 127.0f / size;
  PartInts sums = {};
#pragma GCC unroll 8
  for (int i = 0; i < B; i += kPartLanes) {
    const PartInts numbers = nearest(load<Part>(x + i) * inverse);
    const PartBytes bytes = __builtin_convertvector(numbers, PartBytes);
    std::memcpy(rounded + i, &bytes, sizeof(bytes));
    sums += numbers;
  }
  return {size / 127.0f, of_all(sums, [](auto a, auto b) { return a + b; })};
}

// Rounds the blocks from `begin` to `end` of `count` rows from `row` on, a tile.
template <int B>
void round_tile(const Call& call, Rounded& to, int64_t row, int64_t count, int64_t begin,
                int64_t end) {
  typedef int8_t Sixteen __attribute__((vector_size(16)));
  const int64_t blocks = call.inputs / B;
  const int32_t offset = call.format == kInt8 ? kOffset8 : call.offset;
  for (int64_t r = 0; r < count; ++r) {
    const float* x = call.x + (row + r) * call.inputs;
    uint32_t* words = to.words.data() + row * call.inputs / 4 + begin * B / 4 * count + r;
    for (int64_t b = begin; b < end; ++b) {
      int8_t rounded[B];
      const RoundedBlock block = round_block(x + b * B, rounded);
      for (int i = 0; i < B; i += 16) {
        Sixteen bytes = load<Sixteen>(rounded + i);
        if (call.format != kInt8) {
          // Of eight inputs first the even ones, which meet the low halves of a word's bytes.
          bytes = __builtin_shufflevector(bytes, bytes, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9,
                                          11, 13, 15);
        }
        uint32_t four[4];
        std::memcpy(four, &bytes, sizeof(bytes));
        for (int w = 0; w < 4; ++w, words += count) *words = four[w];
      }
      const int64_t at = row * blocks + b * count + r;
      to.scales[at] = block.scale;
      to.sums[at] = block.scale * block.sum;
      to.starts[at] = -offset * block.sum;
    }
  }
}

template <class Pool>
void round(Pool& pool, const Call& call, Rounded& to) {
  const int64_t blocks = call.inputs / call.block();
  to.words.resize(call.rows * call.inputs / 4);
  to.scales.resize(call.rows * blocks);
  to.sums.resize(call.rows * blocks);
  to.starts.resize(call.rows * blocks);
  const int64_t tiles = (call.rows + kIntegerRows - 1) / kIntegerRows;
  const int64_t parts = std::clamp<int64_t>(call.rows * call.inputs / tiles / kTaskInputs, 1, blocks);
  parallel(pool, tiles * parts, [&](int64_t task) {
    const int64_t tile = task / parts, part = task % parts;
    const int64_t row = call.rows * tile / tiles, next = call.rows * (tile + 1) / tiles;
    const int64_t begin = blocks * part / parts, end = blocks * (part + 1) / parts;
    call.block() == 32 ? round_tile<32>(call, to, row, next - row, begin, end)
                       : round_tile<16>(call, to, row, next - row, begin, end);
  });
  if (call.groups > 1) return;
  to.row_sums.assign(call.rows, 0);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t row = call.rows * tile / tiles, count = call.rows * (tile + 1) / tiles - row;
    for (int64_t i = 0; i < blocks * count; ++i) {
      to.row_sums[row + i % count] += to.sums[row * blocks + i];
    }
  }
}

// Sums of products of four bytes in each lane. `add_4` takes weights of 0 to 15, with `start_4` and
// `ints_4`; `add_7` weights of 0 to 63; `add_8` weights that `prepare_8` made of -128 to 127.

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
  static INLINE Sums start_4(int32_t correction) { return PartInts{} + correction; }
  static INLINE PartInts ints_4(Sums sums, int32_t) { return sums; }
  static INLINE PartInts add_7(PartInts sums, PartWords weights, uint32_t x) {
    return add_4(sums, weights, x);
  }
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
  static INLINE Sums start_4(int32_t correction) { return PartInts{} + correction; }
  static INLINE PartInts ints_4(Sums sums, int32_t) { return sums; }
  static INLINE PartInts add_7(PartInts sums, PartWords weights, uint32_t x) {
    return add_4(sums, weights, x);
  }
  static INLINE Bytes prepare_8(PartWords weights) { return weights; }
  static INLINE PartInts add_8(PartInts sums, Bytes weights, uint32_t x) {
    return add_4(sums, weights, x);
  }
};
#elif defined(__AVX512BW__) || defined(__AVX2__)
// Sums of two products have 16 bits: with weights of 4 bits they hold 16 inputs of a block,
// 16 * 15 * 127 = 30,480, and with more bits two inputs, 2 * 128 * 127 = 32,512.
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
  static INLINE Sums start_4(int32_t) { return Sums{}; }
  static INLINE PartInts ints_4(Sums sums, int32_t correction) {
    return add_pairs(sums) + correction;
  }
  static INLINE PartInts add_7(PartInts sums, PartWords weights, uint32_t x) {
    return sums + add_pairs(pairs((Register)weights, all(x)));
  }
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
  static INLINE Sums start_4(int32_t) { return Sums{}; }
  static INLINE PartInts ints_4(Sums sums, int32_t correction) {
    return ((PartInts)((PartWords)sums << 16) >> 16) + ((PartInts)sums >> 16) + correction;
  }
  static INLINE PartInts add_7(PartInts sums, PartWords weights, uint32_t x) {
    return sums + ints_4(pairs(prepare_8(weights), x), 0);
  }
  static INLINE PartInts add_8(PartInts sums, const Bytes& weights, uint32_t x) {
    return sums + ints_4(pairs(weights, x), 0);
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

// Weights of one format: `kLines` lines of 64 bytes hold `kInputs` inputs of 16 outputs.

struct Nibbles {  // each output's word has eight inputs, the lowest bits first
  static constexpr int kInputs = 8, kLines = 1;
  using Sums = typename Dot::Sums;
  static INLINE Sums start(int32_t correction) { return Dot::start_4(correction); }
  static INLINE PartInts ints(Sums sums, int32_t correction) {
    return Dot::ints_4(sums, correction);
  }
  template <int R>
  static INLINE void add(Sums (&sums)[R], const uint8_t* line, const uint32_t* x) {
    const PartWords weights = load<PartWords>(line);
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

// Lines of nibbles, and one of the other `Bits` bits: the lowest bits of each byte belong to the
// low halves of the same byte of the first line, the next ones to the high halves, and so on.
template <int Bits>
struct Planes {
  static constexpr int kInputs = 32 / Bits, kLines = 4 / Bits + 1;
  using Sums = PartInts;
  static INLINE Sums start(int32_t correction) { return PartInts{} + correction; }
  static INLINE PartInts ints(Sums sums, int32_t) { return sums; }
  template <int R>
  static INLINE void add(Sums (&sums)[R], const uint8_t* line, const uint32_t* x) {
    constexpr uint32_t kMask = Bits == 1 ? 0x10101010u : 0x30303030u;
    const PartWords high = load<PartWords>(line + 64 * (kLines - 1));
#pragma GCC unroll 8
    for (int t = 0; t < 2 * (kLines - 1); ++t) {
      const PartWords low = load<PartWords>(line + 64 * (t / 2)) >> (t % 2 * 4) & 0x0f0f0f0fu;
      const int at = Bits * t;
      const PartWords weights = low | ((at < 4 ? high << (4 - at) : high >> (at - 4)) & kMask);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r] = pinned(Dot::add_7(sums[r], weights, x[t * R + r]));
    }
  }
};

struct Bytes {  // each output's word has four inputs
  static constexpr int kInputs = 4, kLines = 1;
  using Sums = PartInts;
  static INLINE Sums start(int32_t correction) { return PartInts{} + correction; }
  static INLINE PartInts ints(Sums sums, int32_t) { return sums; }
  template <int R>
  static INLINE void add(Sums (&sums)[R], const uint8_t* line, const uint32_t* x) {
    const auto bytes = Dot::prepare_8(load<PartWords>(line));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] = pinned(Dot::add_8(sums[r], bytes, x[r]));
  }
};

// The tile of `R` rows from `row` on.
template <class Weights, int R>
void integer_rows(const Call& call, const Matrix& to, int64_t panel, int64_t row) {
  const int64_t block = call.block(), blocks = call.inputs / block;
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
      load_numbers(call, to.scales, to.scale_units, group, scale);
      if (to.minima) load_numbers(call, to.minima, to.minimum_units, group, minimum);
      ++group;
    }
    for (int n = 0; n < kParts; ++n) {
      typename Weights::Sums sums[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r] = Weights::start(starts[r]);
      const uint8_t* line = values + n * sizeof(Part);
      const uint32_t* word = words;
      for (int64_t i = 0; i < block; i += Weights::kInputs) {
        if (n == 0) __builtin_prefetch(line + 4096);
        Weights::add(sums, line, word);
        line += 64 * Weights::kLines, word += R * Weights::kInputs / 4;
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Part numbers = __builtin_convertvector(Weights::ints(sums[r], starts[r]), Part);
        total[n][r] = fused(scale[n], numbers * scales[r], total[n][r]);
        if (to.minima) total[n][r] = fused(minimum[n], all_lanes(sums_of_x[r]), total[n][r]);
      }
    }
    values += 64 * (block / Weights::kInputs) * Weights::kLines, words += R * block / 4;
    scales += R, sums_of_x += R, starts += R;
  }
  if (!scale_a_block) {
    load_numbers(call, to.scales, to.scale_units, group, scale);
    if (to.minima) load_numbers(call, to.minima, to.minimum_units, group, minimum);
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
          out[n] = fused(minimum[n], all_lanes(call.rounded->row_sums[row + r]), out[n]);
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
              switch (call.format) {
                case kInt4: return integer_rows<Nibbles, R>(call, to, panel, row);
                case kInt5: return integer_rows<Planes<1>, R>(call, to, panel, row);
                case kInt6: return integer_rows<Planes<2>, R>(call, to, panel, row);
                default: return integer_rows<Bytes, R>(call, to, panel, row);
              }
            },
            std::make_integer_sequence<int, kIntegerRows>());
      }
    }
  }
}

}  // namespace
