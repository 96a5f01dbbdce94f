// Division of rows by their root mean square. A row has the same bits whatever
// rows stand beside it, which XLA's sums do not promise.
#include <cmath>

#include "parallel.h"
#include "vectors.h"

static xla::ffi::Error Norm(xla::ffi::ThreadPool pool,
                            xla::ffi::Buffer<xla::ffi::F32> x,
                            xla::ffi::ResultBuffer<xla::ffi::F32> y, float eps) {
  int64_t size = x.dimensions().back(), rows = x.element_count() / size;
  const float* from = x.typed_data();
  float* to = y->typed_data();
  auto run = [=](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      const float* in = from + row * size;
      Vector sums{};
      int64_t i = 0;
      for (; i + kLanes <= size; i += kLanes) {
        Vector part = *(const Vector*)(in + i);
        sums += part * part;
      }
      float sum = 0;
      for (int lane = 0; lane < kLanes; lane++) sum += sums[lane];
      for (; i < size; i++) sum += in[i] * in[i];
      float scale = 1 / std::sqrt(sum / size + eps);
      for (i = 0; i < size; i++) to[row * size + i] = in[i] * scale;
    }
  };
  Parallel(pool, rows, rows * size < (1 << 17), run);
  return xla::ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(norm, Norm,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("eps"));
