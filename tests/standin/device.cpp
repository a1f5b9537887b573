// A strict stand-in for a GPU, in host memory, as PyTorch's PrivateUse1. Written against the wheel's public headers.
//
//  * Pointers are fake, the real address + 2^47: whoever reads device memory as if it were the host's gets a SIGSEGV.
//  * A caching allocator after CUDA's: blocks of 512 bytes, segments of 2, 20 and 2n MiB, best fit, split, merge, one
//    retry after the cache was flushed. All processes of a user share a device of STANDIN_BYTES; a fraction of it can
//    be set for a process, and what passes it is a torch.OutOfMemoryError.
//  * Operators run on the CPU, on aliases of the memory. What they allocate, outputs and workspaces, is taken from the
//    device at the moment of asking: an operator fails before it has written anything, as a kernel is launched last.
//  * Tensors of two devices in one operator are refused as CUDA refuses them.
//  * Random operators draw from a generator of the device's own.
//  * Products of matrices and convolutions round to TF32 where PyTorch's settings let CUDA do so, as convolutions do.
//  * Copies that need not wait are done as late as a stream allows: towards the device when an operator touches what
//    they write to, towards the host when somebody waits for the device.
//  * What would make a CPU wait, what is taken from the device and given back, and each launch is in a log.
//  * A virtual clock charges so much for a launch and for each number: see the functions at the end.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <map>
#include <set>

namespace standin {
using namespace at;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr auto kDev = c10::DeviceType::PrivateUse1;
constexpr int kMost = 4;  // devices
constexpr size_t KiB = 1024, MiB = 1024 * KiB;
constexpr uintptr_t kFake = uintptr_t(1) << 47;

inline void* fake(void* p) { return p ? (void*)((uintptr_t)p + kFake) : nullptr; }
inline void* real(const void* p) { return p ? (void*)((uintptr_t)p - kFake) : nullptr; }
inline bool is_fake(const void* p) { return (uintptr_t)p >= kFake; }

int64_t env(const char* name, int64_t other) {
  auto v = getenv(name);
  return v ? atoll(v) : other;
}
const int kCount = std::min<int>(kMost, (int)env("STANDIN_COUNT", 2));
const size_t kTotal = env("STANDIN_BYTES", 4096 * (int64_t)MiB);
const size_t kContext = env("STANDIN_CONTEXT", 64 * (int64_t)MiB);      // what a process takes beside the allocator
const size_t kWorkspace = env("STANDIN_WORKSPACE", 4 * (int64_t)MiB);   // kept by the first product of matrices
std::atomic<bool> is_late{env("STANDIN_LATE", 1) != 0};
bool forked = false;
const char* kForked =
    "Cannot re-initialize STANDIN in forked subprocess. To use it with multiprocessing, you must use the 'spawn' start "
    "method";
thread_local int current = 0;

// ---- the log, and the virtual clock ------------------------------------------------------------------------------
enum Kind : int { kAlloc, kFree, kSegment, kSegmentFree, kFlush, kSync, kCopyIn, kCopyOut, kLaunch };
struct Entry {
  int kind;
  int64_t bytes;
  double at;
  std::string what;
};
struct Log {
  std::atomic<bool> on{false};
  std::mutex m;
  std::deque<Entry> entries;
  std::atomic<int64_t> touches{0};  // of everything, whether it is logged or not
} journal;
struct Virtual {  // seconds; two timelines, for a launch returns before its work is done
  std::mutex m;
  bool on = false;
  double per_launch = 0, per_number = 0, host = 0, busy_until = 0;
  void launch(int64_t numbers) {
    if (!on) return;
    std::lock_guard<std::mutex> l(m);
    host += per_launch;
    busy_until = std::max(busy_until, host) + per_number * numbers;
  }
  void wait() {
    if (!on) return;
    std::lock_guard<std::mutex> l(m);
    host = std::max(host, busy_until);
  }
} clock_;
using Callback = void (*)(int, int64_t, const char*);
std::atomic<Callback> callback{nullptr};
void note(Kind kind, int64_t bytes, const std::string& what) {
  journal.touches++;
  if (auto f = callback.load()) f(kind, bytes, what.c_str());
  if (!journal.on) return;
  std::lock_guard<std::mutex> l(journal.m);
  journal.entries.push_back({kind, bytes, clock_.host, what});
}

// ---- what every process holds of the devices ---------------------------------------------------------------------
struct Tenant {
  std::atomic<int> pid;
  std::atomic<int64_t> bytes[kMost];
};
bool is_gone(int pid) { return kill(pid, 0) != 0 && errno == ESRCH; }
struct Ledger {
  static constexpr int kTenants = 256;
  Tenant* all;
  Tenant* mine = nullptr;
  std::mutex m;
  Ledger() {
    // Of its own where STANDIN_LEDGER names it: test runs side by side are not each other's tenants.
    auto own = getenv("STANDIN_LEDGER");
    auto name = "/standin-" + std::to_string(getuid()) + "-" + (own ? own : "shared");
    int f = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    TORCH_CHECK(f >= 0 && ftruncate(f, sizeof(Tenant) * kTenants) == 0, "no shared memory for the stand-in device");
    all = (Tenant*)mmap(nullptr, sizeof(Tenant) * kTenants, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
    close(f);
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
  }
  void enter(int d) {
    TORCH_CHECK(!forked, kForked);
    std::lock_guard<std::mutex> l(m);
    for (int i = 0; i < kTenants && !mine; i++) {
      int was = all[i].pid;
      if ((was == 0 || is_gone(was)) && all[i].pid.compare_exchange_strong(was, getpid())) {
        mine = &all[i];
        for (auto& b : mine->bytes) b = 0;
      }
    }
    TORCH_CHECK(mine, "no room in the ledger of the stand-in device");
    if (mine->bytes[d] == 0) mine->bytes[d] = kContext;  // as a CUDA context is outside the allocator
  }
  int64_t used(int d) {
    int64_t sum = 0;
    for (int i = 0; i < kTenants; i++) {
      int p = all[i].pid;
      if (p && (p == getpid() || !is_gone(p))) sum += all[i].bytes[d];
    }
    return sum;
  }
};
Ledger& ledger() {
  static auto* l = new Ledger;
  return *l;
}

// ---- the caching allocator ---------------------------------------------------------------------------------------
struct Block {
  char* ptr;
  size_t size, asked = 0;
  bool is_used = false, is_large;
  Block *prev = nullptr, *next = nullptr;
  bool is_part() const { return prev || next; }
};
struct Less {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->ptr < b->ptr;
  }
};
void finish_copies();
std::string mib(size_t x) {
  char text[64];
  snprintf(text, sizeof text, "%.2f MiB", (double)x / MiB);
  return text;
}
struct Heap {
  int device;
  double fraction = 1.0;
  std::set<Block*, Less> idle[2];
  std::map<void*, Block*> live;
  DeviceStats stats;
  std::recursive_mutex m;
  int64_t fails_in = 0;  // the allocation from now on that is made to fail, counted from 1; 0: none
  int64_t count = 0;     // of allocations

