// Memory of PyTorch's tensors on processors: large blocks from one range of addresses.
//
// A step takes and gives back the same blocks over and over. The C library puts small blocks of
// others between them, and glibc before 2.38 uses no free aligned block for the next one of its
// size: after some steps a tenth of the memory is holes. Here free blocks that touch are one, a
// block is taken from the smallest that fits, and blocks in use and free ones together exceed the
// most that was ever in use by at most a share: beyond that, free pages go back to the system.

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace {

// A block's length stands before it. So blocks of whole pages do not begin at the same place of a
// page, where processors take stores to one for stores to the other.
constexpr size_t HEADER = 64;
constexpr size_t LEAST = 1 << 16;         // smaller ones are the C library's
constexpr size_t SLACK = 32;              // resident beyond the most in use: a part in so many,
constexpr size_t LEAST_SLACK = 4u << 20;  // or so many bytes, if they are more

// Ranges of addresses. Those that touch are one.
class Ranges {
 public:
  size_t bytes = 0;

  void add(char* begin, size_t length) {
    bytes += length;
    auto after = by_address.lower_bound(begin);
    if (after != by_address.begin() &&
        std::prev(after)->first + std::prev(after)->second == begin) {
      begin = std::prev(after)->first;
      length += std::prev(after)->second;
      forget(std::prev(after));
    }
    if (after != by_address.end() && begin + length == after->first) {
      length += after->second;
      after = forget(after);
    }
    by_address.emplace_hint(after, begin, length);
    by_length.emplace(length, begin);
  }

  // The first bytes of the shortest that is long enough, of several the first; or null.
  char* take(size_t length) {
    auto found = by_length.lower_bound({length, nullptr});
    if (found == by_length.end()) return nullptr;
    auto [whole, begin] = *found;
    forget(by_address.find(begin));
    bytes -= whole;
    if (whole > length) add(begin + length, whole - length);
    return begin;
  }

  template <class Do>
  void each(Do work) const {
    for (auto [begin, length] : by_address) work(begin, length);
  }

  size_t longest() const { return by_length.empty() ? 0 : by_length.rbegin()->first; }

 private:
  std::map<char*, size_t> by_address;
  std::set<std::pair<size_t, char*>> by_length;

  std::map<char*, size_t>::iterator forget(std::map<char*, size_t>::iterator range) {
    by_length.erase({range->second, range->first});
    return by_address.erase(range);
  }
};

class Arena {
 public:
  bool reserve(size_t length) {
    void* found = mmap(nullptr, length, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return false;
    madvise(found, length, MADV_HUGEPAGE);
    begin = static_cast<char*>(found);
    end = begin + length;
    absent.add(begin, length);
    return true;
  }

  bool has(void* block) const { return begin <= block && block < end; }

  // Null where no range of addresses is left.
  void* take(size_t length) {
    length = (length + 2 * HEADER - 1) / HEADER * HEADER;
    pthread_mutex_lock(&mutex);
    char* block = resident.take(length);
    if (block == nullptr) {
      size_t most = std::max(most_used, used + length);
      most += std::max(most / SLACK, LEAST_SLACK);
      size_t needed = used + length + resident.bytes;
      if (needed > most) give_back(needed - most);
      block = absent.take(length);
    }
    if (block != nullptr) {
      used += length;
      most_used = std::max(most_used, used);
      std::memcpy(block, &length, sizeof(length));
    }
    pthread_mutex_unlock(&mutex);
    return block == nullptr ? nullptr : block + HEADER;
  }

  // The length of a block with its header.
  static size_t length_of(void* data) {
    size_t length;
    std::memcpy(&length, static_cast<char*>(data) - HEADER, sizeof(length));
    return length;
  }

  void give(void* data) {
    char* block = static_cast<char*>(data) - HEADER;
    size_t length = length_of(data);
    pthread_mutex_lock(&mutex);
    used -= length;
    resident.add(block, length);
    pthread_mutex_unlock(&mutex);
  }

  // Give all free pages back, with those that came along in huge ones.
  void trim() {
    pthread_mutex_lock(&mutex);
    give_back(resident.bytes);
    absent.each(drop);
    pthread_mutex_unlock(&mutex);
  }

  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

 private:
  char *begin = nullptr, *end = nullptr;
  Ranges resident, absent;  // free ones, whose pages are here or not
  size_t used = 0, most_used = 0;

  // Have the system take whole pages.
  static void drop(char* range, size_t length) {
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    auto first = (reinterpret_cast<uintptr_t>(range) + page - 1) / page * page;
    auto last = reinterpret_cast<uintptr_t>(range + length) / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  }

  // So many bytes, of the longest ranges.
  void give_back(size_t excess) {
    while (excess > 0 && resident.bytes > 0) {
      size_t length = resident.longest();
      char* range = resident.take(length);
      size_t given = std::min(length, std::max(excess / HEADER * HEADER, LEAST));
      if (given < length) resident.add(range, length - given);
      drop(range + length - given, given);
      absent.add(range + length - given, given);
      excess -= std::min(excess, given);
    }
  }
};

Arena& arena = *new Arena;  // never destroyed: tensors may be there until the process ends

// The bytes that tensors of all threads have taken since counting began, less those that they have
// given back, and the most of that since somebody asked. Nothing is counted unless somebody does.
class Counter {
 public:
  std::atomic<bool> is_on{false};
  std::atomic<int64_t> live{0}, most{0};

  void taken(void* data) {
    int64_t now = live.fetch_add(bytes(data)) + bytes(data), known = most.load();
    while (now > known && !most.compare_exchange_weak(known, now)) {
    }
  }

  void given(void* data) { live.fetch_sub(bytes(data)); }

 private:
  static int64_t bytes(void* data) {
    return arena.has(data) ? Arena::length_of(data) - HEADER : malloc_usable_size(data);
  }
};

Counter counter;

void free_block(void* data) {
  if (data == nullptr) return;
  if (counter.is_on.load(std::memory_order_relaxed)) counter.given(data);
  c10::profiledCPUMemoryReporter().Delete(data);
  if (arena.has(data)) {
    arena.give(data);
  } else {
    c10::free_cpu(data);
  }
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t length) override {
    void* data = nullptr;
    if (length >= LEAST && length < SIZE_MAX / 2) data = arena.take(length);
    if (data == nullptr) data = c10::alloc_cpu(length);  // or it says why there is none
    c10::profiledCPUMemoryReporter().New(data, length);
    if (counter.is_on.load(std::memory_order_relaxed) && data != nullptr) counter.taken(data);
    return {data, data, &free_block, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* to, const void* from, size_t length) const override {
    default_copy_data(to, from, length);
  }
};

}  // namespace

extern "C" {

// Have PyTorch take its blocks here. False, and nothing is changed, where it takes them from
// another allocator than its own, or the system reserves no addresses: of so many bytes.
bool take_over(size_t reserved) {
  static Allocator allocator;
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator() || !arena.reserve(reserved))
    return false;
  pthread_atfork([] { pthread_mutex_lock(&arena.mutex); },
                 [] { pthread_mutex_unlock(&arena.mutex); },
                 [] { pthread_mutex_unlock(&arena.mutex); });
  c10::SetCPUAllocator(&allocator);
  return true;
}

// Give the system all pages of free blocks.
void trim() { arena.trim(); }

// Count from zero, or no longer.
void count(bool is_on) {
  counter.is_on = false;
  counter.live = counter.most = 0;
  counter.is_on = is_on;
}

// The most bytes that were counted at a time since the last call.
int64_t take_most() {
  int64_t live = counter.live.load();
  return std::max(live, counter.most.exchange(live));
}

// Count so many bytes more, which are none that were taken just now, or fewer.
void adjust(int64_t more) { counter.live += more; }
}
