"""Generates pieces of the site's pages from docstrings, headers, tests and records, when the site is built.

A page asks for a piece with a line `<!-- generated: NAME ARGUMENTS -->`. A host of repositories does not display it; it
displays the lines below that begin with `>` (raw.py), which the piece replaces.

    python docs/generated.py PAGE.md    prints a page with its pieces
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import catalogue
import figures
import instructions
from pieces import rst, table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "declare"))

import declarations  # noqa: E402
import functions  # noqa: E402
from declare import Operator  # noqa: E402

PACKAGE = ROOT / "python" / "hopwell"
MARKER = re.compile(r"^<!-- generated: (\w+) ?(.*?) -->(?:\n> .*)*$", re.MULTILINE)
TARGETS = re.search(r"set\(HOPWELL_TARGETS (.*)\)", (ROOT / "cmake" / "targets.cmake").read_text())
BACKENDS = ("cpu", *(TARGETS[1].split() if TARGETS else ()))


FAMILIES = (  # in the order of the site; an operator's page names its own
    "Sparse attention",
    "Compressed keys (DeepSeek-V4)",
    "Lightning indexer",
    "Decode from a paged cache",
    "Paged caches",
    "4-bit weights (NVFP4)",
)


# ---- lists from the sources ----------------------------------------------------------------------------------------


def declared() -> dict[str, Operator]:
    """Returns the declarations of the operators (src/ops/*/declaration.py) in the order of the README's table."""
    operators = {operator.name: operator for operator in declarations.load()}
    return {name: operators[name] for name in sorted(operators, key=list(readme_chips()).index)}


def operators() -> list[str]:
    """Returns the names of the operators."""
    return list(declared())


def docstrings() -> dict[str, str]:
    """Returns the docstrings of the operators and of the other functions in `hopwell`."""
    tree = ast.parse((PACKAGE / "_ops.py").read_text())
    found = {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.FunctionDef)}
    return found | {operator.name: functions.docstring(operator) for operator in declarations.load()}


def registered() -> dict[str, set[str]]:
    """Returns the backends that register a kernel, by operator."""
    return declarations.registered(declarations.load())


def readme_chips() -> dict[str, list[str]]:
    """Returns each operator's cells in the README's table, by backend. People wrote them: they know which cards ran
    it.
    """
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    return {name: cells.split(" | ") for names, cells in rows for name in re.findall(r"\w+", names)}


@cache
def refusals() -> dict[tuple[str, str], list[str]]:
    """Returns, by operator and backend, the reasons for which a backend does not support a case of the test suite."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "cases.json"
        program = os.environ.get("HOPWELL_COMMAND", Path(sys.executable).with_name("hopwell"))
        subprocess.run([program, "check", "--list", "--json", listed], check=True, stdout=subprocess.DEVNULL)
        operators = json.loads(listed.read_text())["operators"]
    found: dict[tuple[str, str], list[str]] = {}
    for operator in operators:
        for row in operator["unsupported"]:
            found.setdefault((operator["operator"], row["target"]), []).append(row["reason"])
    return found


def other_refusals(operator: str) -> list[str]:
    """Returns further reasons from an operator's own folder that no case of the test suite meets: mostly sizes."""
    text = "".join(path.read_text() for path in sorted((ROOT / "src" / "ops" / operator).glob("*.c*")))
    words = re.findall(r'(?:Support::no\(|Unsupported\{)\s*((?:"[^"]*"\s*)+)[)}]', text)
    met = {word for (name, _), reasons in refusals().items() if name == operator for word in reasons}
    return [word for word in dict.fromkeys("".join(re.findall(r'"([^"]*)"', w)) for w in words) if word not in met]


def compat_modules() -> list[str]:
    """Returns the names of the modules of hopwell.compat."""
    return sorted(path.stem for path in (PACKAGE / "compat").glob("[a-z]*"))


# ---- pieces of pages -----------------------------------------------------------------------------------------------


def python(names: str) -> str:
    """The reference of functions: dotted names, or names in `hopwell`."""
    return rst("\n".join(f".. autofunction:: {name if '.' in name else 'hopwell.' + name}" for name in names.split()))


def module(name: str) -> str:
    return rst(f".. automodule:: {name}\n   :members:\n   :undoc-members:\n")


def docstring(name: str) -> str:
    """A module's docstring without its members."""
    return rst(f".. automodule:: {name}\n")


def operator_list() -> str:
    """A table with a row for each operator: its page, and the first line of its docstring."""
    first = {name: text.split("\n\n")[0].replace("\n", " ") for name, text in docstrings().items()}
    rows = [[f"[`{name}`](../operators/{name}.md)", first[name]] for name in operators()]
    return table(["operator", "what it computes"], rows)


def by_family() -> dict[str, list[str]]:
    """Returns the names of the operators by the family that their pages name: `<!-- family: ... -->`."""
    found: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for name in operators():
        named = re.search(
            r"^<!-- family: (.*) -->$", (ROOT / "docs/operators" / f"{name}.md").read_text(), re.MULTILINE
        )
        if named is None or named[1] not in found:
            raise ValueError(f"docs/operators/{name}.md: expected <!-- family: NAME --> with a name in {FAMILIES}")
        found[named[1]].append(name)
    return found


def families(folder: str = "") -> str:
    """Operators by family: page, first line of the docstring, chips; and the pages in the site's contents."""
    first = {name: text.split("\n\n")[0].replace("\n", " ") for name, text in docstrings().items()}
    text = ""
    for family, names in by_family().items():
        rows = [[f"[`{name}`]({folder}{name}.md)", first[name], *readme_chips()[name]] for name in names]
        text += f"## {family}\n\n{table(['operator', 'what it computes', *BACKENDS], rows)}\n"
        text += contents(" ".join(names)) + "\n"
    return text


def compat() -> str:
    return "\n".join(
        f"## hopwell.compat.{name}\n\n" + rst(f".. automodule:: hopwell.compat.{name}\n   :members:\n")
        for name in compat_modules()
    )


def cpp(operator: str) -> str:
    """An operator's C++ program, which the installation test runs, and its generated argument struct."""
    program = f"```{{literalinclude}} ../../tests/install/operators/{operator}.cpp\n:language: cpp\n```\n\n"
    in_c = f"In C the struct is `hopwell_{operator}_args`, with the same fields. The functions are "
    in_c += f"`hopwell_{operator}` and `hopwell_{operator}_workspace_bytes` "
    in_c += "([differences](../reference/cpp.md#argument-structs)).\n\n"
    return (
        program
        + in_c
        + rst(f".. doxygenstruct:: hopwell::{declared()[operator].camel}Args\n   :members:\n   :undoc-members:\n")
    )


def command() -> str:
    """The options of the `hopwell` command, from its source."""
    source = (ROOT / "src" / "cli" / "main.cpp").read_text()
    pattern = r'add_(subcommand|option|flag|flag_callback)\(\s*"([^"]+)",[^"]*((?:"[^"]*"\s*)+)\)'
    text, rows = "", []
    for kind, name, words in [*re.findall(pattern, source), ("subcommand", "", "")]:
        words = "".join(re.findall(r'"([^"]*)"', words))
        if kind == "subcommand":
            text += table(["option", "meaning"], rows) + "\n" if rows else ""
            rows = []
            text += f"## hopwell {name}\n\n{words[:1].upper()}{words[1:]}.\n\n" if name else ""
        else:
            rows.append([f"`{name}`", words])
    return text


def cpp_structs() -> str:
    """A reference to the page that describes the argument structs."""
    return (
        "\n".join(
            f"- [`hopwell::{operator.camel}Args`, `hopwell_{name}_args`](../operators/{name}.md#c-and-c)"
            for name, operator in declared().items()
        )
        + "\n"
    )


def file(name: str) -> str:
    """A Markdown file from the repository's root, with links that are valid on the site."""
    text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text())
    return re.sub(r"\]\(([A-Z]+)\.md\)", lambda found: f"]({found[1].lower()}.md)", text)


def contents(patterns: str) -> str:
    """A part of the table of contents: all pages that match the patterns."""
    return "```{toctree}\n:hidden:\n:glob:\n\n" + "\n".join(patterns.split()) + "\n```\n"


def chips(folder: str = "") -> str:
    """The README's table of operators × chips, with a row and a link for each. `folder`: the folder of the pages."""
    rows = [[f"[`{operator}`]({folder}{operator}.md)", *readme_chips()[operator]] for operator in operators()]
    return table(["operator", *BACKENDS], rows)


def backends(operator: str) -> str:
    """An operator's backends, and the reasons for which each one does not support a call, as the tests record them."""
    rows, own, words = [], registered()[operator], refusals()
    for backend in BACKENDS:
        if backend not in own:
            continue
        refused = words.get((operator, backend), [])
        takes = "<br>".join(f"“{reason}”" for reason in refused) or "nothing that the test suite has met"
        rows.append([f"`{backend}`", takes])
    text = table(["backend", "leaves to another backend, with these reasons"], rows)
    if others := other_refusals(operator):
        text += "\nGPU backends may also refuse, with: " + "; ".join(f"“{word}”" for word in others) + ".\n"
    return text + (
        "\nThe test suite recorded these reasons (`hopwell check --list`). `hopwell.explain` gives them for a call.\n"
    )


GENERATORS: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        python,
        docstring,
        module,
        operator_list,
        families,
        command,
        compat,
        cpp,
        cpp_structs,
        file,
        contents,
        chips,
        backends,
        instructions.instructions,
        catalogue.catalogue,
    )
} | figures.GENERATORS


# ---- hooks for Sphinx ----------------------------------------------------------------------------------------------


def fill(app: object, docname: str, source: list[str]) -> None:
    """Replaces each marker of a page with its generated piece."""
    source[0] = MARKER.sub(lambda found: GENERATORS[found[1]](*([found[2]] if found[2] else [])), source[0])


def with_docstrings(page: str) -> str:
    """Replaces the directives for functions of a page by their docstrings, for readers of its Markdown."""
    known = docstrings()

    def text(found: re.Match[str]) -> str:
        return f"**{found[1]}**\n\n```text\n{known[found[1]]}\n```" if found[1] in known else found[0]

    page = re.sub(r"\{py:obj\}`(\w+) <[\w.]+>`", r"`\1`", page)
    return re.sub(r"```\{eval-rst\}\n\.\. autofunction:: hopwell\.(\w+)\n```", text, page)


# Methods that the modules call on each other: steps of `forward`, and what PyTorch asks for.
HELPERS = {
    *("combine", "extra_repr", "finish", "halo_sizes", "heads_proj", "into_latent", "lift", "out_of_latent"),
    *("own_pieces", "parts", "pool", "project_all", "share_kept"),
}


def skip_helpers(app: object, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Leaves helpers, and members that have no docstring of their own, out of the reference."""
    if what != "class" or name == "forward":
        return None
    function = getattr(obj, "fget", None) or getattr(obj, "__func__", obj)
    return True if name in HELPERS or not (callable(function) and function.__doc__) else None


def formulas_are_literal(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Applies our docstring format: indented blocks of the text are formulas or code, and Returns is prose."""
    result: list[str] = []
    section, in_block = "", False
    for line in lines:
        if line in ("Args:", "Returns:", "Raises:"):
            section = line
        indented = line.startswith("  ") and not section
        if indented and not in_block:
            result += ["", "::", ""]
        if in_block and line and not indented:
            result.append("")
        in_block = indented or (in_block and not line)
        if section == "Returns:":  # napoleon treats the words before a colon as a type
            result += ["", "**Returns**", ""] if line == section else [line.removeprefix("    ")]
        else:
            result.append(line)
    lines[:] = result


if __name__ == "__main__":
    pieces = [Path(sys.argv[1]).read_text()]
    fill(None, sys.argv[1], pieces)
    print(with_docstrings(pieces[0]))
