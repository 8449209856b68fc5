#include "core/parallel.hpp"

#include "core/addresses.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>

namespace blocksparse {
namespace {

// libtorch's C interface (torch/csrc/stable/c/shim.h): anything but 0 is an error.
using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                                void* context);
using GetNumThreads = int32_t (*)(uint32_t* count);

ParallelFor torch_parallel_for = nullptr;
GetNumThreads torch_get_num_threads = nullptr;

// The flags of a thread that flush subnormal numbers to 0.
#if defined(__x86_64__)
constexpr uint64_t kFlush = 0x8040;  // FTZ and DAZ of MXCSR
uint64_t control() { return _mm_getcsr(); }
void set_control(uint64_t flags) { _mm_setcsr(static_cast<unsigned>(flags)); }
#elif defined(__aarch64__)
constexpr uint64_t kFlush = 1 << 24;  // FZ of FPCR
uint64_t control() {
  uint64_t flags;
  __asm__ volatile("mrs %0, fpcr" : "=r"(flags));
  return flags;
}
void set_control(uint64_t flags) { __asm__ volatile("msr fpcr, %0" : : "r"(flags) : "memory"); }
#else
constexpr uint64_t kFlush = 0;
uint64_t control() { return 0; }
void set_control(uint64_t) {}
#endif

thread_local bool flushes = false, in_task = false;
thread_local const BorrowThreads* borrowed = nullptr;

// Sets these flags during its lifetime.
class FlushAs {
 public:
  explicit FlushAs(uint64_t wanted) : before_(control() & kFlush) { set(wanted); }
  ~FlushAs() { set(before_); }
  FlushAs(const FlushAs&) = delete;
  FlushAs& operator=(const FlushAs&) = delete;

 private:
  static void set(uint64_t wanted) {
    const uint64_t flags = control();
    if ((flags & kFlush) != wanted) set_control((flags & ~kFlush) | wanted);
  }
  const uint64_t before_;
};

thread_local LoopState state;

struct UndoState {
  ~UndoState() {
    if (state.undo) state.undo();
    state = {};
  }
};

struct Loop {
  const std::function<void(int64_t)>& task;
  int64_t count;
  uint64_t flush;
  std::atomic<int64_t> next{0};

  void work() {
    const FlushAs mode(flush);
    const UndoState at_end;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
  }
};

// Marks the tasks of a loop that several threads share; such loops do not nest.
struct InTask {
  InTask() { in_task = true; }
  ~InTask() { in_task = false; }
};

// Threads that help the caller with a loop. Each helper shares ownership, because it may start after the loop has
// ended.
class Helpers {
 public:
  explicit Helpers(Loop& loop) : loop_(loop) {}

  void help() {
    if (inside_.fetch_add(1, std::memory_order_acquire) < kClosed) try {
        const InTask mark;
        loop_.work();
      } catch (...) {
        if (!failed_.exchange(true)) error_ = std::current_exception();
      }
    inside_.fetch_sub(1, std::memory_order_release);
  }

  // Wait for the helpers that have started; the others do nothing from now on. A caller that waited for all would block
  // forever if it is a thread of the same pool and the others wait too.
  void close() {
    inside_.fetch_add(kClosed, std::memory_order_acquire);
    while (inside_.load(std::memory_order_acquire) != kClosed) std::this_thread::yield();
    if (failed_) std::rethrow_exception(error_);
  }

 private:
  static constexpr int64_t kClosed = int64_t(1) << 32;
  Loop& loop_;
  std::atomic<int64_t> inside_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

constexpr int64_t kKeptBytes = 64 << 20;

#if defined(BLOCKSPARSE_SANITIZE)
// Each request gets memory of its own, of the exact size and full of NaN, so that sanitizers and tests notice accesses
// out of range, use after the next request, and reads of unwritten memory.
constexpr bool kReuses = false;
constexpr int64_t kWhole = 1;
#else
constexpr bool kReuses = true;
constexpr int64_t kWhole = 64;
#endif

struct Buffer {
  void* data = nullptr;
  int64_t bytes = 0;

  void resize(int64_t wanted) {
    std::free(data);
    data = nullptr, bytes = 0;
    wanted = ceil_div(wanted, kWhole) * kWhole;
    if (wanted && posix_memalign(&data, 64, wanted)) throw std::bad_alloc();
    bytes = wanted;
    if (!kReuses && data) std::memset(data, 0xff, bytes);
  }
  ~Buffer() { std::free(data); }
};

thread_local Buffer buffers[static_cast<int>(Scratch::kCount)];

}  // namespace

void share_threads(uintptr_t parallel_for, uintptr_t get_num_threads) {
  torch_parallel_for = reinterpret_cast<ParallelFor>(parallel_for);
  torch_get_num_threads = reinterpret_cast<GetNumThreads>(get_num_threads);
}

BorrowThreads::BorrowThreads(int64_t threads, Schedule schedule)
    : threads(threads), schedule(std::move(schedule)), before_(borrowed) {
  borrowed = this;
}
BorrowThreads::~BorrowThreads() { borrowed = before_; }

int64_t thread_count() {
  if (in_task) return 1;
  if (borrowed) return borrowed->threads;
  if (!torch_get_num_threads) return 1;
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return threads;
}

FlushSubnormals::FlushSubnormals(bool flush) : before_(flushes) { flushes = flush; }
FlushSubnormals::~FlushSubnormals() { flushes = before_; }

void parallel_tasks(int64_t count, const std::function<void(int64_t)>& task) {
  const int64_t threads = thread_count();
  Loop loop{task, count, flushes ? kFlush : control() & kFlush};
  const int64_t workers = count < threads ? count : threads;
  if (workers <= 1) return loop.work();
  if (borrowed) {
    const auto helpers = std::make_shared<Helpers>(loop);
    for (int64_t i = 1; i < workers; ++i) borrowed->schedule([helpers] { helpers->help(); });
    try {
      const InTask mark;
      loop.work();
    } catch (...) {
      loop.next = count;
      helpers->close();
      throw;
    }
    return helpers->close();
  }
  const int32_t error = torch_parallel_for(
      0, workers, 1,
      [](int64_t begin, int64_t end, void* context) {
        const InTask mark;
        for (; begin < end; ++begin) static_cast<Loop*>(context)->work();
      },
      &loop);
  if (error) throw std::runtime_error("torch_parallel_for failed");
}

LoopState& loop_state() { return state; }

void* scratch(Scratch slot, int64_t bytes) {
  Buffer& buffer = buffers[static_cast<int>(slot)];
  if (!kReuses || buffer.bytes < bytes) buffer.resize(bytes);
  return buffer.data;
}

void trim_scratch() {
  for (Buffer& buffer : buffers)
    if (buffer.bytes > kKeptBytes) buffer.resize(0);
}

}  // namespace blocksparse
