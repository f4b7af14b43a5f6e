// A pool of threads with the two functions of XLA's that the kernels call, and random numbers.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return (int64_t)threads_.size(); }
  template <class Task>
  void Schedule(Task&& task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.emplace_back(std::forward<Task>(task));
    }
    changed_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return ended_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  bool ended_ = false;
};

// Runs check(pool, seed) for several seeds on each of some threads that share a pool.
template <class Check>
void on_threads(int callers, int seeds, const Check& check) {
  Pool pool(3);
  std::vector<std::thread> threads;
  for (int caller = 0; caller < callers; ++caller) {
    threads.emplace_back([&, caller] {
      for (int i = 0; i < seeds; ++i) check(pool, (uint32_t)(caller * seeds + i));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline void fail(const char* what, double found, double expected) {
  std::fprintf(stderr, "%s: %.9g instead of %.9g\n", what, found, expected);
  std::exit(1);
}
