#include "core/bindings.hpp"
#include "xla/handlers.hpp"

namespace nb = nanobind;

namespace blocksparse {
namespace {

nb::capsule capsule(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

const Binding binding([](nb::module_& m) {
  // For jax.ffi.register_ffi_target.
  m.attr("xla_linear") = capsule(&xla_linear);
  m.attr("xla_linear_wgrad") = capsule(&xla_linear_wgrad);
  m.attr("XLA_FFI_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
});

}  // namespace
}  // namespace blocksparse
