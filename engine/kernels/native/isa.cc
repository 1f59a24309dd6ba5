// One instruction set's kernels: compiled once per set, with that set's flags and KVARTS_ISA.
#include "attention_kernels.h"
#include "log_sum_kernels.h"
#include "lora_kernels.h"
#include "norm_kernels.h"
#include "qmatmul_kernels.h"
#include "recurrence_kernels.h"

#define KVARTS_TEXT_(x) #x
#define KVARTS_TEXT(x) KVARTS_TEXT_(x)

namespace kvarts {
namespace KVARTS_ISA {
extern const Kernels kernels;
const Kernels kernels = {KVARTS_TEXT(KVARTS_ISA), quantise, product, decode_row, norm, log_sum_exp, store_tokens, attend_units, merge_rows, adapt,
                         convolve, recur};
}  // namespace KVARTS_ISA
}  // namespace kvarts
