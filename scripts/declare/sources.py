"""The C++ files of all operators: the functions of the library, and the Python binding."""

from __future__ import annotations

import json

import declarations
import headers
from declare import (
    Argument,
    Boolean,
    Choice,
    Integer,
    Number,
    NumberOrTensor,
    Operator,
    Output,
    Struct,
    Tensor,
)


def operator_list(operators: list[Operator]) -> str:
    """A file that a source includes where it needs something for each operator."""
    return "// Generated.\n" + "".join(f"HOPWELL_OPERATOR({operator.name})\n" for operator in operators)


def emulated_checks(operators: list[Operator]) -> str:
    """The operators and emulated backends whose cases tests/CMakeLists.txt runs."""
    found = declarations.registered(operators)
    pairs = [f"{name}@emu:{backend}" for name in found for backend in sorted(found[name]) if backend != "cpu"]
    return f"set(HOPWELL_EMULATED_CHECKS {' '.join(pairs)})\n"


# ---- the functions of the library -----------------------------------------------------------------------

ENTRY_POINTS = """\
// The functions of every operator. Generated from src/ops/<operator>/declaration.py: do not edit.
#include <hopwell/hopwell.hpp>

#include <cstring>

{includes}
#include "runtime/c_interface.hpp"

namespace hopwell {{

// ---- arguments from C to C++ ----

using runtime::or_default;

{conversions}

// ---- the operators ----

namespace {{
namespace entry {{

{entries}

}}  // namespace entry
}}  // namespace

{functions}

}}  // namespace hopwell

{c_functions}
"""

FROM_C = """\
static void from_c([[maybe_unused]] const char* name, const hopwell_{c}& from, {cpp}& to) {{
{lines}
}}"""

ENTRY = """\
const runtime::Entry {name}{{"{name}", +[](const {camel}Args& args) {{
{refusals}  return ops::{folder}::check(args);
}}}};"""

FUNCTIONS = """\
void {name}(const {camel}Args& args, Stream stream) {{ entry::{name}.run(args, stream); }}
std::size_t {name}_workspace_bytes(const {camel}Args& args) {{ return entry::{name}.workspace_bytes(args); }}
std::string explain(const {camel}Args& args) {{ return entry::{name}.explain(args); }}"""

C_FUNCTIONS = """\
extern "C" hopwell_status hopwell_{name}(const hopwell_{name}_args* args, hopwell_stream stream) {{
  return hopwell::entry::{name}.run_from_c(args, stream);
}}
extern "C" hopwell_status hopwell_{name}_workspace_bytes(const hopwell_{name}_args* args, size_t* bytes) {{
  return hopwell::entry::{name}.workspace_bytes_from_c(args, bytes);
}}"""


def from_c(argument: Argument) -> str:
    """The line that converts an argument of C."""
    name = argument.name
    if isinstance(argument, Boolean) and argument.default:
        return f'  to.{name} = runtime::switch_from_c(name, "{name}", from.{name});'
    if isinstance(argument, Choice):
        return f"  std::memcpy(&to.{name}, &from.{name}, sizeof to.{name});  // C may store any integer there"
    if isinstance(argument, Integer) and argument.zero_is_a_value:
        return f'  to.{name} = runtime::optional_from_c(name, "{name}", from.has_{name}, from.{name});'
    if isinstance(argument, (Number, Integer)) and argument.default != "required":
        return f"  to.{name} = or_default(from.{name}, to.{name});"
    if isinstance(argument, NumberOrTensor):
        value = argument.value
        return f"  to.{name} = from.{name};\n  to.{value} = or_default(from.{value}, to.{value});"
    if isinstance(argument, Struct):
        return f"  from_c(name, from.{name}, to.{name});"
    return f"  to.{name} = from.{name};"


def conversion(c: str, cpp: str, arguments: list[Argument], with_workspace: bool) -> str:
    lines = [from_c(argument) for argument in arguments]
    if with_workspace:
        lines += [f"  to.{name} = from.{name};" for name in headers.COMMON_DOCS]
    return FROM_C.format(c=c, cpp=cpp, lines="\n".join(lines))


def entry(operator: Operator) -> str:
    """An operator's entry, which refuses the fields of structs that the operator does not take."""
    refused = [(s, f) for s in operator.fields if isinstance(s, Struct) for f in s.fields if not s.takes(f)]
    lines = "".join(
        f'  runtime::refuse("{operator.name}", "{f.name}", args.{s.name}.{f.name},'
        f" {headers.cpp_struct_name(s)}{{}}.{f.name});\n"
        for s, f in refused
    )
    return ENTRY.format(name=operator.name, camel=operator.camel, folder=operator.folder, refusals=lines)