  void add(c10::CachingAllocator::StatArray& s, bool is_large, int64_t n) {
    for (int i : {0, is_large ? 2 : 1}) n >= 0 ? s[i].increase(n) : s[i].decrease(-n);
  }
  size_t reserved() { return stats.reserved_bytes[0].current; }
  void rest(Block* b, bool is_now) {  // an idle block of a segment that is in use
    if (b->is_part()) add(stats.inactive_split_bytes, b->is_large, is_now ? (int64_t)b->size : -(int64_t)b->size);
  }
  Block* segment(size_t n, bool is_large) {
    ledger().enter(device);
    if (fraction < 1.0 && reserved() + n > (size_t)(fraction * kTotal)) return nullptr;
    if (ledger().used(device) + n > kTotal) return nullptr;
    auto p = (char*)mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    ledger().mine->bytes[device] += n;
    add(stats.reserved_bytes, is_large, n);
    add(stats.segment, is_large, 1);
    stats.num_device_alloc++;
    note(kSegment, n, "");
    return new Block{p, n, 0, false, is_large};
  }
  void flush(const char* why) {
    note(kFlush, 0, why);
    for (auto& pool : idle)
      for (auto it = pool.begin(); it != pool.end();) {
        auto b = *it;
        if (b->is_part()) {
          ++it;
          continue;
        }
        munmap(b->ptr, b->size);
        if (ledger().mine) ledger().mine->bytes[device] -= b->size;
        add(stats.reserved_bytes, b->is_large, -(int64_t)b->size);
        add(stats.segment, b->is_large, -1);
        stats.num_device_free++;
        note(kSegmentFree, b->size, why);
        clock_.wait();  // cudaFree waits for the device
        it = pool.erase(it);
        delete b;
      }
  }
  void refuse(size_t asked) {
    stats.num_ooms++;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "STANDIN out of memory. Tried to allocate ", mib(asked), ". Device ",
                     device, " has a total capacity of ", mib(kTotal), " of which ",
                     mib(kTotal - std::min<size_t>(kTotal, ledger().used(device))),
                     " is free. Of the allocated memory ", mib(stats.allocated_bytes[0].current),
                     " is allocated by PyTorch, and ", mib(reserved()), " is reserved.");
  }
  void* malloc(size_t asked) {  // returns what the host can read
    if (!asked) return nullptr;
    TORCH_CHECK(!forked, kForked);
    std::lock_guard<std::recursive_mutex> l(m);
    count++;
    if (fails_in && --fails_in == 0) refuse(asked);
    size_t n = (asked + 511) / 512 * 512;
    bool is_large = n > MiB;
    auto& pool = idle[is_large];
    Block key{nullptr, n};
    auto it = pool.lower_bound(&key);
    Block* b;
    if (it != pool.end()) {
      b = *it;
      pool.erase(it);
      rest(b, false);
    } else {
      size_t size = !is_large ? 2 * MiB : n < 10 * MiB ? 20 * MiB : (n + 2 * MiB - 1) / (2 * MiB) * (2 * MiB);
      b = segment(size, is_large);
      if (!b) {
        finish_copies();
        flush("retry");
        stats.num_alloc_retries++;
        b = segment(size, is_large);
      }
      if (!b) refuse(asked);
    }
    if (is_large ? b->size - n > MiB : b->size - n >= 512) {
      auto r = new Block{b->ptr + n, b->size - n, 0, false, is_large, b, b->next};
      if (b->next) b->next->prev = r;
      b->next = r;
      b->size = n;
      pool.insert(r);
      rest(r, true);
    }
    b->is_used = true;
    b->asked = asked;
    memset(b->ptr, 0xFD, std::min<size_t>(n, 4096));  // nobody may count on zeros
    add(stats.allocated_bytes, is_large, b->size);
    add(stats.allocation, is_large, 1);
    add(stats.active, is_large, 1);
    add(stats.active_bytes, is_large, b->size);
    add(stats.requested_bytes, is_large, asked);
    live[b->ptr] = b;
    note(kAlloc, asked, "");
    return b->ptr;
  }
  bool free(void* p) {  // as the host reads it; false where it is none of these
    if (forked) return true;
    std::lock_guard<std::recursive_mutex> l(m);
    auto it = live.find(p);
    if (it == live.end()) return false;
    auto b = it->second;
    live.erase(it);
    b->is_used = false;
    note(kFree, b->asked, "");
    add(stats.allocated_bytes, b->is_large, -(int64_t)b->size);
    add(stats.allocation, b->is_large, -1);
    add(stats.active, b->is_large, -1);
    add(stats.active_bytes, b->is_large, -(int64_t)b->size);
    add(stats.requested_bytes, b->is_large, -(int64_t)b->asked);
    auto& pool = idle[b->is_large];
    if (auto n = b->next; n && !n->is_used) {
      rest(n, false);
      pool.erase(n);
      b->size += n->size;
      b->next = n->next;
      if (n->next) n->next->prev = b;
      delete n;
    }
    if (auto q = b->prev; q && !q->is_used) {
      rest(q, false);
      pool.erase(q);
      q->size += b->size;
      q->next = b->next;
      if (b->next) b->next->prev = q;
      delete b;
      b = q;
    }
    pool.insert(b);
    rest(b, true);
    return true;
  }
};
std::vector<Heap*>& heaps() {
  static auto* h = [] {
    auto v = new std::vector<Heap*>;
    for (int i = 0; i < kCount; i++) {
      v->push_back(new Heap);
      v->back()->device = i;
    }
    return v;
  }();
  return *h;
}
Heap& heap(int d) {
  TORCH_CHECK(d >= 0 && d < kCount, "invalid device ordinal");
  return *heaps()[d];
}
bool release_real(void* p) {
  for (auto h : heaps())
    if (h->free(p)) return true;
  return false;
}
void release(void* p) { release_real(real(p)); }

