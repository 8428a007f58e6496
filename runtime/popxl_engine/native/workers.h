// Threads that share one product after the other.
//
// They meet in loops of their own, as OpenMP's waiting threads sleep before so small a product
// ends.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <thread>
#ifdef _OPENMP
#include <omp.h>
#endif

using std::int64_t;

constexpr int SPINS = 2000;  // of a thread that waits, before it lets others run

// Where all threads meet.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}

  void wait() {
    const int round = round_.load(std::memory_order_acquire);
    if (here_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      here_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int n = 0; round_.load(std::memory_order_acquire) == round; ++n)
      if (n >= SPINS) std::this_thread::yield();
  }

 private:
  const int threads_;
  std::atomic<int> here_{0}, round_{0};
};

// One of the threads that work on the same matrices.
struct Worker {
  Barrier& barrier;
  int index, count;

  // Its part of 0 .. length.
  int64_t first(int64_t length) const { return length * index / count; }
  int64_t end(int64_t length) const { return length * (index + 1) / count; }
};

// Calls work(worker) on so many threads at once.
template <class Work>
static void on_workers(int threads, const Work& work) {
  std::optional<Barrier> barrier;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#ifdef _OPENMP
    const int index = omp_get_thread_num(), team = omp_get_num_threads();
#else
    const int index = 0, team = 1;
#endif
#pragma omp single
    barrier.emplace(team);
    work(Worker{*barrier, index, team});
  }
}
