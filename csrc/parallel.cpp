#include "parallel.hpp"

#include <atomic>
#include <cstdlib>
#include <new>
#include <stdexcept>

namespace blocksparse {
namespace {

// libtorch's C interface (torch/csrc/stable/c/shim.h): errors are returned, as anything but 0.
using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                                void* context);
using GetNumThreads = int32_t (*)(uint32_t* count);

ParallelFor torch_parallel_for = nullptr;
GetNumThreads torch_get_num_threads = nullptr;

struct Loop {
  const std::function<void(int64_t)>& task;
  int64_t count;
  std::atomic<int64_t> next{0};

  void work() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
  }
};

constexpr int64_t kKeptBytes = 64 << 20;

struct Buffer {
  void* data = nullptr;
  int64_t bytes = 0;

  void resize(int64_t wanted) {
    std::free(data);
    bytes = (wanted + 63) / 64 * 64;
    data = bytes ? std::aligned_alloc(64, bytes) : nullptr;
    if (bytes && !data) {
      bytes = 0;
      throw std::bad_alloc();
    }
  }
  ~Buffer() { std::free(data); }
};

thread_local Buffer buffers[static_cast<int>(Scratch::kCount)];

}  // namespace

void share_threads(uintptr_t parallel_for, uintptr_t get_num_threads) {
  torch_parallel_for = reinterpret_cast<ParallelFor>(parallel_for);
  torch_get_num_threads = reinterpret_cast<GetNumThreads>(get_num_threads);
}

int64_t thread_count() {
  if (!torch_get_num_threads) throw std::logic_error("share_threads comes before the first loop");
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return threads;
}

void parallel_tasks(int64_t count, const std::function<void(int64_t)>& task) {
  const int64_t threads = thread_count();
  Loop loop{task, count};
  const int64_t workers = count < threads ? count : threads;
  if (workers <= 1) return loop.work();
  const int32_t error = torch_parallel_for(
      0, workers, 1,
      [](int64_t begin, int64_t end, void* context) {
        for (; begin < end; ++begin) static_cast<Loop*>(context)->work();
      },
      &loop);
  if (error) throw std::runtime_error("torch_parallel_for failed");
}

void* scratch(Scratch slot, int64_t bytes) {
  Buffer& buffer = buffers[static_cast<int>(slot)];
  if (buffer.bytes < bytes) buffer.resize(bytes);
  return buffer.data;
}

void trim_scratch() {
  for (Buffer& buffer : buffers)
    if (buffer.bytes > kKeptBytes) buffer.resize(0);
}

}  // namespace blocksparse
