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

// Queries of one head that read an entry together, a lane of a `Four` for each.
constexpr int kQueries = 4;
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t Flags __attribute__((vector_size(16), aligned(4), may_alias));

struct Entry {
  const float *key, *value;
  Flags is_seen;  // by each query: 0 or -1
};

// The sum of each quarter of a register's lanes, in halves.
template <int size>
static inline Four Fold(const float* lanes) {
  if constexpr (size == 4) return *(const Four*)lanes;
  else {
    typedef float Half __attribute__((vector_size(size * 2), aligned(4), may_alias));
    Half sum = *(const Half*)lanes + *(const Half*)(lanes + size / 2);
    return Fold<size / 2>((const float*)&sum);
  }
}

// The sum of the lanes of each of four registers.
static inline Four Sums(const Vector* x) {
  Four of[4];
  for (int i = 0; i < 4; i++) of[i] = Fold<kLanes>((const float*)&x[i]);
  Four a = of[0], b = of[1], c = of[2], d = of[3];
  Four ab = Four{a[0], a[1], b[0], b[1]} + Four{a[2], a[3], b[2], b[3]};
  Four cd = Four{c[0], c[1], d[0], d[1]} + Four{c[2], c[3], d[2], d[3]};
  return Four{ab[0], ab[2], cd[0], cd[2]} + Four{ab[1], ab[3], cd[1], cd[3]};
}

// The products of four queries with two keys.
static void Score(const float* const* query, const float* key, const float* next,
                  int64_t dim, Four* scores) {
  Vector sums[2][kQueries] = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    Vector a = *(const Vector*)(key + d), b = *(const Vector*)(next + d);
#pragma GCC unroll 4
    for (int i = 0; i < kQueries; i++) {
      Vector q = *(const Vector*)(query[i] + d);
      sums[0][i] += a * q, sums[1][i] += b * q;
    }
  }
  scores[0] = Sums(sums[0]), scores[1] = Sums(sums[1]);
  for (; d < dim; d++) {
    Four q = {query[0][d], query[1][d], query[2][d], query[3][d]};
    scores[0] += q * key[d], scores[1] += q * next[d];
  }
}

// exp(x) of x <= 0 to 2 units in the last place, 0 below -87: 2^n * exp(r) with
// |r| <= ln(2) / 2, and the Taylor series of exp(r).
static inline Vector Exp(Vector x) {
  Vector n = (x < -87.0f ? Vector{} : x) * 1.44269504f - 0.5f;
  Integers whole = __builtin_convertvector(n, Integers);  // towards 0
  n = __builtin_convertvector(whole, Vector);
  Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f, y = Vector{} + 1.0f;
  for (int i = 7; i > 0; i--) y = y * r * (1.0f / i) + 1.0f;
  return x < -87.0f ? Vector{} : y * (Vector)((whole + 127) << 23);
}

// Of `count` queries, y = scale * the sum of weights * values, in the order of
// the entries, at `vectors` registers of the values from d on.
template <int vectors>
static void Mix(const std::vector<Entry>& entries, const float* weights, Four scale,
                int count, float* const* y, int64_t d) {
  Vector sums[kQueries][vectors] = {};
  for (const Entry& entry : entries) {
    Vector values[vectors];
    for (int v = 0; v < vectors; v++)
      values[v] = *(const Vector*)(entry.value + d + v * kLanes);
#pragma GCC unroll 4
    for (int i = 0; i < kQueries; i++)
      for (int v = 0; v < vectors; v++) sums[i][v] += values[v] * weights[i];
    weights += kQueries;
  }
  for (int i = 0; i < count; i++)
    for (int v = 0; v < vectors; v++)
      *(Vector*)(y[i] + d + v * kLanes) = sums[i][v] * scale[i];
}

struct Entries {  // [B, H, size, dim]
  const float* at;
  int64_t size, dim;
  Entries(const Floats& x)
      : at(x.typed_data()), size(x.dimensions()[2]), dim(x.dimensions()[3]) {}
  const float* Of(int64_t head, int64_t i) const { return at + (head * size + i) * dim; }
};

