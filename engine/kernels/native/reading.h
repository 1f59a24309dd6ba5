// Experts are read by the threads of the step that waits for them.
#pragma once
#include "xla/ffi/api/ffi.h"

namespace kvarts {

// While it lives, records that this thread reads are read by these threads too: they wait for it.
class SharedReads {
 public:
  explicit SharedReads(const xla::ffi::ThreadPool& threads);
  ~SharedReads();
  SharedReads(const SharedReads&) = delete;
  SharedReads& operator=(const SharedReads&) = delete;
};

}  // namespace kvarts
