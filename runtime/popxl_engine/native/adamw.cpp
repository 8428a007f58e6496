// AdamW's update of a tensor, in one pass. Every element's result depends on nothing but the operands.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "numbers.h"
#include "pieces.h"

namespace {

// What one step of AdamW multiplies with. In float32 the first steps' corrections would lose four digits.
struct Adam {
  float scale, beta1, share1, beta2, share2, decay, step_size, root_share, epsilon;  // share = 1 - beta
  Adam(double scale, double step, double rate, double beta1, double beta2, double epsilon, double decay)
      : scale(float(scale)), beta1(float(beta1)), share1(float(1 - beta1)), beta2(float(beta2)),
        share2(float(1 - beta2)), decay(float(1 - rate * decay)), step_size(float(rate / (1 - std::pow(beta1, step)))),
        root_share(float(1 / std::sqrt(1 - std::pow(beta2, step)))), epsilon(float(epsilon)) {}
};

// Random bits of element i: base[i mod period] + shifts[i div period], as kernels/rounding.py says.
constexpr int64_t PERIOD = 1 << 16;

struct Noise {
  const int16_t *base, *shifts;
};

// How a tensor's elements are stored, from a place in one period on. Both give what was stored.
struct ToNearest {
  ToNearest(const Noise&, int64_t, int64_t) {}
  template <class T>
  inline float store(float x, T& to, int64_t) const {
    narrow(x, to);
    return wide(to);
  }
};

struct Stochastic {
  const int16_t* bits = nullptr;
  uint16_t shift = 0;
  Stochastic(const Noise& noise, int64_t place, int64_t periods) {
    if (noise.base == nullptr) return;
    bits = noise.base + place % PERIOD;
    shift = uint16_t(noise.shifts[periods]);
  }
  inline float store(float x, float& to, int64_t) const { return to = x; }
  inline float store(float x, bfloat16& to, int64_t i) const {
    to = cut(x, uint32_t(uint16_t(uint16_t(bits[i]) + shift) ^ 0x8000u));
    return wide(to);
  }
};

// A tensor's noise is null where the tensor is float32, or where all are rounded to nearest.
template <class Rounding, class W, class G, class M>
void adamw_as(W* weight, const G* gradient, M* m, M* v, const Adam& a, const Noise* noise, int64_t offset,
              int64_t count, int threads) {
  in_pieces(count, PIECE, threads, [=](int64_t first, int64_t end) {
    for (int64_t start = first; start < end;) {  // up to the end of a period
      const int64_t place = offset + start, period = place / PERIOD, before = period - offset / PERIOD;
      const int64_t stop = std::min(end, start + (period + 1) * PERIOD - place);
      const Rounding of_weight(noise[0], place, before), of_m(noise[1], place, before), of_v(noise[2], place, before);
#pragma omp simd
      for (int64_t i = start; i < stop; ++i) {
        const float g = wide(gradient[i]) * a.scale;
        const float mean = of_m.store(a.beta1 * wide(m[i]) + a.share1 * g, m[i], i - start);
        const float square = of_v.store(a.beta2 * wide(v[i]) + a.share2 * g * g, v[i], i - start);
        const float root = std::sqrt(square) * a.root_share + a.epsilon;
        of_weight.store(wide(weight[i]) * a.decay - a.step_size * mean / root, weight[i], i - start);
      }
      start = stop;
    }
  });
}

template <class W, class G, class M>
void adamw(W* weight, const G* gradient, M* m, M* v, const Adam& a, const Noise* noise, int64_t offset, int64_t count,
           int threads) {
  if constexpr (!std::is_same_v<W, float> || !std::is_same_v<M, float>) {
    if (noise[0].base || noise[1].base || noise[2].base)
      return adamw_as<Stochastic>(weight, gradient, m, v, a, noise, offset, count, threads);
  }
  adamw_as<ToNearest>(weight, gradient, m, v, a, noise, offset, count, threads);
}

}  // namespace

extern "C" {

#define FOR_TYPES(W, WEIGHT, G, GRADIENT, M, MOMENT)                                                                 \
  void adamw_##WEIGHT##_##GRADIENT##_##MOMENT(                                                                       \
      W* weight, const G* gradient, M* m, M* v, const int16_t* weight_base, const int16_t* weight_shifts,            \
      const int16_t* m_base, const int16_t* m_shifts, const int16_t* v_base, const int16_t* v_shifts,                \
      int64_t offset, double scale, double step, double rate, double beta1, double beta2, double epsilon,            \
      double decay, int64_t count, int threads) {                                                                    \
    const Adam a(scale, step, rate, beta1, beta2, epsilon, decay);                                                   \
    const Noise noise[] = {{weight_base, weight_shifts}, {m_base, m_shifts}, {v_base, v_shifts}};                    \
    adamw(weight, gradient, m, v, a, noise, offset, count, threads);                                                 \
  }

FOR_TYPES(float, f32, float, f32, float, f32)
FOR_TYPES(float, f32, bfloat16, bf16, float, f32)
FOR_TYPES(bfloat16, bf16, float, f32, float, f32)
FOR_TYPES(bfloat16, bf16, bfloat16, bf16, float, f32)
FOR_TYPES(float, f32, float, f32, bfloat16, bf16)
FOR_TYPES(float, f32, bfloat16, bf16, bfloat16, bf16)
FOR_TYPES(bfloat16, bf16, float, f32, bfloat16, bf16)
FOR_TYPES(bfloat16, bf16, bfloat16, bf16, bfloat16, bf16)
}
