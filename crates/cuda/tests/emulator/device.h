// The device language on a processor: types, builtins, the instructions that the kernels spell in PTX, and the threads
// of a block as fibers of one thread. libnvrtc.cpp puts this in front of every kernel file; driver.cpp runs its blocks.
//
// One copy of a compiled kernel file belongs to one worker, which runs one block at a time: what is static here is the
// running block's, and so is `__shared__` memory.
#include "block.h"

#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static
#define __constant__ static const
#define __grid_constant__
#define __restrict__ __restrict
#define NOT_INLINE __attribute__((noinline, cold))
#define ALWAYS static inline __attribute__((always_inline))

struct __align__(8) uint2 { unsigned x, y; };
struct uint3 { unsigned x, y, z; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
struct __align__(8) int2 { int x, y; };
struct __align__(16) int4 { int x, y, z, w; };
struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
struct __align__(16) ulonglong2 { unsigned long long x, y; };
struct dim3 { unsigned x, y, z; };

ALWAYS uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
ALWAYS uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
ALWAYS int2 make_int2(int x, int y) { return {x, y}; }
ALWAYS int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
ALWAYS float2 make_float2(float x, float y) { return {x, y}; }
ALWAYS float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- the running block ----

namespace emu {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A copy to shared memory that was asked for and is done when it is waited for, as late as a device may.
struct Copy {
  void *to;
  const void *from;
};
const u32 COPIES = 64, GROUPS = 8;

struct Warp;

struct Fiber {
  void *sp;
  Warp *warp;
  u32 lane;
  uint3 tid;
  u32 asked, done;      // copies
  u32 closed, finished; // groups of them
  u32 ends[GROUPS];     // copies that were asked for when a group was closed
};

// A vote or exchange of some lanes of a warp.
struct Party {
  u32 mask, arrived;
};

struct Warp {
  u32 ready;   // lanes that may go on
  u32 live;    // lanes that have not ended
  u32 barrier; // lanes that wait for the block
  u32 count, parity, kind;
  Fiber *fibers;
  u64 slot[2][32];
  u64 side[32];
  u64 view[32][32];
  Party party[4];
};

// What a worker owns for all its blocks, beside the stacks.
struct Memory {
  Fiber fibers[1024];
  Warp warps[32];
  Copy copies[1024][COPIES];
};
static_assert(sizeof(Memory) <= EMU_MEMORY, "the driver makes room for it");

static Memory *memory;
static Fiber *self;
static void *main_sp;
static const EmuBlock *block;
static u32 votes, voted;
alignas(1024) static char block_shared[EMU_SHARED + EMU_GUARD];
static bool failed;

// Leaves the running fiber for another, to be resumed behind this.
ALWAYS void change(void **save, void *to) {
  asm volatile(
      "push %%rbp\n\tlea 1f(%%rip), %%rax\n\tpush %%rax\n\tmov %%rsp, (%0)\n\tmov %1, %%rsp\n\tpop %%rax\n\tjmp *%%rax\n"
      "1:\tpop %%rbp"
      : "+D"(save), "+S"(to)::"rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory",
        "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",
        "xmm13", "xmm14", "xmm15"
#ifdef __AVX512F__
        ,
        "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27",
        "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#endif
  );
}

// The next lane of the warp that may go on, else the loop over warps.
ALWAYS void wait(Fiber *f, Warp *w) {
  u32 ready = w->ready;
  if (__builtin_expect(ready != 0, 1)) {
    u32 from = (f->lane + 1) & 31;
    u32 turned = from ? ready >> from | ready << (32 - from) : ready;
    u32 lane = (from + __builtin_ctz(turned)) & 31;
    w->ready = ready & ~(1u << lane);
    self = w->fibers + lane;
    change(&f->sp, self->sp);
  } else {
    change(&f->sp, main_sp);
  }
}

NOT_INLINE static void fail(const char *why, u32 a = 0, u32 b = 0) {
  if (!failed) block->report(block->reporter, why, self->tid.x, self->tid.y, self->tid.z, a, b);
  failed = true;
  change(&self->sp, main_sp);
  __builtin_unreachable();
}

template <typename T>
ALWAYS u64 to_bits(T value) {
  static_assert(sizeof(T) <= 8, "values of at most eight bytes are exchanged");
  u64 bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <typename T>
ALWAYS T from_bits(u64 bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

NOT_INLINE static u64 *meet_some(u32 mask, u64 bits) {
  Fiber *f = self;
  Warp *w = f->warp;
  u32 bit = 1u << f->lane;
  if (!(mask & bit)) fail("a lane takes part in an exchange whose mask does not name it; mask %#x", mask);
  Party *party = 0;
  for (Party &p : w->party)
    if (p.arrived && p.mask == mask) party = &p;
  for (Party &p : w->party)
    if (!party && !p.arrived) party = &p;
  if (!party) fail("more than four exchanges of a warp at a time");
  party->mask = mask;
  party->arrived |= bit;
  w->side[f->lane] = bits;
  if (party->arrived == mask) {
    party->arrived = 0;
    for (u32 lane = 0; lane < 32; lane++)
      if (mask >> lane & 1)
        for (u32 i = 0; i < 32; i++) w->view[lane][i] = w->side[i];
    w->ready |= mask & ~bit;
  } else {
    wait(f, w);
  }
  return w->view[f->lane];
}

// Every lane of the mask leaves a value and goes on when all have; gives the values by lane, which stay until this
// lane's next exchange.
ALWAYS const u64 *meet(u32 mask, u64 bits, u32 kind) {
  if (__builtin_expect(mask != 0xffffffffu, 0)) return meet_some(mask, bits);
  Fiber *f = self;
  Warp *w = f->warp;
  u32 parity = w->parity;
  u64 *slot = w->slot[parity];
  slot[f->lane] = bits;
  if (w->count == 0) w->kind = kind;
  if (__builtin_expect(w->kind != kind, 0)) fail("lanes of a warp meet in different operations (%u and %u)", w->kind, kind);
  if (++w->count == 32) {
    w->count = 0;
    w->parity = parity ^ 1;
    w->ready = ~(1u << f->lane);
  } else {
    wait(f, w);
  }
  return slot;
}

static inline void finish_copies(Fiber *f, u32 until) {
  Copy *copies = memory->copies[f - memory->fibers];
  for (; (int)(until - f->done) > 0; f->done++) {
    Copy &copy = copies[f->done % COPIES];
    if (copy.from)
      __builtin_memcpy(copy.to, copy.from, 16);
    else
      __builtin_memset(copy.to, 0, 16);
  }
}

ALWAYS void *shared_place(u32 at) { return block_shared + (int)at; }

ALWAYS void copy_later(u32 to, const void *from, u32 size) {
  Fiber *f = self;
  if (size != 0 && size != 16) fail("a copy of %u of 16 bytes is not emulated", size);
  if (f->asked - f->done == COPIES) finish_copies(f, f->done + 1);
  memory->copies[f - memory->fibers][f->asked++ % COPIES] = {shared_place(to), size ? from : 0};
}

ALWAYS void close_group() {
  Fiber *f = self;
  if (f->closed - f->finished == GROUPS) finish_copies(f, f->ends[f->finished++ % GROUPS]);
  f->ends[f->closed++ % GROUPS] = f->asked;
}

ALWAYS void wait_groups(u32 open) {
  Fiber *f = self;
  while (f->closed - f->finished > open) finish_copies(f, f->ends[f->finished++ % GROUPS]);
}

static void begin() {
  block->call(block->args);
  Fiber *f = self;
  Warp *w = f->warp;
  w->live &= ~(1u << f->lane);
  wait(f, w);
  __builtin_unreachable();
}

}  // namespace emu

#define threadIdx (emu::self->tid)
static uint3 blockIdx;
static dim3 blockDim, gridDim;

extern "C" __attribute__((visibility("default"))) int emu_run(const EmuBlock *b) {
  using namespace emu;
  block = b;
  memory = (Memory *)b->memory;
  blockIdx = {b->index[0], b->index[1], b->index[2]};
  blockDim = {b->threads[0], b->threads[1], b->threads[2]};
  gridDim = {b->grid[0], b->grid[1], b->grid[2]};
  u32 count = blockDim.x * blockDim.y * blockDim.z, warps = (count + 31) / 32;
  // What nobody wrote is no number.
  __builtin_memset(emu::block_shared, 0xff, b->shared + EMU_GUARD);
  votes = voted = 0;
  failed = false;
  uint3 tid = {0, 0, 0};
  for (u32 i = 0; i < count; i++) {
    Fiber &f = memory->fibers[i];
    char *top = b->stacks + (u64)(i + 1) * EMU_STACK;
    u64 *sp = (u64 *)((u64)top & ~15ull) - 2;
    *sp = (u64)&begin;
    f.sp = sp;
    f.warp = memory->warps + i / 32;
    f.lane = i % 32;
    f.tid = tid;
    f.asked = f.done = f.closed = f.finished = 0;
    if (++tid.x == blockDim.x) {
      tid.x = 0;
      if (++tid.y == blockDim.y) tid.y = 0, tid.z++;
    }
  }
  for (u32 i = 0; i < warps; i++) {
    Warp &w = memory->warps[i];
    u32 lanes = count - 32 * i;
    w.ready = w.live = lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1;
    w.barrier = w.count = w.parity = 0;
    w.fibers = memory->fibers + 32 * i;
    for (Party &party : w.party) party.arrived = 0;
  }
  // Neighbouring blocks run their warps in opposite orders, so that what a barrier lacks shows in one of them.
  bool backward = (blockIdx.x + blockIdx.y + blockIdx.z) & 1;
  for (;;) {
    u32 live = 0, waiting = 0;
    for (u32 i = 0; i < warps; i++) {
      Warp &w = memory->warps[backward ? warps - 1 - i : i];
      if (w.ready) {
        u32 lane = __builtin_ctz(w.ready);
        w.ready &= ~(1u << lane);
        self = w.fibers + lane;
        change(&main_sp, self->sp);
        if (failed) return 1;
      }
      live += __builtin_popcount(w.live);
      waiting += __builtin_popcount(w.barrier);
    }
    if (live == 0) break;
    if (waiting != live) {
      for (u32 i = 0; i < warps; i++) {
        Warp &w = memory->warps[i];
        u32 stuck = w.live & ~w.barrier;
        if (!stuck) continue;
        self = w.fibers + __builtin_ctz(stuck);
        b->report(b->reporter, "waits for lanes that never come: waiting lanes %#x of its warp, ended %#x", self->tid.x,
                  self->tid.y, self->tid.z, stuck, ~w.live);
        return 1;
      }
    }
    for (u32 i = 0; i < warps; i++) {
      memory->warps[i].ready = memory->warps[i].barrier;
      memory->warps[i].barrier = 0;
    }
    voted = votes;
    votes = 0;
  }
  for (u32 i = 0; i < EMU_GUARD; i++) {
    if ((u8)block_shared[b->shared + i] != 0xff) {
      b->report(b->reporter, "the block writes behind its %u bytes of shared memory, at %u", 0, 0, 0, b->shared,
                b->shared + i);
      return 1;
    }
  }
  return 0;
}

// ---- builtins ----

ALWAYS void __syncthreads() {
  emu::Fiber *f = emu::self;
  f->warp->barrier |= 1u << f->lane;
  emu::wait(f, f->warp);
}

ALWAYS int __syncthreads_count(int p) {
  emu::votes += p != 0;
  __syncthreads();
  return emu::voted;
}
ALWAYS int __syncthreads_or(int p) { return __syncthreads_count(p) != 0; }
ALWAYS int __syncthreads_and(int p) { return __syncthreads_count(!p) == 0; }

enum { MEET_SYNC, MEET_VOTE, MEET_XOR, MEET_INDEX, MEET_UP, MEET_DOWN, MEET_MATCH, MEET_REDUCE };

ALWAYS void __syncwarp(unsigned mask = 0xffffffffu) { emu::meet(mask, 0, MEET_SYNC); }

template <typename T>
ALWAYS T __shfl_xor_sync(unsigned mask, T v, int o, int width = 32) {
  unsigned lane = emu::self->lane, from = lane ^ o;
  const emu::u64 *all = emu::meet(mask, emu::to_bits(v), MEET_XOR);
  return emu::from_bits<T>(all[(from & 31) / width <= lane / width ? from & 31 : lane]);
}

template <typename T>
ALWAYS T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
  unsigned lane = emu::self->lane;
  const emu::u64 *all = emu::meet(mask, emu::to_bits(v), MEET_INDEX);
  return emu::from_bits<T>(all[(lane & ~(width - 1)) + (from & (width - 1))]);
}

template <typename T>
ALWAYS T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
  unsigned lane = emu::self->lane;
  const emu::u64 *all = emu::meet(mask, emu::to_bits(v), MEET_UP);
  return emu::from_bits<T>(all[(lane & (width - 1)) >= by ? lane - by : lane]);
}

template <typename T>
ALWAYS T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
  unsigned lane = emu::self->lane;
  const emu::u64 *all = emu::meet(mask, emu::to_bits(v), MEET_DOWN);
  return emu::from_bits<T>(all[(lane & (width - 1)) + by < (unsigned)width ? lane + by : lane]);
}

