// Rows of a table by id, called with torch's memory: 64-bit ids, and as many threads as torch has.
#include "rows_kernel.h"

extern "C" {

void rows_unique(const int64_t *ids, int64_t n, int64_t num_rows, int64_t *out_rows, int64_t *order, int64_t *offsets) {
  rows::unique(ids, n, num_rows, out_rows, order, offsets);
}

void rows_sum(const float *values, int64_t n, int64_t width, const int64_t *order, const int64_t *offsets, float *out,
              int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t slot = 0; slot < n; slot++) rows::sum_slot(values, width, order, offsets, slot, out);
}

void rows_write(char *table, int64_t num_rows, int64_t row_bytes, const int64_t *at, const char *values, int64_t n,
                int threads) {
  const int64_t used = rows::used(at, n, num_rows);
#pragma omp parallel for num_threads(threads)
  for (int64_t slot = 0; slot < used; slot++)
    rows::write_slot(table, row_bytes, at, values, slot, std::min(slot + rows::AHEAD, used - 1));
}
}
