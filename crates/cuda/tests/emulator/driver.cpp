// The driver's library on a machine without a GPU: memory, streams, graphs and launches of one emulated device.
//
// A stream's work is done when it is asked for, by the calling thread and a pool of others that share the blocks of a
// grid. A kernel that does what it must not (a bad address, a barrier that not all reach) is named on stderr and breaks
// the device for good, as on hardware: every later call gives its error.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include "block.h"

namespace {

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  NOT_FOUND = 500,
  ILLEGAL_ADDRESS = 700,
  LAUNCH_OUT_OF_RESOURCES = 701,
  MISALIGNED_ADDRESS = 716,
  LAUNCH_FAILED = 719,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_UNJOINED = 904,
  CAPTURE_ISOLATION = 905,
};

// Few, so that grids that fill the device are small; enough that blocks share tiles as on hardware.
const int PROCESSORS = 16;
const size_t MEMORY = (size_t)16 << 30;
const unsigned WORKERS_MAX = 16;
const unsigned THREADS_MAX = 1024;
const size_t PAGE = 4096;
// New memory holds this: no number as bf16 or fp32.
const int UNWRITTEN = 0xff;

std::atomic<int> broken{SUCCESS};

#define CHECK_DEVICE \
  if (int error = broken.load()) return error

// ---- memory ----

std::mutex memory_lock;
std::map<size_t, size_t> allocations;  // first byte to bytes
size_t taken = 0;

