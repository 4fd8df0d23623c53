// A simulated accelerator for tests: torch's device "sim" (PrivateUse1), which shows code that does not wait.
//
// What an accelerator has and a CPU has not:
// - Memory of its own. Tensors have addresses that the host can't touch (SIGSEGV); kernels reach the same memory at
//   another address (``alias``). A caching allocator with a limit gives freed memory to the stream that had it, and to
//   others once the streams named by record_stream are done. What is allocated or freed is poisoned (NaN in floats).
// - Streams. An operation returns before it has run: it is a task of its stream, which has a thread. ``order`` says
//   when tasks run: "lazy": only once somebody waits for them, the worst for code that forgets to; "eager": at once;
//   "random": each push decides by a seed whether its stream goes on, so that streams overtake each other.
// - Pinned memory. A copy from or to it with non_blocking runs later; it is used again once these copies have run.
// - Errors that stick: what a task raises is reported by whatever waits next, for ever, as AcceleratorError.
//
// Kernels are the CPU's. The fallback ``launch`` finds a result's shape by torch's meta kernels, allocates it, and pushes
// a task that calls the CPU's kernel. Where the shape depends on values it waits, as other devices do.
//
// Settings: SIM_DEVICES (2), SIM_MEMORY (bytes of each; 2 GiB), SIM_ORDER ("lazy"), SIM_SEED (0).
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/extension.h>
#include <torch/library.h>

namespace {
constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int POOL = 32;
constexpr size_t MAX_WAITING = 20000;
using at::Tensor;
using c10::IValue;
using Task = std::function<void()>;

long env(const char* name, long fallback) {
  const char* text = getenv(name);
  return text && *text ? atol(text) : fallback;
}
const int COUNT = (int)env("SIM_DEVICES", 2);
const size_t MEMORY = (size_t)env("SIM_MEMORY", 2L << 30);
const size_t ROOM = 4 * MEMORY;  // addresses: pieces of free memory count as one, as pages make them on a device

// When the tasks of streams run.
struct Order {
  std::mutex m;
  std::string name = getenv("SIM_ORDER") ? getenv("SIM_ORDER") : "lazy";
  std::minstd_rand random{(unsigned)env("SIM_SEED", 0) + 1};
  void set(const std::string& wanted, unsigned seed) {
    TORCH_CHECK(wanted == "lazy" || wanted == "eager" || wanted == "random", "no order: ", wanted);
    std::lock_guard lock(m);
    name = wanted;
    random.seed(seed + 1);
  }
  bool goes_on() {
    std::lock_guard lock(m);
    return name == "eager" || (name == "random" && random() % 4 == 0);
  }
} order;

// ---------------------------------------------------------------------------------------------------- streams
struct Device;
struct Stream {
  Device* device;
  int64_t id;
  std::mutex m;
  std::condition_variable more, progress;
  std::deque<Task> tasks;
  uint64_t pushed = 0, wanted = 0, done = 0;

  Stream(Device* device, int64_t id) : device(device), id(id) {
    std::thread([this] { work(); }).detach();
  }
  uint64_t push(Task task) {
    bool goes_on = order.goes_on();
    std::lock_guard lock(m);
    tasks.push_back(std::move(task));
    pushed++;
    if (goes_on || tasks.size() > MAX_WAITING) wanted = pushed;
    if (wanted > done) more.notify_one();
    return pushed;
  }
  void want(uint64_t mark) {
    std::lock_guard lock(m);
    wanted = std::max(wanted, mark);
    more.notify_one();
  }
  bool has_done(uint64_t mark) {  // asks no task to run
    std::lock_guard lock(m);
    return done >= mark;
  }
  bool reached(uint64_t mark) {  // for code that asks until it is so
    want(mark);
    return has_done(mark);
  }
  void wait(uint64_t mark) {
    std::unique_lock lock(m);
    wanted = std::max(wanted, mark);
    more.notify_one();
    progress.wait(lock, [&] { return done >= mark; });
  }
  uint64_t now() {
    std::lock_guard lock(m);
    return pushed;
  }
  void work();
};
struct Mark {
  Stream* stream;
  uint64_t at;
};

// ---------------------------------------------------------------------------------------------------- devices
struct Block {
  size_t offset, size;
  Stream* stream;
  std::set<Stream*> users;
};
struct Cached {
  size_t offset;
  uint64_t freed;  // what its stream had to do by then; its next task poisons the memory
};
struct Device {
  int index;
  char *base, *alias;  // the same memory: as tensors name it, and as kernels reach it
  std::vector<Stream*> streams;
  size_t next_stream = 0, limit = MEMORY;
  std::mutex m;
  std::map<size_t, size_t> extents;
  std::map<size_t, Block> live;
  std::map<Stream*, std::multimap<size_t, Cached>> cached;  // by the stream that may use it again, and by size
  std::list<std::pair<Block, std::vector<Mark>>> pending;
  c10::CachingDeviceAllocator::DeviceStats stats;
  std::string broken;
  std::mutex broken_m;
  int fd;

