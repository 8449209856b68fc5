// Parallel loops on PyTorch's own threads, as two pools that spin against each other take ten times as long.
#pragma once

#include <stdint.h>

#include <functional>

namespace blocksparse {

// The addresses of torch_parallel_for and torch_get_num_threads in the libtorch_cpu of this process.
void share_threads(uintptr_t parallel_for, uintptr_t get_num_threads);

// While it lives, subnormal operands and results count as 0 in the calling thread's parallel loops; without `flush`,
// the loops follow that thread's mode. Products of bfloat16 need it: the CPU's own instructions for them (VDPBF16PS,
// TDPBF16PS) always flush, and all instruction sets must agree. On x86-64 and aarch64; elsewhere it does nothing.
// Between the loops the thread has its own mode, as threads that PyTorch starts then would inherit it.
class FlushSubnormals {
 public:
  explicit FlushSubnormals(bool flush);
  ~FlushSubnormals();
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  const bool before_;
};

// Calls task(0) ... task(count - 1), each once, in the order in which threads come free.
void parallel_tasks(int64_t count, const std::function<void(int64_t)>& task);

// How many threads share a loop.
int64_t thread_count();

// Memory of the calling thread that is kept for its next call: at least `bytes`, aligned to 64. It is valid until the
// same thread asks for the same slot again.
enum class Scratch { kPanels, kGradients, kSums, kWeights, kTurned, kCount };
void* scratch(Scratch slot, int64_t bytes);

// Frees the memory that is too large to keep, at the end of a call.
void trim_scratch();

}  // namespace blocksparse
