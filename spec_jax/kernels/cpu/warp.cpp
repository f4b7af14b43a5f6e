// Logits of rows to probabilities: temperature, top-k, top-p, min-p and softmax, as `warp` in
// sampling/probabilities.py describes them. A row is computed alone, and its sums in double precision.

#include <limits>

#include "common.h"

namespace {

constexpr int64_t kPartSize = sizeof(Part) / sizeof(float);
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct WarpCall {
  int64_t rows, size;
  const float* logits;                         // [rows, size]
  const float *temperature, *top_p, *min_p;    // [rows]
  const int32_t* top_k;                        // [rows]
  float* out;                                  // [rows, size]
};

// Calls function(index, numbers of a part), which gives what replaces them, for a whole row.
template <class Function>
INLINE void for_parts(float* to, int64_t size, Function function) {
  int64_t i = 0;
  for (; i + kPartSize <= size; i += kPartSize) {
    const Part part = function(i, kPartSize);
    std::memcpy(to + i, &part, sizeof(part));
  }
  if (i < size) {
    const Part part = function(i, size - i);
    std::memcpy(to + i, &part, (size - i) * sizeof(float));
  }
}

// The numbers of a part; `other` behind a row's end.
INLINE Part load_part(const float* from, int64_t count, float other) {
  if (count == kPartSize) return load<Part>(from);
  Part part = all_lanes(other);
  std::memcpy(&part, from, count * sizeof(float));
  return part;
}

double sum_of(const float* numbers, int64_t size) {
  constexpr int64_t kPiece = 16 * kPartSize;  // that is added in single precision
  double sum = 0;
  for (int64_t begin = 0; begin < size; begin += kPiece) {
    Part sums = {};
    for (int64_t i = begin; i < std::min(begin + kPiece, size); i += kPartSize) {
      sums += load_part(numbers + i, std::min(kPartSize, size - i), 0);
    }
    float lanes[kPartSize];
    std::memcpy(lanes, &sums, sizeof(sums));
    for (float lane : lanes) sum += lane;
  }
  return sum;
}

// The largest number; a NaN if there is one.
float largest_of(const float* numbers, int64_t size) {
  Part most = all_lanes(-kInfinity);
  PartInts is_nan = {};
  for (int64_t i = 0; i < size; i += kPartSize) {
    const Part part = load_part(numbers + i, std::min(kPartSize, size - i), -kInfinity);
    most = part > most ? part : most;
    is_nan |= part != part;
  }
  float largest = -kInfinity;
  for (int64_t i = 0; i < kPartSize; ++i) {
    if (is_nan[i]) return std::numeric_limits<float>::quiet_NaN();
    largest = std::max(largest, most[i]);
  }
  return largest;
}

// Unsigned integers that compare like the floats; -0 counts as 0.
INLINE uint32_t ordered_bits(float x) {
  const int32_t bits = load<int32_t>(&x);
  return (uint32_t)(bits < 0 ? INT32_MIN - bits : bits) ^ 0x80000000u;
}

INLINE float from_ordered_bits(uint32_t order) {
  const int32_t bits = (int32_t)(order ^ 0x80000000u);
  return to_float(bits < 0 ? INT32_MIN - bits : bits);
}

// The smallest logit for which the weights of all larger ones sum up to less than `bound`; the
// largest logit of a positive weight at least. It is found by its bits, some at a time: sums by these
// bits say which of their values the cut has.
template <class Weight>
float cut_of(const float* logits, int64_t size, double bound, Weight weight) {
  static constexpr int kShifts[] = {20, 8, 0}, kBits[] = {12, 12, 8};
  std::vector<double> sums(1 << 12);
  uint32_t cut = 0;
  double above = 0;
  for (int step = 0; step < 3; ++step) {
    const int shift = kShifts[step];
    const uint32_t mask = (1u << kBits[step]) - 1;
    std::fill(sums.begin(), sums.end(), 0);
    for (int64_t i = 0; i < size; ++i) {
      const uint32_t order = ordered_bits(logits[i]);
      // Of the values that are left, all higher bits are the cut's.
      if (step && (order ^ cut) >> (shift + kBits[step])) continue;
      sums[order >> shift & mask] += weight(i);
    }
    uint32_t value = mask;
    while (value && !(sums[value] > 0 && above + sums[value] >= bound)) above += sums[value--];
    if (!step && !value) return -kInfinity;
    cut |= value << shift;
  }
  return from_ordered_bits(cut);
}

void warp_row(const WarpCall& call, int64_t row) {
  const int64_t size = call.size;
  const float* logits = call.logits + row * size;
  float* out = call.out + row * size;
  const float temperature = call.temperature[row], top_p = call.top_p[row];
  const float min_p = call.min_p[row], best = largest_of(logits, size);
  const int32_t top_k = call.top_k[row];
  if (!std::isfinite(best) || temperature == 0) {
    std::fill(out, out + size, 0.0f);
    if (std::isfinite(best)) out[std::find(logits, logits + size, best) - logits] = 1;
    return;
  }
  const float of_top_k = top_k > 0 && top_k < size
                             ? cut_of(logits, size, top_k, [](int64_t) { return 1.0; })
                             : -kInfinity;
  for_parts(out, size, [&](int64_t i, int64_t count) INLINE_LAMBDA {
    const Part x = load_part(logits + i, count, -kInfinity);
    const Part weights = exp_of_negative((x - best) / temperature);
    return x >= of_top_k ? weights : Part{};
  });
  double total = sum_of(out, size);
  if (top_p < 1) {
    const float cut =
        cut_of(logits, size, top_p * total, [&](int64_t i) { return (double)out[i]; });
    for_parts(out, size, [&](int64_t i, int64_t count) INLINE_LAMBDA {
      const Part x = load_part(logits + i, count, -kInfinity);
      return x >= cut ? load_part(out + i, count, 0) : Part{};
    });
    total = sum_of(out, size);
  }
  if (min_p > 0) {  // the largest weight is 1
    for_parts(out, size, [&](int64_t i, int64_t count) INLINE_LAMBDA {
      const Part weights = load_part(out + i, count, 0);
      return weights >= min_p ? weights : Part{};
    });
    total = sum_of(out, size);
  }
  for_parts(out, size, [&](int64_t i, int64_t count) INLINE_LAMBDA {
    return load_part(out + i, count, 0) / (float)total;
  });
}

template <class Pool>
void run(Pool& pool, const WarpCall& call) {
  parallel(pool, call.rows, [&](int64_t row) { warp_row(call, row); });
}

namespace ffi = xla::ffi;

// logits [rows, size], then temperature, top_k, top_p and min_p of each row.
ffi::Error Warp(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits,
                ffi::Buffer<ffi::F32> temperature, ffi::Buffer<ffi::S32> top_k,
                ffi::Buffer<ffi::F32> top_p, ffi::Buffer<ffi::F32> min_p,
                ffi::ResultBuffer<ffi::F32> out) {
  const auto shape = logits.dimensions();
  for (const size_t count : {temperature.element_count(), top_k.element_count(),
                             top_p.element_count(), min_p.element_count()}) {
    if (shape.size() != 2 || (int64_t)count != shape[0]) {
      return ffi::Error::InvalidArgument("spec_jax_warp: sizes do not match");
    }
  }
  const WarpCall call{shape[0],
                      shape[1],
                      logits.typed_data(),
                      temperature.typed_data(),
                      top_p.typed_data(),
                      min_p.typed_data(),
                      top_k.typed_data(),
                      out->typed_data()};
  run(pool, call);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxWarp, Warp,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