  explicit Device(int index) : index(index) {
    fd = memfd_create("sim", 0);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, ROOM) == 0, "no memory for a simulated device");
    base = (char*)mmap(nullptr, ROOM, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    alias = (char*)mmap(nullptr, ROOM, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    TORCH_CHECK(base != MAP_FAILED && alias != MAP_FAILED, "no addresses for a simulated device");
    extents[0] = ROOM;
    streams.push_back(new Stream(this, 0));
  }
  void fail(const std::string& why) {
    std::lock_guard lock(broken_m);
    if (broken.empty()) broken = why;
  }
  void check() {
    std::lock_guard lock(broken_m);
    if (!broken.empty())
      throw c10::AcceleratorError({__func__, __FILE__, (uint32_t)__LINE__}, 710, "sim error: " + broken);
  }
  bool holds(const void* p) { return p >= base && p < base + ROOM; }
};

std::vector<Device*>& devices() {
  static auto* all = [] {
    auto* made = new std::vector<Device*>;
    for (int i = 0; i < COUNT; i++) made->push_back(new Device(i));
    return made;
  }();
  return *all;
}
Device& device_of(c10::Device d) { return *devices().at(d.has_index() ? d.index() : 0); }
thread_local int current = 0;
thread_local std::vector<int64_t> current_streams;

Stream* stream_now(int device) {
  if (current_streams.empty()) current_streams.resize(COUNT, 0);
  return devices().at(device)->streams.at(current_streams[device]);
}
void await(Stream* stream) {
  stream->wait(stream->now());
  stream->device->check();
}

void Stream::work() {
  at::set_num_threads(1);
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  at::NoGradGuard no_grad;
  for (;;) {
    Task task;
    {
      std::unique_lock lock(m);
      more.wait(lock, [&] { return done < wanted; });
      task = std::move(tasks.front());
      tasks.pop_front();
    }
    bool broken;
    {
      std::lock_guard lock(device->broken_m);
      broken = !device->broken.empty();
    }
    if (!broken) {
      try {
        task();
      } catch (const std::exception& error) {
        std::string text = error.what();
        device->fail(text.substr(0, text.find('\n')));
      } catch (...) {
        device->fail("unknown");
      }
    }
    task = nullptr;
    {
      std::lock_guard lock(m);
      done++;
    }
    progress.notify_all();
  }
}

// ---------------------------------------------------------------------------------------------------- memory
uint64_t poison(Device& d, Stream* stream, size_t offset, size_t size) {
  char* at = d.alias + offset;
  size_t most = std::min(size, (size_t)64 << 20);  // all of it would take the machine's memory
  return stream->push([at, most] { memset(at, 0xFF, most); });  // NaN in every float
}

struct Allocator final : c10::DeviceAllocator {
  static inline std::atomic<bool> hides_memory = false;
  static void release(void* p) {
    for (auto* d : devices())
      if (d->holds(p)) give_back(*d, (char*)p - d->base);
  }
  static void give_back(Device& d, size_t offset) {
    std::lock_guard lock(d.m);
    auto found = d.live.find(offset);
    if (found == d.live.end()) return;
    Block block = std::move(found->second);
    d.live.erase(found);
    d.stats.allocated_bytes[0].decrease(block.size);
    d.stats.num_device_free++;
    std::vector<Mark> marks;
    for (auto* user : block.users)
      if (user != block.stream) marks.push_back({user, user->now()});
    if (marks.empty())
      cache(d, block);
    else
      d.pending.emplace_back(std::move(block), std::move(marks));
  }
  static void cache(Device& d, const Block& block) {  // its stream may use the memory again, and does: it is poisoned
    uint64_t poisoned = poison(d, block.stream, block.offset, block.size);
    d.cached[block.stream].emplace(block.size, Cached{block.offset, poisoned - 1});
  }
  static void settle(Device& d) {
    for (auto it = d.pending.begin(); it != d.pending.end();) {
      bool ready = std::all_of(it->second.begin(), it->second.end(), [](Mark& m) { return m.stream->has_done(m.at); });
      if (ready) cache(d, it->first);
      it = ready ? d.pending.erase(it) : std::next(it);
    }
  }
  static void empty(Device& d, bool waits) {  // without ``waits`` only memory that is in no use any more
    if (waits)
      for (size_t n = 0; n < d.streams.size(); n++) d.streams[n]->wait(d.streams[n]->now());
    std::lock_guard lock(d.m);
    settle(d);
    for (auto& [stream, blocks] : d.cached) {
      std::vector<std::multimap<size_t, Cached>::iterator> order;
      for (auto it = blocks.begin(); it != blocks.end(); ++it) order.push_back(it);
      std::sort(order.begin(), order.end(), [](auto& a, auto& b) { return a->second.freed < b->second.freed; });
      for (auto it : order) {
        auto [size, block] = *it;
        if (!waits && !stream->has_done(block.freed)) continue;
        stream->wait(block.freed + 1);  // the poison, which may be all that the next one waits for
        d.stats.reserved_bytes[0].decrease(size);
        fallocate(d.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block.offset, size);
        d.extents[block.offset] = size;
        blocks.erase(it);
      }
    }
    for (auto it = d.extents.begin(); it != d.extents.end();) {
      auto next = std::next(it);
      if (next != d.extents.end() && it->first + it->second == next->first) {
        it->second += next->second;
        d.extents.erase(next);
      } else
        it = next;
    }
  }
  static bool take(Device& d, size_t size, Stream* stream, size_t& offset) {
    std::lock_guard lock(d.m);
    settle(d);
    auto& blocks = d.cached[stream];
    auto cached = blocks.lower_bound(size);
    if (cached != blocks.end() && cached->first <= 2 * size) {
      offset = cached->second.offset;
      size = cached->first;
      blocks.erase(cached);
    } else {
      if ((size_t)d.stats.reserved_bytes[0].current + size > d.limit) return false;
      auto it = std::find_if(d.extents.begin(), d.extents.end(), [&](auto& e) { return e.second >= size; });
      if (it == d.extents.end()) return false;
      offset = it->first;
      size_t left = it->second - size;
      d.extents.erase(it);
      if (left) d.extents[offset + size] = left;
      d.stats.reserved_bytes[0].increase(size);
    }
    d.live[offset] = {offset, size, stream, {}};
    d.stats.allocated_bytes[0].increase(size);
    d.stats.num_device_alloc++;
    poison(d, stream, offset, size);
    return true;
  }
  at::DataPtr allocate(size_t bytes) override {
    auto& d = *devices().at(current);
    if (!bytes) return {nullptr, nullptr, &release, c10::Device(SIM, current)};
    size_t size = (bytes + 511) / 512 * 512, offset = 0;
    Stream* stream = stream_now(current);
    if (!take(d, size, stream, offset)) {
      empty(d, true);
      if (!take(d, size, stream, offset)) {
        d.stats.num_ooms++;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", size, " bytes");
      }
    }
    void* p = d.base + offset;
    return {p, p, &release, c10::Device(SIM, current)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    TORCH_CHECK(false, "copy_data is not of this allocator");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (auto* d : devices()) empty(*d, false);
  }
  void recordStream(const at::DataPtr& data, c10::Stream s) override {
    auto& d = device_of(data.device());
    std::lock_guard lock(d.m);
    auto found = d.live.find((char*)data.get() - d.base);
    if (data.get() && found != d.live.end()) found->second.users.insert(device_of(s.device()).streams.at(s.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex i) override {
    std::lock_guard lock(devices().at(i)->m);
    return devices()[i]->stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex i) override {}
  void resetPeakStats(c10::DeviceIndex i) override {
    std::lock_guard lock(devices().at(i)->m);
    devices()[i]->stats.allocated_bytes[0].reset_peak();
    devices()[i]->stats.reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex i) override {
    TORCH_CHECK_NOT_IMPLEMENTED(!hides_memory, "getMemoryInfo is not implemented for this allocator yet.");
    auto& d = *devices().at(i);
    d.check();
    std::lock_guard lock(d.m);
    return {d.limit - std::min(d.limit, (size_t)d.stats.reserved_bytes[0].current), d.limit};
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(SIM, &allocator);

// Pinned memory: used again only once no copy needs it.
struct HostAllocator final : at::HostAllocator {
  struct Host {
    size_t size;
    std::vector<Mark> marks;
  };
  static inline std::mutex m;
  static inline std::map<char*, Host> live;
  static inline std::multimap<size_t, std::pair<char*, std::vector<Mark>>> unused;
  static void release(void* p) {
    std::lock_guard lock(m);
    auto it = live.find((char*)p);
    if (it == live.end()) return;
    unused.emplace(it->second.size, std::make_pair((char*)p, std::move(it->second.marks)));
    live.erase(it);
  }
  static bool holds(const void* p) {
    std::lock_guard lock(m);
    auto it = live.upper_bound((char*)p);
    if (it == live.begin()) return false;
    --it;
    return (char*)p < it->first + it->second.size;
  }
  at::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &release, at::Device(at::kCPU)};
    size_t size = 4096;
    while (size < bytes) size *= 2;
    std::lock_guard lock(m);
    auto [from, to] = unused.equal_range(size);
    for (auto it = from; it != to; ++it) {
      auto& marks = it->second.second;
      if (!std::all_of(marks.begin(), marks.end(), [](Mark& k) { return k.stream->has_done(k.at); })) continue;
      char* p = it->second.first;
      unused.erase(it);
      live[p] = {size, {}};
      memset(p, 0xFF, bytes);
      return {p, p, &release, at::Device(at::kCPU)};
    }
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 4096, size) == 0, "no pinned memory");
    memset(p, 0xFF, bytes);
    live[(char*)p] = {size, {}};
    return {p, p, &release, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  static void note(const void* p, Stream* stream) {
    std::lock_guard lock(m);
    auto it = live.upper_bound((char*)p);
    if (it == live.begin()) return;
    --it;
    it->second.marks.push_back({stream, stream->now()});
  }
  bool record_event(void* p, void*, c10::Stream s) override {
    note(p, device_of(s.device()).streams.at(s.id()));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
HostAllocator host_allocator;
REGISTER_HOST_ALLOCATOR(SIM, &host_allocator);

// ---------------------------------------------------------------------------------------------------- generators
struct GeneratorImpl final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator();
  explicit GeneratorImpl(c10::DeviceIndex i)
      : c10::GeneratorImpl(c10::Device(SIM, i), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  static c10::DeviceType device_type() { return SIM; }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device().index());
    copy->inner = inner.clone();
    return copy;
  }
};
const at::Generator& default_generator(int i) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int n = 0; n < COUNT; n++) made->push_back(at::make_generator<GeneratorImpl>(n));
    return made;
  }();
  return all->at(i < 0 ? current : i);
}

// ---------------------------------------------------------------------------------------------------- guard, hooks
struct Event {
  Mark mark{nullptr, 0};
  std::shared_ptr<double> seconds = std::make_shared<double>(0);
};
double clock_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  c10::Device getDevice() const override { return c10::Device(SIM, current); }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < COUNT, "there is no device ", d);
    if (d.has_index()) current = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) current = d.index();
  }
  c10::Stream wrap(Stream* s) const { return c10::Stream(c10::Stream::UNSAFE, c10::Device(SIM, s->device->index), s->id); }
  Stream* unwrap(const c10::Stream& s) const { return device_of(s.device()).streams.at(s.id()); }
  int index(c10::Device d) const { return d.has_index() ? d.index() : current; }
  c10::Stream getStream(c10::Device d) const override { return wrap(stream_now(index(d))); }
  c10::Stream getDefaultStream(c10::Device d) const override { return wrap(devices()[index(d)]->streams[0]); }
  c10::Stream getNewStream(c10::Device d, int = 0) const override {
    auto& device = *devices()[index(d)];
    std::lock_guard lock(device.m);
    size_t n = 1 + device.next_stream++ % POOL;
    if (device.streams.capacity() < POOL + 1) device.streams.reserve(POOL + 1);
    if (device.streams.size() <= n) device.streams.push_back(new Stream(&device, n));
    return wrap(device.streams[n]);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return old;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto* e = *event ? (Event*)*event : new Event;
    *event = e;
    Stream* stream = unwrap(s);
    auto seconds = e->seconds = std::make_shared<double>(0);
    uint64_t at = stream->push([seconds] { *seconds = clock_s(); });
    e->mark = {stream, at};
  }
  void block(void* event, const c10::Stream& s) const override {
    if (!event) return;
    Mark mark = ((Event*)event)->mark;
    if (mark.stream) unwrap(s)->push([mark] { mark.stream->wait(mark.at); });
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Mark mark = ((Event*)event)->mark;
    return !mark.stream || mark.stream->reached(mark.at);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return (c10::DeviceIndex)COUNT; }
  bool queryStream(const c10::Stream& s) const override { return unwrap(s)->reached(unwrap(s)->now()); }
  void synchronizeStream(const c10::Stream& s) const override { await(unwrap(s)); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Mark mark = ((Event*)event)->mark;
    if (!mark.stream) return;
    mark.stream->wait(mark.at);
    mark.stream->device->check();
  }
  void synchronizeDevice(const c10::DeviceIndex i) const override {
    auto& d = *devices().at(i < 0 ? current : i);
    for (size_t n = 0; n < d.streams.size(); n++) d.streams[n]->wait(d.streams[n]->now());
    d.check();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    allocator.recordStream(data, s);
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    synchronizeEvent(a);
    synchronizeEvent(b);
    return (*((Event*)b)->seconds - *((Event*)a)->seconds) * 1000;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

Tensor& resize_storage(const Tensor& self, size_t bytes);
struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return COUNT > 0; }
  c10::DeviceIndex deviceCount() const override { return (c10::DeviceIndex)COUNT; }
  void setCurrentDevice(c10::DeviceIndex i) const override { Guard().setDevice({SIM, i}); }
  c10::DeviceIndex getCurrentDevice() const override { return (c10::DeviceIndex)current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { return Guard().exchangeDevice({SIM, i}).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override {
    return i < 0 || i >= COUNT ? getCurrentDevice() : exchangeDevice(i);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }
  bool isPinnedPtr(const void* p) const override { return HostAllocator::holds(p); }
  at::Device getDeviceFromPtr(void* p) const override {
    for (auto* d : devices())
      if (d->holds(p)) return {SIM, (c10::DeviceIndex)d->index};
    TORCH_CHECK(false, "no memory of a simulated device");
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override {
    return at::make_generator<GeneratorImpl>(i < 0 ? current : i);
  }
};
const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// ---------------------------------------------------------------------------------------------------- tensors
Tensor reach(const Tensor& t) {  // the same memory, as a kernel reaches it; nothing keeps it
  if (!t.defined()) return t;
  void* p = nullptr;
  if (t.numel()) {
    auto& d = device_of(t.device());
    char* at = (char*)t.data_ptr();
    TORCH_CHECK(d.holds(at), "a tensor of ", t.device(), " has memory elsewhere");
    p = d.alias + (at - d.base);
  }
  Tensor found = at::from_blob(p, t.sizes(), t.strides(), t.options().device(at::kCPU));
  if (t.is_conj()) found._set_conj(true);
  if (t.is_neg()) found._set_neg(true);
  return found;
}
bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == SIM; }

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "only strided tensors");
  TORCH_CHECK(!pin.value_or(false), "only CPU memory can be pinned");
  c10::DeviceGuard guard(device.value_or(at::Device(SIM)));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::kFloat));
}
Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "only strided tensors");
  TORCH_CHECK(!pin.value_or(false), "only CPU memory can be pinned");
  c10::DeviceGuard guard(device.value_or(at::Device(SIM)));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::kFloat), format);
}
const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  size_t bytes = (impl->storage_offset() + at::detail::computeStorageNbytes(self.sizes(), self.strides(), 1)) * self.itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < bytes) {
    auto fresh = allocator.allocate(bytes);
    auto& d = device_of(self.device());
    if (size_t old = storage->nbytes()) {
      char *to = d.alias + ((char*)fresh.get() - d.base), *from = d.alias + ((char*)storage->data() - d.base);
      stream_now(self.device().index())->push([=] { memcpy(to, from, old); });
    }
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(bytes);
  }
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  if (!dst.numel()) return dst;
  if (is_sim(self) && is_sim(dst)) {
    Stream *from = stream_now(self.device().index()), *to = stream_now(dst.device().index());
    from->device->check();
    to->device->check();
    Tensor a = reach(self), b = reach(dst);
    if (from != to) {
      Mark ready{to, to->now()};
      from->push([ready] { ready.stream->wait(ready.at); });
    }
    uint64_t at = from->push([a, b]() mutable { b.copy_(a); });
    if (from != to) to->push([from, at] { from->wait(at); });
    return dst;
  }
  bool in = is_sim(dst);
  Stream* stream = stream_now((in ? dst : self).device().index());
  stream->device->check();
  const Tensor& host = in ? self : dst;
  bool pinned = non_blocking && HostAllocator::holds(host.data_ptr());
  if (in) {
    Tensor to = reach(dst);
    Tensor from = pinned ? at::from_blob(self.data_ptr(), self.sizes(), self.strides(), self.options()) : self.clone();
    if (self.is_conj() || self.is_neg()) from = self.clone();
    stream->push([from, to]() mutable { to.copy_(from); });
    if (pinned) HostAllocator::note(self.data_ptr(), stream);
    if (!non_blocking) await(stream);
    return dst;
  }
  Tensor from = reach(self);
  if (pinned) {
    Tensor to = at::from_blob(dst.data_ptr(), dst.sizes(), dst.strides(), dst.options());
    to.fill_(to.is_floating_point() ? at::Scalar(NAN) : at::Scalar(85));  // until the copy has run
    stream->push([from, to]() mutable { to.copy_(from); });
    HostAllocator::note(dst.data_ptr(), stream);
    return dst;
  }
  Tensor to = dst;
  stream->push([from, to]() mutable { to.copy_(from); });
  await(stream);
  return dst;
}
at::Scalar local_scalar(const Tensor& self) {
  await(stream_now(self.device().index()));
  return reach(self).item();
}
void record_stream(Tensor& self, c10::Stream s) { allocator.recordStream(self.storage().data_ptr(), s); }
bool is_pinned(const Tensor& self, std::optional<at::Device>) { return false; }

