// What this machine can do at this moment: bytes read per second, and dot products per second.
//
// Each function runs on `num_threads` threads and returns a rate over all of them; 0 means that the
// processor lacks the instruction. peers_probe.py builds it at run time, for this machine alone.

#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { MAX_THREADS = 64, LANES = 16, NUM_CHAINS = 12, DOTS_PER_CALL = 20000 };
#define BYTES_PER_THREAD (128L << 20)  // far beyond the last cache
#define AVX512 __attribute__((target("avx512f")))
#define AVX512_BF16 __attribute__((target("avx512f,avx512bf16")))
#define AVX512_VNNI __attribute__((target("avx512f,avx512vnni")))

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

// --- one unit of work per kind: returns a value so that nothing is optimised away ---------------

static uint64_t read_plain(const uint64_t* data, int64_t num_words) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < num_words; ++i) sum ^= data[i];
  return sum;
}

AVX512 static uint64_t read_avx512(const uint64_t* data, int64_t num_words) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (int64_t i = 0; i < num_words; i += 32) {
    // Hardware prefetchers stop at a page's end: asking some lines ahead bridges that.
    for (int line = 0; line < 4; ++line) {
      _mm_prefetch((const char*)(data + i) + 4096 + 64 * line, _MM_HINT_T0);
    }
    a = _mm512_xor_si512(a, _mm512_loadu_si512(data + i));
    b = _mm512_xor_si512(b, _mm512_loadu_si512(data + i + 8));
    c = _mm512_xor_si512(c, _mm512_loadu_si512(data + i + 16));
    d = _mm512_xor_si512(d, _mm512_loadu_si512(data + i + 24));
  }
  a = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d));
  return _mm512_reduce_or_epi64(a);
}

// Independent chains of dot products in registers alone: more chains than the latency needs. They
// begin differently, or the compiler would make one of them.
AVX512_BF16 static uint64_t dot_bf16(uint64_t seed) {
  __m512bh x, y;
  __m512 acc[NUM_CHAINS];
  __m512i bits = _mm512_set1_epi32((int)seed);
  memcpy(&x, &bits, sizeof x);
  memcpy(&y, &bits, sizeof y);
#pragma GCC unroll 12
  for (int c = 0; c < NUM_CHAINS; ++c) acc[c] = _mm512_set1_ps((float)c);
  for (int i = 0; i < DOTS_PER_CALL; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < NUM_CHAINS; ++c) acc[c] = _mm512_dpbf16_ps(acc[c], x, y);
  }
  __m512 sum = acc[0];
#pragma GCC unroll 12
  for (int c = 1; c < NUM_CHAINS; ++c) sum = _mm512_add_ps(sum, acc[c]);
  return (uint64_t)_mm512_reduce_add_ps(sum);
}

AVX512_VNNI static uint64_t dot_int8(uint64_t seed) {
  __m512i x = _mm512_set1_epi32((int)seed), acc[NUM_CHAINS];
#pragma GCC unroll 12
  for (int c = 0; c < NUM_CHAINS; ++c) acc[c] = _mm512_set1_epi32(c);
  for (int i = 0; i < DOTS_PER_CALL; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < NUM_CHAINS; ++c) acc[c] = _mm512_dpbusd_epi32(acc[c], x, x);
  }
  __m512i sum = acc[0];
#pragma GCC unroll 12
  for (int c = 1; c < NUM_CHAINS; ++c) sum = _mm512_add_epi32(sum, acc[c]);
  return (uint64_t)_mm512_reduce_add_epi32(sum);
}

// --- threads ------------------------------------------------------------------------------------

typedef enum { READ_BYTES, DOT_BF16, DOT_INT8 } Kind;

typedef struct {
  Kind kind;
  double seconds;        // how long to go on
  const uint64_t* data;  // READ_BYTES: BYTES_PER_THREAD of it
  double work_per_s;     // result: bytes or operations
  volatile uint64_t sink;
} Job;

static double run_once(Job* job) {
  if (job->kind == DOT_BF16) {
    job->sink ^= dot_bf16(job->sink & 1);
    return 2.0 * 2 * LANES * NUM_CHAINS * DOTS_PER_CALL;
  }
  if (job->kind == DOT_INT8) {
    job->sink ^= dot_int8(job->sink & 1);
    return 2.0 * 4 * LANES * NUM_CHAINS * DOTS_PER_CALL;
  }
  const int64_t num_words = BYTES_PER_THREAD / sizeof(uint64_t);
  job->sink ^= __builtin_cpu_supports("avx512f") ? read_avx512(job->data, num_words)
                                                 : read_plain(job->data, num_words);
  return (double)BYTES_PER_THREAD;
}

static void* work(void* argument) {
  Job* job = argument;
  double work_done = 0, start_s = now_s(), elapsed_s;
  do {
    work_done += run_once(job);
    elapsed_s = now_s() - start_s;
  } while (elapsed_s < job->seconds);
  job->work_per_s = work_done / elapsed_s;
  return NULL;
}

static double run_threads(Kind kind, int num_threads, double seconds, const char* data) {
  pthread_t threads[MAX_THREADS];
  Job jobs[MAX_THREADS];
  if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
  for (int i = 0; i < num_threads; ++i) {
    const char* own = data ? data + i * BYTES_PER_THREAD : NULL;
    jobs[i] = (Job){.kind = kind, .seconds = seconds, .data = (const uint64_t*)own};
  }
  int num_started = 0;
  while (num_started < num_threads &&
         pthread_create(&threads[num_started], NULL, work, &jobs[num_started]) == 0) {
    ++num_started;
  }
  double work_per_s = 0;
  for (int i = 0; i < num_started; ++i) {
    pthread_join(threads[i], NULL);
    work_per_s += jobs[i].work_per_s;
  }
  return work_per_s;
}

// Bytes per second that `num_threads` threads read from memory together; 0 without memory for it.
double probe_read_bytes_per_s(int num_threads, double seconds) {
  static char* data = NULL;
  static int num_owners = 0;
  if (num_owners < num_threads) {
    // A page more than is read: the last prefetches look beyond the end.
    data = aligned_alloc(2 << 20, num_threads * BYTES_PER_THREAD + (2 << 20));
    if (data == NULL) return 0;
    madvise(data, num_threads * BYTES_PER_THREAD, MADV_HUGEPAGE);
    memset(data, 1, num_threads * BYTES_PER_THREAD);
    num_owners = num_threads;
  }
  return run_threads(READ_BYTES, num_threads, seconds, data);
}

// Multiplications and additions per second of bf16 dot products held in registers.
double probe_bf16_flop_per_s(int num_threads, double seconds) {
  if (!__builtin_cpu_supports("avx512bf16")) return 0;
  return run_threads(DOT_BF16, num_threads, seconds, NULL);
}

// Multiplications and additions per second of 8-bit dot products held in registers.
double probe_int8_op_per_s(int num_threads, double seconds) {
  if (!__builtin_cpu_supports("avx512vnni")) return 0;
  return run_threads(DOT_INT8, num_threads, seconds, NULL);
}