template <typename F>
ALWAYS void over_lanes(unsigned mask, const emu::u64 *all, F f) {
  for (unsigned lane = 0; lane < 32; lane++)
    if (mask >> lane & 1) f(lane, all[lane]);
}

ALWAYS unsigned __ballot_sync(unsigned mask, int p) {
  const emu::u64 *all = emu::meet(mask, p != 0, MEET_VOTE);
  unsigned votes = 0;
  over_lanes(mask, all, [&](unsigned lane, emu::u64 v) { votes |= (unsigned)v << lane; });
  return votes;
}
ALWAYS int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
ALWAYS int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == mask; }

template <typename T>
ALWAYS unsigned __match_any_sync(unsigned mask, T v) {
  emu::u64 mine = emu::to_bits(v);
  const emu::u64 *all = emu::meet(mask, mine, MEET_MATCH);
  unsigned peers = 0;
  over_lanes(mask, all, [&](unsigned lane, emu::u64 v) { peers |= (unsigned)(v == mine) << lane; });
  return peers;
}

template <typename T, typename F>
ALWAYS T emu_reduce(unsigned mask, T v, F f) {
  const emu::u64 *all = emu::meet(mask, emu::to_bits(v), MEET_REDUCE);
  T result = v;
  over_lanes(mask, all, [&](unsigned lane, emu::u64 other) {
    if (lane != emu::self->lane) result = f(result, emu::from_bits<T>(other));
  });
  return result;
}
#define EMU_REDUCE(NAME, T, WHAT) \
  ALWAYS T __reduce_##NAME##_sync(unsigned mask, T v) { return emu_reduce(mask, v, [](T a, T b) { return (T)(WHAT); }); }
