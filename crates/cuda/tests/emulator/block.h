// What the driver and a compiled kernel file know of each other.
#pragma once

#define EMU_STACK (32768 + 320) /* of a thread; no power of two, so that neighbours share no cache lines' places */
#define EMU_MEMORY (4u << 20)   /* of a worker, for the threads of its block */
#define EMU_GUARD 128u          /* behind a block's shared memory, in bytes */
#define EMU_SHARED 232448u      /* most shared memory of a block */
#define EMU_PARAMS 4            /* most parameters of a kernel */

// One block to run.
struct EmuBlock {
  void (*call)(void **args);
  void **args;
  unsigned grid[3], threads[3], index[3];
  unsigned shared;
  char *stacks;
  void *memory;
  void *reporter;
  void (*report)(void *reporter, const char *why, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b);
};

// One kernel of a file.
struct EmuKernel {
  void (*call)(void **args);
  unsigned params, sizes[EMU_PARAMS];
  unsigned threads_max;
};
