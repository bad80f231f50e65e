#include "thread_pool.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(_WIN32)
#include <intrin.h>
#else
#include <pthread.h>
#include <signal.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

namespace llmctl {
namespace {

constexpr size_t kCacheLine = 64;
constexpr int kPausesPerLook = 32;                     // between two looks at the clock
constexpr std::chrono::microseconds kSpin{100};        // a wake-up by the system costs about as much
constexpr std::chrono::microseconds kSpinCrowded{2};   // more workers than cores: who spins keeps the others from working

inline void pause() {
#if defined(_MSC_VER)
  YieldProcessor();
#elif defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
  __asm__ __volatile__("yield");
#endif
}

int usable_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  return static_cast<int>(std::thread::hardware_concurrency());
}

// How often this process was forked off since the library was loaded: what a pool compares to know that its threads are
// gone. Cheaper than getpid(), which is a system call.
std::atomic<int> forks{0};

void watch_forks() {
#if !defined(_WIN32)
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  if (registered != 0) throw std::runtime_error("no memory for a fork handler");
#endif
}

void name_this_thread(int worker) {  // what profilers and top -H show
#if defined(__linux__)
  pthread_setname_np(pthread_self(), ("llmctl-" + std::to_string(worker)).c_str());
#else
  (void)worker;
#endif
}

// Signals go to the thread that can act on them (Python's main thread); faults stay with the thread that caused them.
class SignalsBlocked {
 public:
#if !defined(_WIN32)
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
#endif
};

// A number that threads wait on. Waiting reads it for a while, then sleeps; changing it costs one more load where nobody
// sleeps. The order is sequentially consistent: either the sleeper sees the change or the changer sees the sleeper.
class alignas(kCacheLine) WaitWord {
 public:
  uint32_t load() const { return value_.load(std::memory_order_acquire); }
  void store(uint32_t value) {
    value_.store(value);
    wake();
  }
  uint32_t add(uint32_t amount) {
    const uint32_t before = value_.fetch_add(amount);
    wake();
    return before + amount;
  }
  // Lets nobody know: for a count whose other end is all that is waited for.
  uint32_t subtract_quietly(uint32_t amount) { return value_.fetch_sub(amount) - amount; }
  void wake() {
    if (sleepers_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }  // a sleeper is either before its last look or asleep
    changed_.notify_all();
  }
  template <class Done>
  void wait(std::chrono::microseconds spin, Done done) {
    if (spin_until(spin, done)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    changed_.wait(lock, [&] { return done(value_.load()); });
    sleepers_.fetch_sub(1);
  }

 private:
  template <class Done>
  bool spin_until(std::chrono::microseconds spin, Done done) {
    if (spin_shortly(done)) return true;  // the common case, without a look at the clock
    const auto deadline = std::chrono::steady_clock::now() + spin;
    do {
      if (spin_shortly(done)) return true;
    } while (std::chrono::steady_clock::now() < deadline);
    return false;
  }
  template <class Done>
  bool spin_shortly(Done done) {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (done(load())) return true;
      pause();
    }
    return false;
  }

  std::atomic<uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

// Thrown out of barrier() where another worker's body failed and will never come.
struct Abandoned : std::exception {
  const char* what() const noexcept override { return "another worker of the thread pool failed"; }
};

}  // namespace

struct ThreadPool::State {
  explicit State(int threads) : size(threads), spin(threads > usable_cores() ? kSpinCrowded : kSpin) {
    const SignalsBlocked inherited_by_the_threads;
    try {
      for (int worker = 1; worker < size; ++worker) workers.emplace_back([this, worker] { work(worker); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~State() { stop(); }

  void stop() {
    stopping.store(true);
    generation.add(1);
    for (std::thread& worker : workers) worker.join();
    workers.clear();
  }

  void work(int worker) {
    name_this_thread(worker);
    for (uint32_t seen = 0;; ++seen) {
      generation.wait(spin, [seen](uint32_t now) { return now != seen; });
      if (stopping.load()) return;
      attempt(worker);
      if (unfinished.subtract_quietly(1) == 0) unfinished.wake();
    }
  }

  void attempt(int worker) noexcept {
    try {
      (*body)(worker);
    } catch (...) {
      fail(std::current_exception());
    }
  }

  // Keeps the first failure and frees those who wait for the failed worker.
  void fail(std::exception_ptr error) {
    {
      std::lock_guard<std::mutex> lock(failure_mutex);
      if (!failure) failure = error;
    }
    failed.store(true);
    phase.add(1);
  }

  void run(const std::function<void(int)>& work) {
    if (busy.exchange(true)) throw std::logic_error("the thread pool is running already");
    body = &work;
    unfinished.store(static_cast<uint32_t>(size - 1));
    generation.add(1);
    attempt(0);
    unfinished.wait(spin, [](uint32_t left) { return left == 0; });
    std::exception_ptr error = std::move(failure);
    failure = nullptr;
    arrived.store(0);
    failed.store(false);
    busy.store(false);
    if (error) std::rethrow_exception(error);
  }

  void check() const {
    if (failed.load(std::memory_order_relaxed)) throw Abandoned();
  }

  void barrier() {
    const uint32_t current = phase.load();
    if (failed.load()) throw Abandoned();
    if (arrived.fetch_add(1) + 1 == size) {
      arrived.store(0, std::memory_order_relaxed);
      phase.add(1);
    } else {
      phase.wait(spin, [current](uint32_t now) { return now != current; });
    }
    if (failed.load()) throw Abandoned();
  }

  const int size;
  const std::chrono::microseconds spin;
  const int born = forks.load();
  std::vector<std::thread> workers;

  WaitWord generation;  // one more for every run
  WaitWord unfinished;  // workers but the caller that have not come to the end of this run
  WaitWord phase;       // one more for every barrier passed, and for every failure
  alignas(kCacheLine) std::atomic<int> arrived{0};
  alignas(kCacheLine) std::atomic<bool> failed{false};
  std::atomic<bool> stopping{false};
  std::atomic<bool> busy{false};
  const std::function<void(int)>* body = nullptr;
  std::mutex failure_mutex;
  std::exception_ptr failure;
};

ThreadPool::ThreadPool(int threads) {
  if (threads < 1) throw std::invalid_argument("a thread pool needs at least one thread");
  watch_forks();
  state_ = std::make_unique<State>(threads);
}

// The threads of a pool that came over a fork do not exist, and a lock may be held by one of them: the state is left as it is.
ThreadPool::~ThreadPool() {
  if (state_->born != forks.load()) (void)state_.release();
}

int ThreadPool::size() const { return state_->size; }

void ThreadPool::run(const std::function<void(int)>& body) {
  if (state_->size == 1) return body(0);
  if (state_->born != forks.load()) {
    const int threads = state_->size;
    (void)state_.release();
    state_ = std::make_unique<State>(threads);
  }
  state_->run(body);
}

void ThreadPool::barrier() {
  if (state_->size > 1) state_->barrier();
}

void ThreadPool::check() const { state_->check(); }

}  // namespace llmctl