EMU_REDUCE(max, unsigned, a > b ? a : b)
EMU_REDUCE(max, int, a > b ? a : b)
EMU_REDUCE(min, unsigned, a < b ? a : b)
EMU_REDUCE(min, int, a < b ? a : b)
EMU_REDUCE(add, unsigned, a + b)
EMU_REDUCE(add, int, a + b)
EMU_REDUCE(and, unsigned, a & b)
EMU_REDUCE(or, unsigned, a | b)
EMU_REDUCE(xor, unsigned, a ^ b)

ALWAYS float __uint_as_float(unsigned v) { return emu::from_bits<float>(v); }
ALWAYS float __int_as_float(int v) { return emu::from_bits<float>((unsigned)v); }
ALWAYS unsigned __float_as_uint(float v) { return (unsigned)emu::to_bits(v); }
ALWAYS int __float_as_int(float v) { return (int)emu::to_bits(v); }

ALWAYS float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ALWAYS float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ALWAYS float __fadd_rn(float a, float b) { return a + b; }
ALWAYS float __fsub_rn(float a, float b) { return a - b; }
ALWAYS float __fmul_rn(float a, float b) { return a * b; }
ALWAYS float __fdiv_rn(float a, float b) { return a / b; }
ALWAYS float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
ALWAYS float sqrtf(float a) { return __builtin_sqrtf(a); }
ALWAYS float fabsf(float a) { return __builtin_fabsf(a); }
ALWAYS float copysignf(float a, float b) { return __builtin_copysignf(a, b); }
ALWAYS float rintf(float a) { return __builtin_rintf(a); }
ALWAYS float floorf(float a) { return __builtin_floorf(a); }
// The number of a number and a NaN; +0 is the larger zero.
ALWAYS float fmaxf(float a, float b) {
  float r = a > b ? a : b;
  r = b != b ? a : r;
  return a == b ? __uint_as_float(__float_as_uint(a) & __float_as_uint(b)) : r;
}
ALWAYS float fminf(float a, float b) {
  float r = a < b ? a : b;
  r = b != b ? a : r;
  return a == b ? __uint_as_float(__float_as_uint(a) | __float_as_uint(b)) : r;
}

