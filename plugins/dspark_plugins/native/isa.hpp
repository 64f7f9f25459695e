// Choice of kernels by processor, and matrix helpers shared by the passes.
#pragma once
#include "kernels.hpp"

namespace dspark {

// Best kernels this processor runs, at most `wanted` ("avx512", "avx2", "portable") when it is not null.
const Kernels& kernels_for(const char* wanted);
void matrix_row(const Matrix& m, int row, float* out);

}  // namespace dspark
