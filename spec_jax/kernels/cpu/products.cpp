// Products of few or many rows with weights that are read as they lie in memory.
//
// A weight is cut into panels of 16 outputs. In a panel, 16 neighbouring numbers belong to the 16
// outputs, so that one vector of weights meets one broadcast activation and no sum crosses lanes.
// `weights.py` describes the formats and makes them.

#include "common.h"

namespace {

// How many rows are multiplied with packed weights as those are read.
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
    const uint8_t* bytes = from + kLanes * input + part * (sizeof(Part) / sizeof(float));
#if defined(__AVX512F__)
    return (Part)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(bytes)));
#elif defined(__AVX2__)
    return (Part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(bytes)));
#else
    typedef int8_t Four __attribute__((vector_size(4)));
    return __builtin_convertvector(__builtin_convertvector(load<Four>(bytes), PartInts), Part);
#endif
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

// A weight and the activations it meets.

enum Format : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3 };

struct Matrix {
  const uint8_t* values;   // [panels, inputs / step, 16] steps of the format
  const uint8_t* scales;   // [panels, groups, 16]
  const uint8_t* minima;   // likewise, or null
  float* out;              // [rows, outputs]
  int64_t outputs, panels;
};

struct Call {
  Format format;
  bool half;               // scales and minima in half precision
  int64_t rows, inputs;    // inputs padded to whole steps
  int64_t group, groups;   // inputs that share a scale, and how many such groups there are
  const float* x;          // [rows, inputs]
  const uint32_t* pairs;   // the same as pairs of bfloat16, for kBfloat16
  const float* group_sums; // [rows, groups], where there are minima
  std::vector<Matrix> matrices;

  int64_t panel_bytes() const {
    static constexpr int64_t kBits[] = {32, 16, 8, 4};
    return inputs * kLanes * kBits[format] / 8;
  }
};

INLINE void store(const Matrix& to, int64_t panel, int64_t row, Floats sum) {
  int64_t lanes = std::min<int64_t>(kLanes, to.outputs - panel * kLanes);
  float* out = to.out + row * to.outputs + panel * kLanes;
  if (lanes == kLanes) {
    std::memcpy(out, &sum, sizeof(sum));
  } else {
    std::memcpy(out, &sum, lanes * sizeof(float));
  }
}

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

// A panel of packed weights as floats, for so many rows that widening pays once for all.
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
void panels(const Call& call, const Matrix& to, int64_t begin, int64_t end) {
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
    case kInt4:
      return call.half ? packed_panels<Int4, uint16_t>(call, to, begin, end)
                       : packed_panels<Int4, float>(call, to, begin, end);
  }
}

// Activations as the format wants them, in buffers that live as long as the call.
struct Activations {
  std::vector<float> x, sums;
  std::vector<uint32_t> pairs;

