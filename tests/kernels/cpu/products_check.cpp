// Products of random sizes and formats, with one weight or with a stack of them for experts, of float
// activations or of activations in 8 bits, against sums in double precision. Run by sanitize.sh. An
// expert that no row chose must not be read. The results of padding are zeros.

#include "../../../spec_jax/kernels/cpu/products.cpp"

#include <sanitizer/asan_interface.h>

#include "pool.h"

namespace {

constexpr int64_t kInputsOfStep[] = {1, 2, 4, 8, 32, 16};

// The activations after rounding to 8 bits, one scale a block.
std::vector<double> rounded(const std::vector<float>& x, int64_t width, int64_t block) {
  std::vector<double> numbers(x.size());
  for (size_t row = 0; row < x.size(); row += width) {
    for (int64_t begin = 0; begin < width; begin += block) {
      const int64_t end = std::min(begin + block, width);
      float size = 0;
      for (int64_t i = begin; i < end; ++i) size = std::max(size, std::abs(x[row + i]));
      const float inverse = 127 / size, scale = size / 127;
      for (int64_t i = begin; i < end; ++i) {
        const float multiple = x[row + i] * inverse;
        numbers[row + i] = std::nearbyint(multiple) * (double)scale;
      }
    }
  }
  return numbers;
}

void check(Pool& pool, uint32_t seed) {
  std::mt19937 random(seed);
  auto below = [&](int64_t n) { return (int64_t)(random() % n); };
  auto normal = [&] { return std::normal_distribution<float>()(random); };

  Call call{};
  call.format = (Format)(seed % 6);
  const bool quantized = call.format >= kInt8;
  call.integers = call.format > kInt4 || (quantized && below(2));
  if (call.integers && call.format != kInt8) call.offset = below(2) * 4 << (call.format - kInt8);
  const int64_t step = call.integers ? 32 : kInputsOfStep[call.format];
  const bool minima = quantized && below(2);
  call.rows = 1 + below(below(9) ? 30 : 300);
  call.groups = quantized ? 1 + below(4) : 1;
  call.group = step * (1 + below(12));
  if (call.integers && call.groups > 1) call.group = 16 * (call.format == kInt5 ? 2 : 1 + below(2));
  call.units = call.integers && below(2);
  while (call.units && call.groups >> call.unit_shift & 1 ^ 1 && below(3)) ++call.unit_shift;
  call.inputs = call.group * call.groups;
  const int64_t width = call.groups > 1 ? call.inputs : call.inputs - below(step);
  std::vector<float> x(call.rows * width);
  for (float& each : x) each = normal();
  std::vector<double> activations(x.begin(), x.end());
  if (call.integers) activations = rounded(x, width, call.block());

  const int64_t experts = 1 + below(2) * below(6);
  std::vector<int32_t> chosen(call.rows);
  for (int32_t& each : chosen) each = below(experts);
  // Some rows are padding.
  int64_t batch = 1 + below(4);
  while (call.rows % batch) --batch;
  std::vector<int32_t> num_tokens(batch);
  for (int32_t& each : num_tokens) each = below(2) ? call.rows : below(call.rows / batch + 1);
  const auto real = real_rows(num_tokens.data(), batch, call.rows);
  std::vector<bool> is_real(call.rows);
  for (int64_t row : real) is_real[row] = true;
  for (int64_t row = 0; row < call.rows; ++row) {
    if (!is_real[row]) chosen[row] = -1;
  }
  auto is_chosen = [&](int64_t expert) {
    return std::count(chosen.begin(), chosen.end(), expert) > 0;
  };

  struct Arrays {
    std::vector<uint8_t> values;
    std::vector<float> scales, minima, out;
    std::vector<int8_t> scale_bytes, minimum_bytes;
    std::vector<uint16_t> scale_units, minimum_units;  // from 1 to 2
    std::vector<float> bias, residual;
  };
  auto from_1_to_2 = [](uint16_t half) { return 1 + (half & 1023) / 1024.0f; };
  std::vector<Arrays> all(1 + below(3));
  for (Arrays& arrays : all) {
    Matrix matrix{};
    matrix.outputs = 1 + below(70);
    matrix.panels = (matrix.outputs + kLanes - 1) / kLanes;
    arrays.values.resize(experts * matrix.panels * call.panel_bytes());
    for (uint8_t& each : arrays.values) each = (uint8_t)random();
    if (!quantized) {  // numbers, not any bits
      for (size_t i = 0; i < arrays.values.size(); i += call.format == kFloat32 ? 4 : 2) {
        float value = normal();
        uint32_t bits = load<uint32_t>(&value), high = bfloat16_bits(value);
        if (call.format == kFloat32) std::memcpy(&arrays.values[i], &bits, 4);
        if (call.format == kBfloat16) std::memcpy(&arrays.values[i], &high, 2);
      }
    }
    arrays.scales.resize(experts * matrix.panels * call.groups * kLanes);
    arrays.minima.resize(arrays.scales.size());
    for (float& each : arrays.scales) each = normal();
    for (float& each : arrays.minima) each = normal();
    arrays.scale_units.resize(arrays.scales.size() >> call.unit_shift);
    arrays.minimum_units.resize(arrays.scale_units.size());
    for (uint16_t& each : arrays.scale_units) each = 0x3c00 + below(1024);
    for (uint16_t& each : arrays.minimum_units) each = 0x3c00 + below(1024);
    for (size_t i = 0; i < arrays.scales.size(); ++i) {
      arrays.scale_bytes.push_back(below(256) - 128);
      arrays.minimum_bytes.push_back(below(256) - 128);
      if (!call.units) continue;
      const size_t group = i / kLanes, at = (group >> call.unit_shift) * kLanes + i % kLanes;
      arrays.scales[i] = arrays.scale_bytes[i] * from_1_to_2(arrays.scale_units[at]);
      arrays.minima[i] = arrays.minimum_bytes[i] * from_1_to_2(arrays.minimum_units[at]);
    }
    arrays.out.assign(call.rows * matrix.outputs, 1);
    matrix.values = arrays.values.data();
    if (quantized) matrix.scales = (const uint8_t*)arrays.scales.data();
    if (minima) matrix.minima = (const uint8_t*)arrays.minima.data();
    if (call.units) {
      matrix.scales = (const uint8_t*)arrays.scale_bytes.data();
      matrix.scale_units = (const uint8_t*)arrays.scale_units.data();
      if (minima) matrix.minima = (const uint8_t*)arrays.minimum_bytes.data();
      if (minima) matrix.minimum_units = (const uint8_t*)arrays.minimum_units.data();
    }
    matrix.out = arrays.out.data();
    arrays.bias.resize(matrix.outputs), arrays.residual.resize(arrays.out.size());
    for (float& each : arrays.bias) each = normal();
    for (float& each : arrays.residual) each = normal();
    if (experts == 1 && below(2)) matrix.bias = arrays.bias.data();
    if (experts == 1 && below(2)) matrix.residual = arrays.residual.data();
    call.matrices.push_back(matrix);
  }
  auto each_unchosen = [&](auto apply) {
    for (size_t k = 0; k < all.size(); ++k) {
      const int64_t panels = call.matrices[k].panels;
      for (int64_t e = 0; e < experts; ++e) {
        if (is_chosen(e)) continue;
        apply(&all[k].values[e * panels * call.panel_bytes()], panels * call.panel_bytes());
        const int64_t scales = panels * call.groups * kLanes;
        apply(&all[k].scales[e * scales], scales * sizeof(float));
        apply(&all[k].minima[e * scales], scales * sizeof(float));
        apply(&all[k].scale_bytes[e * scales], scales);
        apply(&all[k].minimum_bytes[e * scales], scales);
        const int64_t units = scales >> call.unit_shift;
        apply(&all[k].scale_units[e * units], units * sizeof(uint16_t));
        apply(&all[k].minimum_units[e * units], units * sizeof(uint16_t));
      }
    }
  };
  each_unchosen([](void* begin, size_t size) { ASAN_POISON_MEMORY_REGION(begin, size); });
  if (experts > 1) {
    run_experts(pool, call, x.data(), width, minima, chosen.data());
  } else {
    run_some(pool, call, x.data(), width, minima, real);
  }
  each_unchosen([](void* begin, size_t size) { ASAN_UNPOISON_MEMORY_REGION(begin, size); });

  for (size_t k = 0; k < all.size(); ++k) {
    const Matrix& matrix = call.matrices[k];
    for (int64_t r = 0; r < call.rows; ++r) {
      for (int64_t o = 0; o < matrix.outputs; ++o) {
        if (!is_real[r]) {
          // Experts clear it; products do not write it.
          const float found = matrix.out[r * matrix.outputs + o], expected = experts > 1 ? 0 : 1;
          if (found != expected) fail("padding", found, expected);
          continue;
        }
        const int64_t panel = chosen[r] * matrix.panels + o / kLanes, lane = o % kLanes;
        const uint8_t* values = matrix.values + panel * call.panel_bytes();
        double sum = 0, size = 0;
        if (matrix.bias) sum += matrix.bias[o];
        if (matrix.residual) sum += matrix.residual[r * matrix.outputs + o];
        size += std::abs(sum);
        for (int64_t i = 0; i < width; ++i) {
          double weight = 0;
          double given = activations[r * width + i];
          switch (call.format) {
            case kFloat32:
              weight = load<float>(values + (i * kLanes + lane) * 4);
              break;
            case kBfloat16: {
              uint32_t half = load<uint16_t>(values + ((i / 2 * kLanes + lane) * 2 + i % 2) * 2);
              weight = to_float(half << 16);
              given = to_float(bfloat16_bits((float)given) << 16);
              break;
            }
            case kInt8:
              weight = (int8_t)values[call.integers ? (i / 4 * kLanes + lane) * 4 + i % 4
                                                    : i * kLanes + lane];
              break;
            case kInt4: {
              uint32_t word = load<uint32_t>(values + (i / 8 * kLanes + lane) * 4);
              weight = (int)(word >> (4 * (i % 8)) & 15) - call.offset;
              break;
            }
            case kInt5:
            case kInt6: {
              const int bits = call.format - kInt4, lines = 4 / bits, inputs = 8 * lines;
              const uint8_t* line = values + i / inputs * (lines + 1) * 64 + lane * 4;
              const int64_t at = i % inputs, eight = at / 8, byte = at % 8 / 2, half = at % 2;
              const uint32_t low = load<uint32_t>(line + eight * 64) >> (4 * (at % 8)) & 15;
              const uint32_t high = load<uint32_t>(line + lines * 64) >>
                                    (8 * byte + bits * (2 * eight + half)) & ((1 << bits) - 1);
              weight = (int)(low | high << 4) - call.offset;
              break;
            }
          }
          const int64_t at = (panel * call.groups + i / call.group) * kLanes + lane;
          double scaled = quantized ? weight * all[k].scales[at] : weight;
          double minimum = minima ? all[k].minima[at] : 0;
          sum += given * (scaled + minimum);
          size += std::abs(given) * (std::abs(scaled) + std::abs(minimum));
        }
        double found = all[k].out[r * matrix.outputs + o];
        if (!(std::abs(found - sum) <= 4e-6 * size + 1e-30)) fail("product", found, sum);
      }
    }
  }
}

}  // namespace

int main() {
  on_threads(4, 150, check);
  std::puts("products: 600 calls equal sums in double precision");
}