struct Allocator final : c10::DeviceAllocator {
  DataPtr allocate(size_t n) override {
    auto p = fake(heap(current).malloc(n));
    return {p, p, &release, Device(kDev, current)};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* d, const void* s, size_t n) const override { memmove(real(d), real(s), n); }
  bool initialized() override { return ledger().mine != nullptr; }
  void emptyCache(c10::MempoolId_t) override {
    finish_copies();
    for (auto h : heaps()) {
      std::lock_guard<std::recursive_mutex> l(h->m);
      h->flush("empty_cache");
    }
  }
  void recordStream(const DataPtr&, c10::Stream) override {}
  DeviceStats getDeviceStats(DeviceIndex d) override {
    std::lock_guard<std::recursive_mutex> l(heap(d).m);
    return heap(d).stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override {
    std::lock_guard<std::recursive_mutex> l(heap(d).m);
    auto& s = heap(d).stats;
    for (auto a : {&s.allocation, &s.segment, &s.active, &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes,
                   &s.requested_bytes, &s.inactive_split_bytes})
      for (auto& x : *a) x.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    ledger().enter(d);
    journal.touches++;
    return {kTotal - std::min<size_t>(kTotal, ledger().used(d)), kTotal};
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(kDev, &allocator);

// What the CPU's kernels allocate while they stand for the device's is taken from the device.
thread_local int within = -1;  // the device whose operator runs in this thread
struct Within {
  int before;
  explicit Within(int d) : before(within) { within = d; }
  ~Within() { within = before; }
};
void release_host(void* p) {
  if (!release_real(p)) c10::GetDefaultCPUAllocator()->raw_deleter()(p);
}
struct HostAllocator final : c10::Allocator {
  DataPtr allocate(size_t n) override {
    if (within < 0) return c10::GetDefaultCPUAllocator()->allocate(n);
    auto p = heap(within).malloc(n);
    return {p, p, &release_host, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &release_host; }
  void copy_data(void* d, const void* s, size_t n) const override { memcpy(d, s, n); }
} host_allocator;

// ---- pinned memory -----------------------------------------------------------------------------------------------
std::mutex pins_m;
std::map<char*, size_t>& pins() {
  static auto* p = new std::map<char*, size_t>;
  return *p;
}
struct Pinned final : c10::Allocator {
  static void drop(void* p) {
    if (!p) return;
    {
      std::lock_guard<std::mutex> l(pins_m);
      pins().erase((char*)p);
    }
    ::free(p);
  }
  DataPtr allocate(size_t n) override {
    TORCH_CHECK(!forked, kForked);
    void* p = n ? aligned_alloc(64, (n + 63) / 64 * 64) : nullptr;
    if (p) {
      std::lock_guard<std::mutex> l(pins_m);
      pins()[(char*)p] = n;
    }
    return {p, p, &drop, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* d, const void* s, size_t n) const override { memcpy(d, s, n); }
} pinned;
bool is_pinned(const void* q) {
  std::lock_guard<std::mutex> l(pins_m);
  auto it = pins().upper_bound((char*)q);
  return it != pins().begin() && (--it, (char*)q < it->first + std::max<size_t>(1, it->second));
}

// ---- copies that are not done yet --------------------------------------------------------------------------------
struct Pending {
  const void* storage;  // that they write to
  std::function<void()> copy;
};
std::recursive_mutex late_m;
std::atomic<int> num_late_in{0};
std::vector<Pending>& late_in() {
  static auto* v = new std::vector<Pending>;
  return *v;
}
std::vector<Pending>& late_out() {
  static auto* v = new std::vector<Pending>;
  return *v;
}
// What was copied is let go by whoever calls this, after the lock: tensors may wait for Python's own lock to go.
void finish(std::vector<Pending>& pending, std::vector<Pending>& done) {
  auto all = std::move(pending);
  pending.clear();
  // No operation of the program: dispatch modes see none of it.
  c10::impl::ExcludeDispatchKeyGuard unseen(c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot}));
  for (auto& one : all) one.copy();
  std::move(all.begin(), all.end(), std::back_inserter(done));
}
void finish_in() {
  if (!num_late_in) return;
  std::vector<Pending> done;
  std::lock_guard<std::recursive_mutex> l(late_m);
  num_late_in = 0;
  finish(late_in(), done);
}
void finish_in(const void* storage) {  // in their order, up to the last that writes there
  if (!num_late_in) return;
  std::vector<Pending> done;
  std::lock_guard<std::recursive_mutex> l(late_m);
  auto& all = late_in();
  auto last = std::find_if(all.rbegin(), all.rend(), [&](auto& one) { return one.storage == storage; });
  std::vector<Pending> due(std::make_move_iterator(all.begin()), std::make_move_iterator(last.base()));
  all.erase(all.begin(), last.base());
  num_late_in = all.size();
  finish(due, done);
}
void finish_out(const void* storage) {  // as finish_in: what reads there later on the stream finds it written
  std::vector<Pending> done;
  std::lock_guard<std::recursive_mutex> l(late_m);
  auto& all = late_out();
  auto last = std::find_if(all.rbegin(), all.rend(), [&](auto& one) { return one.storage == storage; });
  std::vector<Pending> due(std::make_move_iterator(all.begin()), std::make_move_iterator(last.base()));
  all.erase(all.begin(), last.base());
  finish(due, done);
}
void finish_copies() {
  std::vector<Pending> done;
  std::lock_guard<std::recursive_mutex> l(late_m);
  num_late_in = 0;
  finish(late_in(), done);
  finish(late_out(), done);
}
void wait_for_device(const std::string& why) {
  note(kSync, 0, why);
  clock_.wait();
  finish_copies();
}

// ---- devices, streams, events ------------------------------------------------------------------------------------
struct Event {
  double at;
};
thread_local StreamId stream_id[kMost];
std::atomic<int64_t> next_stream{1};
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kDev; }
  Device getDevice() const override { return Device(kDev, current); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < kCount, "invalid device ordinal");
    if (d.index() >= 0) current = d.index();
  }
  Device exchangeDevice(Device d) const override {
    auto was = getDevice();
    setDevice(d);
    return was;
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current = d.index();
  }
  DeviceIndex deviceCount() const noexcept override { return kCount; }
  Device full(Device d) const { return d.has_index() ? d : getDevice(); }
  Stream getStream(Device d) const override {
    d = full(d);
    return Stream(Stream::UNSAFE, d, stream_id[d.index()]);
  }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, full(d)); }
  Stream getStreamFromGlobalPool(Device d, bool) const override {
    return Stream(Stream::UNSAFE, full(d), next_stream++);
  }
  Stream getNewStream(Device d, int) const override { return Stream(Stream::UNSAFE, full(d), next_stream++); }
  Stream exchangeStream(Stream s) const override {
    auto was = getStream(s.device());
    stream_id[s.device_index()] = s.id();
    return was;
  }
  void record(void** e, const Stream&, const DeviceIndex, const EventFlag) const override {
    if (!*e) *e = new Event;
    std::lock_guard<std::mutex> l(clock_.m);
    ((Event*)*e)->at = std::max(clock_.host, clock_.busy_until);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void* e) const override {
    bool is_done = !clock_.on || ((Event*)e)->at <= clock_.host;
    if (is_done) finish_copies();
    return is_done;
  }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete (Event*)e; }
  bool queryStream(const Stream&) const override { return !clock_.on || clock_.busy_until <= clock_.host; }
  void synchronizeStream(const Stream&) const override { wait_for_device("synchronize a stream"); }
  void synchronizeEvent(void*) const override { wait_for_device("synchronize an event"); }
  void synchronizeDevice(const DeviceIndex) const override { wait_for_device("synchronize"); }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    return 1e3 * (((Event*)b)->at - ((Event*)a)->at);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- random numbers of its own -----------------------------------------------------------------------------------
