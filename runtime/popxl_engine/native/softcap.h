// The soft bound of logits.
#pragma once
#include "lanes.h"

// cap * tanh(x / cap), as exactly as results of a type need, and its slope from that. A division
// takes as long as all else.
template <class T = float>
static inline auto softcap(float cap, T type = {}) {
  return [cap, inverse = 1.0f / cap, type](auto at) {
    return hyperbolic_tangent(at * inverse, type) * cap;
  };
}
static inline auto softcap_slope(float cap) {
  return [inverse = 1.0f / cap](auto at) {
    const auto share = at * inverse;
    return fused(share, share * -1.0f, 1.0f);
  };
}
