// What XLA's doors to the kernels share.
#pragma once
#include <cstdint>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace kvarts {

// The kernels of the instruction set in use.
const Kernels& chosen();

constexpr int64_t kWorthSharing = 1 << 17;  // multiplications; below, waking a thread costs more

inline xla::ffi::Error invalid(const char* what) { return xla::ffi::Error::InvalidArgument(what); }
inline xla::ffi::Error out_of_memory() {
  return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted, "out of memory");
}

}  // namespace kvarts
