// hopwell._hopwell: the operators on arrays that the caller has allocated. hopwell/_operators.py allocates outputs.
#include "call.hpp"

#include <cstdint>
#include <limits>

namespace hopwell::python {
namespace {

using nb::handle;

void check_given(const char* operator_name, const char* argument, handle array) {
  Call(operator_name, nb::none(), nb::none()).check_given(argument, array);
}

void set_num_threads(handle threads) {
  const Call call("set_num_threads", nb::none(), nb::none());
  const std::int64_t number = call.integer("threads", threads);
  if (number < 0 || number > std::numeric_limits<int>::max())
    call.fail("threads", "a number from 1 to 2147483647, or 0 for the default", std::to_string(number));
  hopwell::set_num_threads(static_cast<int>(number));
}

nb::list names(const std::vector<std::string>& strings) {
  nb::list list;
  for (const std::string& string : strings) list.append(nb::str(string.c_str()));
  return list;
}

}  // namespace
}  // namespace hopwell::python

NB_MODULE(_hopwell, m) {
  namespace hp = hopwell::python;
  namespace nb = nanobind;
  static PyObject* const error_type = PyErr_NewExceptionWithDoc(
      "hopwell.Error", "What a device, its driver or a missing backend reports. Bad arguments raise ValueError.",
      PyExc_RuntimeError, nullptr);
  m.attr("Error") = nb::borrow(error_type);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const hopwell::Error& error) {
      const std::string_view message = error.what();  // an environment variable that it quotes may be no UTF-8
      const nb::object text =
          nb::steal(PyUnicode_DecodeUTF8(message.data(), static_cast<Py_ssize_t>(message.size()), "backslashreplace"));
      if (!text.is_valid()) return;  // out of memory: that error is set
      PyErr_SetObject(error.status() == HOPWELL_INVALID_ARGUMENT ? PyExc_ValueError : error_type, text.ptr());
    }
  });
  nb::class_<hp::Explanation>(m, "Explanation")
      .def(nb::init<>())
      .def_prop_ro("text", [](const hp::Explanation& explanation) { return nb::str(explanation.text.c_str()); });

  hp::define_operators(m);
  m.def("check_given", hp::check_given);
  m.def("tell_written", hp::tell_written);
  m.def("backends", [] { return hp::names(hopwell::backends()); });
  m.def("backends", [](const char* operator_name) { return hp::names(hopwell::backends(operator_name)); });
  m.def("num_threads", hopwell::num_threads, "How many threads a CPU operator may use, the calling one included.");
  m.def("set_num_threads", hp::set_num_threads, nb::arg("threads").none());
  m.def("version", [] { return nb::str(hopwell::version().c_str()); });
}
