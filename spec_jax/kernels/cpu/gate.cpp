// The gate of an MLP: an activation of one projection times the other projection.

#include "common.h"

namespace {

enum Activation : int64_t { kSilu = 0, kGeluTanh = 1 };

struct GateCall {
  Activation activation;
  int64_t rows, size;
  const float *gate, *up;  // [rows, size]
  float* out;              // [rows, size]
};

// x / (1 + e^-y), without overflow.
INLINE Part times_sigmoid(Part x, Part y) {
  const Part power = exp_of_negative(y < 0 ? y : -y);
  return x * (y < 0 ? power : Part{} + 1.0f) / (power + 1.0f);
}

INLINE Part activated(Activation activation, Part x) {
  if (activation == kSilu) return times_sigmoid(x, x);
  // 1 + tanh(y) is twice the sigmoid of 2 * y; here 2 * sqrt(2 / pi) * (x + 0.044715 * x^3).
  return times_sigmoid(x, x * (x * x * 0.044715f + 1.0f) * 1.5957691216f);
}

// A number of a row is the same, bit for bit, whatever rows are beside it.
void gate_row(const GateCall& call, int64_t row) {
  for (int64_t i = 0; i < call.size; i += kLanes) {
    const int64_t at = row * call.size + i, count = std::min<int64_t>(kLanes, call.size - i);
    Part gates[kParts], ups[kParts];
    split(load_some(call.gate + at, count), gates);
    split(load_some(call.up + at, count), ups);
#pragma GCC unroll 4
    for (int n = 0; n < kParts; ++n) gates[n] = activated(call.activation, gates[n]) * ups[n];
    std::memcpy(call.out + at, gates, count * sizeof(float));
  }
}

template <class Pool>
void run(Pool& pool, const GateCall& call, const std::vector<int64_t>& rows) {
  for_rows(pool, rows, call.size, [&](int64_t row) { gate_row(call, row); });
}

namespace ffi = xla::ffi;

ffi::Error Gate(ffi::ThreadPool pool, int64_t activation, ffi::Buffer<ffi::F32> gate,
                ffi::Buffer<ffi::F32> up, ffi::Buffer<ffi::S32> num_tokens,
                ffi::ResultBuffer<ffi::F32> out) {
  const int64_t batch = num_tokens.element_count();
  const auto sizes = gate.dimensions(), of_up = up.dimensions();
  if (sizes.size() != 2 || !std::equal(sizes.begin(), sizes.end(), of_up.begin(), of_up.end()) ||
      (batch && sizes[0] % batch)) {
    return ffi::Error::InvalidArgument("spec_jax_gate: sizes do not match");
  }
  GateCall call{(Activation)activation, sizes[0], sizes[1]};
  call.gate = gate.typed_data(), call.up = up.typed_data(), call.out = out->typed_data();
  if (call.size) run(pool, call, real_rows(num_tokens.typed_data(), batch, call.rows));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxGate, Gate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("activation")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
