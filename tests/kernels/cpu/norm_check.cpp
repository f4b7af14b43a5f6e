// Norms of random rows, against sums in double precision. Run by sanitize.sh.

#include "../../../spec_jax/kernels/cpu/norm.cpp"

#include "pool.h"

namespace {

void check(Pool& pool, uint32_t seed) {
  std::mt19937 random(seed);
  auto below = [&](int64_t n) { return (int64_t)(random() % n); };
  auto normal = [&] { return std::normal_distribution<float>()(random); };

  NormCall call{below(2) == 1, 1e-5f, 1 + below(300), 1 + below(300)};
  const bool adds = below(2) == 1;
  std::vector<float> x(call.rows * call.size), weight(call.size), bias(call.size), out(x.size());
  std::vector<float> added(x.size(), 0.5f), sum(x.size());
  for (auto* part : {&x, &weight, &bias}) {
    for (float& each : *part) each = normal();
  }
  call.x = x.data(), call.weight = weight.data(), call.out = out.data();
  if (below(2)) call.bias = bias.data();
  if (adds) call.added = added.data(), call.sum = sum.data();
  const int32_t real = (int32_t)below(call.rows + 1);
  run(pool, call, real_rows(&real, 1, call.rows));

  for (int64_t row = 0; row < real; ++row) {
    const float* from = (adds ? sum : x).data() + row * call.size;
    if (adds && sum[row * call.size] != x[row * call.size] + 0.5f) fail("sum", sum[0], x[0]);
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < call.size && call.centered; ++i) mean += (double)from[i] / call.size;
    for (int64_t i = 0; i < call.size; ++i) squares += (from[i] - mean) * (from[i] - mean);
    for (int64_t i = 0; i < call.size; ++i) {
      double expected = (from[i] - mean) / std::sqrt(squares / call.size + call.eps) * weight[i];
      if (call.bias) expected += bias[i];
      double computed = out[row * call.size + i];
      // Of a row of one number, centered, nothing but rounding is left.
      if (!(std::abs(computed - expected) <= 1e-4)) fail("norm", computed, expected);
    }
  }
}

}  // namespace

int main() {
  on_threads(4, 100, check);
  std::puts("norm: 400 calls equal sums in double precision");
}
