// How programs call attention.

#include "attention.h"

namespace {

namespace ffi = xla::ffi;

using Floating = ffi::Buffer<ffi::F32>;
using Integers = ffi::Buffer<ffi::S32>;

// The call that reads a cache, or what is wrong with its sizes.
ffi::Error read(Attend& call, float scale, float cap, int64_t window, bool ring, Floating queries,
                Floating rotation, Floating keys, Floating values, Integers positions,
                Integers start, Integers text, ffi::Buffer<ffi::PRED> among, Integers depths,
                Floating slopes, ffi::ResultBuffer<ffi::F32> out) {
  auto sizes = queries.dimensions(), cached = keys.dimensions(), turned = rotation.dimensions();
  if (sizes.size() != 4 || cached.size() != 4 || cached[3] != sizes[3] || !cached[1] ||
      sizes[2] % cached[1] || positions.dimensions().size() != 2 || turned.size() != 4 ||
      2 * turned[3] > sizes[3]) {
    return ffi::Error::InvalidArgument("spec_jax_attention: sizes do not match");
  }
  call.batch = sizes[0], call.tokens = sizes[1], call.width = sizes[3];
  call.heads = cached[1], call.group = sizes[2] / cached[1], call.slots = cached[2];
  call.recent = depths.element_count(), call.half = turned[3];
  call.window = window, call.ring = ring, call.scale = scale, call.cap = cap;
  if (slopes.element_count()) call.slopes = slopes.typed_data();
  call.queries = queries.typed_data(), call.rotation = rotation.typed_data();
  call.keys = keys.typed_data(), call.values = values.typed_data();
  call.positions = positions.typed_data(), call.start = start.typed_data();
  call.text = text.typed_data(), call.depths = depths.typed_data();
  call.among = among.typed_data(), call.out = out->typed_data();
  return ffi::Error::Success();
}

ffi::Error Attention(ffi::ThreadPool pool, float scale, float cap, int64_t window, bool ring,
                     Floating queries, Floating rotation, Floating keys, Floating values,
                     Integers positions, Integers start, Integers text,
                     ffi::Buffer<ffi::PRED> among, Integers depths, Floating slopes,
                     ffi::ResultBuffer<ffi::F32> out) {
  Attend call{};
  ffi::Error error = read(call, scale, cap, window, ring, queries, rotation, keys, values,
                          positions, start, text, among, depths, slopes, out);
  if (error.success() && queries.element_count() && call.slots) run(pool, call);
  return error;
}

// The same after the new tokens are written. The results are the cache itself: XLA is told so.
ffi::Error WriteAndAttend(ffi::ThreadPool pool, float scale, float cap, int64_t window, bool ring,
                          Floating queries, Floating rotation, Floating keys, Floating values,
                          Integers positions, Integers start, Integers text,
                          ffi::Buffer<ffi::PRED> among, Integers depths, Floating slopes,
                          Floating new_keys, Floating new_values, Integers num_tokens,
                          ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> keys_out,
                          ffi::ResultBuffer<ffi::F32> values_out) {
  Attend call{};
  ffi::Error error = read(call, scale, cap, window, ring, queries, rotation, keys, values,
                          positions, start, text, among, depths, slopes, out);
  if (!error.success()) return error;
  auto sizes = new_keys.dimensions();
  if (sizes.size() != 4 || sizes[1] != call.tokens || sizes[2] != call.heads ||
      sizes[3] != call.width || keys_out->typed_data() != call.keys ||
      values_out->typed_data() != call.values) {
    return ffi::Error::InvalidArgument("spec_jax_write_and_attend: sizes or caches do not match");
  }
  call.new_keys = new_keys.typed_data(), call.new_values = new_values.typed_data();
  if (num_tokens.element_count()) call.num_tokens = num_tokens.typed_data();
  if (queries.element_count() && call.slots) run(pool, call);
  return error;
}

auto reading() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Attr<float>("scale")
      .Attr<float>("cap")
      .Attr<int64_t>("window")
      .Attr<bool>("ring")
      .Arg<Floating>()
      .Arg<Floating>()
      .Arg<Floating>()
      .Arg<Floating>()
      .Arg<Integers>()
      .Arg<Integers>()
      .Arg<Integers>()
      .Arg<ffi::Buffer<ffi::PRED>>()
      .Arg<Integers>()
      .Arg<Floating>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxAttention, Attention, reading().Ret<Floating>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxWriteAndAttend, WriteAndAttend,
                              reading()
                                  .Arg<Floating>()
                                  .Arg<Floating>()
                                  .Arg<Integers>()
                                  .Ret<Floating>()
                                  .Ret<Floating>()
                                  .Ret<Floating>());
