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
constexpr int kFewRows = 8;  // of a tile: their sums stay in registers
constexpr int kFewTiles = 2;  // of so few rows; more rows make tiles of many
constexpr int kManyRows = 128;  // of a tile: their sums stay in the first-level cache
constexpr int kTogether = 4;  // of many rows: their sums stay in registers
constexpr int64_t kTileBytes = 1 << 19;  // of activations that stay in the second-level cache
constexpr int64_t kTaskInputs = 1 << 14;  // that a thread rounds: fewer are not worth a task

// Rows in tiles, as even as possible. The numbers of a tile lie in the order of their use.
struct Rounded {
  bool many;                    // whether tiles are of kManyRows at most, not of kFewRows
  int64_t tiles;
  std::vector<uint32_t> words;  // [blocks, words, rows] of a tile, or [blocks, rows, words] if many;
                                // a word has four activations
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
  const int64_t next_row = to.many ? B / 4 : 1, next_word = to.many ? 1 : count;
  const int32_t offset = call.format == kInt8 ? kOffset8 : call.offset;
  for (int64_t r = 0; r < count; ++r) {
    const float* x = call.x + (call.sources ? call.sources[row + r] : row + r) * call.inputs;
    uint32_t* first = to.words.data() + row * call.inputs / 4 + r * next_row;
    for (int64_t b = begin; b < end; ++b) {
      uint32_t* words = first + b * B / 4 * count;
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
        for (int w = 0; w < 4; ++w, words += next_word) *words = four[w];
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
  to.many = call.rows > kFewTiles * kFewRows;
  const int64_t most = to.many ? kManyRows : kFewRows;
  const int64_t tiles = to.tiles = (call.rows + most - 1) / most;
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

// Weights of one format: `kLines` lines of 64 bytes hold `kInputs` inputs of 16 outputs. `read` takes
// them apart: four inputs of a part's outputs in each word.

struct Nibbles {  // each output's word has eight inputs, the lowest bits first
  static constexpr int kInputs = 8, kLines = 1;
  using Sums = typename Dot::Sums;
  using Word = PartWords;
  static INLINE Sums start(int32_t correction) { return Dot::start_4(correction); }
  static INLINE PartInts ints(Sums sums, int32_t correction) {
    return Dot::ints_4(sums, correction);
  }
  static INLINE Sums add(Sums sums, Word weights, uint32_t x) {
    return Dot::add_4(sums, weights, x);
  }
  static INLINE void read(const uint8_t* line, Word* to) {
    const PartWords weights = load<PartWords>(line);
    to[0] = weights & 0x0f0f0f0fu;
    to[1] = weights >> 4 & 0x0f0f0f0fu;
  }
};

// Lines of nibbles, and one of the other `Bits` bits: the lowest bits of each byte belong to the
// low halves of the same byte of the first line, the next ones to the high halves, and so on.
template <int Bits>
struct Planes {
  static constexpr int kInputs = 32 / Bits, kLines = 4 / Bits + 1;
  using Sums = PartInts;
  using Word = PartWords;
  static INLINE Sums start(int32_t correction) { return PartInts{} + correction; }
  static INLINE PartInts ints(Sums sums, int32_t) { return sums; }
  static INLINE Sums add(Sums sums, Word weights, uint32_t x) {
    return Dot::add_7(sums, weights, x);
  }
  static INLINE void read(const uint8_t* line, Word* to) {
    constexpr uint32_t kMask = Bits == 1 ? 0x10101010u : 0x30303030u;
    const PartWords high = load<PartWords>(line + 64 * (kLines - 1));
#pragma GCC unroll 8
    for (int t = 0; t < kInputs / 4; ++t) {
      const PartWords low = load<PartWords>(line + 64 * (t / 2)) >> (t % 2 * 4) & 0x0f0f0f0fu;
      const int at = Bits * t;
      to[t] = low | ((at < 4 ? high << (4 - at) : high >> (at - 4)) & kMask);
    }
  }
};

struct Bytes {  // each output's word has four inputs
  static constexpr int kInputs = 4, kLines = 1;
  using Sums = PartInts;
  using Word = typename Dot::Bytes;
  static INLINE Sums start(int32_t correction) { return PartInts{} + correction; }
  static INLINE PartInts ints(Sums sums, int32_t) { return sums; }
  static INLINE Sums add(Sums sums, const Word& weights, uint32_t x) {
    return Dot::add_8(sums, weights, x);
  }
  static INLINE void read(const uint8_t* line, Word* to) {
    *to = Dot::prepare_8(load<PartWords>(line));
  }
};

// The scales and minima of a panel: of its blocks, one after another, or of all inputs.
struct Scaling {
  const Call* call;
  const Matrix* matrix;
  int64_t group;
  bool a_block;  // whether each block has scales, or all have one
  Part scale[kParts], minimum[kParts];

  Scaling(const Call& call, const Matrix& matrix, int64_t panel)
      : call(&call), matrix(&matrix), group(panel * call.groups),
        a_block(call.groups == call.inputs / call.block()), minimum{} {
    split(splat(1), scale);
  }
  INLINE void read() {
    load_numbers(*call, matrix->scales, matrix->scale_units, group, scale);
    if (matrix->minima) load_numbers(*call, matrix->minima, matrix->minimum_units, group, minimum);
    ++group;
  }
  INLINE void store_row(int64_t panel, int64_t row, const Part (&total)[kParts]) const {
    Part out[kParts];
#pragma GCC unroll 4
    for (int n = 0; n < kParts; ++n) {
      out[n] = total[n];
      if (a_block) continue;
      out[n] *= scale[n];
      if (matrix->minima) out[n] = fused(minimum[n], all_lanes(call->rounded->row_sums[row]), out[n]);
    }
    store(*matrix, panel, row, load<Floats>(out));
  }
};

// A row's sum with a block added.
template <bool Minima>
INLINE Part with_block(Part total, PartInts ints, Part scale, Part minimum, const float& scale_of_x,
                       const float& sum_of_x) {
  const Part numbers = __builtin_convertvector(ints, Part);
  total = fused(scale, numbers * scale_of_x, total);
  return Minima ? fused(minimum, all_lanes(sum_of_x), total) : total;
}

// A tile of `R` rows, from `row` on: each word of weights meets all rows.
template <class Weights, bool Minima, int R>
void few_rows(const Call& call, const Matrix& to, int64_t panel, int64_t row) {
  const int64_t block = call.block(), blocks = call.inputs / block;
  const uint8_t* values = to.values + panel * call.panel_bytes();
  const uint32_t* words = call.rounded->words.data() + row * call.inputs / 4;
  const float* scales = call.rounded->scales.data() + row * blocks;
  const float* sums_of_x = call.rounded->sums.data() + row * blocks;
  const int32_t* starts = call.rounded->starts.data() + row * blocks;
  Scaling scaling(call, to, panel);
  Part total[R][kParts] = {};
  for (int64_t b = 0; b < blocks; ++b) {
    if (scaling.a_block) scaling.read();
    for (int n = 0; n < kParts; ++n) {
      typename Weights::Sums sums[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r] = Weights::start(starts[r]);
      const uint8_t* line = values + n * sizeof(Part);
      const uint32_t* word = words;
      for (int64_t i = 0; i < block; i += Weights::kInputs) {
        if (n == 0) __builtin_prefetch(line + 4096);
        typename Weights::Word weights[Weights::kInputs / 4];
        Weights::read(line, weights);
#pragma GCC unroll 8
        for (int t = 0; t < Weights::kInputs / 4; ++t) {
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            sums[r] = pinned(Weights::add(sums[r], weights[t], word[t * R + r]));
          }
        }
        line += 64 * Weights::kLines, word += R * Weights::kInputs / 4;
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        total[r][n] = with_block<Minima>(total[r][n], Weights::ints(sums[r], starts[r]),
                                         scaling.scale[n], scaling.minimum[n], scales[r],
                                         sums_of_x[r]);
      }
    }
    values += 64 * (block / Weights::kInputs) * Weights::kLines, words += R * block / 4;
    scales += R, sums_of_x += R, starts += R;
  }
  if (!scaling.a_block) scaling.read();
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) scaling.store_row(panel, row + r, total[r]);
}

// A tile of `rows` rows with `P` panels, in blocks of `B` inputs: all words of a block meet some rows,
// then the next ones.
template <class Weights, bool Minima, int B, int P>
void many_rows(const Call& call, const Matrix& to, int64_t panel, int64_t row, int64_t rows) {
  constexpr int kSteps = B / Weights::kInputs, kWords = Weights::kInputs / 4;
  const int64_t blocks = call.inputs / B;
  const uint8_t* values = to.values + panel * call.panel_bytes();
  const uint32_t* words = call.rounded->words.data() + row * call.inputs / 4;
  const float* scales = call.rounded->scales.data() + row * blocks;
  const float* sums_of_x = call.rounded->sums.data() + row * blocks;
  const int32_t* starts = call.rounded->starts.data() + row * blocks;
  std::vector<Scaling> scaling;
  for (int p = 0; p < P; ++p) scaling.emplace_back(call, to, panel + p);
  Part total[kManyRows][P][kParts];
  std::memset(total, 0, rows * sizeof(total[0]));
  for (int64_t b = 0; b < blocks; ++b) {
    for (Scaling& each : scaling) {
      if (each.a_block) each.read();
    }
    for (int n = 0; n < kParts; ++n) {
      typename Weights::Word weights[P][B / 4];
      Part scale[P], minimum[P];
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
        scale[p] = scaling[p].scale[n], minimum[p] = scaling[p].minimum[n];
#pragma GCC unroll 8
        for (int s = 0; s < kSteps; ++s) {
          const uint8_t* line = values + p * call.panel_bytes() + 64 * Weights::kLines * s;
          if (n == 0) {
#pragma GCC unroll 4
            for (int l = 0; l < Weights::kLines; ++l) __builtin_prefetch(line + 2048 + 64 * l);
          }
          Weights::read(line + n * sizeof(Part), weights[p] + s * kWords);
        }
      }
      auto add = [&](auto count, int64_t first) INLINE_LAMBDA {
        constexpr int R = decltype(count)::value;
        typename Weights::Sums sums[R][P];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
          for (int p = 0; p < P; ++p) sums[r][p] = Weights::start(starts[first + r]);
        }
#pragma GCC unroll 8
        for (int t = 0; t < B / 4; ++t) {
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            const uint32_t x = words[(first + r) * B / 4 + t];
#pragma GCC unroll 2
            for (int p = 0; p < P; ++p) {
              sums[r][p] = pinned(Weights::add(sums[r][p], weights[p][t], x));
            }
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const int64_t at = first + r;
#pragma GCC unroll 2
          for (int p = 0; p < P; ++p) {
            total[at][p][n] =
                with_block<Minima>(total[at][p][n], Weights::ints(sums[r][p], starts[at]), scale[p],
                                   minimum[p], scales[at], sums_of_x[at]);
          }
        }
      };
      int64_t r = 0;
      for (; r + kTogether <= rows; r += kTogether) add(std::integral_constant<int, kTogether>(), r);
      for (; r < rows; ++r) add(std::integral_constant<int, 1>(), r);
    }
    values += 64 * kSteps * Weights::kLines, words += rows * B / 4;
    scales += rows, sums_of_x += rows, starts += rows;
  }
  for (int p = 0; p < P; ++p) {
    if (!scaling[p].a_block) scaling[p].read();
    for (int64_t r = 0; r < rows; ++r) scaling[p].store_row(panel + p, row + r, total[r][p]);
  }
}