static ffi::Error Attention(ffi::ThreadPool pool, Floats queries,
                            ffi::Buffer<ffi::PRED> mask, Floats keys,
                            Floats new_keys, Floats values, Floats new_values,
                            Floats sinks, ffi::ResultBuffer<ffi::F32> result,
                            float softcap) {
  auto shape = queries.dimensions();
  int64_t heads = keys.dimensions()[1], tokens = shape[1], group = shape[2] / heads;
  int64_t count = group * tokens;  // queries of one head of keys
  const float *query = queries.typed_data(), *sink = sinks.typed_data();
  const bool* seen = mask.typed_data();
  Entries key[] = {keys, new_keys}, value[] = {values, new_values};
  int64_t all = key[0].size + key[1].size, blocks = (count + kQueries - 1) / kQueries;
  float* y = result->typed_data();
  auto run = [=](int64_t first, int64_t last) {
    std::vector<Entry> read;
    std::vector<float> scores;
    for (int64_t block = first; block < last; block++) {
      int64_t head = block / blocks, row = block % blocks * kQueries;
      int num = std::min<int64_t>(kQueries, count - row);
      const float* q[kQueries];
      const bool* sees[kQueries];
      float* to[kQueries];
      Four own_sink;
      for (int i = 0; i < kQueries; i++) {  // the last query fills the block
        int64_t r = row + std::min(i, num - 1), token = head / heads * tokens + r % tokens;
        int64_t at = (token * heads + head % heads) * group + r / tokens;
        q[i] = query + at * key[0].dim, to[i] = y + at * value[0].dim;
        sees[i] = seen + token * all;
        own_sink[i] = sink[head % heads * count + r];
      }
      read.clear();
      for (int64_t i = 0; i < all; i++) {
        Flags is_seen = -Flags{sees[0][i], sees[1][i], sees[2][i], sees[3][i]};
        if (!(sees[0][i] | sees[1][i] | sees[2][i] | sees[3][i])) continue;
        int part = i >= key[0].size;
        int64_t at = i - part * key[0].size;
        read.push_back({key[part].Of(head, at), value[part].Of(head, at), is_seen});
      }
      int64_t size = read.size();
      scores.assign((size * kQueries + 2 * kLanes) / kLanes * kLanes, -INFINITY);
      Four highest = own_sink;
      for (int64_t i = 0; i < size; i += 2) {
        Four both[2];
        bool has_next = i + 1 < size;
        Score(q, read[i].key, read[i + has_next].key, key[0].dim, both);
        for (int64_t j = 0; j <= has_next; j++) {
          Four score = both[j];
          if (softcap > 0)
            for (int k = 0; k < kQueries; k++)
              score[k] = softcap * std::tanh(score[k] / softcap);
          score = read[i + j].is_seen ? score : Four{} - INFINITY;
          highest = score > highest ? score : highest;
          *(Four*)&scores[(i + j) * kQueries] = score;
        }
      }
      Vector shift, rest;
      for (int lane = 0; lane < kLanes; lane++) {
        shift[lane] = highest[lane % kQueries];
        rest[lane] = own_sink[lane % kQueries];
      }
      for (int64_t i = 0; i < size * kQueries; i += kLanes)
        *(Vector*)&scores[i] = Exp(*(Vector*)&scores[i] - shift);
      rest = Exp(rest - shift);
      Four total{};
      for (int64_t i = 0; i < size; i++) total += *(Four*)&scores[i * kQueries];
      Four scale = 1 / (total + *(Four*)&rest);
      int64_t dim = value[0].dim, d = 0;
      for (; d + 2 * kLanes <= dim; d += 2 * kLanes)
        Mix<2>(read, scores.data(), scale, num, to, d);
      for (; d + kLanes <= dim; d += kLanes)
        Mix<1>(read, scores.data(), scale, num, to, d);
      for (; d < dim; d++) {
        Four sum{};
        for (int64_t i = 0; i < size; i++)
          sum += *(Four*)&scores[i * kQueries] * read[i].value[d];
        for (int i = 0; i < num; i++) to[i][d] = sum[i] * scale[i];
      }
    }
  };
  int64_t work = shape[0] * shape[2] * tokens * all * key[0].dim;
  Parallel(pool, shape[0] * heads * blocks, work < (1 << 17), run);
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
