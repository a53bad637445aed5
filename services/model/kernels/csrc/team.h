// A team of threads that shares out the steps of a pass.
//
// Every member runs the same program, a sequence of steps. A step is cut into claims; a member takes claims until none is left,
// and goes on when all claims are *done* -- not when all members have arrived. A member that the system has put aside
// therefore holds up nobody unless it holds a claim, and a pass beside another busy process costs what the cores left over
// can do, not a time slice a barrier. (An OpenMP barrier on two cores shared with one busy process: 600 ms a pass.)
//
// A member that comes late finds its steps closed and runs through them without touching anything: a step's number is part of the
// ticket that claims are taken from, and numbers are never used again.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace slipstream {

class Team;

class Member {
 public:
  Member(Team& team, int index, uint64_t step) : team_(team), index_(index), step_(step) {}
  int index() const { return index_; }
  uint64_t step() const { return step_; }

  // Calls body(i) for items 0 .. items - 1, each once, on some member; returns when all are done. `prepare` is called before a
  // member's first item: what it computes is for that member alone. `claims` pieces, or a few for each member.
  template <typename Body, typename Prepare>
  void share(int items, Prepare prepare, Body body, int claims = 0);
  template <typename Body>
  void share(int items, Body body, int claims = 0) {
    share(items, [] {}, body, claims);
  }

 private:
  Team& team_;
  int index_;
  uint64_t step_;
};

class Team {
 public:
  using Program = std::function<void(Member&)>;

  explicit Team(int threads) : threads_(threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
  }
  ~Team() {
    stopping_.store(true);
    job_number_.fetch_add(1);
    job_number_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return threads_; }

  // The caller is member 0. The program is copied: it may capture pointers by value, and must follow them inside items only.
  void run(const Program& program) {
    auto job = std::make_shared<Job>(Job{program, next_step_});
    {
      const std::lock_guard<std::mutex> lock(job_mutex_);
      job_ = job;
    }
    job_number_.fetch_add(1);
    job_number_.notify_all();
    Member caller(*this, 0, next_step_);
    job->program(caller);
    next_step_ = caller.step();
  }

 private:
  friend class Member;

  struct Job {
    Program program;
    uint64_t first_step;
  };

  static constexpr int CLAIM_BITS = 16;
  static constexpr int SPINS = 4000;  // some tens of microseconds, then sleep

  template <typename T>
  static void wait_while(const std::atomic<T>& value, T old) {
    for (int i = 0; i < SPINS; i++) {
      if (value.load(std::memory_order_acquire) != old) return;
      _mm_pause();
    }
    value.wait(old, std::memory_order_acquire);
  }

  void work(int index) {
    uint32_t seen = 0;
    while (true) {
      wait_while(job_number_, seen);
      seen = job_number_.load();
      if (stopping_.load()) return;
      std::shared_ptr<Job> job;
      {
        const std::lock_guard<std::mutex> lock(job_mutex_);
        job = job_;
      }
      if (job == nullptr) continue;
      Member member(*this, index, job->first_step);
      job->program(member);
    }
  }

  // A claim of step `step`, or -1 when there is none left; waits until the step is done before it says so.
  int claim(uint64_t step, int claims) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (ticket >> CLAIM_BITS == step) {
      const int next = static_cast<int>(ticket & ((1u << CLAIM_BITS) - 1));
      if (next == claims) {
        wait_while(ticket_, ticket);
        ticket = ticket_.load(std::memory_order_acquire);
      } else if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
        return next;
      }
    }
    return -1;
  }
  void finish(uint64_t step, int claims) {
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 < claims) return;
    done_.store(0, std::memory_order_relaxed);
    ticket_.store((step + 1) << CLAIM_BITS, std::memory_order_release);
    ticket_.notify_all();
  }

  const int threads_;
  std::vector<std::thread> workers_;
  std::atomic<bool> stopping_{false};
  std::atomic<uint32_t> job_number_{0};
  std::mutex job_mutex_;
  std::shared_ptr<Job> job_;
  uint64_t next_step_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{0};  // number of the open step, and its next claim
  alignas(64) std::atomic<int> done_{0};
};

template <typename Body, typename Prepare>
void Member::share(int items, Prepare prepare, Body body, int claims) {
  if (items == 0) return;
  claims = std::min({items, claims > 0 ? claims : 2 * team_.threads_, (1 << Team::CLAIM_BITS) - 1});
  bool prepared = false;
  for (int c; (c = team_.claim(step_, claims)) >= 0; team_.finish(step_, claims)) {
    if (!prepared) prepare();
    prepared = true;
    const int first = static_cast<int>(static_cast<int64_t>(items) * c / claims);
    const int last = static_cast<int>(static_cast<int64_t>(items) * (c + 1) / claims);
    for (int i = first; i < last; i++) body(i);
  }
  step_++;
}

}  // namespace slipstream
