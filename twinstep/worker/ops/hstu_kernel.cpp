// HSTU attention on a CPU, forward and backward, for one pair of head widths (HEAD_A, HEAD_V; see hstu_kernel.py).
//
// Each (row, head) pair is one task. Its tokens are packed without gaps, in the order of their columns; scores live in
// tiles of 16 queries x 16 keys that never leave the first-level cache. Rank never falls along the columns, so the keys
// that a query sees are one interval and itself: tiles outside of it are skipped, tiles within need no mask. The
// backward computes the scores again. Sums are float32 in an order that depends on the row alone.
#include "hstu_kernel.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, ACCUMULATORS = 16;
#else
constexpr int W = 8, ACCUMULATORS = 8;
#endif
typedef float vf __attribute__((vector_size(W * 4), may_alias));
typedef int32_t vi __attribute__((vector_size(W * 4), may_alias));

constexpr int T = 16;  // queries of a tile, and keys
constexpr int padded(int width) { return (width + W - 1) / W * W; }
constexpr int A = HEAD_A, V = HEAD_V, AP = padded(A), VP = padded(V);
static_assert(T % W == 0 && T % ACCUMULATORS == 0);

inline vf splat(float x) { return vf{} + x; }

// 1 / (1 + e^-x) within a few units in the last place; x beyond +-87 counts as +-87, NaN stays.
#if defined(__AVX512F__)
inline vf sigmoid(vf x) {
  const __m512 most = _mm512_set1_ps(87.0f), one = _mm512_set1_ps(1.0f);
  const __m512 y = _mm512_max_ps(-most, _mm512_min_ps(most, -(__m512)x));  // the second operand stays where it is NaN
  const __m512 whole = _mm512_roundscale_ps(y * 1.44269504088896341f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = (y - whole * 0.693359375f) + whole * 2.12194440e-4f;
  __m512 power = _mm512_set1_ps(1.0f / 720);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) power = power * r + c;
  const __m512 sum = one + _mm512_scalef_ps(power, whole);
  const __m512 guess = _mm512_rcp14_ps(sum);
  return (vf)(guess * (2.0f - sum * guess));  // one step of Newton's: 14 bits become 28
}
#else
inline vf sigmoid(vf x) {
  const vf most = splat(87.0f), magic = splat(12582912.0f);
  vf y = -x;
  y = y < -most ? -most : y;
  y = y > most ? most : y;
  const vf shifted = y * 1.44269504088896341f + magic;  // its low bits hold round(y / ln 2)
  const vf whole = shifted - magic;
  const vf r = (y - whole * 0.693359375f) + whole * 2.12194440e-4f;
  vf power = splat(1.0f / 720);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) power = power * r + c;
  const vi scale = ((vi)shifted - (vi)magic + 127) << 23;
  return 1.0f / (1.0f + power * (vf)scale);
}
#endif

// C[M][N] = or += sum over k of a(i, k) * b[k][:], with a(i, k) = a[i * row + k * step].
template <int M, int N, int K, bool ADD>
inline void product(float *__restrict c, int ldc, const float *__restrict a, int row, int step,
                    const float *__restrict b, int ldb) {
  constexpr int VECTORS = N / W > 1 ? 2 : 1, ROWS = ACCUMULATORS / VECTORS;
  constexpr int PAIRED = N / W / VECTORS * VECTORS;  // vectors that come in full chunks
  static_assert(M % ROWS == 0);
  for (int i = 0; i < M; i += ROWS)
    for (int j = 0; j < N; j += VECTORS * W) {
      const int vectors = j / W < PAIRED ? VECTORS : 1;
      vf sum[ROWS][VECTORS] = {};
      if (vectors == VECTORS) {
        for (int k = 0; k < K; k++) {
          vf right[VECTORS];
#pragma GCC unroll 2
          for (int x = 0; x < VECTORS; x++) right[x] = *(const vf *)(b + k * ldb + j + x * W);
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; r++) {
            const vf left = splat(a[(i + r) * row + k * step]);
#pragma GCC unroll 2
            for (int x = 0; x < VECTORS; x++) sum[r][x] += left * right[x];
          }
        }
      } else {
        for (int k = 0; k < K; k++) {
          const vf right = *(const vf *)(b + k * ldb + j);
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; r++) sum[r][0] += splat(a[(i + r) * row + k * step]) * right;
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++)
        for (int x = 0; x < vectors; x++) {
          vf *to = (vf *)(c + (i + r) * ldc + j + x * W);
          *to = ADD ? *to + sum[r][x] : sum[r][x];
        }
    }
}

