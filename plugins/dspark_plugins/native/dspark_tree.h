/* Trees of drafts from one block of a drafter: the C interface of tree.cpp. As dspark_native.h: raw pointers, no checks. */
#pragma once
#include "dspark_native.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int32_t num_sequences, steps, width, branch, max_nodes, reserved;
  const int32_t* anchors; /* [n] target token ids */
  const float* hidden;    /* [n, steps, hidden_size] h_k */
  const float* logits;    /* [n, steps, Vd] U_k */
  int32_t* tokens;        /* [n, max_nodes] target token ids, the likeliest node first, parents before their children */
  int32_t* parents;       /* [n, max_nodes] index of the node before it, -1 = the anchor */
  int32_t* depths;        /* [n, max_nodes] 0 = behind the anchor */
  int32_t* ranks;         /* [n, max_nodes] place among its siblings, 0 = the likeliest */
  float* log_q;           /* [n, max_nodes] logarithm of q of the token given its path */
  float* rating;          /* [n, max_nodes] confidence logit of its siblings' slot, or null */
  int32_t* num_nodes;     /* [n] */
} DSparkTreeCall;

/* `config` must be of kind DSPARK_HEAD_NONE or DSPARK_HEAD_VANILLA; its arrays are borrowed. */
DSPARK_API void* dspark_tree_create(const DSparkHeadConfig* config, void* pool);
DSPARK_API void dspark_tree_destroy(void* tree);
DSPARK_API int32_t dspark_tree_build(void* tree, const DSparkTreeCall* call);

#ifdef __cplusplus
}
#endif
