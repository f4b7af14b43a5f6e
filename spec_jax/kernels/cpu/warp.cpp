// Logits of rows to probabilities: temperature, top-k, top-p, min-p and softmax, as `warp` in
// sampling/probabilities.py describes them; or to their likeliest tokens, like `likeliest` there.
// A row is computed alone, and its sums in double precision.

#include <functional>

#include "rows.h"

namespace {

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

// Unsigned integers that compare like the floats; -0 counts as 0.
INLINE uint32_t ordered_bits(float x) {
  const int32_t bits = load<int32_t>(&x);
  return (uint32_t)(bits < 0 ? INT32_MIN - bits : bits) ^ 0x80000000u;
}

INLINE float from_ordered_bits(uint32_t order) {
  const int32_t bits = (int32_t)(order ^ 0x80000000u);
  return to_float(bits < 0 ? INT32_MIN - bits : bits);
}

// Logits of a row, with the largest of each chunk: most chunks have no token that a cut leaves.
class Row {
 public:
  Row(const float* logits, int64_t size) : logits_(logits), size_(size) {
    largest_.reserve(size / kChunk + 1);
    for (int64_t begin = 0; begin < size; begin += kChunk) {
      largest_.push_back(largest_of(logits + begin, std::min(kChunk, size - begin)));
      // A NaN stays.
      best_ = std::isnan(best_) || best_ >= largest_.back() ? best_ : largest_.back();
    }
  }

  float best() const { return best_; }

  // A logit that at least `count` logits reach.
  float reached_by(int64_t count) const {
    if (count > (int64_t)largest_.size()) return -kInfinity;
    std::vector<float> largest = largest_;
    std::nth_element(largest.begin(), largest.begin() + count - 1, largest.end(), std::greater<>());
    return largest[count - 1];
  }

  // Calls function(begin, size of a chunk, whether one of its logits reaches a bound).
  template <class Function>
  INLINE void for_chunks(float bound, Function function) const {
    for (int64_t begin = 0; begin < size_; begin += kChunk) {
      function(begin, std::min(kChunk, size_ - begin), largest_[begin / kChunk] >= bound);
    }
  }

  // The smallest logit for which the weights of all larger ones sum up to less than `sum`; the largest
  // logit of a positive weight at least. All logits that reach `bound` weigh at least `sum`.
  template <class Weight>
  float cut(float bound, double sum, Weight weight) const {
    std::vector<std::pair<uint32_t, double>> found;
    for_chunks(bound, [&](int64_t begin, int64_t count, bool reaches) {
      for (int64_t i = begin; reaches && i < begin + count; ++i) {
        if (logits_[i] >= bound) found.emplace_back(ordered_bits(logits_[i]), weight(i));
      }
    });
    // It is found by its bits, some at a time: sums by these bits say which of their values it has.
    static constexpr int kShifts[] = {20, 8, 0}, kBits[] = {12, 12, 8};
    std::vector<double> sums(1 << 12);
    uint32_t cut = 0;
    double above = 0;
    for (int step = 0; step < 3; ++step) {
      const int shift = kShifts[step];
      const uint32_t mask = (1u << kBits[step]) - 1;
      std::fill(sums.begin(), sums.end(), 0);
      for (const auto& [order, each] : found) {
        // Of the values that are left, all higher bits are the cut's.
        if (step && (order ^ cut) >> (shift + kBits[step])) continue;
        sums[order >> shift & mask] += each;
      }
      uint32_t value = mask;
      while (value && !(sums[value] > 0 && above + sums[value] >= sum)) above += sums[value--];
      if (!step && !value) return -kInfinity;
      cut |= value << shift;
    }
    return from_ordered_bits(cut);
  }