// Grows and is kept by its thread: a pair's scratch is some hundred KiB, too much to map anew each time.
struct Scratch {
  float *data = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(data); }
  float *take(size_t floats) {
    if (floats > size) {
      std::free(data);
      size = (floats + 4095) / 4096 * 4096;
      data = static_cast<float *>(std::aligned_alloc(64, size * sizeof(float)));
      if (data == nullptr) std::abort();
    }
    return data;
  }
};
thread_local Scratch scratch;
thread_local Scratch marks;

// Where a pair's tokens stand, and which keys each of them sees: [low, high) and itself.
struct Row {
  int64_t b, h, prefix, first, slots;
  int length, blocks;
  int32_t *rank, *low, *high;

  int64_t slot(int column) const { return column < prefix ? column : first + (column - prefix); }

  Row(const AttentionArgs &args, int64_t index) {
    b = index / args.heads;
    h = index % args.heads;
    slots = args.slots;
    first = args.slots - args.num_targets;
    auto read = [&](const void *from) {
      return args.lengths64 ? static_cast<const int64_t *>(from)[b] : static_cast<const int32_t *>(from)[b];
    };
    prefix = std::clamp<int64_t>(read(args.prefix), 0, first);
    const int64_t targets = std::clamp<int64_t>(read(args.targets), 0, args.num_targets);
    length = static_cast<int>(prefix + targets);
    blocks = (length + T - 1) / T;
    rank = reinterpret_cast<int32_t *>(marks.take(3 * static_cast<size_t>(blocks + 1) * T));
    low = rank + blocks * T;
    high = low + blocks * T;
    see(args);
  }

  void see(const AttentionArgs &args) {
    const int32_t context = args.contextual_len;
    const int32_t last = static_cast<int32_t>(prefix) - (context > 0 ? context - 1 : 0);
    for (int i = 0; i < length; i++) {
      rank[i] = context > 0 ? std::max(i - context + 1, 0) : i;
      if (args.target_aware) rank[i] = std::min(rank[i], last);
    }
    // Ranks never fall, so that the first column of a rank, or of one within the window, only moves on.
    const int32_t before_targets =
        args.target_aware ? static_cast<int32_t>(std::lower_bound(rank, rank + length, last) - rank) : length;
    // Queries from this rank on see as far as if there were no window.
    const int32_t end = args.target_aware ? last : static_cast<int32_t>(length) - (context > 0 ? context - 1 : 0);
    const int64_t full_from = args.full_len > 0 ? static_cast<int64_t>(end) - args.full_len : INT64_MAX;
    int from = 0, to = 0;
    for (int i = 0; i < length; i++) {
      while (args.window > 0 && static_cast<int64_t>(rank[i]) - rank[from] > args.window) from++;
      while (rank[to] < rank[i]) to++;
      low[i] = rank[i] >= full_from ? 0 : from;
      high[i] = to;
      if (context > 0 && rank[i] == 0) {
        low[i] = 0;
        high[i] = before_targets;
      }
    }
    for (int i = length; i < blocks * T; i++) low[i] = high[i] = 0;
  }

  // Calls tile(key block, whether every query of the block sees every key of it) for each that any of them sees.
  template <class Tile>
  void keys(int block, Tile tile) const {
    int least = INT_MAX, most = 0, all_low = 0, all_high = INT_MAX;
    for (int i = block * T; i < block * T + T; i++) {
      if (i < length && low[i] < high[i]) least = std::min(least, low[i]), most = std::max(most, high[i]);
      all_low = std::max(all_low, low[i]);
      all_high = std::min(all_high, high[i]);
    }
    bool diagonal = false;
    for (int j = least == INT_MAX ? 0 : least / T; j * T < most; j++) {
      tile(j, all_low <= j * T && j * T + T <= all_high);
      diagonal |= j == block;
    }
    if (!diagonal) tile(block, false);
  }

