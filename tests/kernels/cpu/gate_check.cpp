// Gates of random rows, against double precision. Run by sanitize.sh.

#include <cmath>

#include "../../../spec_jax/kernels/cpu/gate.cpp"

#include "pool.h"

namespace {

void check(Pool& pool, uint32_t seed) {
  std::mt19937 random(seed);
  auto below = [&](int64_t n) { return (int64_t)(random() % n); };

  GateCall call{(Activation)below(2), 1 + below(40), 1 + below(3000)};
  std::vector<float> gate(call.rows * call.size), up(gate.size()), out(gate.size());
  for (float& each : gate) each = std::normal_distribution<float>(0, 4)(random);
  for (float& each : up) each = std::normal_distribution<float>()(random);
  call.gate = gate.data(), call.up = up.data(), call.out = out.data();
  const int32_t real = (int32_t)below(call.rows + 1);
  run(pool, call, real_rows(&real, 1, call.rows));

  for (int64_t i = 0; i < real * call.size; ++i) {
    const double x = gate[i], cube = x * x * x;
    const double y = call.activation == kSilu ? x : 1.5957691216057308 * (x + 0.044715 * cube);
    const double expected = x / (1 + std::exp(-y)) * up[i];
    if (!(std::abs(out[i] - expected) <= 1e-6 * (1 + std::abs(expected)))) {
      fail("gate", out[i], expected);
    }
  }
}

}  // namespace

int main() {
  on_threads(4, 100, check);
  std::puts("gate: 400 calls equal double precision");
}
