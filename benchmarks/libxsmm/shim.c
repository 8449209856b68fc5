// What the benchmarks call of libxsmm: y = x W^T with a block-sparse W, on PyTorch's threads.
//
// libxsmm multiplies panels of `width` tokens, [features][width], by a BCSC matrix. That of W^T has our values, row
// pointers and column indices as they are. Panels of bfloat16 have pairs of features side by side:
// [features / 2][width][2]. Row-major activations are turned into panels, and panels of results back, by libxsmm's own
// transposes. Its kernel that multiplies row-major ones as they lie (LIBXSMM_GEMM_FLAG_TRANS_A) took about twice the
// time of all three with AVX2, and is not tried.
#define _POSIX_C_SOURCE 200112L  // setenv
#include <libxsmm.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

// libtorch's parallel loop, as in csrc/parallel.cpp.
typedef int32_t (*parallel_for)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                                void* context);

typedef struct {
  int64_t tokens, in_features, out_features, block_rows;  // block_rows: those of blocks, in W
  int64_t width, panels, chunks, pieces;
  int64_t bytes;  // of a number
  int panels_first;
  libxsmm_gemmfunction product;
  libxsmm_meltwfunction_unary pack, unpack;
} plan;

typedef struct {
  const plan* plan;
  const char *x, *values;
  const unsigned *crow, *col;
  char *a, *c, *y;
  int repack;
  atomic_llong next;
} job;

static libxsmm_meltwfunction_unary transpose(libxsmm_datatype type, int64_t m, int64_t n, int64_t ldi, int64_t ldo) {
  const libxsmm_meltw_unary_shape shape = libxsmm_create_meltw_unary_shape(
      (libxsmm_blasint)m, (libxsmm_blasint)n, (libxsmm_blasint)ldi, (libxsmm_blasint)ldo, type, type, type);
  return libxsmm_dispatch_meltw_unary(LIBXSMM_MELTW_TYPE_UNARY_TRANSFORM_NORM_TO_NORMT, shape,
                                      LIBXSMM_MELTW_FLAG_UNARY_NONE);
}

void blocksparse_libxsmm_free(plan* p) {
  if (p == NULL) return;
  if (p->product != NULL) libxsmm_release_kernel((const void*)p->product);
  free(p);
}

// The architecture that libxsmm makes code for.
const char* blocksparse_libxsmm_target(void) {
  libxsmm_init();
  return libxsmm_get_target_arch();
}

// NULL where libxsmm has no such kernel on this CPU. The tokens are cut into panels of `width`, the outputs into
// `chunks` of as many blocks each; a task is one of either, neighbouring tasks have one panel if `panels_first`. With
// `prefetch` the kernel asks for the next block ahead.
plan* blocksparse_libxsmm_plan(int bfloat16, int64_t tokens, int64_t in_features, int64_t out_features,
                               int64_t block_out, int64_t block_in, int64_t width, int64_t chunks, int panels_first,
                               int prefetch, int64_t threads) {
  if (tokens % width || in_features % block_in || out_features % (block_out * chunks)) return NULL;
  plan* p = calloc(1, sizeof(plan));
  if (p == NULL) return NULL;
  const int64_t panels = tokens / width;
  int64_t pieces = 1;  // of a panel, so that there are enough of them for the threads
  while (panels * pieces < 4 * threads && panels % threads && in_features % (4 * pieces) == 0) pieces *= 2;
  *p = (plan){.tokens = tokens, .in_features = in_features, .out_features = out_features};
  p->block_rows = out_features / block_out;
  p->width = width, p->panels = panels, p->chunks = chunks, p->pieces = pieces;
  p->bytes = bfloat16 ? 2 : 4, p->panels_first = panels_first;

  const libxsmm_datatype type = bfloat16 ? LIBXSMM_DATATYPE_BF16 : LIBXSMM_DATATYPE_F32;
  const libxsmm_blasint k = (libxsmm_blasint)in_features, n = (libxsmm_blasint)out_features;
  libxsmm_init();
  const libxsmm_gemm_shape shape = libxsmm_create_gemm_shape(1, 0, k, k, 0, n, type, type, type, LIBXSMM_DATATYPE_F32);
  libxsmm_spgemm_config config = {0};
  config.packed_width = (libxsmm_blasint)width;
  config.bk = (libxsmm_blasint)block_in;
  config.bn = (libxsmm_blasint)block_out;
  libxsmm_bitfield flags = LIBXSMM_GEMM_FLAG_BETA_0;
  if (bfloat16) flags |= LIBXSMM_GEMM_FLAG_VNNI_A;
  setenv("LIBXSMM_X86_PACKED_SPGEMM_BCSC_PF_DIST_B", prefetch ? "1" : "0", 1);  // read where it makes the kernel
  p->product = libxsmm_create_packed_spgemm_bcsc(shape, flags, LIBXSMM_GEMM_PREFETCH_NONE, config);
  const int64_t pairs = bfloat16 ? 2 : 1;  // two numbers of 16 bits move as one of 32
  p->pack = transpose(LIBXSMM_DATATYPE_F32, in_features / pieces / pairs, width, in_features / pairs, width);
  p->unpack = transpose(type, width, out_features / chunks, width, out_features);
  if (p->product == NULL || p->pack == NULL || p->unpack == NULL) {
    blocksparse_libxsmm_free(p);
    return NULL;
  }
  return p;
}

