// Parallel loops on PyTorch's own threads: two pools that spin against each other cost ten times.
#pragma once

#include <stdint.h>

#include <functional>

namespace blocksparse {

// The addresses of torch_parallel_for and torch_get_num_threads in the libtorch_cpu of this process.
void share_threads(uintptr_t parallel_for, uintptr_t get_num_threads);

// While it lives, subnormal numbers count as 0 in the calling thread's parallel loops, operands and results; if not
// `flush`, the loops do as that thread does. Products of bfloat16 need it: the CPU's own instructions for them
// (VDPBF16PS, TDPBF16PS) know no other way, and all instruction sets are to agree. On x86-64 and aarch64; elsewhere it
// does nothing. Between the loops the thread is as it was: threads that PyTorch starts then would inherit its mode.
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

// Memory of the calling thread that stays for its next call; of at least `bytes`, aligned to 64. It holds until the
// same thread asks for the same slot again.
enum class Scratch { kPanels, kGradients, kSums, kWeights, kTurned, kCount };
void* scratch(Scratch slot, int64_t bytes);

// Gives back what of it is too large to keep, at the end of a call.
void trim_scratch();

}  // namespace blocksparse