struct Gen final : c10::GeneratorImpl {
  Generator inner;
  uint64_t seed_;
  explicit Gen(DeviceIndex d, uint64_t s = c10::detail::getNonDeterministicRandom())
      : GeneratorImpl(Device(kDev, d), DispatchKeySet(DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator(~s)),
        seed_(s) {}
  void set_current_seed(uint64_t s) override {
    seed_ = s;
    inner.set_current_seed(~s);
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "no offset"); }
  Tensor inner_state() const { return Tensor(inner.unsafeGetGeneratorImpl()->get_state()); }
  void set_inner(const Tensor& t) { inner.unsafeGetGeneratorImpl()->set_state(*t.unsafeGetTensorImpl()); }
  void set_state(const c10::TensorImpl& t) override {
    at::detail::check_rng_state(t);
    auto n = inner_state().numel();
    TORCH_CHECK(t.numel() == n + 8, "RNG state is wrong size");
    auto p = (const uint8_t*)t.data();
    memcpy(&seed_, p, 8);
    auto s = at::detail::empty_cpu({n}, at::kByte);
    memcpy(s.data_ptr(), p + 8, n);
    set_inner(Tensor(s));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto in = inner_state();
    auto s = Tensor(at::detail::empty_cpu({in.numel() + 8}, at::kByte));
    memcpy(s.data_ptr(), &seed_, 8);
    memcpy((uint8_t*)s.data_ptr() + 8, in.data_ptr(), in.numel());
    return s.getIntrusivePtr();
  }
  Gen* clone_impl() const override {
    auto g = new Gen(device().index(), seed_);
    g->set_inner(inner_state());
    return g;
  }
};
Generator& default_generator(int d) {
  static auto* g = [] {
    auto v = new std::vector<Generator>;
    for (int i = 0; i < kCount; i++) v->push_back(at::make_generator<Gen>(i));
    return v;
  }();
  return (*g)[d < 0 ? current : d];
}
bool hand_out_default = false;

