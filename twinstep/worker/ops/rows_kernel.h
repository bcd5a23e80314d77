// Rows of a table by id, on a CPU: what worker/ops/rows.py says of unique_rows, sum_rows and write_rows.
//
// For torch through rows_kernel.cpp, for XLA through worker/compile/lower/rows_ffi.cpp: the same sums in the same order.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace rows {

constexpr int DIGIT = 11;  // bits of a pass of the sort: its 2,048 counts stay in the first cache

// Sorts keys and the positions beside them, equal keys in the order they had (radix, least digit first).
template <class Id>
void sort(std::vector<uint64_t> &keys, std::vector<Id> &places, uint64_t largest) {
  std::vector<uint64_t> other_keys(keys.size());
  std::vector<Id> other_places(places.size());
  for (int shift = 0; shift < 64 && (largest >> shift) > 0; shift += DIGIT) {
    int64_t starts[(1 << DIGIT) + 1] = {0};
    const uint64_t mask = (1 << DIGIT) - 1;
    for (uint64_t key : keys) starts[((key >> shift) & mask) + 1]++;
    for (int digit = 0; digit < (1 << DIGIT); digit++) starts[digit + 1] += starts[digit];
    for (size_t i = 0; i < keys.size(); i++) {
      const int64_t to = starts[(keys[i] >> shift) & mask]++;
      other_keys[to] = keys[i], other_places[to] = places[i];
    }
    keys.swap(other_keys), places.swap(other_places);
  }
}

// rows [n], order [n], offsets [n + 1] of ids [n]; ids outside of 0 … num_rows - 1 get no slot.
template <class Id>
void unique(const Id *ids, int64_t n, int64_t num_rows, Id *rows, Id *order, Id *offsets) {
  std::vector<uint64_t> keys(n);
  std::vector<Id> places(n);
  for (int64_t i = 0; i < n; i++) {
    const bool inside = ids[i] >= 0 && int64_t(ids[i]) < num_rows;
    keys[i] = inside ? uint64_t(ids[i]) : uint64_t(num_rows);
    places[i] = Id(i);
  }
  sort(keys, places, uint64_t(num_rows));
  int64_t slot = 0, named = 0;
  for (; named < n && keys[named] < uint64_t(num_rows); named++)
    if (named == 0 || keys[named] != keys[named - 1]) rows[slot] = Id(keys[named]), offsets[slot++] = Id(named);
  for (; slot < n; slot++) rows[slot] = Id(num_rows + slot), offsets[slot] = Id(named);
  offsets[n] = Id(named);
  std::copy(places.begin(), places.end(), order);
}

// One slot of [n, width]: what its ids carry, added up in the order they were given.
template <class Id>
void sum_slot(const float *values, int64_t width, const Id *order, const Id *offsets, int64_t slot, float *out) {
  float *to = out + slot * width;
  std::memset(to, 0, sizeof(float) * width);
  for (Id at = offsets[slot]; at < offsets[slot + 1]; at++) {
    const float *from = values + int64_t(order[at]) * width;
    for (int64_t x = 0; x < width; x++) to[x] += from[x];
  }
}

// How many of the slots name a row: they come first.
template <class Id>
int64_t used(const Id *rows, int64_t n, int64_t num_rows) {
  return std::lower_bound(rows, rows + n, num_rows, [](Id row, int64_t end) { return int64_t(row) < end; }) - rows;
}

// Writes the value of one slot over its row; `ahead` is a slot whose row will be wanted soon.
template <class Id>
void write_slot(char *table, int64_t row_bytes, const Id *rows, const char *values, int64_t slot, int64_t ahead) {
  for (int64_t x = 0; x < row_bytes; x += 64) __builtin_prefetch(table + int64_t(rows[ahead]) * row_bytes + x, 1);
  std::memcpy(table + int64_t(rows[slot]) * row_bytes, values + slot * row_bytes, row_bytes);
}

constexpr int64_t AHEAD = 8;  // rows lie anywhere in a table: memory is asked for that many before they are written

}  // namespace rows
