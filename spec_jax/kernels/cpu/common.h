// Vectors of 16 floats, sums of rows with panels of 16 outputs, and tasks on XLA's own threads.
//
// The code is written with the vector extensions of GCC and Clang, and compiled once for each kind
// of processor: the compiler splits a vector of 16 floats into as many registers as it needs.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "xla/ffi/api/ffi.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are arguments of inlined functions only
#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

// How many rows and panels share a pass over a weight: their sums fill the vector registers.
#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTilePanels = 2;
#else
constexpr int kTileRows = 6, kTilePanels = 1;
#endif

template <class T>
INLINE T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

INLINE Floats splat(float x) { return Floats{} + x; }

INLINE float to_float(uint32_t bits) { return load<float>(&bits); }

// The nearest bfloat16, ties to even; a NaN stays one.
INLINE uint32_t bfloat16_bits(float x) {
  uint32_t bits = load<uint32_t>(&x);
  if (std::isnan(x)) return (bits >> 16) | 0x40;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

INLINE Floats load_floats(const float* from) { return load<Floats>(from); }

// 16 numbers of half precision.
INLINE Floats load_floats(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  Floats out;
  for (int i = 0; i < kLanes; i += 8) {
    __m256 part = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i)));
    std::memcpy((float*)&out + i, &part, sizeof(part));
  }
  return out;
#elif defined(__aarch64__)
  Floats out;
  for (int i = 0; i < kLanes; i += 4) {
    float32x4_t part = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i)));
    std::memcpy((float*)&out + i, &part, sizeof(part));
  }
  return out;
#else
  Floats out;
  for (int i = 0; i < kLanes; ++i) {
    uint32_t sign = (uint32_t)(from[i] & 0x8000) << 16, rest = from[i] & 0x7fff;
    // An exponent of all ones stays one; all others are moved by a product, which is exact.
    float size = rest >= 0x7c00 ? to_float((rest << 13) | 0x7f800000)
                                : to_float(rest << 13) * 0x1p112f;
    out[i] = to_float(load<uint32_t>(&size) | sign);
  }
  return out;
#endif
}

// What one register holds of 16 floats: GCC 12 keeps sums of wider vectors in memory.
#if defined(__AVX512F__)
typedef float Part __attribute__((vector_size(64)));
typedef int32_t PartInts __attribute__((vector_size(64)));
typedef uint32_t PartWords __attribute__((vector_size(64)));
#elif defined(__AVX2__)
typedef float Part __attribute__((vector_size(32)));
typedef int32_t PartInts __attribute__((vector_size(32)));
typedef uint32_t PartWords __attribute__((vector_size(32)));
#else
typedef float Part __attribute__((vector_size(16)));
typedef int32_t PartInts __attribute__((vector_size(16)));
typedef uint32_t PartWords __attribute__((vector_size(16)));
#endif

// a * b + c with one rounding, where the processor has it. Compilers fuse the same expression in one
// function and not in another, so that sums which must agree bit for bit say it.
INLINE Part fused(Part a, Part b, Part c) {
#if defined(__AVX512F__)
  return (Part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// As integers: a sum with 0.0 would be an instruction, since it changes -0.0.
INLINE Part all_lanes(float x) { return (Part)(PartInts{} + load<int32_t>(&x)); }

// At most 16 numbers, then zeros.
INLINE Floats load_some(const float* from, int64_t count) {
  if (count >= kLanes) return load<Floats>(from);
  Floats out = {};
  std::memcpy(&out, from, count * sizeof(float));
  return out;
}

constexpr int kParts = sizeof(Floats) / sizeof(Part);

// e^x for x <= 0, as in Cephes: 2 units in the last place; 0 below the smallest normal numbers. A
// register at a time, since GCC 12 compares the numbers of wider vectors one by one.
INLINE Part exp_of_negative(Part x) {
  const Part least = Part{} - 87.0f, magic = Part{} + 12582912.0f;  // 1.5 * 2^23
  Part y = x < least ? least : x;
  Part shifted = y * 1.44269504f + magic;
  Part n = shifted - magic;
  Part r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Part p = Part{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Part power = (Part)((PartWords)p + ((PartWords)shifted << 23));
  power = x < least ? Part{} : power;
  return x == x ? power : x;
}

// As many bytes with signs as a part has numbers.
INLINE Part load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Part)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#elif defined(__AVX2__)
  return (Part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(from)));
#else
  typedef int8_t Four __attribute__((vector_size(4)));
  return __builtin_convertvector(__builtin_convertvector(load<Four>(from), PartInts), Part);
#endif
}

INLINE void split(Floats whole, Part (&parts)[kParts]) {
  std::memcpy(parts, &whole, sizeof(whole));
}

// What `tile` multiplies: a step is one vector of weights and one broadcast activation.

struct FloatStep {
  using Activation = float;
  using Register = Part;
  static INLINE Part add(Part sum, Part weights, float x) { return sum + weights * x; }
};

