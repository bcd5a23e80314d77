// XLA's door to the CPU kernels for rows of a table (worker/ops/rows_kernel.h), as typed FFI handlers.
//
// XLA's own scatters on a CPU go through a loop of the program for each row. A table is written in place: its result is
// the argument's memory, which XLA is told; where it could not arrange that, the table is copied first.
#include "rows_kernel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Ids = ffi::Buffer<ffi::DataType::S32>;
using Floats = ffi::Buffer<ffi::DataType::F32>;
using Any = ffi::AnyBuffer;

int64_t length(const Any &buffer) { return buffer.dimensions()[0]; }

ffi::Error unique(Ids ids, ffi::Result<Ids> out_rows, ffi::Result<Ids> order, ffi::Result<Ids> offsets,
                  int64_t num_rows) {
  rows::unique(ids.typed_data(), int64_t(ids.element_count()), num_rows, out_rows->typed_data(), order->typed_data(),
               offsets->typed_data());
  return ffi::Error::Success();
}

ffi::Error sum(Floats values, Ids order, Ids offsets, ffi::Result<Floats> out) {
  const int64_t n = int64_t(order.element_count());
  const int64_t width = n ? int64_t(values.element_count()) / n : 0;
  for (int64_t slot = 0; slot < n; slot++)
    rows::sum_slot(values.typed_data(), width, order.typed_data(), offsets.typed_data(), slot, out->typed_data());
  return ffi::Error::Success();
}

ffi::Error write(Any table, Ids at, Any values, ffi::Result<Any> out) {
  char *to = static_cast<char *>(out->untyped_data());
  if (to != table.untyped_data()) std::memcpy(to, table.untyped_data(), table.size_bytes());
  const int64_t num_rows = length(table), n = int64_t(at.element_count());
  const int64_t row_bytes = num_rows ? int64_t(table.size_bytes()) / num_rows : 0;
  const int64_t used = rows::used(at.typed_data(), n, num_rows);
  for (int64_t slot = 0; slot < used; slot++)
    rows::write_slot(to, row_bytes, at.typed_data(), static_cast<const char *>(values.untyped_data()), slot,
                     std::min(slot + rows::AHEAD, used - 1));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    rows_ffi_unique, unique,
    ffi::Ffi::Bind().Arg<Ids>().Ret<Ids>().Ret<Ids>().Ret<Ids>().Attr<int64_t>("num_rows"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(rows_ffi_sum, sum,
                              ffi::Ffi::Bind().Arg<Floats>().Arg<Ids>().Arg<Ids>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(rows_ffi_write, write, ffi::Ffi::Bind().Arg<Any>().Arg<Ids>().Arg<Any>().Ret<Any>());
