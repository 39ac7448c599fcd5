// Threads that compute pieces of work as they come. They know nothing of Python, so nobody waits for its interpreter.

#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

// As in execution/compiled_calls.py. `status` is a result: what the work returned, or one of these.
constexpr int64_t WAITING = -1, STARTED = -2, CANCELLED = -3;

struct Piece {
    const void *table;
    int64_t bytes;  // of one number
    void *jobs;
    int64_t count, trains;
    int64_t status;
    double seconds;  // a result
};

// The processor that this thread runs on, and a move to any other one. A system may wake a thread on the processor of the one that
// woke it, although others are idle; then one waits until the other has done its work.
inline int processor() {
#ifdef __linux__
    return sched_getcpu();
#else
    return -1;
#endif
}

inline void leave_processor(int which) {
#ifdef __linux__
    static const cpu_set_t allowed = [] { cpu_set_t set; return sched_getaffinity(0, sizeof set, &set) ? cpu_set_t{} : set; }();
    cpu_set_t others = allowed;
    CPU_CLR(which, &others);
    if (CPU_COUNT(&others)) sched_setaffinity(0, sizeof others, &others);
#endif
}

// Helpers wait for pieces until the process ends: nobody ends them.
class Helpers {
    using Work = int (*)(const Piece &);
    Work work;
    std::mutex mutex;
    std::condition_variable came, done;
    std::deque<Piece *> waiting;
    int asked_from = -1;  // the processor of the thread that started the last piece

    void compute(std::unique_lock<std::mutex> &lock) {
        Piece &piece = *waiting.front();
        waiting.pop_front();
        piece.status = STARTED;
        lock.unlock();
        const auto began = std::chrono::steady_clock::now();
        const int status = work(piece);
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
        lock.lock();
        piece.seconds = spent.count(), piece.status = status;
        done.notify_all();
    }

   public:
    Helpers(Work work, int64_t count) : work(work) {
        for (int64_t i = 0; i < count; i++)
            std::thread([this] {
                std::unique_lock<std::mutex> lock(mutex);
                for (;;) {
                    came.wait(lock, [this] { return !waiting.empty(); });
                    if (asked_from >= 0 && asked_from == processor()) leave_processor(asked_from);
                    compute(lock);
                }
            }).detach();
    }

    void start(Piece &piece) {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            piece.status = WAITING, asked_from = processor();
            waiting.push_back(&piece);
        }
        came.notify_one();
    }

    // Wait for a piece, and compute what waits in the meantime; not for long, so that the caller can be interrupted.
    void finish(const Piece &piece) {
        std::unique_lock<std::mutex> lock(mutex);
        if (piece.status == STARTED && waiting.empty())
            done.wait_for(lock, std::chrono::milliseconds(100), [&] { return piece.status != STARTED; });
        else if (piece.status < 0 && piece.status != CANCELLED)
            compute(lock);
    }

    // A piece that waits is not computed any more.
    void cancel(Piece &piece) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (piece.status != WAITING) return;
        waiting.erase(std::find(waiting.begin(), waiting.end(), &piece));
        piece.status = CANCELLED;
    }
};