#if defined(__AVX512BF16__)
struct PairStep {  // two inputs in a step
  using Activation = uint32_t;
  using Register = Floats;
  static INLINE Floats add(Floats sum, Floats weights, uint32_t x) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)weights,
                                    (__m512bh)_mm512_set1_epi32((int)x));
  }
};
#endif

// Sums of `R` rows with `P` panels; `U` independent sums hide the latency of an addition.
template <class Step, int R, int P, int U>
INLINE void tile(const Floats* weights, int64_t panel_stride, const typename Step::Activation* x,
                 int64_t x_stride, int64_t steps, Floats (&out)[P][R]) {
  using Register = typename Step::Register;
  constexpr int N = sizeof(Floats) / sizeof(Register);
  Register sums[U][P][R][N] = {};
  auto add = [&](int64_t i, Register (&to)[P][R][N]) INLINE_LAMBDA {
    Register w[P][N];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        w[p][n] = load<Register>((const Register*)(weights + p * panel_stride + i) + n);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      typename Step::Activation value = x[r * x_stride + i];
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) to[p][r][n] = Step::add(to[p][r][n], w[p][n], value);
      }
    }
  };
  int64_t i = 0;
  for (; i + U <= steps; i += U) {
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) add(i + u, sums[u]);
  }
  for (; i < steps; ++i) add(i, sums[0]);
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        Register sum = sums[0][p][r][n];
#pragma GCC unroll 4
        for (int u = 1; u < U; ++u) sum += sums[u][p][r][n];
        std::memcpy((Register*)&out[p][r] + n, &sum, sizeof(sum));
      }
    }
  }
}

constexpr int chains(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

// Rows in tiles of at most `Most`, as even as possible: function(first row, number of rows).
template <int Most, class Function>
INLINE void in_tiles(int64_t rows, Function function) {
  int64_t tiles = (rows + Most - 1) / Most;
  for (int64_t t = 0; t < tiles; ++t) {
    int64_t begin = rows * t / tiles;
    function(begin, rows * (t + 1) / tiles - begin);
  }
}

// Calls function(std::integral_constant<int, n>) for the n of 1 to Most that equals `count`.
template <class Function, int... N>
INLINE void with_count(int64_t count, Function function, std::integer_sequence<int, N...>) {
  (void)((count == N + 1 && (function(std::integral_constant<int, N + 1>()), true)) || ...);
}

// The rows of [batch, tokens] that are real: of each b the first num_tokens[b] tokens; all if batch
// is 0.
inline std::vector<int64_t> real_rows(const int32_t* num_tokens, int64_t batch, int64_t all_rows) {
  std::vector<int64_t> rows;
  const int32_t all = (int32_t)all_rows;
  if (!batch) batch = 1, num_tokens = &all;
  const int64_t tokens = all_rows / batch;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < std::min<int64_t>(num_tokens[b], tokens); ++t) {
      rows.push_back(b * tokens + t);
    }
  }
  return rows;
}

// Runs task(0) to task(count - 1) on the caller and the pool's threads. Each thread has a share of
// neighbouring tasks, which read neighbouring memory, and then helps the others. The caller takes
// part, and waits only for tasks that a thread has begun, so that it cannot wait for one that waits.
template <class Pool, class Task>
void parallel(Pool& pool, int64_t count, const Task& task) {
  struct alignas(64) Share {  // in separate lines of the caches
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct Progress {
    std::vector<Share> shares;
    std::atomic<int64_t> done{0};
    explicit Progress(int64_t threads) : shares(threads) {}
  };
  const int64_t threads = std::clamp<int64_t>(count, 1, std::max<int64_t>(pool.num_threads(), 1));
  auto progress = std::make_shared<Progress>(threads);
  for (int64_t t = 0; t < threads; ++t) {
    progress->shares[t].next = count * t / threads;
    progress->shares[t].end = count * (t + 1) / threads;
  }
  auto work = [progress, threads, &task](int64_t thread) {
    // A thread that comes late finds nothing left and does not touch `task`, which may be gone.
    for (int64_t k = 0; k < threads; ++k) {
      Share& share = progress->shares[(thread + k) % threads];
      for (int64_t i; (i = share.next.fetch_add(1)) < share.end;) {
        task(i);
        progress->done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  for (int64_t t = 1; t < threads; ++t) pool.Schedule([work, t] { work(t); });
  work(0);
  for (int spins = 0; progress->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 2000) std::this_thread::yield();
  }
}

// Calls function(row) for some rows of `size` numbers, on several threads if they are many.
template <class Pool, class Function>
void for_rows(Pool& pool, const std::vector<int64_t>& rows, int64_t size, const Function& function) {
  constexpr int64_t kTaskNumbers = 1 << 14;  // fewer are not worth a second thread
  const int64_t count = rows.size(), tasks = std::min(count, count * size / kTaskNumbers + 1);
  parallel(pool, tasks, [&](int64_t i) {
    for (int64_t r = count * i / tasks; r < count * (i + 1) / tasks; ++r) function(rows[r]);
  });
}

}  // namespace