void resize_bytes(c10::StorageImpl* s, size_t n) {
  c10::DeviceGuard guard(s->device());
  finish_in();
  auto fresh = allocator.allocate(n);
  if (n && s->nbytes()) memcpy(real(fresh.get()), real(s->data()), std::min(n, s->nbytes()));
  s->set_data_ptr_noswap(std::move(fresh));
  s->set_nbytes(n);
}
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return kCount > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return ledger().mine != nullptr; }
  void init() const override { TORCH_CHECK(!forked, kForked); }
  DeviceIndex deviceCount() const override { return kCount; }
  void setCurrentDevice(DeviceIndex d) const override {
    TORCH_CHECK(d < kCount, "invalid device ordinal");
    current = d;
  }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto was = current;
    if (d >= 0) current = d;
    return was;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  Device getDeviceFromPtr(void*) const override { return Device(kDev, current); }
  const Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  Generator getNewGenerator(DeviceIndex d) const override {
    if (hand_out_default) return default_generator(d);
    return at::make_generator<Gen>(d < 0 ? current : d, 67280421310721);
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    resize_bytes(s.unsafeGetStorageImpl(), n);
  }
};
Hooks hooks;
static bool hooked = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// ---- operators ---------------------------------------------------------------------------------------------------
bool ours(const Tensor& t) { return t.defined() && t.device().type() == kDev; }
Tensor host(const Tensor& t) {  // a CPU tensor over the same bytes
  auto s = t.storage();
  finish_in(s.unsafeGetStorageImpl());
  auto keep = new c10::Storage(s);
  c10::DataPtr p(
      real(s.unsafeGetStorageImpl()->data()), keep, [](void* k) { delete (c10::Storage*)k; }, Device(kCPU));
  auto r = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), s.nbytes(), std::move(p), nullptr, false),
      DispatchKeySet(DispatchKey::CPU), t.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return r;
}
Tensor empty_at(IntArrayRef size, ScalarType dtype, Device d, std::optional<MemoryFormat> f = {}) {
  c10::DeviceGuard guard(d);
  return at::detail::empty_generic(size, &allocator, DispatchKeySet(DispatchKey::PrivateUse1), dtype, f);
}
Tensor empty_strided_at(IntArrayRef size, IntArrayRef stride, ScalarType dtype, Device d) {
  c10::DeviceGuard guard(d);
  return at::detail::empty_strided_generic(size, stride, &allocator, DispatchKeySet(DispatchKey::PrivateUse1), dtype);
}
Device target(std::optional<Device> d) { return d && d->has_index() ? *d : Device(kDev, current); }
Tensor empty_(IntArrayRef size, std::optional<ScalarType> dt, std::optional<Layout> layout, std::optional<Device> d,
              std::optional<bool> pin, std::optional<MemoryFormat> f) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(c10::layout_or_default(layout) == kStrided, "only strided");
  return empty_at(size, c10::dtype_or_default(dt), target(d), f);
}
Tensor empty_strided_(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dt, std::optional<Layout>,
                      std::optional<Device> d, std::optional<bool>) {
  return empty_strided_at(size, stride, c10::dtype_or_default(dt), target(d));
}
// What an operator returned: the memory is the device's already, unless it was not the allocator above that gave it.
Tensor to_device(const Tensor& cpu, Device d) {
  auto s = cpu.storage().unsafeGetStorageImpl();
  if (cpu.storage().use_count() == 1 && s->nbytes() && s->data_ptr().get_deleter() == &release_host &&
      s->data_ptr().get_context() == s->data_ptr().get()) {
    auto p = fake(s->mutable_data());
    auto nbytes = s->nbytes();
    auto was = s->set_data_ptr(DataPtr(nullptr, Device(kCPU)));
    was.release_context();
    auto r = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(c10::Storage::use_byte_size_t(), nbytes, DataPtr(p, p, &release, d), &allocator, true),
        DispatchKeySet(DispatchKey::PrivateUse1), cpu.dtype());
    r.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    return r;
  }
  auto contiguous = c10::contiguous_strides(cpu.sizes());
  auto strides = cpu.is_non_overlapping_and_dense() ? cpu.strides() : IntArrayRef(contiguous);
  auto r = empty_strided_at(cpu.sizes(), strides, cpu.scalar_type(), d);
  if (cpu.numel()) host(r).copy_(cpu);
  return r;
}
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  auto bytes = (int64_t)dst.numel() * (int64_t)dst.itemsize();
  if (ours(dst) && !ours(self)) {
    bool is_free = is_pinned(self.storage().data());
    note(kCopyIn, bytes, is_free ? "from pinned memory" : "from pageable memory");
    clock_.launch(dst.numel());
    if (is_late && non_blocking && self.numel() && is_free) {
      std::lock_guard<std::recursive_mutex> l(late_m);
      auto d = host(dst);
      num_late_in++;
      late_in().push_back({dst.storage().unsafeGetStorageImpl(), [self, d] {
                             finish_out(self.storage().unsafeGetStorageImpl());
                             d.copy_(self);
                           }});
    } else {
      if (!non_blocking) wait_for_device("copy to the device");
      finish_out(self.storage().unsafeGetStorageImpl());
      host(dst).copy_(self);
    }
  } else if (ours(self) && !ours(dst)) {
    note(kCopyOut, bytes, "");
    clock_.launch(dst.numel());
    if (is_late && non_blocking && dst.numel()) {
      auto kept = host(self).clone();
      if (dst.is_non_overlapping_and_dense()) memset(dst.data_ptr(), 0xFD, dst.nbytes());
      std::lock_guard<std::recursive_mutex> l(late_m);
      late_out().push_back({dst.storage().unsafeGetStorageImpl(), [kept, dst] { dst.copy_(kept); }});
    } else {
      if (!non_blocking) wait_for_device("copy to the host");
      dst.copy_(host(self));
    }
  } else {
    note(kLaunch, bytes, "copy");
    clock_.launch(dst.numel());
    Within in(dst.device().index());
    host(dst).copy_(host(self));
  }
  return dst;
}
const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat> f) {
  auto impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    auto need = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset());
    if (c10::multiply_integers(size) && need > self.storage().nbytes())
      resize_bytes(self.storage().unsafeGetStorageImpl(), need);
    impl->set_sizes_contiguous(size);
  }
  if (f && *f != MemoryFormat::Preserve) impl->empty_tensor_restride(*f);
  return self;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  if (ours(dst))
    resize_(dst, self.sizes(), {});
  else
    dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}
