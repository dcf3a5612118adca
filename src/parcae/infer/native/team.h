// Threads that run a pass together, with barriers between steps that depend on each other.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <thread>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

// Threads wait for each other a hundred times per token, mostly for microseconds. So they spin
// first, and sleep if the last thread seems to have no core to run on: it may then have theirs.
class Barrier {
    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
    };
    std::atomic<int> arrived{0}, round{0};
    std::vector<Counter> taken;  // items of each thread's range since the last wait

  public:
    explicit Barrier(int64_t size) : taken(size) {}
    void wait() {
        int mine = round.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<int>(taken.size())) {
            for (Counter& counter : taken) counter.value.store(0, std::memory_order_relaxed);
            arrived.store(0, std::memory_order_relaxed);
            round.store(mine + 1, std::memory_order_release);
            round.notify_all();
            return;
        }
        for (int spins = 0; spins < 4000; spins++)
            if (round.load(std::memory_order_acquire) != mine) return;
        round.wait(mine, std::memory_order_acquire);
    }
    int64_t take(int range) { return taken[range].value.fetch_add(1, std::memory_order_relaxed); }
};

struct Team {
    int rank, size;
    Barrier* barrier;
    void sync() const {
        if (size > 1) barrier->wait();
    }
    // This thread's range of n items, in multiples of `grain`.
    void share(int64_t n, int64_t grain, int64_t& begin, int64_t& end) const {
        int64_t blocks = (n + grain - 1) / grain;
        begin = std::min(n, blocks * rank / size * grain);
        end = std::min(n, blocks * (rank + 1) / size * grain);
    }
    // Call the function with every number below n, in some thread each; once between two syncs.
    // Each thread has a range, and when it has finished, takes what is left of the others': another
    // program may hold up a thread for longer than the whole step takes.
    template <typename Function>
    void for_each(int64_t n, Function function) const {
        for (int other = 0; other < size; other++) {
            const int range = (rank + other) % size;
            const int64_t begin = n * range / size, end = n * (range + 1) / size;
            if (size == 1)
                for (int64_t i = begin; i < end; i++) function(i);
            else
                for (int64_t i; (i = begin + barrier->take(range)) < end;) function(i);
        }
    }
};

// Call the function in every thread of a team: OpenMP's threads, which PyTorch uses too, or where
// the compiler has no OpenMP, new threads, which take some ten microseconds to start.
template <typename Function>
void run_threads(int64_t threads, Function function) {
    if (threads <= 1) {
        function(Team{0, 1, nullptr});
        return;
    }
#ifdef _OPENMP
    std::optional<Barrier> barrier;
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
#pragma omp single
        barrier.emplace(omp_get_num_threads());  // OpenMP may give fewer threads than asked for
        function(Team{omp_get_thread_num(), omp_get_num_threads(), &*barrier});
    }
#else
    Barrier barrier(threads);
    const int size = static_cast<int>(threads);
    std::vector<std::thread> others;
    for (int rank = 1; rank < size; rank++)
        others.emplace_back([&, rank] { function(Team{rank, size, &barrier}); });
    function(Team{0, size, &barrier});
    for (std::thread& other : others) other.join();
#endif
}

}  // namespace
