// Attention of a few queries to a cache and to the new tokens.
//
// A query's result depends only on the entries that it sees, in their order,
// cached ones first: it has the same bits whether an entry is still new or in
// the cache already, and whatever other queries there are.
#include <cmath>
#include <vector>

#include "parallel.h"
#include "vectors.h"

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;

// The sum of a register's lanes, in halves.
template <int size>
static inline float Sum(const float* lanes) {
  if constexpr (size == 1) return *lanes;
  else {
    typedef float Half __attribute__((vector_size(size * 2), aligned(4), may_alias));
    Half sum = *(const Half*)lanes + *(const Half*)(lanes + size / 2);
    return Sum<size / 2>((const float*)&sum);
  }
}

static float Dot(const float* a, const float* b, int64_t size) {
  Vector even{}, odd{};
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    even += *(const Vector*)(a + i) * *(const Vector*)(b + i);
    odd += *(const Vector*)(a + i + kLanes) * *(const Vector*)(b + i + kLanes);
  }
  float rest = 0;
  for (; i < size; i++) rest += a[i] * b[i];
  even += odd;
  return Sum<kLanes>((const float*)&even) + rest;
}

// exp(x) of x <= 0 to 2 units in the last place, 0 below -87: 2^n * exp(r) with
// |r| <= ln(2) / 2, and the Taylor series of exp(r).
static Vector Exp(Vector x) {
  x = x < -87.0f ? Vector{} - 87.0f : x;
  Vector n = x * 1.44269504f - 0.5f;
  Integers whole = __builtin_convertvector(n, Integers);  // towards 0
  n = __builtin_convertvector(whole, Vector);
  Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f, y = Vector{} + 1.0f;
  for (int i = 7; i > 0; i--) y = y * r / (float)i + 1.0f;
  return y * (Vector)((whole + 127) << 23);
}

struct Entries {  // [B, H, size, dim]
  const float* at;
  int64_t size, dim;
  Entries(const Floats& x)
      : at(x.typed_data()), size(x.dimensions()[2]), dim(x.dimensions()[3]) {}
  const float* Head(int64_t head) const { return at + head * size * dim; }
};

// y[dim] = sum of weights[i] * entry i, in the order of i.
static void Mix(const std::vector<const float*>& entries, const float* weights,
                float scale, float* y, int64_t dim) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) {
    Vector sums[4] = {};
    for (size_t i = 0; i < entries.size(); i++)
      for (int v = 0; v < 4; v++)
        sums[v] += *(const Vector*)(entries[i] + d + v * kLanes) * weights[i];
    for (int v = 0; v < 4; v++) *(Vector*)(y + d + v * kLanes) = sums[v] * scale;
  }
  for (; d < dim; d++) {
    float sum = 0;
    for (size_t i = 0; i < entries.size(); i++) sum += entries[i][d] * weights[i];
    y[d] = sum * scale;
  }
}

static ffi::Error Attention(ffi::ThreadPool pool, Floats queries,
                            ffi::Buffer<ffi::PRED> mask, Floats keys,
                            Floats new_keys, Floats values, Floats new_values,
                            Floats sinks, ffi::ResultBuffer<ffi::F32> result,
                            float softcap) {
  auto shape = queries.dimensions();
  int64_t heads = shape[1], count = shape[2], tokens = mask.dimensions()[1];
  const float *query = queries.typed_data(), *sink = sinks.typed_data();
  const bool* seen = mask.typed_data();
  Entries key[] = {keys, new_keys}, value[] = {values, new_values};
  int64_t all = key[0].size + key[1].size;
  float* y = result->typed_data();
  auto run = [=](int64_t first, int64_t last) {
    std::vector<const float*> read;
    std::vector<float> scores;
    for (int64_t q = first; q < last; q++) {
      int64_t head = q / count, row = q % count, dim = key[0].dim;
      const bool* sees = seen + (head / heads * tokens + row % tokens) * all;
      float own_sink = sink[head % heads * count + row], highest = own_sink;
      read.clear(), scores.clear();
      for (int64_t i = 0; i < all; i++) {
        if (!sees[i]) continue;
        int part = i >= key[0].size;
        int64_t at = i - part * key[0].size;
        float score = Dot(query + q * dim, key[part].Head(head) + at * dim, dim);
        if (softcap > 0) score = softcap * std::tanh(score / softcap);
        highest = std::max(highest, score);
        scores.push_back(score);
        read.push_back(value[part].Head(head) + at * value[0].dim);
      }
      scores.resize((scores.size() + kLanes - 1) / kLanes * kLanes, -INFINITY);
      scores.push_back(own_sink), scores.resize(scores.size() + kLanes - 1, -INFINITY);
      float total = 0;
      for (size_t i = 0; i < scores.size(); i += kLanes) {
        Vector* part = (Vector*)&scores[i];
        *part = Exp(*part - highest);
        for (int lane = 0; lane < kLanes; lane++) total += (*part)[lane];
      }
      Mix(read, scores.data(), 1 / total, y + q * value[0].dim, value[0].dim);
    }
  };
  int64_t queries_all = shape[0] * heads * count;
  Parallel(pool, queries_all, queries_all * all * key[0].dim < (1 << 17), run);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(attention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Attr<float>("softcap"));