template <class Weights, bool Minima>
void integer_tile(const Call& call, const Matrix& to, int64_t panel, int64_t panels, int64_t row,
                  int64_t rows) {
  if (!call.rounded->many) {
    with_count(
        rows,
        [&](auto count) { few_rows<Weights, Minima, decltype(count)::value>(call, to, panel, row); },
        std::make_integer_sequence<int, kFewRows>());
    return;
  }
  with_count(
      panels,
      [&](auto count) {
        constexpr int P = decltype(count)::value;
        if constexpr (Weights::kInputs <= 16) {
          if (call.block() == 16) {
            return many_rows<Weights, Minima, 16, P>(call, to, panel, row, rows);
          }
        }
        many_rows<Weights, Minima, 32, P>(call, to, panel, row, rows);
      },
      std::make_integer_sequence<int, kTilePanels>());
}

// Some neighbouring panels of one weight.
void integer_panels(const Call& call, const Matrix& to, int64_t begin, int64_t end) {
  // Some rows meet all panels before the next rows do, so that both stay in caches.
  const int64_t tiles = call.rounded->tiles;
  const int64_t together = std::max<int64_t>(1, kTileBytes * tiles / (call.rows * call.inputs));
  const int64_t step = call.rounded->many ? kTilePanels : 1;
  for (int64_t first = 0; first < tiles; first += together) {
    for (int64_t panel = begin; panel < end; panel += step) {
      const int64_t panels = std::min(step, end - panel);
      for (int64_t tile = first; tile < std::min(first + together, tiles); ++tile) {
        const int64_t row = call.rows * tile / tiles, rows = call.rows * (tile + 1) / tiles - row;
        auto run = [&](auto weights) {
          using Weights = decltype(weights);
          const auto tile = to.minima ? integer_tile<Weights, true> : integer_tile<Weights, false>;
          tile(call, to, panel, panels, row, rows);
        };
        switch (call.format) {
          case kInt4: run(Nibbles()); break;
          case kInt5: run(Planes<1>()); break;
          case kInt6: run(Planes<2>()); break;
          default: run(Bytes());
        }
      }
    }
  }
}

}  // namespace