static void pack(job* j, int64_t task) {
  const plan* p = j->plan;
  const int64_t panel = task / p->pieces, first = task % p->pieces * (p->in_features / p->pieces);
  libxsmm_meltw_unary_param param = {0};
  param.in.primary = (void*)(j->x + (panel * p->width * p->in_features + first) * p->bytes);
  param.out.primary = j->a + (panel * p->in_features + first) * p->width * p->bytes;
  p->pack(&param);
}

static void multiply(job* j, int64_t task) {
  const plan* p = j->plan;
  const int64_t panel = p->panels_first ? task / p->chunks : task % p->panels;
  const int64_t chunk = p->panels_first ? task % p->chunks : task / p->panels;
  const int64_t outputs = p->out_features / p->chunks;
  unsigned long long count = (unsigned long long)(p->block_rows / p->chunks);
  char* in_panel = j->c + (panel * p->out_features + chunk * outputs) * p->width * p->bytes;
  libxsmm_gemm_param param = {0};
  param.a.primary = (void*)(j->a + panel * p->width * p->in_features * p->bytes);
  param.b.primary = (void*)j->values;
  param.b.secondary = (void*)(j->crow + chunk * (int64_t)count);
  param.b.tertiary = (void*)j->col;
  param.b.quaternary = &count;
  param.c.primary = in_panel;
  p->product(&param);
  if (j->repack) {
    libxsmm_meltw_unary_param turn = {0};
    turn.in.primary = in_panel;
    turn.out.primary = j->y + (panel * p->width * p->out_features + chunk * outputs) * p->bytes;
    p->unpack(&turn);
  }
}

static void packs(int64_t begin, int64_t end, void* context) {
  (void)begin, (void)end;
  job* j = context;
  const int64_t count = j->plan->panels * j->plan->pieces;
  for (int64_t task; (task = atomic_fetch_add(&j->next, 1)) < count;) pack(j, task);
}

static void products(int64_t begin, int64_t end, void* context) {
  (void)begin, (void)end;
  job* j = context;
  const int64_t count = j->plan->panels * j->plan->chunks;
  for (int64_t task; (task = atomic_fetch_add(&j->next, 1)) < count;) multiply(j, task);
}

// From panels `a` to panels `c`; with `repack` from rows `x` to rows `y`, in which `a` and `c` are working memory.
int blocksparse_libxsmm_run(const plan* p, parallel_for loop, int64_t threads, int repack, const void* x, void* a,
                            const void* values, const unsigned* crow, const unsigned* col, void* c, void* y) {
  job j = {.plan = p, .x = x, .values = values, .crow = crow, .col = col, .a = a, .c = c, .y = y, .repack = repack};
  if (repack) {
    atomic_store(&j.next, 0);
    if (loop(0, threads, 1, packs, &j)) return 1;
  }
  atomic_store(&j.next, 0);
  return loop(0, threads, 1, products, &j);
}