size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// Memory between pages that nobody may touch; its end is a page's, so that one byte too far is found.
int allocate(size_t *at, size_t bytes) {
  if (bytes == 0) return INVALID_VALUE;
  bytes = (bytes + 255) / 256 * 256;
  std::lock_guard<std::mutex> guard(memory_lock);
  if (taken + pages(bytes) > MEMORY) return OUT_OF_MEMORY;
  char *base = (char *)mmap(nullptr, pages(bytes) + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return OUT_OF_MEMORY;
  if (mprotect(base + PAGE, pages(bytes), PROT_READ | PROT_WRITE) != 0) return OUT_OF_MEMORY;
  char *first = base + PAGE + pages(bytes) - bytes;
  memset(first, UNWRITTEN, bytes);
  allocations[(size_t)first] = bytes;
  taken += pages(bytes);
  *at = (size_t)first;
  return SUCCESS;
}

int release(size_t at) {
  std::lock_guard<std::mutex> guard(memory_lock);
  auto found = allocations.find(at);
  if (found == allocations.end()) return INVALID_VALUE;
  size_t bytes = found->second, base = at + bytes - pages(bytes) - PAGE;
  munmap((void *)base, pages(bytes) + 2 * PAGE);
  taken -= pages(bytes);
  allocations.erase(found);
  return SUCCESS;
}

// Whether these bytes lie in one allocation.
bool on_device(size_t at, size_t bytes) {
  std::lock_guard<std::mutex> guard(memory_lock);
  auto after = allocations.upper_bound(at);
  if (after == allocations.begin()) return false;
  --after;
  return at + bytes <= after->first + after->second;
}

// ---- workers ----

struct Grid {
  const char *name;
  const EmuKernel *const *kernels;      // by worker
  int (*const *run)(const EmuBlock *);  // likewise
  void **args;
  unsigned grid[3], threads[3], shared;
  unsigned blocks;
};

struct Worker {
  EmuBlock block;
  const Grid *grid = nullptr;
  char *stacks;
  void *memory;
  sigjmp_buf back;
  volatile bool in_block = false;
  bool memory_ready = false;
};

thread_local Worker *here = nullptr;

void say(const Grid &grid, const EmuBlock &block, const char *what) {
  fprintf(stderr, "emulated device: kernel %s, block (%u, %u, %u) of (%u, %u, %u): %s\n", grid.name, block.index[0],
          block.index[1], block.index[2], block.grid[0], block.grid[1], block.grid[2], what);
}

void report(void *worker, const char *why, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b) {
  char text[300], words[200];
  snprintf(words, sizeof words, why, a, b);
  snprintf(text, sizeof text, "thread (%u, %u, %u) %s", x, y, z, words);
  const Worker &w = *(Worker *)worker;
  say(*w.grid, w.block, text);
}

struct sigaction before[NSIG];

// A fault in a block ends the block; others are what they were.
void on_fault(int signal, siginfo_t *info, void *) {
  if (!here || !here->in_block) {
    sigaction(signal, &before[signal], nullptr);
    return;
  }
  // A misaligned vector access has no address on this machine.
  bool misaligned = signal == SIGILL || (signal == SIGSEGV && info->si_addr == nullptr && info->si_code == SI_KERNEL);
  char text[200];
  snprintf(text, sizeof text, "%s (signal %d) at %p",
           misaligned ? "a misaligned address" : signal == SIGFPE ? "an integer division by zero" : "an illegal address",
           signal, info->si_addr);
  say(*here->grid, here->block, text);
  here->in_block = false;
  siglongjmp(here->back, misaligned ? MISALIGNED_ADDRESS : ILLEGAL_ADDRESS);
}

void make_worker(Worker &worker) {
  const size_t stacks = pages((size_t)EMU_STACK * THREADS_MAX);
  char *base = (char *)mmap(nullptr, stacks + 2 * PAGE + EMU_MEMORY, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) abort();
  mprotect(base, PAGE, PROT_NONE);
  worker.stacks = base + PAGE;
  worker.memory = base + 2 * PAGE + stacks;
}

// Faults of a thread are handled on a stack of their own.
void prepare_thread() {
  thread_local bool ready = false;
  if (ready) return;
  ready = true;
  stack_t alternate = {};
  alternate.ss_size = 64 << 10;
  alternate.ss_sp = malloc(alternate.ss_size);
  sigaltstack(&alternate, nullptr);
}

struct Pool {
  std::mutex turn;  // one grid at a time
  std::mutex lock;
  std::condition_variable wake;
  std::vector<std::unique_ptr<Worker>> workers;
  const Grid *grid = nullptr;
  unsigned long long number = 0;  // of the grid
  std::atomic<unsigned> inside{0};  // workers beside the caller
  std::atomic<unsigned> next{0};
  std::atomic<int> error{SUCCESS};

  Pool() {
    unsigned count = std::min(WORKERS_MAX, std::max(1u, std::thread::hardware_concurrency()));
    for (unsigned i = 0; i < count; i++) workers.push_back(std::make_unique<Worker>());
    for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) {
      struct sigaction action = {};
      action.sa_sigaction = on_fault;
      action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
      sigaction(signal, &action, &before[signal]);
    }
    for (unsigned i = 1; i < count; i++) std::thread([this, i] { serve(i); }).detach();
  }

  void serve(unsigned index) {
    make_worker(*workers[index]);
    unsigned long long seen = 0;
    std::unique_lock<std::mutex> guard(lock);
    for (;;) {
      wake.wait(guard, [&] { return grid && number != seen; });
      seen = number;
      const Grid *mine = grid;
      inside++;
      guard.unlock();
      work(index, *mine);
      inside--;
      guard.lock();
    }
  }

  // Takes blocks until there are none.
  void work(unsigned index, const Grid &g) {
    Worker &worker = *workers[index];
    prepare_thread();
    here = &worker;
    worker.grid = &g;
    EmuBlock &block = worker.block;
    block.call = g.kernels[index]->call;
    block.args = g.args;
    block.shared = g.shared;
    block.stacks = worker.stacks;
    block.memory = worker.memory;
    block.reporter = &worker;
    block.report = report;
    memcpy(block.grid, g.grid, sizeof g.grid);
    memcpy(block.threads, g.threads, sizeof g.threads);
    if (int fault = sigsetjmp(worker.back, 0)) {
      error = fault;
    } else {
      for (unsigned i; error == SUCCESS && (i = next++) < g.blocks;) {
        block.index[0] = i % g.grid[0];
        block.index[1] = i / g.grid[0] % g.grid[1];
        block.index[2] = i / g.grid[0] / g.grid[1];
        worker.in_block = true;
        int failed = g.run[index](&block);
        worker.in_block = false;
        if (failed) error = LAUNCH_FAILED;
      }
    }
    here = nullptr;
  }

  int run(const Grid &g) {
    std::lock_guard<std::mutex> mine(turn);
    if (!workers[0]->memory_ready) {
      make_worker(*workers[0]);
      workers[0]->memory_ready = true;
    }
    next = 0;
    bool alone = workers.size() == 1 || g.blocks == 1;
    if (!alone) {
      std::lock_guard<std::mutex> guard(lock);
      grid = &g;
      number++;
      wake.notify_all();
    }
    work(0, g);
    if (!alone) {
      {
        std::lock_guard<std::mutex> guard(lock);
        grid = nullptr;
      }
      // They are in the middle of their last blocks.
      while (inside != 0) std::this_thread::yield();
    }
    return error;
  }
};