  void prepare(Call& call, const float* given, int64_t width, bool minima) {
    call.x = given;
    const bool rounded = call.format == kBfloat16;
    if (width != call.inputs || rounded) {
      x.assign(call.rows * call.inputs, 0);
      for (int64_t r = 0; r < call.rows; ++r) {
        const float* from = given + r * width;
        float* to = x.data() + r * call.inputs;
        for (int64_t i = 0; i < width; ++i) {
          to[i] = rounded ? to_float(bfloat16_bits(from[i]) << 16) : from[i];
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
    if (minima) {
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

constexpr int64_t kTaskBytes = 1 << 15;  // of weights: less is not worth a task of its own

// All calls at once, of one or of several experts.
template <class Pool>
void run(Pool& pool, const std::vector<Call>& calls) {
  // A row adds to a panel's work what some bytes of weights do.
  auto cost = [](const Call& call) { return call.panel_bytes() + call.rows * call.inputs * 4; };
  int64_t total = 0;
  for (const Call& call : calls) {
    for (const Matrix& matrix : call.matrices) total += matrix.panels * cost(call);
  }
  int64_t threads = std::max<int64_t>(1, pool.num_threads());
  // Neighbouring panels in a task, in whole tiles; several tasks a thread, so that none waits long.
  const int64_t share = std::max(kTaskBytes, total / (8 * threads));
  struct Task {
    const Call* call;
    const Matrix* matrix;
    int64_t begin, end;
  };
  std::vector<Task> tasks;
  for (const Call& call : calls) {
    const int64_t size = std::max<int64_t>(1, share / cost(call) / kTilePanels) * kTilePanels;
    for (const Matrix& matrix : call.matrices) {
      for (int64_t panel = 0; panel < matrix.panels; panel += size) {
        tasks.push_back({&call, &matrix, panel, std::min(panel + size, matrix.panels)});
      }
    }
  }
  parallel(pool, (int64_t)tasks.size(), [&](int64_t i) {
    panels(*tasks[i].call, *tasks[i].matrix, tasks[i].begin, tasks[i].end);
  });
}

// The rows in the order of their experts.
std::vector<int64_t> by_expert(const int32_t* experts, int64_t rows) {
  std::vector<int64_t> order(rows);
  for (int64_t r = 0; r < rows; ++r) order[r] = r;
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return experts[a] < experts[b]; });
  return order;
}

// A call for each expert that some row chose. `whole` has the rows in their experts' order, and the
// matrices of expert 0, which the others follow at equal distances.
std::vector<Call> calls_of_experts(const Call& whole, const int32_t* experts,
                                   const std::vector<int64_t>& order) {
  std::vector<Call> calls;
  for (int64_t begin = 0, end; begin < whole.rows; begin = end) {
    const int64_t expert = experts[order[begin]];
    for (end = begin + 1; end < whole.rows && experts[order[end]] == expert;) ++end;
    Call call = whole;
    call.rows = end - begin;
    call.x += begin * call.inputs;
    if (call.pairs) call.pairs += begin * call.inputs / 2;
    if (call.group_sums) call.group_sums += begin * call.groups;
    const int64_t scale_bytes = call.groups * kLanes * (call.half ? 2 : 4);
    for (Matrix& matrix : call.matrices) {
      matrix.values += expert * matrix.panels * call.panel_bytes();
      if (matrix.scales) matrix.scales += expert * matrix.panels * scale_bytes;
      if (matrix.minima) matrix.minima += expert * matrix.panels * scale_bytes;
      matrix.out += begin * matrix.outputs;
    }
    calls.push_back(std::move(call));
  }
  return calls;
}

// Each row of x [rows, width] times the matrices of its own expert. What no row chose is not read.
template <class Pool>
void run_experts(Pool& pool, Call call, const float* given, int64_t width, bool minima,
                 const int32_t* experts) {
  const std::vector<int64_t> order = by_expert(experts, call.rows);
  std::vector<float> x(call.rows * width);
  for (int64_t r = 0; r < call.rows; ++r) {
    std::memcpy(&x[r * width], given + order[r] * width, width * sizeof(float));
  }
  Activations activations;
  activations.prepare(call, x.data(), width, minima);
  std::vector<std::vector<float>> sorted;
  std::vector<float*> outs;
  for (Matrix& matrix : call.matrices) {
    sorted.emplace_back(call.rows * matrix.outputs);
    outs.push_back(matrix.out);
    matrix.out = sorted.back().data();
  }
  run(pool, calls_of_experts(call, experts, order));
  for (size_t k = 0; k < outs.size(); ++k) {
    const int64_t outputs = call.matrices[k].outputs;
    for (int64_t r = 0; r < call.rows; ++r) {
      std::memcpy(outs[k] + order[r] * outputs, &sorted[k][r * outputs], outputs * sizeof(float));
    }
  }
}

namespace ffi = xla::ffi;

// Reads the weights and the results of a call; `axes` stand before the panels in their shapes.
ffi::Error read(Call& call, int64_t axes, int64_t first, int64_t arrays, ffi::RemainingArgs& args,
                ffi::RemainingRets& rets) {
  static constexpr int64_t kInputsOfWord[] = {1, 2, 1, 8};  // of the second dimension of values
  if ((int64_t)args.size() != first + arrays * (int64_t)rets.size()) {
    return ffi::Error::InvalidArgument("spec_jax_product: arguments do not match");
  }
  call.groups = 1;
  for (size_t k = 0; k < rets.size(); ++k) {
    auto out = rets.get<ffi::Buffer<ffi::F32>>(k);
    if (!out) return ffi::Error::InvalidArgument("spec_jax_product: a result is not float32");
    Matrix matrix{};
    const uint8_t** parts[] = {&matrix.values, &matrix.scales, &matrix.minima};
    for (int64_t a = 0; a < arrays; ++a) {
      auto part = args.get<ffi::AnyBuffer>(first + k * arrays + a);
      if (!part) return ffi::Error::InvalidArgument("spec_jax_product: an argument is missing");
      if (a == 0) matrix.panels = part->dimensions()[axes];
      if (a == 0) call.inputs = part->dimensions()[axes + 1] * kInputsOfWord[call.format];
      if (a == 1) call.groups = part->dimensions()[axes + 1];
      *parts[a] = (const uint8_t*)part->untyped_data();
    }
    matrix.out = (*out)->typed_data();
    matrix.outputs = (*out)->dimensions()[1];
    if ((int64_t)(*out)->dimensions()[0] != call.rows ||
        (matrix.outputs + kLanes - 1) / kLanes != matrix.panels) {
      return ffi::Error::InvalidArgument("spec_jax_product: sizes do not match");
    }
    call.matrices.push_back(matrix);
  }
  call.group = call.inputs / call.groups;
  return ffi::Error::Success();
}

// x [rows, inputs], then for each weight its values and, by the format, scales and minima; the
// results are the products [rows, outputs].
ffi::Error Product(ffi::ThreadPool pool, int64_t format, int64_t arrays, bool half,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  auto given = args.get<ffi::Buffer<ffi::F32>>(0);
  if (!given) return ffi::Error::InvalidArgument("spec_jax_product: x is not float32");
  std::vector<Call> calls(1);
  Call& call = calls[0];
  call.format = (Format)format;
  call.half = half;
  call.rows = given->dimensions()[0];
  ffi::Error error = read(call, 0, 1, arrays, args, rets);
  if (error.failure() || !call.rows) return error;
  Activations activations;
  activations.prepare(call, given->typed_data(), given->dimensions()[1], arrays == 3);
  run(pool, calls);
  return error;
}

// The same with stacks of weights: each row meets the matrices of its own expert, and what no row
// chose is not read. The second argument is the rows' experts.
ffi::Error ExpertProduct(ffi::ThreadPool pool, int64_t format, int64_t arrays, bool half,
                         ffi::RemainingArgs args, ffi::RemainingRets rets) {
  auto given = args.get<ffi::Buffer<ffi::F32>>(0);
  auto experts = args.get<ffi::Buffer<ffi::S32>>(1);
  auto values = args.get<ffi::AnyBuffer>(2);
  if (!given || !experts || !values || experts->dimensions()[0] != given->dimensions()[0]) {
    return ffi::Error::InvalidArgument("spec_jax_expert_product: arguments do not match");
  }
  Call call{};
  call.format = (Format)format;
  call.half = half;
  call.rows = given->dimensions()[0];
  const int32_t* chosen = experts->typed_data();
  for (int64_t r = 0; r < call.rows; ++r) {
    if (chosen[r] < 0 || chosen[r] >= values->dimensions()[0]) {
      return ffi::Error::InvalidArgument("spec_jax_expert_product: there is no such expert");
    }
  }
  ffi::Error error = read(call, 1, 2, arrays, args, rets);
  if (error.failure() || !call.rows) return error;
  run_experts(pool, call, given->typed_data(), given->dimensions()[1], arrays == 3, chosen);
  return error;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxProduct, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("arrays")
                                  .Attr<bool>("half")
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxExpertProduct, ExpertProduct,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("arrays")
                                  .Attr<bool>("half")
                                  .RemainingArgs()
                                  .RemainingRets());
