/* The C interface: raw pointers, no ownership of arrays. The Python binding checks every argument first, so the only
 * failure is a lack of memory: calls that return int32_t give 0, or -1 then, and *_create give null; nothing is leaked, and
 * every handle may be used again. dspark_last_error says what could not be allocated.
 *
 * A call is made by one thread at a time per pool. Handles are freed by their *_destroy function. */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DSPARK_API __attribute__((visibility("default")))

enum { DSPARK_VISIBLE_CHAIN = 0, DSPARK_VISIBLE_MASK = 1, DSPARK_VISIBLE_BLOCK = 2 };
enum { DSPARK_ROWS_PLAIN = 0, DSPARK_ROWS_GATE = 1, DSPARK_ROWS_UP = 2 };
enum { DSPARK_QKV = 0, DSPARK_OUTPUT = 1, DSPARK_GATE_UP = 2, DSPARK_DOWN = 3 };
enum { DSPARK_INPUT_NORM = 0, DSPARK_POST_NORM = 1, DSPARK_Q_NORM = 2, DSPARK_K_NORM = 3, DSPARK_FINAL_NORM = 4 };

/* Best of "avx512", "avxvnni", "avx2", "portable" that this processor runs, at most `wanted` when it is not null. */
DSPARK_API const char* dspark_isa(const char* wanted);

/* Of the calling thread's last call that failed: what had no memory, and how many bytes where that is known. */
DSPARK_API const char* dspark_last_error(void);

DSPARK_API void* dspark_pool_create(int32_t num_threads, int32_t pin);
DSPARK_API void dspark_pool_destroy(void* pool);
DSPARK_API int32_t dspark_pool_threads(void* pool);

/* Memory for weights, in huge pages where the system gives them; freed as a whole. */
DSPARK_API void* dspark_arena_create(void);
DSPARK_API void dspark_arena_destroy(void* arena);
DSPARK_API int64_t dspark_arena_bytes(void* arena);

/* A weight matrix [n, k] of dtype 0 float32, 1 bfloat16, 2 int8; lives as long as its arena. */
DSPARK_API void* dspark_matrix_create(void* arena, int32_t dtype, int32_t n, int32_t k);
DSPARK_API int32_t dspark_matrix_pack(void* matrix, void* pool, const float* rows, int32_t num_rows, int32_t first_row,
                                   int32_t kind);
DSPARK_API int32_t dspark_matrix_rows(void* matrix, void* pool, const int32_t* rows, int32_t num_rows, float* out);
DSPARK_API int64_t dspark_matrix_bytes(void* matrix);
/* out [rows, n] = x [rows, k] W^T */
DSPARK_API int32_t dspark_matrix_apply(void* matrix, void* pool, const char* isa, const float* x, int32_t rows, float* out);

typedef struct {
  int32_t hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim;
  int32_t dtype, cache_dtype;
  float rms_norm_eps;
  const int32_t* windows; /* [num_layers] sliding window in positions, 0 = all */
  const char* isa;
} DSparkDecoderConfig;

DSPARK_API void* dspark_decoder_create(const DSparkDecoderConfig* config, void* pool);
DSPARK_API void dspark_decoder_destroy(void* decoder);
DSPARK_API void dspark_decoder_set_matrix(void* decoder, int32_t layer, int32_t which, void* matrix);
DSPARK_API int32_t dspark_decoder_set_norm(void* decoder, int32_t layer, int32_t which, const float* values, int32_t n);
DSPARK_API void dspark_decoder_set_ends(void* decoder, void* embedding, void* head);
DSPARK_API int32_t dspark_decoder_allocate_cache(void* decoder, int64_t num_slots);
/* Have the system give the cache's memory now rather than when it is first written. */
DSPARK_API int32_t dspark_decoder_touch_cache(void* decoder);
/* Copy keys and values of every layer from slot from[i] to slot to[i], in order. */
DSPARK_API void dspark_decoder_move_cache(void* decoder, int32_t num, const int32_t* from, const int32_t* to);

typedef struct {
  int32_t num_rows, num_sequences, max_pages, page_size, mask_words, visibility, num_logit_rows, num_taps;
  int32_t logits_width, reserved;
  const int32_t *tokens, *positions, *query_start, *context_len, *page_table, *slots, *ancestors, *logit_rows;
  const int32_t* taps;         /* [num_taps] layer ids whose output is copied, -1 = the embedding */
  const float *cos, *sin;      /* [positions, head_dim / 2] */
  float* features;             /* [num_rows, num_taps * hidden_size] */
  float* hidden;               /* [num_logit_rows, hidden_size] after the final norm, or null */
  float* logits;               /* [num_logit_rows, logits_width] or null */
  int32_t* argmax;             /* [num_logit_rows] or null */
  uint8_t* finite;             /* [num_logit_rows] or null */
} DSparkPass;