ALWAYS unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
ALWAYS unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
ALWAYS int min(int a, int b) { return a < b ? a : b; }
ALWAYS int max(int a, int b) { return a > b ? a : b; }
ALWAYS unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
ALWAYS unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }

ALWAYS int __popc(unsigned v) { return __builtin_popcount(v); }
ALWAYS int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
ALWAYS int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
ALWAYS int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
ALWAYS int __ffs(int v) { return __builtin_ffs(v); }
ALWAYS unsigned __brev(unsigned v) {
  v = (v & 0x55555555u) << 1 | (v >> 1 & 0x55555555u);
  v = (v & 0x33333333u) << 2 | (v >> 2 & 0x33333333u);
  v = (v & 0x0f0f0f0fu) << 4 | (v >> 4 & 0x0f0f0f0fu);
  return __builtin_bswap32(v);
}
ALWAYS unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) {
    unsigned pick = s >> (4 * i) & 15, byte = (unsigned)(both >> (8 * (pick & 7))) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;
    out |= byte << (8 * i);
  }
  return out;
}

template <typename T> ALWAYS T __ldg(const T *p) { return *p; }
template <typename T> ALWAYS T __ldca(const T *p) { return *p; }
template <typename T> ALWAYS T __ldcg(const T *p) { return *p; }
template <typename T> ALWAYS T __ldcs(const T *p) { return *p; }
template <typename T> ALWAYS T __ldcv(const T *p) { return *(const volatile T *)p; }
template <typename T> ALWAYS void __stcg(T *p, T v) { *p = v; }
template <typename T> ALWAYS void __stcs(T *p, T v) { *p = v; }
template <typename T> ALWAYS void __stwt(T *p, T v) { *p = v; }