Pool &pool() {
  static Pool &pool = *new Pool;  // its threads outlive everything
  return pool;
}

// ---- modules ----

struct Module;

struct Function {
  std::string name;
  Module *module;
  std::vector<const EmuKernel *> kernels;  // by worker
  unsigned shared_max = 48 << 10;
};

// A compiled file, loaded once per worker: what is static in it is the worker's. Never unloaded: the same bytes are the
// same module.
struct Module {
  std::vector<void *> handles;
  std::vector<int (*)(const EmuBlock *)> run;
};

std::mutex module_lock;
std::map<std::string, std::unique_ptr<Module>> modules;

Module *load_module(const std::string &code) {
  std::lock_guard<std::mutex> guard(module_lock);
  std::unique_ptr<Module> &module = modules[code];
  if (module) return module.get();
  auto made = std::make_unique<Module>();
  for (size_t i = 0; i < pool().workers.size(); i++) {
    int file = memfd_create("emulated-kernels", MFD_CLOEXEC);
    if (file < 0 || write(file, code.data(), code.size()) != (ssize_t)code.size()) return nullptr;
    // Each copy needs a name of its own.
    std::string path = "/proc/self/fd/" + std::to_string(file);
    void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) fprintf(stderr, "emulated device: %s\n", dlerror());
    void *run = handle ? dlsym(handle, "emu_run") : nullptr;
    if (!run) return nullptr;
    // The descriptor stays open: its number is the copy's name.
    made->handles.push_back(handle);
    made->run.push_back((int (*)(const EmuBlock *))run);
  }
  module = std::move(made);
  return module.get();
}

// ---- streams and graphs ----

typedef std::function<int()> Work;
typedef std::vector<Work> Graph;

struct Stream;

// A capture: of the stream that began it, and of those that waited for an event of it.
struct Capture {
  Graph graph;
  Stream *origin;
  std::vector<Stream *> joined;
};

struct Stream {
  std::shared_ptr<Capture> capture;
  unsigned long long asked = 0, awaited = 0;  // work in the capture, and what of it the origin waits for
};

struct Event {
  std::chrono::steady_clock::time_point at;
  std::shared_ptr<Capture> capture;
  Stream *stream = nullptr;
  unsigned long long asked = 0;
};

Stream default_stream;

Stream &stream_of(Stream *stream) { return (size_t)stream <= 2 ? default_stream : *stream; }

int submit(Stream *stream, Work work) {
  CHECK_DEVICE;
  Stream &s = stream_of(stream);
  if (s.capture) {
    s.capture->graph.push_back(std::move(work));
    s.asked++;
    return SUCCESS;
  }
  return work();
}

int broke(int error) {
  if (error != SUCCESS) broken = error;
  return error;
}

// ---- launches ----

// A launch with its parameters, which are copied when it is made.
struct Launch {
  Function *function;
  std::vector<std::vector<char>> params;
  unsigned grid[3], threads[3], shared;

  int run() const {
    std::vector<std::vector<char>> own = params;
    void *args[EMU_PARAMS];
    // Aligned as the widest value is.
    std::vector<std::unique_ptr<char, void (*)(void *)>> places;
    for (size_t i = 0; i < own.size(); i++) {
      char *place = (char *)aligned_alloc(64, (own[i].size() + 63) / 64 * 64);
      memcpy(place, own[i].data(), own[i].size());
      places.emplace_back(place, [](void *p) { free(p); });
      args[i] = place;
    }
    Grid g;
    g.name = function->name.c_str();
    g.kernels = function->kernels.data();
    g.run = function->module->run.data();
    g.args = args;
    memcpy(g.grid, grid, sizeof grid);
    memcpy(g.threads, threads, sizeof threads);
    g.shared = shared;
    g.blocks = grid[0] * grid[1] * grid[2];
    return broke(pool().run(g));
  }
};

