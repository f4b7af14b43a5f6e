// Sums and largest numbers of rows, a part at a time.

#pragma once

#include <limits>

#include "common.h"

namespace {

constexpr int64_t kPartSize = sizeof(Part) / sizeof(float);
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The numbers of a part; `other` behind a row's end.
INLINE Part load_part(const float* from, int64_t count, float other) {
  if (count == kPartSize) return load<Part>(from);
  Part part = all_lanes(other);
  std::memcpy(&part, from, count * sizeof(float));
  return part;
}

// The sum of the weights that are at least `least`.
inline double sum_of(const float* numbers, int64_t size, float least = 0) {
  constexpr int64_t kPiece = 16 * kPartSize;  // that is added in single precision
  double sum = 0;
  for (int64_t begin = 0; begin < size; begin += kPiece) {
    Part sums = {};
    for (int64_t i = begin; i < std::min(begin + kPiece, size); i += kPartSize) {
      const Part part = load_part(numbers + i, std::min(kPartSize, size - i), 0);
      sums += part >= least ? part : Part{};
    }
    float lanes[kPartSize];
    std::memcpy(lanes, &sums, sizeof(sums));
    for (float lane : lanes) sum += lane;
  }
  return sum;
}

// The largest number; a NaN if there is one.
inline float largest_of(const float* numbers, int64_t size) {
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

}  // namespace
