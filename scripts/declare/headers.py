"""The C and the C++ header of all operators: argument structs with their comments, and functions."""

from __future__ import annotations

import textwrap
from typing import Any

import declarations
from declare import (
    REQUIRED,
    Argument,
    Boolean,
    Choice,
    Enum,
    Integer,
    Number,
    NumberOrTensor,
    Operator,
    Output,
    Struct,
    Tensor,
    one_line,
)

WIDTH = 116

C_HEADER = """\
/* Argument structs and functions of the operators. Generated from src/ops/<operator>/declaration.py: do not edit. */
#ifndef HOPWELL_OPERATORS_H_
#define HOPWELL_OPERATORS_H_

#include <dlpack/dlpack.h>
#include <hopwell/enums.h>
#include <hopwell/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

{body}

#ifdef __cplusplus
}}
#endif

#endif /* HOPWELL_OPERATORS_H_ */
"""

ENUM_HEADER = """\
/* Enumerations of the operators' arguments. Generated from src/ops/<operator>/declaration.py: do not edit. */
#ifndef HOPWELL_ENUMS_H_
#define HOPWELL_ENUMS_H_

#ifdef __cplusplus
extern "C" {{
#endif

{body}

#ifdef __cplusplus
}}
#endif

#endif /* HOPWELL_ENUMS_H_ */
"""

CPP_HEADER = """\
// Argument structs and functions of the operators. Generated from src/ops/<operator>/declaration.py: do not edit.
#ifndef HOPWELL_OPERATORS_HPP_
#define HOPWELL_OPERATORS_HPP_

#include <hopwell/operators.h>
#include <hopwell/library.hpp>
#include <hopwell/tensor.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

namespace hopwell {{

{body}

}}  // namespace hopwell

#endif  // HOPWELL_OPERATORS_HPP_
"""

C_FUNCTIONS = """\
HOPWELL_API hopwell_status
hopwell_{name}(const hopwell_{name}_args* args, hopwell_stream stream);
HOPWELL_API hopwell_status
hopwell_{name}_workspace_bytes(const hopwell_{name}_args* args, size_t* bytes);"""

CPP_FUNCTIONS = """\
HOPWELL_API void {name}(const {camel}Args& args, Stream stream = nullptr);
HOPWELL_API std::size_t {name}_workspace_bytes(const {camel}Args& args);
HOPWELL_API std::string explain(const {camel}Args& args);"""

# What every operator has after its own arguments.
COMMON_DOCS = {
    "workspace": "hopwell_{name}_workspace_bytes() bytes on the device of the tensors, aligned to 16.",
    "workspace_bytes": "Size of workspace.",
    "backend": 'A name such as "cpu"; null: the best one.',
}


def comment(text: str, indent: str = "") -> str:
    """A doc comment. Paragraphs are filled, and indented blocks are kept."""
    width = WIDTH - len(indent)
    if "\n" not in text and len(text) <= width - 7:
        return f"{indent}/** {text} */"
    lines: list[str] = []
    for paragraph in textwrap.dedent(text).strip("\n").split("\n\n"):
        block = paragraph.startswith(" ")
        lines += paragraph.splitlines() if block else textwrap.wrap(one_line(paragraph), width - 3)
        lines.append("")
    body = "".join(f"{indent} * {line}".rstrip() + "\n" for line in lines[:-1])
    return f"{indent}/**\n{body}{indent} */"


def operator_doc(operator: Operator) -> str:
    parts = [one_line(operator.doc)]
    if operator.formula:
        parts.append(textwrap.indent(textwrap.dedent(operator.formula).strip("\n"), "    ").rstrip())
    if operator.notes:
        parts.append(one_line(operator.notes))
    return "\n\n".join(parts)


def field_doc(argument: Argument, in_c: bool) -> str:
    """Dtype, shape and meaning of a field, and how a default is written in C."""
    parts = []
    if isinstance(argument, Tensor):
        kind = "output, " if isinstance(argument, Output) else ""
        optional = "; optional" if argument.optional else ""
        parts.append(f"{kind}{argument.dtype.replace(' | ', ' or ')} {argument.shape}{optional}.")
    if isinstance(argument, NumberOrTensor):
        parts.append(f"fp32, one element; absent: {argument.value}.")
    parts.append(one_line(argument.doc))
    if isinstance(argument, Boolean) and argument.default and in_c:
        parts.append("On by default.")
    if in_c and isinstance(argument, (Number, Integer)):
        parts.append(zero_in_c(argument.default, isinstance(argument, Number)))
    return " ".join(part for part in parts if part)


def zero_in_c(default: Any, is_float: bool) -> str:
    """What 0 means in C for a field with this default."""
    if default is REQUIRED:
        return "It has no default: 0 is 0."
    if default is None:
        return "0: absent."
    return f"0 means {default:g}" + (", and -0.0f means 0." if is_float else ".")


# ---- C --------------------------------------------------------------------------------------------------


def c_fields(argument: Argument) -> list[tuple[str, str]]:
    """Declarations of an argument's fields in C, with their comments."""
    doc = field_doc(argument, in_c=True)
    if isinstance(argument, Tensor):
        return [(f"const DLTensor* {argument.name};", doc)]
    if isinstance(argument, NumberOrTensor):
        number = f"Excludes {argument.name}. {zero_in_c(argument.default, True)}"
        return [(f"const DLTensor* {argument.name};", doc), (f"float {argument.value};", number)]
    if isinstance(argument, Number):
        return [(f"float {argument.name};", doc)]
    if isinstance(argument, Integer) and argument.zero_is_a_value:
        has = f"Whether {argument.name} is given."
        number = f"{one_line(argument.doc)} An error if it is not 0 without has_{argument.name}."
        return [(f"bool has_{argument.name};", has), (f"int64_t {argument.name};", number)]
    if isinstance(argument, Integer):
        return [(f"int64_t {argument.name};", doc)]
    if isinstance(argument, Boolean):
        return [(f"{'hopwell_switch' if argument.default else 'bool'} {argument.name};", doc)]
    if isinstance(argument, Choice):
        return [(f"hopwell_{argument.enum.name} {argument.name};", doc)]
    assert isinstance(argument, Struct)
    return [(f"hopwell_{argument.name} {argument.name};", struct_doc(argument))]