  // Of W lanes of keys from `key` on, those that query `i` sees.
  vi seen(int i, int key) const {
    vi lane;
    for (int x = 0; x < W; x++) lane[x] = x;
    lane += key;
    const vi itself = i < length ? (vi)(lane == i) : vi{};
    return (vi)((lane >= low[i]) & (lane < high[i])) | itself;
  }
};

inline float widen(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline uint16_t narrow(float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Brings a pair's tokens into to[column][stride], scaled, zeros behind the width and behind the last token.
template <int WIDTH, int PADDED>
void pack(const AttentionArgs &args, const Row &row, const View &from, float scale, float *to) {
  std::memset(to + row.length * PADDED, 0, sizeof(float) * PADDED * (row.blocks * T - row.length));
  for (int i = 0; i < row.length; i++) {
    const int64_t at = row.b * from.stride[0] + row.slot(i) * from.stride[1] + row.h * from.stride[2];
    float *out = to + i * PADDED;
    for (int x = WIDTH; x < PADDED; x++) out[x] = 0.0f;
    const int64_t step = from.stride[3];
    if (args.bfloat16) {
      const uint16_t *in = static_cast<const uint16_t *>(from.data) + at;
      for (int x = 0; x < WIDTH; x++) out[x] = widen(in[x * step]) * scale;
    } else if (step == 1) {
      const float *in = static_cast<const float *>(from.data) + at;
      for (int x = 0; x < WIDTH; x++) out[x] = in[x] * scale;
    } else {
      const float *in = static_cast<const float *>(from.data) + at;
      for (int x = 0; x < WIDTH; x++) out[x] = in[x * step] * scale;
    }
  }
}

// Writes a pair's tokens back to their slots, scaled; zeros where no token stands.
template <int WIDTH, int PADDED>
void unpack(const AttentionArgs &args, const Row &row, const float *from, float scale, const View &to) {
  auto write = [&](int64_t slot, const float *in) {
    const int64_t at = row.b * to.stride[0] + slot * to.stride[1] + row.h * to.stride[2];
    if (args.bfloat16) {
      uint16_t *out = static_cast<uint16_t *>(to.data) + at;
      for (int x = 0; x < WIDTH; x++) out[x * to.stride[3]] = in ? narrow(in[x] * scale) : 0;
    } else {
      float *out = static_cast<float *>(to.data) + at;
      if (in && to.stride[3] == 1)
        for (int x = 0; x < WIDTH; x++) out[x] = in[x] * scale;
      else
        for (int x = 0; x < WIDTH; x++) out[x * to.stride[3]] = in ? in[x] * scale : 0.0f;
    }
  };
  for (int i = 0; i < row.length; i++) write(row.slot(i), from + i * PADDED);
  for (int64_t slot = row.prefix; slot < row.first; slot++) write(slot, nullptr);
  for (int64_t slot = row.first + row.length - row.prefix; slot < row.slots; slot++) write(slot, nullptr);
}

// Key blocks one after the other, each as [width][T]: what a tile's scores read.
template <int WIDTH, int PADDED>
void transpose(const Row &row, const float *from, float *to) {
  for (int block = 0; block < row.blocks; block++)
    for (int x = 0; x < WIDTH; x++)
      for (int i = 0; i < T; i++) to[(block * WIDTH + x) * T + i] = from[(block * T + i) * PADDED + x];
}

}  // namespace

extern "C" {

void hstu_forward_pair(const AttentionArgs *given, int64_t index) {
  const AttentionArgs &args = *given;
  const Row row(args, index);
  const size_t count = static_cast<size_t>(row.blocks) * T;
  float *q = scratch.take(count * (2 * AP + A + 2 * VP));
  float *k = q + count * AP, *k_turned = k + count * AP, *v = k_turned + count * A, *out = v + count * VP;
  pack<A, AP>(args, row, args.q, args.alpha, q);
  pack<A, AP>(args, row, args.k, 1.0f, k);
  pack<V, VP>(args, row, args.v, 1.0f, v);
  transpose<A, AP>(row, k, k_turned);
  std::memset(out, 0, sizeof(float) * count * VP);
  for (int block = 0; block < row.blocks; block++)
    row.keys(block, [&](int key, bool whole) {
      alignas(64) float scores[T * T];
      product<T, T, A, false>(scores, T, q + block * T * AP, AP, 1, k_turned + key * T * A, T);
      for (int i = 0; i < T; i++)
        for (int x = 0; x < T; x += W) {
          vf &score = *(vf *)(scores + i * T + x);
          const vf weight = score * sigmoid(score);
          score = whole ? weight : (vf)((vi)weight & row.seen(block * T + i, key * T + x));
        }
      product<T, VP, T, true>(out + block * T * VP, VP, scores, T, 1, v + key * T * VP, VP);
    });
  unpack<V, VP>(args, row, out, row.length ? 1.0f / *args.n : 0.0f, args.out);
}

void hstu_backward_pair(const AttentionArgs *given, int64_t index) {
  const AttentionArgs &args = *given;
  const Row row(args, index);
  const size_t count = static_cast<size_t>(row.blocks) * T;
  float *q = scratch.take(count * (4 * AP + A + 3 * VP + V));
  float *k = q + count * AP, *dq = k + count * AP, *dk = dq + count * AP, *v = dk + count * AP;
  float *grad = v + count * VP, *dv = grad + count * VP, *k_turned = dv + count * VP, *v_turned = k_turned + count * A;
  pack<A, AP>(args, row, args.q, args.alpha, q);
  pack<A, AP>(args, row, args.k, 1.0f, k);
  pack<V, VP>(args, row, args.v, 1.0f, v);
  pack<V, VP>(args, row, args.grad, row.length ? 1.0f / *args.n : 0.0f, grad);
  transpose<A, AP>(row, k, k_turned);
  transpose<V, VP>(row, v, v_turned);
  std::memset(dq, 0, sizeof(float) * count * 2 * AP);
  std::memset(dv, 0, sizeof(float) * count * VP);
  for (int block = 0; block < row.blocks; block++)
    row.keys(block, [&](int key, bool whole) {
      alignas(64) float scores[T * T], slopes[T * T];
      const float *queries = q + block * T * AP, *grads = grad + block * T * VP;
      product<T, T, A, false>(scores, T, queries, AP, 1, k_turned + key * T * A, T);
      product<T, T, V, false>(slopes, T, grads, VP, 1, v_turned + key * T * V, T);
      for (int i = 0; i < T; i++)
        for (int x = 0; x < T; x += W) {
          vf &score = *(vf *)(scores + i * T + x), &slope = *(vf *)(slopes + i * T + x);
          const vf gate = sigmoid(score), weight = score * gate;
          slope *= gate + weight * (1.0f - gate);
          score = weight;
          if (!whole) {
            const vi seen = row.seen(block * T + i, key * T + x);
            score = (vf)((vi)score & seen);
            slope = (vf)((vi)slope & seen);
          }
        }
      product<T, AP, T, true>(dq + block * T * AP, AP, slopes, T, 1, k + key * T * AP, AP);
      product<T, AP, T, true>(dk + key * T * AP, AP, slopes, 1, T, queries, AP);
      product<T, VP, T, true>(dv + key * T * VP, VP, scores, 1, T, grads, VP);
    });
  unpack<A, AP>(args, row, dq, args.alpha, args.dq);
  unpack<A, AP>(args, row, dk, 1.0f, args.dk);
  unpack<V, VP>(args, row, dv, 1.0f, args.dv);
}

void hstu_forward(const AttentionArgs *args, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t index = 0; index < args->rows * args->heads; index++) hstu_forward_pair(args, index);
}

void hstu_backward(const AttentionArgs *args, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t index = 0; index < args->rows * args->heads; index++) hstu_backward_pair(args, index);
}
}