Scalar item(const Tensor& self) {
  wait_for_device("item");
  return host(self).item();
}

bool lets_cpu_tensors_in(const std::string& name) {
  static const std::set<std::string> names{"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                           "aten::_pack_padded_sequence", "aten::_thnn_fused_lstm_cell"};
  return names.count(name);
}
bool multiplies_matrices(const std::string& name) {
  static const std::set<std::string> names{"aten::mm",  "aten::addmm",  "aten::bmm",  "aten::baddbmm",
                                           "aten::mv",  "aten::addmv",  "aten::addmm_", "aten::linear"};
  return names.count(name);
}
Tensor rounded(const Tensor& t) {  // to the 10 bits of mantissa that TF32 has
  if (!t.defined() || t.scalar_type() != kFloat) return t;
  return t.contiguous().view(kInt).add(0x1000).bitwise_and(~0x1FFF).view(kFloat);
}
bool is_tf32(at::Float32Op op) {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, op) == at::Float32Precision::TF32;
}
struct Swap {  // the default generator of the CPU, and the device's
  Tensor outside;
  Gen* own;
  explicit Swap(int d) : own(static_cast<Gen*>(default_generator(d).unsafeGetGeneratorImpl())) {
    auto cpu = at::detail::getDefaultCPUGenerator();
    outside = Tensor(cpu.unsafeGetGeneratorImpl()->get_state());
    auto in = own->inner_state();
    cpu.unsafeGetGeneratorImpl()->set_state(*in.unsafeGetTensorImpl());
  }
  ~Swap() {
    auto cpu = at::detail::getDefaultCPUGenerator();
    own->set_inner(Tensor(cpu.unsafeGetGeneratorImpl()->get_state()));
    cpu.unsafeGetGeneratorImpl()->set_state(*outside.unsafeGetTensorImpl());
  }
};
struct Aliases {
  struct One {
    Tensor original, cpu;
    bool is_written;
  };
  std::vector<One> all;
  std::optional<Device> device;
  bool is_strict;
  const std::string& name;
  int64_t numbers = 0;
  void refuse(Device other) {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device,
                " and ", other, "! (", name, ")");
  }
  void look(const Tensor& t) {
    if (!ours(t)) return;
    if (device && *device != t.device()) refuse(t.device());
    device = t.device();
    numbers += t.numel();
  }
  void look_at_cpu(const Tensor& t) {
    if (t.defined() && t.is_cpu() && is_strict && t.dim() > 0) refuse(Device(kCPU));
  }
  Tensor give(const Tensor& t, bool is_written) {
    if (!ours(t)) return t;
    auto c = is_written && t.storage().nbytes() == 0
                 ? at::empty_strided(t.sizes(), t.strides(), t.options().device(kCPU))
                 : host(t);
    all.push_back({t, c, is_written});
    return c;
  }
  void settle() {  // outputs that were given another size
    for (auto& a : all)
      if (a.is_written && (a.cpu.sizes() != a.original.sizes() ||
                           (a.original.storage().nbytes() == 0 && a.cpu.numel()))) {
        resize_(a.original, a.cpu.sizes(), {});
        host(a.original).copy_(a.cpu);
      }
  }
};
void take_workspace(int d) {  // as cuBLAS does, at the first product of each thread
  static thread_local DataPtr kept[kMost];
  if (kept[d] || !kWorkspace) return;
  c10::DeviceGuard guard(Device(kDev, d));
  kept[d] = allocator.allocate(kWorkspace);
  kept[d].release_context();  // for as long as the process lives
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_CHECK(!forked, kForked);
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  const auto n = schema.arguments().size(), begin = stack->size() - n;
  Aliases a{{}, {}, !lets_cpu_tensors_in(schema.name()), schema.name()};
  auto every = [&](auto&& f) {
    for (size_t i = 0; i < n; i++) {
      auto& v = (*stack)[begin + i];
      auto info = schema.arguments()[i].alias_info();
      bool w = info && info->isWrite();
      if (v.isTensor()) {
        Tensor t = v.toTensor();
        f(t, w);
        v = t;
      } else if (v.isTensorList()) {
        std::vector<Tensor> ts = v.toTensorVector();
        for (auto& t : ts) f(t, w);
        v = ts;
      } else if (v.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> out;
        for (std::optional<Tensor> t : v.toOptionalTensorList()) {
          if (t) {
            Tensor x = *t;
            f(x, w);
            out.push_back(x);
          } else {
            out.push_back(t);
          }
        }
        v = out;
      }
    }
  };
  std::vector<IValue> originals(stack->begin() + begin, stack->end());
  every([&](Tensor& t, bool) { a.look(t); });
  if (a.device) every([&](Tensor& t, bool) { a.look_at_cpu(t); });
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[begin + i];
    if (v.isDevice() && v.toDevice().type() == kDev) {
      if (!a.device) a.device = target(v.toDevice());
      v = Device(kCPU);
    }
  }
  auto device = a.device.value_or(Device(kDev, current));
  c10::DeviceGuard guard(device);
  if (multiplies_matrices(schema.name())) take_workspace(device.index());
  // How large an output is, or what is true of it, is known on the host only once it is computed.
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output))
    wait_for_device(schema.name());
  bool takes_generator = false;
  for (size_t i = 0; i < n; i++) {
    auto type = schema.arguments()[i].type();
    if (auto o = type->cast<OptionalType>()) type = o->getElementType();
    if (type->kind() != c10::TypeKind::GeneratorType) continue;
    auto& v = (*stack)[begin + i];
    Generator g = v.isNone() ? default_generator(device.index()) : v.toGenerator();
    TORCH_CHECK(g.device().type() == kDev, "Expected a 'standin' device type for generator but found 'cpu'");
    v = static_cast<Gen*>(g.unsafeGetGeneratorImpl())->inner;
    takes_generator = true;
  }
  bool is_rounding = multiplies_matrices(schema.name()) && is_tf32(at::Float32Op::MATMUL);
  every([&](Tensor& t, bool w) { t = is_rounding && !w ? rounded(a.give(t, w)) : a.give(t, w); });
  {
    std::unique_ptr<Swap> swap;
    if (!takes_generator && op.hasTag(at::Tag::nondeterministic_seeded)) swap = std::make_unique<Swap>(device.index());
    Within in(device.index());
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }
  a.settle();
  originals.resize(n);
  const auto& returns = schema.returns();
  const auto from = stack->size() - returns.size();
  auto move = [&](Tensor t) {
    if (!t.defined() || !t.is_cpu()) return t;
    for (auto& x : a.all)
      if (t.is_same(x.cpu)) return x.original;
    a.numbers += t.numel();
    return to_device(t, device);
  };
  for (size_t i = 0; i < returns.size(); i++) {
    auto& v = (*stack)[from + i];
    if (auto info = returns[i].alias_info(); info && info->isWrite()) {
      for (size_t j = 0; j < n; j++)
        if (auto in = schema.arguments()[j].alias_info(); in && *in == *info) {
          v = originals[j];
          break;
        }
      continue;
    }
    if (v.isTensor()) {
      v = move(std::move(v).toTensor());
    } else if (v.isTensorList()) {
      auto ts = v.toTensorVector();
      v = IValue();  // so that nothing else holds them
      for (auto& t : ts) t = move(std::move(t));
      v = ts;
    }
  }
  note(kLaunch, 0, schema.name());
  clock_.launch(a.numbers);
}
Tensor conv(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, IntArrayRef stride, IntArrayRef pad,
            IntArrayRef dil, bool t, IntArrayRef op, int64_t g) {
  TORCH_CHECK(ours(x) && ours(w), "Input type (", x.device(), ") and weight type (", w.device(), ") should be the same");
  at::AutoDispatchBelowADInplaceOrView below;
  note(kLaunch, 0, "aten::convolution");
  auto bias = b && b->defined() ? std::optional<Tensor>(host(*b)) : std::nullopt;
  Tensor r;
  {
    Within in(x.device().index());
    auto of = [](const Tensor& t) { return is_tf32(at::Float32Op::CONV) ? rounded(host(t)) : host(t); };
    r = at::convolution(of(x), of(w), bias, stride, pad, dil, t, op, g);
  }
  clock_.launch(x.numel() + w.numel() + r.numel());
  return to_device(std::move(r), x.device());
}
std::tuple<Tensor, Tensor, Tensor> conv_backward(const Tensor& gy, const Tensor& x, const Tensor& w,
                                                 IntArrayRef stride, IntArrayRef pad, IntArrayRef dil, bool t,
                                                 IntArrayRef op, int64_t g, std::array<bool, 3> mask) {
  at::AutoDispatchBelowADInplaceOrView below;
  note(kLaunch, 0, "aten::convolution_backward");
  clock_.launch(gy.numel() + x.numel() + w.numel());
  std::vector<int64_t> bias{gy.size(1)};
  std::tuple<Tensor, Tensor, Tensor> r;
  {
    Within in(x.device().index());
    auto of = [](const Tensor& t) { return is_tf32(at::Float32Op::CONV) ? rounded(host(t)) : host(t); };
    r = at::convolution_backward(of(gy), of(x), of(w), IntArrayRef(bias), stride, pad, dil, t, op, g, mask);
  }
  auto move = [&](Tensor& y) { return y.defined() ? to_device(y, x.device()) : y; };
  return {move(std::get<0>(r)), move(std::get<1>(r)), move(std::get<2>(r))};
}
int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return 0;
}
void record_stream(Tensor&, c10::Stream) {}
// `p.data = p.to("cuda")` keeps a Parameter; c10 leaves it to PrivateUse1 to say so.
bool same_layout(const Tensor& a, const Tensor& b) { return a.layout() == b.layout(); }

