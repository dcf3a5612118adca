// Threads that run a pass together, with barriers between steps that depend on each other.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

// Threads wait for each other a hundred times per token, mostly for microseconds. So they spin
// first, and yield if the last thread seems to have no core to run on.
class Barrier {
    std::atomic<int> arrived{0}, round{0};

  public:
    void wait(int size) {
        int mine = round.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(mine + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == mine; spins++)
            if (spins > 4000) std::this_thread::yield();
    }
};

struct Team {
    int rank, size;
    Barrier* barrier;
    void sync() const {
        if (size > 1) barrier->wait(size);
    }
    // This thread's range of n items, in multiples of `grain`.
    void share(int64_t n, int64_t grain, int64_t& begin, int64_t& end) const {
        int64_t blocks = (n + grain - 1) / grain;
        begin = std::min(n, blocks * rank / size * grain);
        end = std::min(n, blocks * (rank + 1) / size * grain);
    }
};

// Call the function in every thread of a team: OpenMP's threads, which PyTorch uses too, or where
// the compiler has no OpenMP, new threads, which take some ten microseconds to start.
template <typename Function>
void run_threads(int64_t threads, Function function) {
    Barrier barrier;
    if (threads <= 1) {
        function(Team{0, 1, &barrier});
        return;
    }
#ifdef _OPENMP
#pragma omp parallel num_threads(static_cast<int>(threads))
    function(Team{omp_get_thread_num(), omp_get_num_threads(), &barrier});
#else
    const int size = static_cast<int>(threads);
    std::vector<std::thread> others;
    for (int rank = 1; rank < size; rank++)
        others.emplace_back([&, rank] { function(Team{rank, size, &barrier}); });
    function(Team{0, size, &barrier});
    for (std::thread& other : others) other.join();
#endif
}

}  // namespace