template <typename T> ALWAYS T atomicAdd(T *p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
template <typename T> ALWAYS T atomicSub(T *p, T v) { return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED); }
template <typename T> ALWAYS T atomicOr(T *p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
template <typename T> ALWAYS T atomicAnd(T *p, T v) { return __atomic_fetch_and(p, v, __ATOMIC_RELAXED); }
template <typename T> ALWAYS T atomicExch(T *p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }
template <typename T> ALWAYS T atomicCAS(T *p, T expected, T v) {
  __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
template <typename T> ALWAYS T atomicMax(T *p, T v) {
  T old = *p;
  while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  return old;
}
template <typename T> ALWAYS T atomicMin(T *p, T v) {
  T old = *p;
  while (v < old && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  return old;
}
ALWAYS void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
ALWAYS void __threadfence_block() {}

ALWAYS unsigned long long __cvta_generic_to_shared(const void *p) { return (unsigned)((const char *)p - emu::block_shared); }

// ---- instructions, by their text: what is no letter or digit is one underscore ----

// fp32 to bf16, nearest, ties to even.
ALWAYS unsigned emu_bf16(float x) {
  unsigned bits = __float_as_uint(x);
  return x != x ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

// fp32 to E4M3, nearest, ties to even, the largest number for what is larger.
ALWAYS unsigned emu_e4m3(float x) {
  unsigned sign = __float_as_uint(x) >> 24 & 0x80, bits = __float_as_uint(x) & 0x7fffffffu;
  if (x != x) return sign | 0x7f;
  if (bits < 0x3c800000u) {  // below 2^-6: multiples of 2^-9
    float steps = __builtin_rintf(__uint_as_float(bits) * 512.0f);
    return sign | (unsigned)steps;
  }
  bits += 0x7ffffu + (bits >> 20 & 1);
  unsigned code = (bits >> 20) - (120 << 3);
  return sign | (code > 0x7e ? 0x7e : code);
}

// E4M3 to fp16 bits. With the code's bits at the fp16's exponent it is 2^-8 times the value.
struct EmuHalves {
  unsigned short at[256];
  constexpr EmuHalves() : at() {
    for (int code = 0; code < 256; code++) {
      int exponent = code >> 3 & 15, mantissa = code & 7, bits = 0;
      if ((code & 0x7f) == 0x7f) {
        bits = 0x7fff;
      } else if (exponent) {
        bits = (exponent + 8) << 10 | mantissa << 7;
      } else if (mantissa) {
        int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
        bits = (top + 6) << 10 | (mantissa << (10 - top) & 0x3ff);
      }
      at[code] = (unsigned short)(bits == 0x7fff ? bits : bits | (code & 0x80) << 8);
    }
  }
};
static constexpr EmuHalves emu_halves;

ALWAYS float emu_half(unsigned short bits) {
  _Float16 value;
  __builtin_memcpy(&value, &bits, 2);
  return (float)value;
}

#define ptx_cvt_rn_bf16_f32_0_1(to, x) (to = (unsigned short)emu_bf16(x))
#define ptx_cvt_rn_bf16x2_f32_0_1_2(to, high, low) (to = emu_bf16(high) << 16 | emu_bf16(low))
#define ptx_cvt_rn_f16x2_e4m3x2_0_1(to, codes) \
  (to = (unsigned)emu_halves.at[(codes) >> 8 & 255] << 16 | emu_halves.at[(codes) & 255])
#define ptx_reg_f16_a_b_mov_b32_a_b_1_cvt_f32_f16_0_a(to, halves) (to = emu_half((unsigned short)(halves)))
#define ptx_reg_f16_a_b_mov_b32_a_b_1_cvt_f32_f16_0_b(to, halves) (to = emu_half((unsigned short)((halves) >> 16)))
#define ptx_cvt_rn_satfinite_e4m3x2_f32_0_1_2(to, high, low) \
  (to = (unsigned short)(emu_e4m3(high) << 8 | emu_e4m3(low)))
#define ptx_griddepcontrol_launch_dependents() ((void)0)
#define ptx_griddepcontrol_wait() ((void)0)

ALWAYS void ptx_ld_shared_v4_f32_0_1_2_3_4(float &x, float &y, float &z, float &w, unsigned at) {
  float4 v = *(const float4 *)emu::shared_place(at);
  x = v.x, y = v.y, z = v.z, w = v.w;
}
ALWAYS void ptx_ld_shared_v4_u32_0_1_2_3_4(unsigned &x, unsigned &y, unsigned &z, unsigned &w, unsigned at) {
  uint4 v = *(const uint4 *)emu::shared_place(at);
  x = v.x, y = v.y, z = v.z, w = v.w;
}
ALWAYS void ptx_ld_shared_f32_0_1(float &v, unsigned at) { v = *(const float *)emu::shared_place(at); }
ALWAYS void ptx_ld_shared_u32_0_1(unsigned &v, unsigned at) { v = *(const unsigned *)emu::shared_place(at); }
ALWAYS void ptx_ld_shared_u8_0_1(unsigned &v, unsigned at) { v = *(const unsigned char *)emu::shared_place(at); }

#define ptx_cp_async_cg_shared_global_L2_128B_0_1_16_2(to, from, size) emu::copy_later(to, from, size)
#define ptx_cp_async_cg_shared_global_0_1_16_2(to, from, size) emu::copy_later(to, from, size)
#define ptx_cp_async_cg_shared_global_0_1_16(to, from) emu::copy_later(to, from, 16)
#define ptx_cp_async_commit_group() emu::close_group()
#define ptx_cp_async_wait_group_0(n) emu::wait_groups(n)
#define ptx_cp_async_wait_all() emu::wait_groups(0)