// ---------------------------------------------------------------------------------------------------- kernels
const std::set<std::string> TAKES_HOST_INDICES = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_index_put_impl", "aten::_unsafe_index"};

template <class F>
IValue map_tensors(const IValue& value, F&& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : value.toTensorVector()) out.push_back(f(t));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (std::optional<Tensor> t : value.toOptionalTensorList().vec())
      out.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return out;
  }
  return value;
}

void launch(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  size_t count = arguments.size(), begin = stack->size() - count;
  std::vector<IValue> given(stack->begin() + begin, stack->end());
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), schema.name(), " is not implemented for sim");
  std::optional<at::Device> where;
  for (auto& value : given) {
    map_tensors(value, [&](const Tensor& t) {
      if (is_sim(t) && !where) where = t.device();
      return t;
    });
  }
  if (!where)
    for (auto& value : given)
      if (value.isDevice() && value.toDevice().type() == SIM) where = value.toDevice();
  TORCH_CHECK(where, schema.name(), ": no tensor of a simulated device");
  if (!where->has_index()) where = at::Device(SIM, current);
  c10::DeviceGuard guard(*where);
  auto& device = device_of(*where);
  device.check();
  Stream* stream = stream_now(where->index());
  bool host_indices = TAKES_HOST_INDICES.count(schema.name());

  auto to_host = [&](const Tensor& t) -> Tensor {
    if (!t.defined()) return t;
    if (is_sim(t)) {
      TORCH_CHECK(t.device() == *where, "Expected all tensors to be on the same device, but found at least two devices, ",
          *where, " and ", t.device(), "! (", schema.name(), ")");
      return reach(t);
    }
    TORCH_CHECK(t.is_cpu() && (t.dim() == 0 || host_indices),
        "Expected all tensors to be on the same device, but found at least two devices, ", *where, " and ", t.device(),
        "! (", schema.name(), ")");
    Tensor copy = t.clone();
    copy.unsafeGetTensorImpl()->set_wrapped_number(t.unsafeGetTensorImpl()->is_wrapped_number());
    return copy;
  };
  auto to_meta = [&](const Tensor& t) -> Tensor {
    if (!t.defined()) return t;
    Tensor made = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta).pinned_memory(false));
    if (t.dim() == 0) made.unsafeGetTensorImpl()->set_wrapped_number(t.unsafeGetTensorImpl()->is_wrapped_number());
    return made;
  };
  torch::jit::Stack host, meta;
  bool writes = false, has_out = false;
  for (size_t n = 0; n < count; n++) {
    const auto& argument = arguments[n];
    bool written = argument.alias_info() && argument.alias_info()->isWrite();
    writes |= written;
    has_out |= argument.is_out();
    IValue value = given[n];
    if (value.isDevice()) {
      host.push_back(at::Device(at::kCPU));
      meta.push_back(at::Device(at::kMeta));
      continue;
    }
    if (value.isGenerator() || (value.isNone() && argument.type()->str() == "Generator?")) {
      at::Generator chosen = default_generator(where->index());
      if (value.isGenerator()) {
        chosen = value.toGenerator();
        TORCH_CHECK(chosen.device().type() == SIM, "Expected a 'sim' device type for generator but found '", chosen.device(), "'");
      }
      host.push_back(((GeneratorImpl*)chosen.unsafeGetGeneratorImpl())->inner);
      meta.push_back(IValue());
      continue;
    }
    host.push_back(map_tensors(value, to_host));
    meta.push_back(map_tensors(value, to_meta));
  }
  // What each result is: an argument that was written to, or a new tensor.
  const auto& returns = schema.returns();
  std::vector<int> written_by(returns.size(), -1);
  bool fresh = false, plain = true;
  for (size_t r = 0; r < returns.size(); r++) {
    const auto* info = returns[r].alias_info();
    if (info && info->isWrite()) {
      for (size_t n = 0; n < count; n++)
        if (arguments[n].alias_info() && arguments[n].alias_info()->isWrite() &&
            arguments[n].alias_info()->beforeSets() == info->beforeSets())
          written_by[r] = (int)n;
    }
    TORCH_CHECK(!info || info->isWrite(), schema.name(), " makes a view, which is not implemented");
    if (written_by[r] < 0) {
      fresh = true;
      auto kind = returns[r].type()->kind();
      plain &= kind == c10::TypeKind::TensorType ||
          (kind == c10::TypeKind::ListType && returns[r].type()->containedType(0)->kind() == c10::TypeKind::TensorType);
    }
  }
  auto finish = [&](std::vector<IValue> results) {
    stack->erase(stack->begin() + begin, stack->end());
    for (size_t r = 0; r < returns.size(); r++) stack->push_back(written_by[r] >= 0 ? given[written_by[r]] : results[r]);
  };

  bool inferred = true;
  if (fresh || has_out) {
    inferred = plain;
    if (plain) try {
        op.callBoxed(&meta);
      } catch (const std::exception&) {  // it depends on values, or there is no meta kernel: the CPU says what is wrong
        inferred = false;
      }
  }
  if (inferred) {
    std::vector<IValue> results(returns.size());
    std::vector<std::vector<Tensor>> outs(returns.size());
    for (size_t r = 0; r < returns.size() && (fresh || has_out); r++) {
      if (written_by[r] >= 0) {
        if (!arguments[written_by[r]].is_out()) continue;
        Tensor out = given[written_by[r]].toTensor(), wanted = meta[r].toTensor();
        if (out.sizes() != wanted.sizes()) {
          out.resize_(wanted.sizes());
          if (out.strides() != wanted.strides() && wanted.is_non_overlapping_and_dense()) out.as_strided_(wanted.sizes(), wanted.strides());
          host[written_by[r]] = reach(out);
        }
        continue;
      }
      results[r] = map_tensors(meta[r], [&](const Tensor& t) -> Tensor {
        Tensor made = t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(*where)) : t;
        outs[r].push_back(made.defined() ? reach(made) : made);
        return made;
      });
    }
    stream->push([op, host, outs, written_by]() mutable {
      op.callBoxed(&host);
      for (size_t r = 0; r < outs.size(); r++) {
        if (outs[r].empty()) continue;
        size_t n = 0;
        map_tensors(host[r], [&](const Tensor& t) {
          Tensor& out = outs[r].at(n++);
          if (out.defined() && t.defined() && (t.numel() || !out.numel())) {  // the CPU leaves out what no backward needs
            TORCH_CHECK(out.sizes() == t.sizes(), op.schema().name(), " gave ", t.sizes(), " for ", out.sizes());
            out.copy_(t);
          }
          return t;
        });
      }
    });
    return finish(std::move(results));
  }
  // The result's shape depends on values: wait for them, as a GPU's kernels do.
  std::vector<IValue> results;
  std::exception_ptr error;
  for (size_t n = 0; n < count; n++)
    if (arguments[n].is_out()) host[n] = at::empty({0}, given[n].toTensor().options().device(at::kCPU));
  auto outs = host;
  uint64_t at = stream->push([&] {
    try {
      op.callBoxed(&host);
    } catch (...) {
      error = std::current_exception();
    }
  });
  stream->wait(at);
  device.check();
  if (error) std::rethrow_exception(error);
  for (size_t r = 0; r < returns.size(); r++) {
    if (written_by[r] >= 0) {
      if (arguments[written_by[r]].is_out()) {
        Tensor out = given[written_by[r]].toTensor();
        out.resize_(outs[written_by[r]].toTensor().sizes());
        out.copy_(outs[written_by[r]].toTensor());
      }
      results.emplace_back();
    } else
      results.push_back(map_tensors(host[r], [&](const Tensor& t) { return t.defined() ? t.to(*where) : t; }));
  }
  finish(std::move(results));
}

