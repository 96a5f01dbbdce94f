// Vector registers of this processor, in the vector extensions of GCC and Clang.
#pragma once
#include <cstdint>

// kBytes: size of a register. kVectors: registers across a panel of a packed
// matrix. kRows: rows of one call, so that all sums stay in registers.
#if defined(__AVX512F__)
constexpr int kBytes = 64, kVectors = 2, kRows = 12;  // 32 registers
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kBytes = 32, kVectors = 2, kRows = 6;  // 16 registers
#elif defined(__ARM_NEON) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
constexpr int kBytes = 16, kVectors = 4, kRows = 6;  // 32 registers
#else
#error "this processor has none of AVX-512, AVX2 with FMA, and NEON"
#endif
constexpr int kLanes = kBytes / 4, kPanel = kLanes * kVectors;

typedef float Vector __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef uint16_t BFloat16;