DSPARK_API int32_t dspark_decoder_forward(void* decoder, const DSparkPass* pass);

/* Write keys and values of every layer for rows of raw input (no layer norm, no queries): features [rows, fc.k]
 * -> fc -> RMSNorm(norm) -> each layer's K and V projections -> cache. */
DSPARK_API int32_t dspark_decoder_append(void* decoder, void* fc, const float* norm, const float* features,
                                      int32_t num_rows, const int32_t* positions, const int32_t* slots,
                                      const float* cos, const float* sin);

/* The sequential head of a block drafter (rank 0: base logits alone) and its confidence head. Arrays are borrowed. */
enum { DSPARK_HEAD_NONE = 0, DSPARK_HEAD_VANILLA = 1, DSPARK_HEAD_GATED = 2, DSPARK_HEAD_RNN = 3 };

typedef struct {
  int32_t hidden_size, rank, kind, draft_vocab_size, w1_is_bfloat16, confidence_sees_previous;
  float confidence_bias;
  int32_t reserved;
  const void* w1;                    /* [rows, rank] float32 or bfloat16 */
  const float* mix_bias;             /* [rank] gated, [3 * rank] rnn */
  const float* confidence;           /* [hidden_size (+ rank)] or null */
  const float* greedy_confidence;    /* [steps, 3]: arg-max drafts are rated w0 logit + w1 logit q + w2, or null */
  const int32_t* previous_to_row;    /* [vocab_size] row of w1 for a target token, null = the token */
  const int32_t* draft_to_target;    /* [draft_vocab_size] or null */
  void* w2;                          /* matrix [draft_vocab_size, rank] */
  void* mix;                         /* matrix [rank, hidden + rank] gated, [3 rank, 2 rank + hidden] rnn, or null */
  const char* isa;
} DSparkHeadConfig;

DSPARK_API void* dspark_head_create(const DSparkHeadConfig* config, void* pool);
DSPARK_API void dspark_head_destroy(void* head);
/* Draw arg-max tokens left to right. hidden [n, steps, d]; logits [n, steps, Vd] hold U_k and leave as U_k + B_k;
 * tokens, finite, confidence [n, steps] (confidence may be null). */
DSPARK_API int32_t dspark_head_greedy(void* head, int32_t num_sequences, int32_t steps, const int32_t* anchors,
                                   const float* hidden, float* logits, int32_t* tokens, uint8_t* finite,
                                   float* confidence);
/* How the drafts of one sequence are drawn (dspark/sampling). */
typedef struct {
  uint64_t seed;
  double top_p;          /* 1 = all */
  float scale;           /* 1 / temperature; 0 = the arg-max */
  float min_log;         /* log of min_p, -infinity = all */
  int32_t top_k;         /* 0 = all */
  int32_t coupled;       /* the race of tokens' own noise, else the inverse of the running total */
  int32_t position;      /* absolute, of the first draft */
  int32_t num_committed; /* tokens that are committed */
} DSparkSampling;

/* As dspark_head_greedy, drawn by samplings [n]. Of each draft also q: probs [n, steps, Vd] of the draft-vocabulary
 * entries [n, steps, Vd] that were kept, count [n, steps]; count 0 = arg-max, count Vd = all, entries not written. */
DSPARK_API int32_t dspark_head_sample(void* head, int32_t num_sequences, int32_t steps, const int32_t* anchors,
                                   const float* hidden, float* logits, const DSparkSampling* samplings,
                                   int32_t* tokens, uint8_t* finite, float* confidence, double* probs,
                                   int32_t* entries, int32_t* count);
/* One step: bias [n, Vd] = B_k; state [n, rank] is read and replaced (rnn). */
DSPARK_API int32_t dspark_head_step(void* head, int32_t num_sequences, const int32_t* previous, const float* hidden,
                                 float* state, float* bias);
DSPARK_API int32_t dspark_head_confidence(void* head, int32_t num_sequences, const int32_t* previous,
                                       const float* hidden, float* confidence);

/* Seconds that all threads of the pool take to read `bytes` of memory once, the best of three; 0 without memory. */
DSPARK_API double dspark_read_seconds(void* pool, const char* isa, int64_t bytes);
/* Seconds of each of `times` reads of all that lies in the arena, one after the other. */
DSPARK_API int32_t dspark_arena_read_seconds(void* arena, void* pool, const char* isa, int32_t times, double* seconds);

#ifdef __cplusplus
}
#endif
