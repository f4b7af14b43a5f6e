// Products of float activations: weights are widened to floats as they are read.

#pragma once

#include "call.h"

namespace {

// How many rows are multiplied with packed weights as these are read.
#if defined(__AVX512F__)
constexpr int kPackedRows = 12;
#elif defined(__AVX2__)
constexpr int kPackedRows = 5;
#elif defined(__x86_64__)
constexpr int kPackedRows = 3;
#else
constexpr int kPackedRows = 5;
#endif

// Weights of one format: 64 bytes hold `kInputs` vectors of 16 outputs.

struct Int8 {
  static constexpr int kInputs = 4;
  static INLINE Part decode(const uint8_t* from, int input, int part) {
    return load_bytes(from + kLanes * input + part * (kLanes / kParts));
  }
};

struct Int4 {  // 0 to 15; each output's word holds eight neighbouring inputs, the lowest bits first
  static constexpr int kInputs = 8;
  static INLINE Part decode(const uint8_t* from, int input, int part) {
    PartWords words = load<PartWords>(from + part * sizeof(Part)) >> (4 * input);
#if defined(__AVX512F__)  // a look-up that regards the lowest four bits alone
    const Floats numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (Part)_mm512_permutexvar_ps((__m512i)words, (__m512)numbers);
#else
    return __builtin_convertvector((PartInts)(words & 15), Part);
#endif
  }
};

struct Bfloat16 {  // each output's word holds two neighbouring inputs, the first in the low half
  static constexpr int kInputs = 2;
  static INLINE Part decode(const uint8_t* from, int input, int part) {
    PartWords pair = load<PartWords>(from + part * sizeof(Part));
    return (Part)(input ? pair & 0xffff0000u : pair << 16);
  }
};

// `R` rows with packed weights, widened as they are read.
template <class Weights, class Scale, int R>
void packed_rows(const Call& call, const Matrix& to, int64_t panel, int64_t row) {
  constexpr int kInputs = Weights::kInputs, kChains = std::min(chains(R), kInputs);
  const uint8_t* values = to.values + panel * call.panel_bytes();
  const int64_t at = panel * call.groups * kLanes;
  const float* x = call.x + row * call.inputs;
  constexpr int N = kParts;
  Part total[R][N] = {};
  for (int64_t g = 0; g < call.groups; ++g) {
    Part sums[kChains][R][N] = {};
    for (int64_t i = g * call.group; i < (g + 1) * call.group; i += kInputs, values += 64) {
      __builtin_prefetch(values + 1024);
#pragma GCC unroll 12
      for (int j = 0; j < kInputs; ++j) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          Part w = Weights::decode(values, j, n);
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) sums[j % kChains][r][n] += w * x[r * call.inputs + i + j];
        }
      }
    }
    Part scale[N], minimum[N];
    if (to.scales) split(load_floats((const Scale*)to.scales + at + g * kLanes), scale);
    if (to.minima) split(load_floats((const Scale*)to.minima + at + g * kLanes), minimum);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const float sum_of_x = to.minima ? call.group_sums[(row + r) * call.groups + g] : 0;
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        Part sum = sums[0][r][n];
#pragma GCC unroll 4
        for (int u = 1; u < kChains; ++u) sum += sums[u][r][n];
        total[r][n] += to.scales ? scale[n] * sum : sum;
        if (to.minima) total[r][n] += minimum[n] * sum_of_x;
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) store(to, panel, row + r, load<Floats>(total[r]));
}

// A panel of packed weights as floats, for many rows, which then pay once for widening.
template <class Weights, class Scale>
void widen(const Call& call, const Matrix& from, int64_t panel, Floats* out) {
  const uint8_t* values = from.values + panel * call.panel_bytes();
  const int64_t at = panel * call.groups * kLanes;
  for (int64_t g = 0; g < call.groups; ++g) {
    Part scale[kParts], minimum[kParts] = {};
    split(splat(1), scale);
    if (from.scales) split(load_floats((const Scale*)from.scales + at + g * kLanes), scale);
    if (from.minima) split(load_floats((const Scale*)from.minima + at + g * kLanes), minimum);
    for (int64_t i = g * call.group; i < (g + 1) * call.group; i += Weights::kInputs, values += 64) {
#pragma GCC unroll 12
      for (int j = 0; j < Weights::kInputs; ++j) {
#pragma GCC unroll 4
        for (int n = 0; n < kParts; ++n) {
          Part w = Weights::decode(values, j, n) * scale[n] + minimum[n];
          std::memcpy((Part*)(out + i + j) + n, &w, sizeof(w));
        }
      }
    }
  }
}

