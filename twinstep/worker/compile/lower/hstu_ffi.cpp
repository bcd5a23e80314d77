// XLA's door to the CPU kernel of HSTU attention (worker/ops/hstu_kernel.cpp), as typed FFI handlers.
//
// Kernels are made for one pair of head widths each and register themselves here by those widths. Pairs of row and head
// are shared out over XLA's own threads; the calling thread works too and never waits for a task that did not start,
// since the pool may be busy with what waits for us.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "hstu_kernel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

std::mutex lock;
std::map<std::pair<int64_t, int64_t>, std::pair<AttentionPair, AttentionPair>> kernels;

View view(const ffi::AnyBuffer &buffer) {
  auto dims = buffer.dimensions();
  return {buffer.untyped_data(), {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1}};
}

struct Work {  // outlives the call: a task may start after all is done
  std::atomic<int64_t> next{0}, done{0};
  int64_t count;
  AttentionArgs args;
  AttentionPair pair;
  std::mutex mutex;
  std::condition_variable all_done;

  void run() {
    for (int64_t index; (index = next.fetch_add(1)) < count;) {
      pair(&args, index);
      if (done.fetch_add(1) + 1 == count) {
        std::lock_guard<std::mutex> held(mutex);
        all_done.notify_all();
      }
    }
  }
};

void share(ffi::ThreadPool &pool, const AttentionArgs &args, AttentionPair pair) {
  auto work = std::make_shared<Work>();
  work->count = args.rows * args.heads;
  work->args = args;
  work->pair = pair;
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), work->count) - 1;
  for (int64_t i = 0; i < helpers; i++) pool.Schedule([work] { work->run(); });
  work->run();
  std::unique_lock<std::mutex> held(work->mutex);
  work->all_done.wait(held, [&] { return work->done.load() == work->count; });
}

bool lengths_fit(const ffi::AnyBuffer &lengths, int64_t rows) {
  auto type = lengths.element_type();
  return (type == ffi::DataType::S32 || type == ffi::DataType::S64) && lengths.element_count() == size_t(rows);
}

ffi::Error fill(AttentionArgs &args, const ffi::AnyBuffer &q, const ffi::AnyBuffer &k, const ffi::AnyBuffer &v,
                const ffi::AnyBuffer &prefix, const ffi::AnyBuffer &targets, const ffi::AnyBuffer &n,
                int64_t num_targets, int64_t contextual_len, int64_t window, bool target_aware, int64_t full_len,
                float alpha, std::pair<AttentionPair, AttentionPair> &found) {
  auto dims = q.dimensions();
  const auto type = q.element_type();
  const bool number = type == ffi::DataType::F32 || type == ffi::DataType::BF16;
  if (dims.size() != 4 || k.dimensions().size() != 4 || v.dimensions().size() != 4 || !number ||
      k.element_type() != type || v.element_type() != type || n.element_type() != ffi::DataType::F32 ||
      !lengths_fit(prefix, dims[0]) || !lengths_fit(targets, dims[0]) ||
      prefix.element_type() != targets.element_type())
    return ffi::Error::InvalidArgument("HSTU attention was lowered with shapes or dtypes that it does not take");
  std::lock_guard<std::mutex> held(lock);
  auto kernel = kernels.find({dims[3], v.dimensions()[3]});
  if (kernel == kernels.end())
    return ffi::Error(ffi::ErrorCode::kNotFound, "no kernel is registered for head widths " +
                                                     std::to_string(dims[3]) + " and " +
                                                     std::to_string(v.dimensions()[3]));
  found = kernel->second;
  args.q = view(q), args.k = view(k), args.v = view(v);
  args.prefix = prefix.untyped_data(), args.targets = targets.untyped_data();
  args.n = static_cast<const float *>(n.untyped_data());
  args.rows = dims[0], args.slots = dims[1], args.heads = dims[2], args.num_targets = num_targets;
  args.contextual_len = int32_t(contextual_len), args.window = int32_t(window), args.target_aware = target_aware;
  args.full_len = int32_t(full_len);
  args.lengths64 = prefix.element_type() == ffi::DataType::S64;
  args.bfloat16 = type == ffi::DataType::BF16;
  args.alpha = alpha;
  return ffi::Error::Success();
}

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

ffi::Error forward(ffi::ThreadPool pool, Buffer q, Buffer k, Buffer v, Buffer prefix, Buffer targets, Buffer n,
                   Result out, int64_t num_targets, int64_t contextual_len, int64_t window, bool target_aware,
                   int64_t full_len, float alpha) {
  AttentionArgs args{};
  std::pair<AttentionPair, AttentionPair> found;
  auto error = fill(args, q, k, v, prefix, targets, n, num_targets, contextual_len, window, target_aware, full_len,
                    alpha, found);
  if (error.failure()) return error;
  args.out = view(*out);
  if (args.rows * args.heads > 0) share(pool, args, found.first);
  return ffi::Error::Success();
}

ffi::Error backward(ffi::ThreadPool pool, Buffer grad, Buffer q, Buffer k, Buffer v, Buffer prefix, Buffer targets,
                    Buffer n, Result dq, Result dk, Result dv, int64_t num_targets, int64_t contextual_len,
                    int64_t window, bool target_aware, int64_t full_len, float alpha) {
  AttentionArgs args{};
  std::pair<AttentionPair, AttentionPair> found;
  auto error = fill(args, q, k, v, prefix, targets, n, num_targets, contextual_len, window, target_aware, full_len,
                    alpha, found);
  if (error.failure()) return error;
  args.grad = view(grad), args.dq = view(*dq), args.dk = view(*dk), args.dv = view(*dv);
  if (args.rows * args.heads > 0) share(pool, args, found.second);
  return ffi::Error::Success();
}

}  // namespace

extern "C" void hstu_register(int64_t width_qk, int64_t width_v, void *forward, void *backward) {
  std::lock_guard<std::mutex> held(lock);
  kernels[{width_qk, width_v}] = {reinterpret_cast<AttentionPair>(forward), reinterpret_cast<AttentionPair>(backward)};
}

#define RULE                           \
  Attr<int64_t>("num_targets")         \
      .Attr<int64_t>("contextual_len") \
      .Attr<int64_t>("window")         \
      .Attr<bool>("target_aware")      \
      .Attr<int64_t>("full_len")       \
      .Attr<float>("alpha")

XLA_FFI_DEFINE_HANDLER_SYMBOL(hstu_ffi_forward, forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Buffer>()
                                  .Arg<Buffer>()
                                  .Arg<Buffer>()
                                  .Arg<Buffer>()
                                  .Arg<Buffer>()
                                  .Arg<Buffer>()
                                  .Ret<Buffer>()
                                  .RULE);

XLA_FFI_DEFINE_HANDLER_SYMBOL(hstu_ffi_backward, backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Buffer>()
                                  .Arg<Buffer>()
                                  .Arg<Buffer>()
                                  .Arg<Buffer>()
                                  .Arg<Buffer>()
                                  .Arg<Buffer>()
                                  .Arg<Buffer>()
                                  .Ret<Buffer>()
                                  .Ret<Buffer>()
                                  .Ret<Buffer>()
                                  .RULE);
