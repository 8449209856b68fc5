// Parallel loops on the threads of PyTorch or XLA. A pool of our own would spin against theirs and take ten times as
// long.
#pragma once

#include <stdint.h>

#include <functional>

namespace blocksparse {

// Use torch_parallel_for and torch_get_num_threads at these addresses in the libtorch_cpu of this process. Until then
// loops run on the thread that calls them.
void share_threads(uintptr_t parallel_for, uintptr_t get_num_threads);

// During its lifetime the parallel loops of the calling thread run on `threads` threads: the calling one, and others
// that run what `schedule` gets, whenever they are free. Without it loops run on PyTorch's threads.
class BorrowThreads {
 public:
  using Schedule = std::function<void(std::function<void()>)>;
  BorrowThreads(int64_t threads, Schedule schedule);
  ~BorrowThreads();
  BorrowThreads(const BorrowThreads&) = delete;
  BorrowThreads& operator=(const BorrowThreads&) = delete;

  const int64_t threads;
  const Schedule schedule;

 private:
  const BorrowThreads* const before_;
};

// During its lifetime subnormal operands and results count as 0 in the parallel loops of the calling thread; without
// `flush` the loops follow the mode of that thread. Products of bfloat16 need it: the CPU's instructions for them
// (VDPBF16PS, TDPBF16PS) always flush, and all instruction sets must agree. Works on x86-64 and aarch64 only. Between
// loops the thread keeps its own mode, since new threads of PyTorch would inherit it.
class FlushSubnormals {
 public:
  explicit FlushSubnormals(bool flush);
  ~FlushSubnormals();
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  const bool before_;
};

// Call task(0) ... task(count - 1), each once, on whichever thread is free. A loop within a task runs on its thread.
void parallel_tasks(int64_t count, const std::function<void(int64_t)>& task);

// Up to this many threads each prepare all that they read, rather than share the work: what another core has just
// written takes longer to read than to make again, and no thread waits.
constexpr int64_t kFewThreads = 2;

// Call part(0) ... part(parts - 1), side by side if they are several. The loops of a single part run on all threads.
inline void parallel_parts(int64_t parts, const std::function<void(int64_t)>& part) {
  if (parts == 1) return part(0);
  parallel_tasks(parts, part);
}

// The tile registers, say, that kernels have set up on a thread for as long as it works in a parallel loop.
struct LoopState {
  uint64_t set_up = 0;
  void (*undo)() = nullptr;
};

// Return the state of the calling thread. Once the thread leaves its parallel loop, the state is undone and cleared.
LoopState& loop_state();

// Return the number of threads that share a loop, 1 within a task.
int64_t thread_count();

// Return at least `bytes` of memory of the calling thread, aligned to 64. It stays valid until the same thread asks for
// the same slot again, and is kept for the next call.
enum class Scratch { kPanels, kGradients, kSums, kWeights, kTurned, kCount };
void* scratch(Scratch slot, int64_t bytes);

// Free memory that is too large to keep; call it at the end of an op.
void trim_scratch();

}  // namespace blocksparse
