// What a block's sequential head and trees of it share.
#pragma once
#include <cstdint>

#include "dspark_native.h"
#include "kernels.hpp"

namespace dspark {

// W1[token] as float32 [rank].
void embed_token(const DSparkHeadConfig& c, int32_t token, float* out);

// The confidence logit of a slot: of its hidden state and, where the head sees it, of W1 of the token before.
float rate_slot(const DSparkHeadConfig& c, const Kernels& kernels, const float* hidden, const float* embedded);

}  // namespace dspark