// All rows with `P` neighbouring panels of vectors that `Step` takes as they are.
template <class Step, int P>
void whole_rows(const Call& call, const Matrix& to, int64_t panel, const Floats* weights,
                int64_t steps, const typename Step::Activation* x) {
  in_tiles<kTileRows>(call.rows, [&](int64_t row, int64_t count) {
    with_count(
        count,
        [&](auto rows) {
          constexpr int R = decltype(rows)::value;
          Floats out[P][R];
          tile<Step, R, P, P == 1 ? chains(R) : 1>(weights, steps, x + row * steps, steps, steps,
                                                   out);
          for (int p = 0; p < P; ++p) {
            for (int r = 0; r < R; ++r) store(to, panel + p, row + r, out[p][r]);
          }
        },
        std::make_integer_sequence<int, kTileRows>());
  });
}

template <class Step>
void whole_panels(const Call& call, const Matrix& to, int64_t begin, int64_t end,
                  const Floats* weights, int64_t steps, const typename Step::Activation* x) {
  int64_t panel = begin;
  if (call.rows >= 4) {  // fewer are bound by memory, which one stream of weights suits best
    for (; panel + kTilePanels <= end; panel += kTilePanels, weights += kTilePanels * steps) {
      whole_rows<Step, kTilePanels>(call, to, panel, weights, steps, x);
    }
  }
  for (; panel < end; ++panel, weights += steps) {
    whole_rows<Step, 1>(call, to, panel, weights, steps, x);
  }
}

template <class Weights, class Scale>
void packed_panels(const Call& call, const Matrix& to, int64_t begin, int64_t end) {
  if (call.rows > kPackedRows) {
    std::unique_ptr<Floats[]> widened(new Floats[call.inputs * kTilePanels]);
    for (int64_t panel = begin; panel < end; panel += kTilePanels) {
      int64_t count = std::min<int64_t>(kTilePanels, end - panel);
      for (int64_t p = 0; p < count; ++p) {
        widen<Weights, Scale>(call, to, panel + p, widened.get() + p * call.inputs);
      }
      whole_panels<FloatStep>(call, to, panel, panel + count, widened.get(), call.inputs, call.x);
    }
    return;
  }
  for (int64_t panel = begin; panel < end; ++panel) {
    with_count(
        call.rows,
        [&](auto rows) { packed_rows<Weights, Scale, decltype(rows)::value>(call, to, panel, 0); },
        std::make_integer_sequence<int, kPackedRows>());
  }
}

// Some neighbouring panels of one weight.
void float_panels(const Call& call, const Matrix& to, int64_t begin, int64_t end) {
  const Floats* weights = (const Floats*)(to.values + begin * call.panel_bytes());
  switch (call.format) {
    case kFloat32:
      return whole_panels<FloatStep>(call, to, begin, end, weights, call.inputs, call.x);
    case kBfloat16:
#if defined(__AVX512BF16__)
      return whole_panels<PairStep>(call, to, begin, end, weights, call.inputs / 2, call.pairs);
#else
      return packed_panels<Bfloat16, float>(call, to, begin, end);
#endif
    case kInt8:
      return call.half ? packed_panels<Int8, uint16_t>(call, to, begin, end)
                       : packed_panels<Int8, float>(call, to, begin, end);
    default:  // of fewer bits only 4, and without a sign
      return call.half ? packed_panels<Int4, uint16_t>(call, to, begin, end)
                       : packed_panels<Int4, float>(call, to, begin, end);
  }
}

// Activations in the form that the format needs, in buffers that live as long as the call.
struct Activations {
  std::vector<float> x, sums;
  std::vector<uint32_t> pairs;

  void prepare(Call& call, const float* from, int64_t width, bool minima) {
    call.x = from;
    const bool rounded = call.format == kBfloat16;
    if (width != call.inputs || rounded) {
      x.assign(call.rows * call.inputs, 0);
      for (int64_t r = 0; r < call.rows; ++r) {
        const float* row = from + r * width;
        float* to = x.data() + r * call.inputs;
        for (int64_t i = 0; i < width; ++i) {
          to[i] = rounded ? to_float(bfloat16_bits(row[i]) << 16) : row[i];
        }
      }
      call.x = x.data();
    }
#if defined(__AVX512BF16__)
    if (rounded) {
      pairs.resize(call.rows * call.inputs / 2);
      for (size_t i = 0; i < pairs.size(); ++i) {
        pairs[i] = load<uint32_t>(&x[2 * i]) >> 16 | (load<uint32_t>(&x[2 * i + 1]) & 0xffff0000u);
      }
      call.pairs = pairs.data();
    }
#endif
    if (minima && !call.integers) {
      sums.resize(call.rows * call.groups);
      for (int64_t r = 0; r < call.rows; ++r) {
        for (int64_t g = 0; g < call.groups; ++g) {
          const float* from = call.x + r * call.inputs + g * call.group;
          float sum = 0;
          for (int64_t i = 0; i < call.group; ++i) sum += from[i];
          sums[r * call.groups + g] = sum;
        }
      }
      call.group_sums = sums.data();
    }
  }
};

}  // namespace