int launch(Function *f, const unsigned grid[3], const unsigned threads[3], unsigned shared, Stream *stream, void **params) {
  if (!f || !params) return INVALID_VALUE;
  Launch l;
  l.function = f;
  unsigned long long blocks = 1, count = 1;
  for (int i = 0; i < 3; i++) {
    if (grid[i] == 0 || threads[i] == 0 || (i > 0 && grid[i] > 65535)) return INVALID_VALUE;
    blocks *= l.grid[i] = grid[i];
    count *= l.threads[i] = threads[i];
  }
  if (blocks > 0x7fffffff || count > THREADS_MAX || shared > f->shared_max) return INVALID_VALUE;
  if (count > f->kernels[0]->threads_max) return LAUNCH_OUT_OF_RESOURCES;
  l.shared = shared;
  for (unsigned i = 0; i < f->kernels[0]->params; i++)
    l.params.emplace_back((char *)params[i], (char *)params[i] + f->kernels[0]->sizes[i]);
  return submit(stream, [l] { return l.run(); });
}

struct Config {
  unsigned grid[3], threads[3], shared;
  Stream *stream;
  void *attributes;
  unsigned attribute_count;
};

int context;

}  // namespace

#define CALL extern "C" __attribute__((visibility("default"))) int

CALL cuInit(unsigned) { return SUCCESS; }

CALL cuDriverGetVersion(int *version) {
  *version = 13000;
  return SUCCESS;
}

CALL cuGetErrorName(int error, const char **text) {
  switch (error) {
    case SUCCESS: *text = "CUDA_SUCCESS"; break;
    case INVALID_VALUE: *text = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *text = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case INVALID_DEVICE: *text = "CUDA_ERROR_INVALID_DEVICE"; break;
    case INVALID_IMAGE: *text = "CUDA_ERROR_INVALID_IMAGE"; break;
    case NOT_FOUND: *text = "CUDA_ERROR_NOT_FOUND"; break;
    case ILLEGAL_ADDRESS: *text = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    case LAUNCH_OUT_OF_RESOURCES: *text = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"; break;
    case MISALIGNED_ADDRESS: *text = "CUDA_ERROR_MISALIGNED_ADDRESS"; break;
    case LAUNCH_FAILED: *text = "CUDA_ERROR_LAUNCH_FAILED"; break;
    case NOT_SUPPORTED: *text = "CUDA_ERROR_NOT_SUPPORTED"; break;
    case CAPTURE_UNSUPPORTED: *text = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"; break;
    case CAPTURE_UNJOINED: *text = "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"; break;
    case CAPTURE_ISOLATION: *text = "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"; break;
    default: *text = "CUDA_ERROR_UNKNOWN";
  }
  return SUCCESS;
}

CALL cuGetErrorString(int error, const char **text) {
  cuGetErrorName(error, text);
  return SUCCESS;
}

CALL cuDeviceGetCount(int *count) {
  *count = 1;
  return SUCCESS;
}

CALL cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? SUCCESS : INVALID_DEVICE;
}

CALL cuDeviceGetName(char *name, int length, int) {
  snprintf(name, (size_t)length, "emulated device");
  return SUCCESS;
}

CALL cuDeviceTotalMem_v2(size_t *bytes, int) {
  *bytes = MEMORY;
  return SUCCESS;
}

CALL cuDeviceGetAttribute(int *value, int attribute, int) {
  switch (attribute) {
    case 1: *value = THREADS_MAX; break;        // threads of a block
    case 8: *value = 48 << 10; break;           // shared memory of a block
    case 10: *value = 32; break;                // warp size
    case 16: *value = PROCESSORS; break;        // multiprocessors
    case 75: *value = 9; break;                 // compute capability, major
    case 76: *value = 0; break;                 // and minor
    case 81: *value = 228 << 10; break;         // shared memory of a multiprocessor
    case 97: *value = (int)EMU_SHARED; break;   // shared memory of a block that asks for it
    case 115: *value = 0; break;                // memory pools
    default: return NOT_SUPPORTED;
  }
  return SUCCESS;
}

CALL cuDevicePrimaryCtxRetain(void **out, int) {
  *out = &context;
  pool();
  return SUCCESS;
}

CALL cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

CALL cuCtxGetCurrent(void **out) {
  *out = &context;
  return SUCCESS;
}

CALL cuCtxSetCurrent(void *) { return SUCCESS; }

CALL cuCtxSynchronize() { return broken; }

CALL cuMemGetInfo_v2(size_t *free, size_t *total) {
  CHECK_DEVICE;
  std::lock_guard<std::mutex> guard(memory_lock);
  *total = MEMORY;
  *free = MEMORY - taken;
  return SUCCESS;
}