def struct_doc(struct: Struct) -> str:
    refused = [field.name for field in struct.fields if not struct.takes(field)]
    return one_line(struct.doc) + (f" {', '.join(refused)} must be absent." if refused else "")


def c_struct(name: str, doc: str, arguments: Any, more: str = "") -> str:
    lines = [comment(doc), f"typedef struct hopwell_{name} {{"]
    for declaration, text in (field for argument in arguments for field in c_fields(argument)):
        lines += [comment(text, "  "), f"  {declaration}"]
    return "\n".join(lines) + f"\n{more}}} hopwell_{name};"


def c_common(operator: Operator) -> str:
    types = {
        "workspace": "void* workspace",
        "workspace_bytes": "size_t workspace_bytes",
        "backend": "const char* backend",
    }
    return "".join(
        f"{comment(doc.format(name=operator.name), '  ')}\n  {types[name]};\n" for name, doc in COMMON_DOCS.items()
    )


def c_enum(enum: Enum) -> str:
    values = [
        f"{comment(text, '  ')}\n  {enum.enumerator(value)} = {number}"
        for number, (value, text) in enumerate(enum.values.items())
    ]
    doc = comment(enum.doc) + "\n" if enum.doc else ""
    return f"{doc}typedef enum hopwell_{enum.name} {{\n" + ",\n".join(values) + f"\n}} hopwell_{enum.name};"


def enum_header(operators: list[Operator]) -> str:
    """The enumerations. In a header of their own, so that other changes do not compile the kernels that need them."""
    return ENUM_HEADER.format(body="\n\n".join(c_enum(enum) for enum in declarations.enums(operators)))


def c_header(operators: list[Operator]) -> str:
    parts = [c_struct(struct.name, struct.doc, struct.fields) for struct in declarations.structs(operators)]
    for operator in operators:
        more = c_common(operator)
        parts.append(c_struct(f"{operator.name}_args", operator_doc(operator), operator.fields, more))
        parts.append(C_FUNCTIONS.format(name=operator.name))
    return C_HEADER.format(body="\n\n".join(parts))


# ---- C++ ------------------------------------------------------------------------------------------------


def cpp_number(default: Any) -> tuple[str, str]:
    if default is None:
        return "std::optional<float>", "{}"
    if default is REQUIRED:
        return "float", "std::numeric_limits<float>::quiet_NaN()"
    return "float", f"{default}F"


def cpp_fields(argument: Argument) -> list[tuple[str, str, str, str]]:
    """Type, name, initial value and comment of an argument's fields in C++."""
    doc = field_doc(argument, in_c=False)
    if isinstance(argument, Tensor):
        return [("Tensor", argument.name, "{}", doc)]
    if isinstance(argument, NumberOrTensor):
        kind, initial = cpp_number(argument.default)
        number = (kind, argument.value, initial, f"Excludes {argument.name}.")
        return [("Tensor", argument.name, "{}", doc), number]
    if isinstance(argument, Number):
        kind, initial = cpp_number(argument.default)
        return [(kind, argument.name, initial, doc)]
    if isinstance(argument, Integer):
        if argument.default is None:
            return [("std::optional<std::int64_t>", argument.name, "{}", doc)]
        initial = 0 if argument.default is REQUIRED else argument.default  # 0 is an error where it is required
        return [("std::int64_t", argument.name, str(initial), doc)]
    if isinstance(argument, Boolean):
        return [("bool", argument.name, str(argument.default).lower(), doc)]
    if isinstance(argument, Choice):
        return [(f"hopwell_{argument.enum.name}", argument.name, argument.enum.enumerator(argument.default), doc)]
    assert isinstance(argument, Struct)
    return [(cpp_struct_name(argument), argument.name, "{}", struct_doc(argument))]


def cpp_struct_name(struct: Struct) -> str:
    return f"{struct.name.capitalize()}Args"


def cpp_struct(name: str, doc: str, arguments: Any, more: str = "") -> str:
    lines = [comment(doc), f"struct {name} {{"]
    for kind, field, initial, text in (one for argument in arguments for one in cpp_fields(argument)):
        lines += [comment(text, "  "), f"  {kind} {field} = {initial};"]
    return "\n".join(lines) + f"\n{more}}};"


def cpp_common(operator: Operator) -> str:
    fields = {
        "workspace": "void* workspace = nullptr",
        "workspace_bytes": "std::size_t workspace_bytes = 0",
        "backend": "const char* backend = nullptr",
    }
    docs = {name: doc.format(name=operator.name).replace("hopwell_", "") for name, doc in COMMON_DOCS.items()}
    return "".join(f"{comment(docs[name], '  ')}\n  {field};\n" for name, field in fields.items())


def cpp_header(operators: list[Operator]) -> str:
    parts = [cpp_struct(cpp_struct_name(s), s.doc, s.fields) for s in declarations.structs(operators)]
    for operator in operators:
        more = cpp_common(operator)
        parts.append(cpp_struct(f"{operator.camel}Args", operator_doc(operator), operator.fields, more))
        parts.append(CPP_FUNCTIONS.format(name=operator.name, camel=operator.camel))
    return CPP_HEADER.format(body="\n\n".join(parts))
