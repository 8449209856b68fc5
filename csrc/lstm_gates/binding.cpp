#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "core/arguments.hpp"
#include "core/bindings.hpp"
#include "isa/dispatch.hpp"
#include "lstm_gates/lstm_gates.hpp"

using namespace nb::literals;

namespace blocksparse {
namespace {

void py_gates_forward(const std::string& isa, const std::string& dtype, int64_t rows, int64_t hidden, const PyRows& z,
                      const PyRows& add, uintptr_t gain, const PyRows& c, const PyRows& h, const PyRows& c_out,
                      const PyRows& gates) {
  nb::gil_scoped_release release;
  gates_forward(isa_named(isa), dtype_named(dtype), rows,
                {hidden, input(z), input(add), pointer(gain), input(c), output(h), output(c_out), output(gates)});
}

void py_gates_backward(const std::string& isa, const std::string& dtype, int64_t rows, int64_t hidden,
                       const PyRows& gates, const PyRows& c_before, const PyRows& c, const PyRows& grad_h,
                       const PyRows& grad_y, const PyRows& grad_c, const PyRows& grad_pre,
                       const PyRows& grad_c_before) {
  nb::gil_scoped_release release;
  gates_backward(isa_named(isa), dtype_named(dtype), rows,
                 {hidden, input(gates), input(c_before), input(c), input(grad_h), input(grad_y), input(grad_c),
                  output(grad_pre), output(grad_c_before)});
}

const Binding binding([](nb::module_& m) {
  // Positional arguments: keywords would take longer than a small step.
  m.def("gates_forward", &py_gates_forward);
  m.def("gates_backward", &py_gates_backward);
});

}  // namespace
}  // namespace blocksparse
