// AdamW's update of a tensor, in one pass. Every element's result depends on nothing but the operands.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "draws.h"
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

// Random bits of element i: base[i mod PERIOD], which is half of a draw, plus half of draw PERIOD / 2 + i div PERIOD, as
// kernels/rounding.py says.
constexpr int64_t PERIOD = 1 << 16;
typedef uint16_t Bits __attribute__((may_alias));  // they are parts of words

struct Noise {
  uint64_t key = 0;  // of the generator, odd; 0: there is no noise
  const Bits* base = nullptr;
  uint16_t shift(int64_t period) const {
    const uint64_t draw = PERIOD / 2 + uint64_t(period);
    return uint16_t(squares64(draw / 2, key) >> draw % 2 * 32);
  }
};

// The noises of three tensors, with bits of elements up to `end`. They stay until this thread asks again.
static void draw_noises(const uint64_t* keys, int64_t end, int threads, Noise* noises) {
  static thread_local std::vector<uint64_t> kept[3];
  const int64_t count = (std::min(end, PERIOD) + 3) / 4;
  for (int n = 0; n < 3; ++n) {
    if (keys[n] == 0) continue;
    if (int64_t(kept[n].size()) < count) kept[n].resize(std::size_t(count));
    draw(kept[n].data(), keys[n], 0, count, threads);
    noises[n] = {keys[n], reinterpret_cast<const Bits*>(kept[n].data())};
  }
}

// How a tensor's elements are stored, from a place in one period on. Both give what was stored.
struct ToNearest {
  ToNearest(const Noise&, int64_t) {}
  template <class T>
  inline float store(float x, T& to, int64_t) const {
    narrow(x, to);
    return wide(to);
  }
};

struct Stochastic {
  const Bits* bits = nullptr;
  uint16_t shift = 0;
  Stochastic(const Noise& noise, int64_t place) {
    if (noise.key == 0) return;
    bits = noise.base + place % PERIOD;
    shift = noise.shift(place / PERIOD);
  }
  inline float store(float x, float& to, int64_t) const { return to = x; }
  inline float store(float x, bfloat16& to, int64_t i) const {
    to = cut(x, uint32_t(uint16_t(bits[i] + shift) ^ 0x8000u));
    return wide(to);
  }
};

// There is no noise for a tensor that is float32, or where all are rounded to nearest.
template <class Rounding, class W, class G, class M>
void adamw_as(W* weight, const G* gradient, M* m, M* v, const Adam& a, const Noise* noise, int64_t offset,
              int64_t count, int threads) {
  in_pieces(count, PIECE, threads, [=](int64_t first, int64_t end) {
    for (int64_t start = first; start < end;) {  // up to the end of a period
      const int64_t place = offset + start, stop = std::min(end, start + PERIOD - place % PERIOD);
      const Rounding of_weight(noise[0], place), of_m(noise[1], place), of_v(noise[2], place);
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
void adamw(W* weight, const G* gradient, M* m, M* v, const Adam& a, const uint64_t* keys, int64_t offset, int64_t count,
           int threads) {
  Noise noises[3];
  if constexpr (!std::is_same_v<W, float> || !std::is_same_v<M, float>) {
    if (keys[0] || keys[1] || keys[2]) {
      draw_noises(keys, offset + count, threads, noises);
      return adamw_as<Stochastic>(weight, gradient, m, v, a, noises, offset, count, threads);
    }
  }
  adamw_as<ToNearest>(weight, gradient, m, v, a, noises, offset, count, threads);
}

}  // namespace

extern "C" {

// Keys: of the generators whose bits round weight, m and v; 0: to nearest.
#define FOR_TYPES(W, WEIGHT, G, GRADIENT, M, MOMENT)                                                                 \
  void adamw_##WEIGHT##_##GRADIENT##_##MOMENT(W* weight, const G* gradient, M* m, M* v, uint64_t weight_key,         \
                                              uint64_t m_key, uint64_t v_key, int64_t offset, double scale,          \
                                              double step, double rate, double beta1, double beta2, double epsilon,  \
                                              double decay, int64_t count, int threads) {                            \
    const Adam a(scale, step, rate, beta1, beta2, epsilon, decay);                                                   \
    const uint64_t keys[] = {weight_key, m_key, v_key};                                                              \
    adamw(weight, gradient, m, v, a, keys, offset, count, threads);                                                  \
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
