// Products of a few rows with matrices that were packed when they were loaded.
//
// A matrix [in, out] is stored as panels [out / kPanel, in, kPanel], float32 or
// bfloat16, so that it is read once, in order, at the speed of the memory. Every
// output is summed over `in` in ascending order: a row's result has the same
// bits whatever rows stand beside it.
#include <vector>

#include "parallel.h"
#include "vectors.h"

namespace ffi = xla::ffi;

// Inputs per block: a block of a panel stays in the second-level cache while
// several calls read it. Sums go through `y` between blocks, which is exact.
constexpr int64_t kBlock = 2048;

static inline void Load(const float* w, Vector* u) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; v++) u[v] = *(const Vector*)(w + v * kLanes);
}

// A word of packed bfloat16 holds a column of one vector in its low half, and
// the same column of the next vector in its high half (packed.py).
static inline void Load(const BFloat16* w, Vector* u) {
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; v += 2) {
    Words pair = *(const Words*)(w + v * kLanes);
    u[v] = (Vector)(pair << 16);
    u[v + 1] = (Vector)(pair & 0xffff0000u);
  }
}

// One call: y[n, panel] (+)= x[n, in] * w[in, panel]. Meanwhile it fetches a
// share of the next panel, `step` bytes for each input.
template <typename T, int N>
static void Multiply(const T* w, const float* x, int64_t stride, int64_t in,
                     float* y, int64_t out, bool adds, const char* next,
                     int64_t step) {
  Vector sums[N][kVectors], u[kVectors];
  for (int i = 0; i < N; i++)
    for (int v = 0; v < kVectors; v++)
      sums[i][v] = adds ? *(Vector*)(y + i * out + v * kLanes) : Vector{};
  for (int64_t k = 0; k < in; k++, w += kPanel, next += step) {
    Load(w, u);
    __builtin_prefetch(next, 0, 2);
    if (sizeof(T) * kPanel > 64) __builtin_prefetch(next + 64, 0, 2);
#pragma GCC unroll 12
    for (int i = 0; i < N; i++) {
      float t = x[i * stride + k];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) sums[i][v] += u[v] * t;
    }
  }
  for (int i = 0; i < N; i++)
    for (int v = 0; v < kVectors; v++)
      *(Vector*)(y + i * out + v * kLanes) = sums[i][v];
}

template <typename T, int N>
static void MultiplyAny(int64_t n, const T* w, const float* x, int64_t stride,
                        int64_t in, float* y, int64_t out, bool adds,
                        const char* next, int64_t step) {
  if constexpr (N > 0) {
    if (n == N) return Multiply<T, N>(w, x, stride, in, y, out, adds, next, step);
    MultiplyAny<T, N - 1>(n, w, x, stride, in, y, out, adds, next, step);
  }
}

struct Matrix {
  const void* values;
  float* y;
  int64_t panels;
  bool is_bfloat16;
};

template <typename T>
static void Panel(const T* w, const float* x, int64_t rows, int64_t in, float* y,
                  int64_t out) {
  int64_t calls = (rows + kRows - 1) / kRows;
  for (int64_t k = 0; k < in; k += kBlock) {
    int64_t size = std::min(kBlock, in - k), first = 0;
    for (int64_t c = 0, n; c < calls; c++, first += n) {
      n = (rows - first + calls - c - 1) / (calls - c);
      const T* next = w + (k + size) * kPanel + c * size * kPanel / calls;
      MultiplyAny<T, kRows>(n, w + k * kPanel, x + first * in + k, in, size,
                            y + first * out, out, k > 0, (const char*)next,
                            (int64_t)sizeof(T) * kPanel / calls);
    }
  }
}

static ffi::Error Rows(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                       ffi::RemainingArgs kernels, ffi::RemainingRets results) {
  int64_t rows = x.dimensions()[0], in = x.dimensions()[1], panels = 0, bytes = 0;
  const float* xs = x.typed_data();
  std::vector<Matrix> matrices;
  for (size_t i = 0; i < kernels.size(); i++) {
    auto w = kernels.get<ffi::AnyBuffer>(i);
    auto y = results.get<ffi::AnyBuffer>(i);
    if (!w || !y || w->dimensions()[1] != in || w->dimensions()[2] != kPanel)
      return ffi::Error::InvalidArgument("a matrix is not packed for this CPU");
    bool narrow = w->element_type() == ffi::BF16;
    matrices.push_back({w->untyped_data(), (*y)->typed_data<float>(),
                        w->dimensions()[0], narrow});
    panels += w->dimensions()[0], bytes += w->size_bytes();
  }
  auto run = [=](int64_t first, int64_t last) {
    for (const Matrix& m : matrices) {
      for (int64_t p = std::max<int64_t>(first, 0); p < std::min(last, m.panels); p++) {
        int64_t at = p * in * kPanel, out = m.panels * kPanel;
        float* y = m.y + p * kPanel;
        if (m.is_bfloat16) Panel((const BFloat16*)m.values + at, xs, rows, in, y, out);
        else Panel((const float*)m.values + at, xs, rows, in, y, out);
      }
      first -= m.panels, last -= m.panels;
    }
  };
  Parallel(pool, panels, bytes < (1 << 16), run);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(rows, Rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets());
extern "C" int panel_width() { return kPanel; }
extern "C" int vector_width() { return kLanes; }