CALL cuMemAlloc_v2(size_t *at, size_t bytes) {
  CHECK_DEVICE;
  return allocate(at, bytes);
}

CALL cuMemFree_v2(size_t at) { return release(at); }

CALL cuMemHostAlloc(void **at, size_t bytes, unsigned) {
  CHECK_DEVICE;
  *at = aligned_alloc(PAGE, pages(bytes));
  return *at ? SUCCESS : OUT_OF_MEMORY;
}

CALL cuMemFreeHost(void *at) {
  free(at);
  return SUCCESS;
}

CALL cuMemcpyHtoDAsync_v2(size_t to, const void *from, size_t bytes, Stream *stream) {
  if (!on_device(to, bytes)) return INVALID_VALUE;
  return submit(stream, [=] { return memcpy((void *)to, from, bytes), SUCCESS; });
}

CALL cuMemcpyHtoD_v2(size_t to, const void *from, size_t bytes) { return cuMemcpyHtoDAsync_v2(to, from, bytes, nullptr); }

CALL cuMemcpyDtoHAsync_v2(void *to, size_t from, size_t bytes, Stream *stream) {
  if (!on_device(from, bytes)) return INVALID_VALUE;
  return submit(stream, [=] { return memcpy(to, (const void *)from, bytes), SUCCESS; });
}

CALL cuMemcpyDtoH_v2(void *to, size_t from, size_t bytes) { return cuMemcpyDtoHAsync_v2(to, from, bytes, nullptr); }

CALL cuMemcpyDtoDAsync_v2(size_t to, size_t from, size_t bytes, Stream *stream) {
  if (!on_device(to, bytes) || !on_device(from, bytes)) return INVALID_VALUE;
  return submit(stream, [=] { return memmove((void *)to, (const void *)from, bytes), SUCCESS; });
}

CALL cuMemcpyDtoD_v2(size_t to, size_t from, size_t bytes) { return cuMemcpyDtoDAsync_v2(to, from, bytes, nullptr); }

CALL cuMemsetD8Async(size_t at, unsigned char value, size_t bytes, Stream *stream) {
  if (!on_device(at, bytes)) return INVALID_VALUE;
  return submit(stream, [=] { return memset((void *)at, value, bytes), SUCCESS; });
}

CALL cuMemsetD8_v2(size_t at, unsigned char value, size_t bytes) { return cuMemsetD8Async(at, value, bytes, nullptr); }

CALL cuStreamCreate(Stream **stream, unsigned) {
  CHECK_DEVICE;
  *stream = new Stream;
  return SUCCESS;
}

CALL cuStreamCreateWithPriority(Stream **stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }

CALL cuStreamDestroy_v2(Stream *stream) {
  delete stream;
  return SUCCESS;
}

CALL cuStreamSynchronize(Stream *stream) {
  CHECK_DEVICE;
  return stream_of(stream).capture ? CAPTURE_UNSUPPORTED : SUCCESS;
}

CALL cuStreamWaitEvent(Stream *stream, Event *event, unsigned) {
  CHECK_DEVICE;
  Stream &s = stream_of(stream);
  if (!event->capture) return s.capture ? CAPTURE_ISOLATION : SUCCESS;
  if (!s.capture) {
    if (!event->capture->origin) return CAPTURE_ISOLATION;
    s.capture = event->capture;
    s.asked = s.awaited = 0;
    s.capture->joined.push_back(&s);
  }
  if (s.capture != event->capture) return CAPTURE_ISOLATION;
  if (s.capture->origin == &s && event->stream != &s) event->stream->awaited = event->asked;
  return SUCCESS;
}

CALL cuStreamBeginCapture_v2(Stream *stream, int) {
  CHECK_DEVICE;
  Stream &s = stream_of(stream);
  if (s.capture) return CAPTURE_UNSUPPORTED;
  s.capture = std::make_shared<Capture>();
  s.capture->origin = &s;
  return SUCCESS;
}

CALL cuStreamIsCapturing(Stream *stream, int *status) {
  *status = stream_of(stream).capture ? 1 : 0;
  return SUCCESS;
}