 private:
  static constexpr int64_t kChunk = 256;
  const float* logits_;
  int64_t size_;
  std::vector<float> largest_;
  float best_ = -kInfinity;
};

void warp_row(const WarpCall& call, int64_t number) {
  const int64_t size = call.size;
  const float* logits = call.logits + number * size;
  float* out = call.out + number * size;
  const float temperature = call.temperature[number], top_p = call.top_p[number];
  const float min_p = call.min_p[number];
  const int32_t top_k = call.top_k[number];
  const Row row(logits, size);
  const float best = row.best();
  if (!std::isfinite(best) || temperature == 0) {
    std::fill(out, out + size, 0.0f);
    if (std::isfinite(best)) out[std::find(logits, logits + size, best) - logits] = 1;
    return;
  }
  float least = -kInfinity;  // logit that is left
  if (top_k > 0 && top_k < size) {
    least = row.cut(row.reached_by(top_k), top_k, [](int64_t) { return 1.0; });
  }
  double total = 0;
  row.for_chunks(least, [&](int64_t begin, int64_t chunk, bool reaches) {
    if (!reaches) return std::fill(out + begin, out + begin + chunk, 0.0f);
    for_parts(out + begin, chunk, [&](int64_t i, int64_t count) INLINE_LAMBDA {
      const Part x = load_part(logits + begin + i, count, -kInfinity);
      const Part weights = exp_of_negative((x - best) / temperature);
      return x >= least ? weights : Part{};
    });
    total += sum_of(out + begin, chunk);
  });
  // Replaces the weights of a chunk that has some by function(logits, weights).
  auto change = [&](auto function) INLINE_LAMBDA {
    total = 0;
    row.for_chunks(least, [&](int64_t begin, int64_t chunk, bool reaches) {
      if (!reaches) return;
      for_parts(out + begin, chunk, [&](int64_t i, int64_t count) INLINE_LAMBDA {
        return function(load_part(logits + begin + i, count, -kInfinity),
                        load_part(out + begin + i, count, 0));
      });
      total += sum_of(out + begin, chunk);
    });
  };
  if (top_p < 1) {
    // Tokens that weigh less than `light` weigh less than what top-p leaves out, by a factor of two.
    double light = (1.0 - top_p) * total / (2.0 * size);
    for (const float weight : {0x1p-14f, 0x1p-10f, 0x1p-6f}) {
      if (weight > light && sum_of(out, size, weight) > 1.00001 * top_p * total) light = weight;
    }
    const float bound = (float)(best + temperature * (std::log(light) - 0.01));
    const float cut = row.cut(std::max(bound, least), top_p * total,
                              [&](int64_t i) { return (double)out[i]; });
    change([&](Part x, Part weights) INLINE_LAMBDA { return x >= cut ? weights : Part{}; });
    least = std::max(least, cut);
  }
  if (min_p > 0) {  // the largest weight is 1
    change([&](Part, Part weights) INLINE_LAMBDA { return weights >= min_p ? weights : Part{}; });
  }
  const float divisor = (float)total;
  change([&](Part, Part weights) INLINE_LAMBDA { return weights / divisor; });
}

// Padding holds whatever its memory held: zeros would be as many bytes as several logits' rows.
template <class Pool>
void run(Pool& pool, const WarpCall& call, const std::vector<int64_t>& rows) {
  parallel(pool, rows.size(), [&](int64_t i) { warp_row(call, rows[i]); });
}

struct LikeliestCall {
  int64_t rows, size;
  const float* logits;  // [rows, size]
  int32_t* out;         // [rows]
  float* confidence;    // [rows]: the token's probability at temperature 1; or null
};

// The sum of exp(x - best), a chunk at a time.
double sum_of_weights(const float* logits, int64_t size, float best) {
  constexpr int64_t kChunk = 16 * kPartSize;
  double sum = 0;
  for (int64_t begin = 0; begin < size; begin += kChunk) {
    const int64_t count = std::min(kChunk, size - begin);
    float weights[kChunk];
    for_parts(weights, count, [&](int64_t i, int64_t part) INLINE_LAMBDA {
      return exp_of_negative(load_part(logits + begin + i, part, -kInfinity) - best);
    });
    sum += sum_of(weights, count);
  }
  return sum;
}

// The first of the largest logits; -1 if there is a NaN, or if none is finite or one is infinite.
void likeliest(const LikeliestCall& call, int64_t row) {
  const float* logits = call.logits + row * call.size;
  const float best = largest_of(logits, call.size);
  if (!std::isfinite(best)) return;
  call.out[row] = (int32_t)(std::find(logits, logits + call.size, best) - logits);
  if (call.confidence) call.confidence[row] = 1 / sum_of_weights(logits, call.size, best);
}

// Padding is not computed, and holds -1, with confidence 0.
template <class Pool>
void run(Pool& pool, const LikeliestCall& call, const std::vector<int64_t>& rows) {
  std::fill(call.out, call.out + call.rows, -1);
  if (call.confidence) std::fill(call.confidence, call.confidence + call.rows, 0.0f);
  for_rows(pool, rows, call.size, [&](int64_t row) { likeliest(call, row); });
}

namespace ffi = xla::ffi;

// logits [rows, size], then temperature, top_k, top_p and min_p of each row.
ffi::Error Warp(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits,
                ffi::Buffer<ffi::F32> temperature, ffi::Buffer<ffi::S32> top_k,
                ffi::Buffer<ffi::F32> top_p, ffi::Buffer<ffi::F32> min_p,
                ffi::Buffer<ffi::S32> num_tokens, ffi::ResultBuffer<ffi::F32> out) {
  const auto shape = logits.dimensions();
  const int64_t batch = num_tokens.element_count();
  for (const size_t count : {temperature.element_count(), top_k.element_count(),
                             top_p.element_count(), min_p.element_count()}) {
    if (shape.size() != 2 || (int64_t)count != shape[0] || (batch && shape[0] % batch)) {
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
  run(pool, call, real_rows(num_tokens.typed_data(), batch, call.rows));
  return ffi::Error::Success();
}

// Confidences are written if their result has room for them.
ffi::Error Likeliest(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits,
                     ffi::Buffer<ffi::S32> num_tokens, ffi::ResultBuffer<ffi::S32> out,
                     ffi::ResultBuffer<ffi::F32> confidence) {
  const auto shape = logits.dimensions();
  const int64_t batch = num_tokens.element_count(), asked = confidence->element_count();
  if (shape.size() != 2 || (batch && shape[0] % batch) || (asked && asked != shape[0])) {
    return ffi::Error::InvalidArgument("spec_jax_likeliest: sizes do not match");
  }
  const LikeliestCall call{shape[0], shape[1], logits.typed_data(), out->typed_data(),
                           asked ? confidence->typed_data() : nullptr};
  run(pool, call, real_rows(num_tokens.typed_data(), batch, call.rows));
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
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxLikeliest, Likeliest,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
