// RMS norm and layer norm of rows. The numbers of a row are added in one order, in 16 sums, however
// many rows there are: XLA adds the numbers of a row in another order where there are eight rows.

#include <cmath>

#include "common.h"

namespace {

struct NormCall {
  bool centered;  // layer norm
  float eps;
  int64_t rows, size;
  const float *x, *weight, *bias;  // [rows, size], [size], [size] or null
  const float* added;              // [rows, size], or null
  float *sum, *out;                // [rows, size]; x + added, and its norm
};

INLINE float sum_of(Floats lanes) {
  float numbers[kLanes], sum = 0;
  std::memcpy(numbers, &lanes, sizeof(lanes));
  for (float each : numbers) sum += each;
  return sum;
}

// Calls function(index, how many of the next 16 numbers there are).
template <class Function>
INLINE void for_lanes(int64_t size, Function function) {
  for (int64_t i = 0; i < size; i += kLanes) function(i, std::min<int64_t>(kLanes, size - i));
}

void norm_row(const NormCall& call, int64_t row) {
  const float* x = call.x + row * call.size;
  if (call.added) {
    float* sum = call.sum + row * call.size;
    const float* added = call.added + row * call.size;
    for (int64_t i = 0; i < call.size; ++i) sum[i] = x[i] + added[i];
    x = sum;
  }
  float mean = 0;
  if (call.centered) {
    Floats sums = {};
    for_lanes(call.size, [&](int64_t i, int64_t count) INLINE_LAMBDA {
      sums += load_some(x + i, count);
    });
    mean = sum_of(sums) / call.size;
  }
  Floats squares = {};
  for_lanes(call.size, [&](int64_t i, int64_t count) INLINE_LAMBDA {
    Floats each = load_some(x + i, count) - mean;
    if (count < kLanes) {  // the zeros behind the end are not numbers of the row
      float lanes[kLanes];
      std::memcpy(lanes, &each, sizeof(each));
      std::fill(lanes + count, lanes + kLanes, 0.0f);
      std::memcpy(&each, lanes, sizeof(each));
    }
    squares += each * each;
  });
  const float scale = 1.0f / std::sqrt(sum_of(squares) / call.size + call.eps);
  float* out = call.out + row * call.size;
  for_lanes(call.size, [&](int64_t i, int64_t count) INLINE_LAMBDA {
    Floats each = (load_some(x + i, count) - mean) * scale * load_some(call.weight + i, count);
    if (call.bias) each += load_some(call.bias + i, count);
    std::memcpy(out + i, &each, count * sizeof(float));
  });
}

template <class Pool>
void run(Pool& pool, const NormCall& call, const std::vector<int64_t>& rows) {
  for_rows(pool, rows, call.size, [&](int64_t row) { norm_row(call, row); });
}

namespace ffi = xla::ffi;

ffi::Error run_ffi(ffi::ThreadPool pool, NormCall call, ffi::Buffer<ffi::F32> x,
                   ffi::Buffer<ffi::F32> weight, ffi::Buffer<ffi::F32> bias,
                   ffi::Buffer<ffi::S32> num_tokens, ffi::ResultBuffer<ffi::F32> out) {
  const int64_t batch = num_tokens.element_count();
  if (x.dimensions().size() != 2 || (batch && x.dimensions()[0] % batch) ||
      x.dimensions()[1] != static_cast<int64_t>(weight.element_count()) ||
      (bias.element_count() && bias.element_count() != weight.element_count())) {
    return ffi::Error::InvalidArgument("spec_jax_norm: sizes do not match");
  }
  call.rows = x.dimensions()[0], call.size = x.dimensions()[1];
  call.x = x.typed_data(), call.weight = weight.typed_data(), call.out = out->typed_data();
  if (bias.element_count()) call.bias = bias.typed_data();
  if (call.size) run(pool, call, real_rows(num_tokens.typed_data(), batch, call.rows));
  return ffi::Error::Success();
}

ffi::Error Norm(ffi::ThreadPool pool, bool centered, float eps, ffi::Buffer<ffi::F32> x,
                ffi::Buffer<ffi::F32> weight, ffi::Buffer<ffi::F32> bias,
                ffi::Buffer<ffi::S32> num_tokens, ffi::ResultBuffer<ffi::F32> out) {
  return run_ffi(pool, NormCall{centered, eps}, x, weight, bias, num_tokens, out);
}

// The sum of x and `added`, and its norm.
ffi::Error NormOfSum(ffi::ThreadPool pool, bool centered, float eps, ffi::Buffer<ffi::F32> x,
                     ffi::Buffer<ffi::F32> added, ffi::Buffer<ffi::F32> weight,
                     ffi::Buffer<ffi::F32> bias, ffi::Buffer<ffi::S32> num_tokens,
                     ffi::ResultBuffer<ffi::F32> sum, ffi::ResultBuffer<ffi::F32> out) {
  if (added.element_count() != x.element_count()) {
    return ffi::Error::InvalidArgument("spec_jax_norm: sizes do not match");
  }
  NormCall call{centered, eps};
  call.added = added.typed_data(), call.sum = sum->typed_data();
  return run_ffi(pool, call, x, weight, bias, num_tokens, out);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxNorm, Norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<bool>("centered")
                                  .Attr<float>("eps")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxNormOfSum, NormOfSum,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<bool>("centered")
                                  .Attr<float>("eps")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
