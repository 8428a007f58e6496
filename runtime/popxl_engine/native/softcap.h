// The soft bound of logits.
#pragma once
#include "lanes.h"

// cap * tanh(x / cap), and its slope from that.
static inline auto softcap(float cap) {
  return [cap](auto at) { return hyperbolic_tangent(at / cap) * cap; };
}
static inline auto softcap_slope(float cap) {
  return [cap](auto at) {
    const auto share = at / cap;
    return fused(share, share * -1.0f, 1.0f);
  };
}