CALL cuStreamEndCapture(Stream *stream, Graph **graph) {
  std::shared_ptr<Capture> capture = stream_of(stream).capture;
  *graph = nullptr;
  if (!capture || capture->origin != &stream_of(stream)) return CAPTURE_UNSUPPORTED;
  bool apart = false;
  for (Stream *joined : capture->joined) {
    apart = apart || joined->asked != joined->awaited;
    joined->capture = nullptr;
  }
  capture->origin->capture = nullptr;
  capture->origin = nullptr;
  if (apart) return CAPTURE_UNJOINED;
  *graph = new Graph(capture->graph);
  return SUCCESS;
}

CALL cuGraphInstantiateWithFlags(Graph **exec, Graph *graph, unsigned long long) {
  *exec = new Graph(*graph);
  return SUCCESS;
}

CALL cuGraphUpload(Graph *, Stream *) { return broken; }

CALL cuGraphLaunch(Graph *graph, Stream *stream) {
  for (const Work &work : *graph)
    if (int error = submit(stream, work)) return error;
  return SUCCESS;
}

CALL cuGraphExecDestroy(Graph *graph) {
  delete graph;
  return SUCCESS;
}

CALL cuGraphDestroy(Graph *graph) {
  delete graph;
  return SUCCESS;
}

CALL cuEventCreate(Event **event, unsigned) {
  *event = new Event;
  return SUCCESS;
}

CALL cuEventDestroy_v2(Event *event) {
  delete event;
  return SUCCESS;
}

CALL cuEventRecord(Event *event, Stream *stream) {
  Stream &s = stream_of(stream);
  event->capture = s.capture;
  event->stream = &s;
  event->asked = s.asked;
  if (s.capture) return broken;
  return submit(stream, [=] { return event->at = std::chrono::steady_clock::now(), SUCCESS; });
}

CALL cuEventSynchronize(Event *) { return broken; }

CALL cuEventQuery(Event *) { return broken; }

CALL cuEventElapsedTime_v2(float *ms, Event *start, Event *end) {
  *ms = std::chrono::duration<float, std::milli>(end->at - start->at).count();
  return broken;
}

CALL cuModuleLoadData(Module **module, const void *image) {
  CHECK_DEVICE;
  if (memcmp(image, "EMULATED", 8) != 0) return INVALID_IMAGE;
  unsigned long long size;
  memcpy(&size, (const char *)image + 8, 8);
  *module = load_module(std::string((const char *)image + 16, size));
  return *module ? SUCCESS : INVALID_IMAGE;
}

CALL cuModuleUnload(Module *) { return SUCCESS; }

CALL cuModuleGetFunction(Function **function, Module *module, const char *name) {
  static std::mutex lock;
  static std::map<std::pair<Module *, std::string>, std::unique_ptr<Function>> all;
  std::lock_guard<std::mutex> guard(lock);
  std::unique_ptr<Function> &made = all[{module, name}];
  if (!made) {
    auto found = std::make_unique<Function>();
    found->name = name;
    found->module = module;
    for (void *handle : module->handles) {
      void *kernel = dlsym(handle, ("emu_kernel_" + found->name).c_str());
      if (!kernel) return NOT_FOUND;
      found->kernels.push_back((const EmuKernel *)kernel);
    }
    made = std::move(found);
  }
  *function = made.get();
  return SUCCESS;
}

CALL cuFuncSetAttribute(Function *function, int attribute, int value) {
  if (attribute == 8) {
    if (value < 0 || value > (int)EMU_SHARED) return INVALID_VALUE;
    function->shared_max = (unsigned)value;
  }
  return SUCCESS;
}

CALL cuFuncGetAttribute(int *value, int attribute, Function *function) {
  switch (attribute) {
    case 0: *value = (int)function->kernels[0]->threads_max; break;  // threads of a block
    case 8: *value = (int)function->shared_max; break;           // dynamic shared memory
    default: *value = 0;
  }
  return SUCCESS;
}

CALL cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, Function *, int, size_t, unsigned) {
  *blocks = 1;
  return SUCCESS;
}

CALL cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Function *f, int threads, size_t shared) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, f, threads, shared, 0);
}

CALL cuLaunchKernel(Function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                    unsigned shared, Stream *stream, void **params, void **) {
  const unsigned grid[3] = {gx, gy, gz}, threads[3] = {bx, by, bz};
  return launch(f, grid, threads, shared, stream, params);
}

CALL cuLaunchKernelEx(const Config *config, Function *f, void **params, void **) {
  return launch(f, config->grid, config->threads, config->shared, config->stream, params);
}