def entry_points(operators: list[Operator]) -> str:
    folders = sorted({operator.folder for operator in operators})
    structs = declarations.structs(operators)
    conversions = [conversion(s.name, headers.cpp_struct_name(s), list(s.fields), False) for s in structs]
    conversions += [conversion(f"{o.name}_args", f"{o.camel}Args", o.fields, True) for o in operators]
    names = [{"name": o.name, "camel": o.camel} for o in operators]
    return ENTRY_POINTS.format(
        includes="\n".join(f'#include "ops/{folder}/op.hpp"' for folder in folders),
        conversions="\n\n".join(conversions),
        entries="\n\n".join(entry(operator) for operator in operators),
        functions="\n\n".join(FUNCTIONS.format(**one) for one in names),
        c_functions="\n\n".join(C_FUNCTIONS.format(**one) for one in names),
    )


# ---- the Python binding ---------------------------------------------------------------------------------

BINDING = """\
// The operators as functions of hopwell._hopwell. Generated from src/ops/<operator>/declaration.py: do not edit.
#include "call.hpp"

namespace hopwell::python {{
namespace {{

using nb::handle;

{functions}

// Arguments are handles to arrays or to None, so nanobind must accept None.
template <class... Args>
void define(nb::module_& module, const char* name, void (*function)(Args...)) {{
  module.def(name, function, ((void)sizeof(Args), nb::arg().none())...);
}}

}}  // namespace

void define_operators(nb::module_& module) {{
{definitions}
}}

}}  // namespace hopwell::python
"""

BOUND = """\
void {name}_({parameters}) {{
  Call call("{name}", backend, stream);
  {camel}Args args;
{lines}
  call.run(args, hopwell::{name}{renamed});
}}"""


def bound(argument: Argument, parameter: str, place: str) -> str:
    """The line that takes an argument from Python; `place` is its field of the C++ struct."""
    given = f'"{argument.python_name}", {parameter}'
    if isinstance(argument, Output):
        return f"  {place} = call.output({given});"
    if isinstance(argument, Tensor):
        return f"  {place} = call.input({given});"
    if isinstance(argument, NumberOrTensor):
        value = place.replace(f".{argument.name}", f".{argument.value}")
        return f"  call.number_or_tensor({given}, {place}, {value});"
    if isinstance(argument, Boolean):
        return f"  {place} = call.flag({given});"
    if isinstance(argument, Choice):
        choices = ", ".join(f"{{{json.dumps(v)}, {argument.enum.enumerator(v)}}}" for v in argument.enum.values)
        return f"  {place} = call.choice<hopwell_{argument.enum.name}>({given}, {{{choices}}});"
    assert isinstance(argument, (Number, Integer))
    optional = "" if argument.default is not None else "optional_"
    kind = "real" if isinstance(argument, Number) else "integer"
    return f"  {place} = call.{optional}{kind}({given});"


def parameter_list(names: list[str]) -> str:
    """Six parameters a line."""
    lines = [", ".join(f"handle {name}" for name in names[i : i + 6]) for i in range(0, len(names), 6)]
    return ",\n    ".join(lines)


def bound_operator(operator: Operator) -> str:
    lines, parameters, renamed = [], [], []
    for argument in operator.fields:
        inner = [f for f in argument.fields if argument.takes(f)] if isinstance(argument, Struct) else [argument]
        for one in inner:
            place = f"args.{argument.name}.{one.name}" if isinstance(argument, Struct) else f"args.{one.name}"
            lines.append(bound(one, one.name, place))
            parameters.append(one.name)
            names = [one.name, one.value] if isinstance(one, NumberOrTensor) else [one.name]
            renamed += [f'{{"{n}", "{one.python_name}"}}' for n in names if n != one.python_name]
    return BOUND.format(
        name=operator.name,
        camel=operator.camel,
        parameters=parameter_list([*parameters, "backend", "stream"]),
        lines="\n".join(lines),
        renamed=f", {{{', '.join(renamed)}}}" if renamed else "",
    )


def binding(operators: list[Operator]) -> str:
    return BINDING.format(
        functions="\n\n".join(bound_operator(operator) for operator in operators),
        definitions="\n".join(f'  define(module, "{o.name}", {o.name}_);' for o in operators),
    )