// LSTMs are computed in one operation on devices, for which the CPU has no kernel.
using Three = std::tuple<Tensor, Tensor, Tensor>;
Three lstm_cell(const Tensor& inputs, const Tensor& hidden, const Tensor& cx, const std::optional<Tensor>& b,
                const std::optional<Tensor>& c) {
  auto gates = inputs + hidden;
  if (b && b->defined()) gates = gates + *b + *c;
  auto four = gates.chunk(4, 1);
  auto i = four[0].sigmoid(), f = four[1].sigmoid(), g = four[2].tanh(), o = four[3].sigmoid();
  auto cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}
Three lstm_cell_backward(const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy, const Tensor& cx,
                         const Tensor& cy, const Tensor& workspace, bool has_bias) {
  auto four = workspace.chunk(4, 1);
  auto &i = four[0], &f = four[1], &g = four[2], &o = four[3];
  auto hy = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy), tanh = cy.tanh();
  auto grad = hy * o * (1 - tanh * tanh);
  if (grad_cy && grad_cy->defined()) grad = grad + *grad_cy;
  auto gates = at::cat({grad * g * i * (1 - i), grad * cx * f * (1 - f), grad * i * (1 - g * g), hy * tanh * o * (1 - o)}, 1);
  return {gates, grad * f, has_bias ? gates.sum(0) : Tensor()};
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_);
  m.impl("empty_strided", empty_strided_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("resize_", resize_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(at::native::view));
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("convolution_overrideable", conv);
  m.impl("convolution_backward_overrideable", conv_backward);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  // Composed for whoever has no kernel, of one into an output that the CPU's then finds of the wrong size, and says so.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", same_layout);
}
}  // namespace standin
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &standin::sdp_choice)
}
namespace at::autocast {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
}
}  // namespace at::autocast