c10::OperatorHandle find(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) { launch(find("aten::convolution"), stack); }
void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  size_t begin = stack->size() - op.schema().arguments().size();
  Tensor weight = (*stack)[begin + 2].toTensor();
  bool transposed = (*stack)[begin + 6].toBool();
  int64_t groups = (*stack)[begin + 8].toInt();
  c10::List<int64_t> sizes({transposed ? weight.size(1) * groups : weight.size(0)});
  stack->insert(stack->begin() + begin + 3, IValue(sizes));
  launch(find("aten::convolution_backward"), stack);
}
int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // math
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", [](Tensor& self, at::Storage source) -> Tensor& { return at::native::set_(self, source); });
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("is_pinned", &is_pinned);
  m.impl("_fused_sdp_choice", &choose_attention);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}
} // namespace

PYBIND11_MODULE(_C, m) {
  m.def("device_count", [] { return COUNT; });
  m.def("current_device", [] { return current; });
  m.def("set_device", [](int i) { Guard().setDevice({SIM, (c10::DeviceIndex)i}); });
  m.def("exchange_device", [](int i) { return i < 0 ? -1 : (int)Guard().exchangeDevice({SIM, (c10::DeviceIndex)i}).index(); });
  m.def("default_generator", [](int i) { return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(i))); });
  m.def("break_device", [](int i, std::string why) { devices().at(i)->fail(why); });
  m.def("mend_device", [](int i) { std::lock_guard lock(devices().at(i)->broken_m); devices()[i]->broken.clear(); });
  m.def("limit_memory", [](int i, size_t bytes) { std::lock_guard lock(devices().at(i)->m); devices()[i]->limit = std::min(bytes, MEMORY); });
  m.def("hide_memory", [](bool hides) { Allocator::hides_memory = hides; });
  m.def("set_order", [](std::string name, unsigned seed) { order.set(name, seed); });
}
