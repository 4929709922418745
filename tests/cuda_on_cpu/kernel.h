// What CUDA C++ as TVM writes it needs to be compiled by g++ and run by block.cpp.
// Compiled with -fsanitize=thread, so that every access to memory asks block.cpp first.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernel_info.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(threads)
#define __align__(bytes) alignas(bytes)
#define alignas(bytes) __attribute__((aligned(bytes)))
// Of one block, since blocks run one after the other; the section is poisoned ahead of each.
#define __shared__ static __attribute__((section("cuda_shared")))

#define threadIdx cuda_on_cpu_thread()
#define blockIdx cuda_on_cpu_block()
#define blockDim cuda_on_cpu_block_size()
#define gridDim cuda_on_cpu_grid_size()
#define __syncthreads() cuda_on_cpu_barrier(__LINE__)
#define __shfl_sync(...) shuffle(__LINE__, Lane::of, __VA_ARGS__)
#define __shfl_down_sync(...) shuffle(__LINE__, Lane::down, __VA_ARGS__)
#define __shfl_up_sync(...) shuffle(__LINE__, Lane::up, __VA_ARGS__)
#define __shfl_xor_sync(...) shuffle(__LINE__, Lane::with, __VA_ARGS__)

enum class Lane { of, down, up, with };

template <class T>
T shuffle(unsigned line, Lane which, unsigned mask, T value, unsigned by, unsigned width = 32) {
  static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes at most");
  unsigned own = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
  unsigned first = own & ~(width - 1), end = first + width, source = own;
  switch (which) {
    case Lane::of: source = first + by % width; break;
    case Lane::down: source = own + by < end ? own + by : own; break;
    case Lane::up: source = own >= first + by ? own - by : own; break;
    case Lane::with: source = (own ^ by) < end ? own ^ by : own; break;
  }
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = cuda_on_cpu_shuffle(line, mask, source, bits);
  memcpy(&value, &bits, sizeof value);
  return value;
}

// --- vectors, aligned as CUDA has them: an access at another address is a fault ---

#define VECTOR(T, name)                       \
  struct alignas(2 * sizeof(T)) name##2 {     \
    T x, y;                                   \
  };                                          \
  struct alignas(4 * sizeof(T)) name##4 {     \
    T x, y, z, w;                             \
  };                                          \
  inline name##2 make_##name##2(T x, T y) {   \
    return {x, y};                            \
  }                                           \
  inline name##4 make_##name##4(T x, T y, T z, T w) { \
    return {x, y, z, w};                      \
  }
VECTOR(float, float)
VECTOR(int, int)
VECTOR(unsigned, uint)
VECTOR(short, short)
VECTOR(unsigned short, ushort)
VECTOR(signed char, char)
VECTOR(unsigned char, uchar)
#undef VECTOR

// --- numbers ---

inline float __int_as_float(int bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
#define CUDART_NAN_F __int_as_float(0x7fffffff)
#define CUDART_INF_F __int_as_float(0x7f800000)

inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
T max(T a, T b) { return a > b ? a : b; }
template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
T min(T a, T b) { return a < b ? a : b; }

// IEEE's binary16, rounded to nearest even as the hardware does; any NaN becomes CUDA's.
struct half {
  unsigned short bits = 0;
  half() = default;
  half(float value) {
    uint32_t b;
    memcpy(&b, &value, 4);
    uint32_t sign = b >> 16 & 0x8000, magnitude = b & 0x7fffffff;
    if (magnitude > 0x7f800000) {
      bits = 0x7fff;
      return;
    }
    if (magnitude < 0x38800000) {  // below the least normal number: whole steps of 2^-24
      float scaled = __int_as_float((int)magnitude) * 16777216.f;
      bits = (unsigned short)(sign | (uint32_t)rintf(scaled));
      return;
    }
    uint32_t rounded = (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13;
    bits = (unsigned short)(sign | (rounded < 0x7c00 ? rounded : 0x7c00));
  }
  operator float() const {
    uint32_t magnitude = bits & 0x7fff;
    float value = magnitude >= 0x7c00 ? __int_as_float((int)(magnitude << 13 | 0x7f800000))
                                      : __int_as_float((int)(magnitude << 13)) * 0x1p112f;
    return bits & 0x8000 ? -value : value;
  }
};
using __half = half;
struct half2 {
  half x, y;
};
using __half2 = half2;
inline float __half2float(half x) { return x; }
inline half __float2half(float x) { return x; }
inline bool __hgt(half a, half b) { return (float)a > (float)b; }
inline bool __hlt(half a, half b) { return (float)a < (float)b; }

// --- kernels as the driver finds them ---

extern "C" char __start_cuda_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_cuda_shared[] __attribute__((weak, visibility("hidden")));

// Arguments lie in the host's memory: nothing here is checked.
#define UNCHECKED __attribute__((no_sanitize("thread", "alignment")))

template <class... T>
struct Of {
  static constexpr size_t count = sizeof...(T), sizes[] = {sizeof(T)..., 0};
  template <void (*function)(T...), size_t... i>
  UNCHECKED static void unpack(void **arguments, std::index_sequence<i...>) {
    function(*(T *)arguments[i]...);
  }
  template <void (*function)(T...)>
  UNCHECKED static void call(void **arguments) {
    unpack<function>(arguments, std::index_sequence_for<T...>());
  }
};
template <class... T>
Of<T...> of(void (*)(T...));

#define KERNEL(name, most)                                                              \
  extern "C" Kernel name##_info;                                                        \
  Kernel name##_info = {decltype(of(&name))::template call<&name>,                      \
                        decltype(of(&name))::sizes, decltype(of(&name))::count, most,   \
                        __start_cuda_shared, __stop_cuda_shared};
