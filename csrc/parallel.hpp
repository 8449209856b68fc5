// Parallel loops on PyTorch's own threads: two pools that spin against each other cost ten times.
#pragma once

#include <stdint.h>

#include <functional>

namespace blocksparse {

// The addresses of torch_parallel_for and torch_get_num_threads in the libtorch_cpu of this process.
void share_threads(uintptr_t parallel_for, uintptr_t get_num_threads);

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
