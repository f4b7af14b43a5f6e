// A weight in panels of 16 outputs, and the activations it meets.
//
// In a panel, 16 neighbouring numbers belong to the 16 outputs, so that one vector of weights meets
// one broadcast activation and no sum crosses lanes. `weights.py` describes the formats and makes
// them.

#pragma once

#include "common.h"

namespace {

enum Format : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3, kInt5 = 4, kInt6 = 5 };

struct Rounded;

struct Matrix {
  const uint8_t* values;   // [panels, inputs / step, 16] steps of the format
  const uint8_t* scales;   // [panels, groups, 16], or null for 1
  const uint8_t* minima;   // [panels, groups, 16], or null for 0
  const uint8_t* scale_units;    // [panels, blocks, 16], or null for 1
  const uint8_t* minimum_units;  // the same
  float* out;              // [rows, outputs]
  int64_t outputs, panels;
  const float* bias;       // [outputs], or null for 0
  const float* residual;   // [rows, outputs], which is added to the product, or null
  const int64_t* places;   // where each row stands in `out` and `residual`, or null: in order
};

struct Call {
  Format format;
  bool half;               // scales and minima in half precision
  bool units;              // scales and minima as bytes, and their units in half precision
  int unit_shift;          // a unit is of 2^unit_shift groups
  int32_t offset;          // what is added to values of fewer than 8 bits
  int64_t rows, inputs;    // inputs padded to a multiple of the format's steps
  int64_t group, groups;   // inputs that share a scale, and how many such groups there are
  const float* x;          // [rows, inputs]
  const int64_t* sources;  // where each row stands in x, or null: in order; for integers alone
  const uint32_t* pairs;   // the same as pairs of bfloat16, for kBfloat16
  const float* group_sums; // [rows, groups], where there are minima
  bool integers;           // whether x is rounded to 8 bits
  const Rounded* rounded;  // x so rounded
  std::vector<Matrix> matrices;

  // Inputs that share a scale of rounded activations.
  int64_t block() const { return groups == 1 ? 32 : group; }

  int64_t scale_bytes() const { return units ? 1 : half ? 2 : 4; }

  int64_t panel_bytes() const {
    static constexpr int64_t kBits[] = {32, 16, 8, 4, 5, 6};
    return inputs * kLanes * kBits[format] / 8;
  }
};

// The numbers of a group: 16 scales or minima.
INLINE void load_numbers(const Call& call, const uint8_t* from, const uint8_t* units, int64_t group,
                         Part (&to)[kParts]) {
  if (!call.units) {
    split(call.half ? load_floats((const uint16_t*)from + group * kLanes)
                    : load_floats((const float*)from + group * kLanes),
          to);
    return;
  }
  split(load_floats((const uint16_t*)units + (group >> call.unit_shift) * kLanes), to);
#pragma GCC unroll 4
  for (int n = 0; n < kParts; ++n) {
    to[n] *= load_bytes(from + group * kLanes + n * (kLanes / kParts));
  }
}

INLINE void store(const Matrix& to, int64_t panel, int64_t row, Floats sum) {
  const int64_t first = panel * kLanes, lanes = std::min<int64_t>(kLanes, to.outputs - first);
  if (to.places) row = to.places[row];
  const int64_t at = row * to.outputs + first;
  if (to.bias) sum += load_some(to.bias + first, lanes);
  if (to.residual) sum += load_some(to.residual + at, lanes);
  if (lanes == kLanes) {
    std::memcpy(to.out + at, &sum, sizeof(sum));
  } else {
    std::memcpy(to.out + at, &sum, lanes * sizeof(float));
  }
}

}  // namespace