// For ctypes: operators of a library would be seen by dispatch modes, which CUDA's functions are not.
extern "C" {
using namespace standin;
void standin_begin() { c10::SetCPUAllocator(&host_allocator, 255); }
int standin_count() { return kCount; }
int standin_forked() { return forked; }
int64_t standin_total() { return kTotal; }
void standin_set_fraction(int d, double f) { heap(d).fraction = f; }
double standin_fraction(int d) { return heap(d).fraction; }
void standin_default_generators(int yes) { hand_out_default = yes; }
int64_t standin_touches() { return journal.touches; }
int64_t standin_allocations(int d) { return heap(d).count; }
void standin_fail_in(int d, int64_t n) {
  std::lock_guard<std::recursive_mutex> l(heap(d).m);
  heap(d).fails_in = n;
}
int64_t standin_fails_in(int d) { return heap(d).fails_in; }
void standin_log(int on) {
  std::lock_guard<std::mutex> l(journal.m);
  journal.entries.clear();
  journal.on = on;
}
int64_t standin_log_size() { return journal.entries.size(); }
void standin_log_entry(int64_t i, int* kind, int64_t* bytes, double* at, char* what, int most) {
  std::lock_guard<std::mutex> l(journal.m);
  auto& e = journal.entries[i];
  *kind = e.kind;
  *bytes = e.bytes;
  *at = e.at;
  strncpy(what, e.what.c_str(), most - 1);
}
void standin_callback(Callback f) { callback = f; }
void standin_clock(int on, double per_launch, double per_number) {
  std::lock_guard<std::mutex> l(clock_.m);
  clock_.on = on;
  clock_.per_launch = per_launch;
  clock_.per_number = per_number;
  clock_.host = clock_.busy_until = 0;
}
double standin_now() { return clock_.host; }
void standin_advance(double seconds) {
  std::lock_guard<std::mutex> l(clock_.m);
  clock_.host += seconds;
}
}
