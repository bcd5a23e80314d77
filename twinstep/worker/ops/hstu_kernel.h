// What the HSTU attention kernel is called with. The same struct stands in hstu_kernel.py, field by field.
#pragma once
#include <cstdint>

struct View {  // [B, S, H, width], strides in elements
  void *data;
  int64_t stride[4];
};

struct AttentionArgs {
  View q, k, v, grad, out, dq, dk, dv;  // grad and d* in the backward only, out in the forward only
  const void *prefix, *targets;         // [B] tokens of each row's prefix, and its targets
  const float *n;                       // [] what scores are divided by
  int64_t rows, slots, heads, num_targets;
  int32_t contextual_len, window, target_aware, full_len;
  int32_t lengths64;  // prefix and targets are int64, else int32
  int32_t bfloat16;   // the views' numbers are bfloat16, else float32
  float alpha;
};

// One (row, head) pair: index = row * heads + head. Pairs are independent, so that a pair's bits do not depend on who
// runs it.
using AttentionPair = void (*)(const AttentionArgs *, int64_t index);
