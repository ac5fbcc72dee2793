"""Makes the list of all public functions and classes of the Python packages, from their sources."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from pieces import table

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "hopwell"
sys.path.insert(0, str(ROOT / "scripts" / "declare"))

import declarations  # noqa: E402


def exported(module: Path) -> list[str]:
    """Returns the names in `__all__` of a file, or of a folder's __init__.py."""
    tree = ast.parse((module / "__init__.py" if module.is_dir() else module).read_text())
    names: list[str] = []
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id == "__all__" and isinstance(value, ast.List):
            names += [str(ast.literal_eval(element)) for element in value.elts]
    return names


def described(module: Path) -> dict[str, str]:
    """Returns the first sentence about each documented function and class of a file, or of a folder's files."""
    found: dict[str, str] = {}
    for path in sorted(module.rglob("*.py")) if module.is_dir() else [module]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                first = text.split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".:")
                found.setdefault(node.name, first.replace("|", "\\|").replace("*", "\\*"))
    return found


def modules() -> dict[str, list[tuple[str, str]]]:
    """Returns each module's public functions and classes with their first sentences."""
    places = {"hopwell.torch": [PACKAGE / "torch", PACKAGE / "torch" / "ops"]}
    places |= {f"hopwell.torch.{name}": [PACKAGE / "torch" / name] for name in ("nn", "parallel")}
    places |= {f"hopwell.compat.{path.stem}": [path] for path in sorted((PACKAGE / "compat").glob("[a-z]*"))}
    places["hopwell.reference"] = [PACKAGE / "reference"]
    found: dict[str, list[tuple[str, str]]] = {}
    for module, paths in places.items():
        text = described(paths[-1]) | described(paths[0])
        names = sorted({name for path in paths for name in exported(path)})
        if module in ("hopwell.torch", "hopwell.reference"):  # their __all__ has the generated list of operators too
            names = sorted({*names, *(operator.name for operator in declarations.load())})
        if module.startswith("hopwell.compat.") and not names:
            names = sorted(name for name in text if not name.startswith("_"))
        found[module] = [(name, text[name]) for name in names if name in text]
    return found


def catalogue() -> str:
    """Tables of the functions and classes of each module, with links to their descriptions."""
    pages = {"hopwell.reference": "specification.md"}
    text = ""
    for module, names in modules().items():
        page = pages.get(module, "../compat.md" if ".compat." in module else "torch.md")
        rows = [[f"{{py:obj}}`{name} <{module}.{name}>`", sentence] for name, sentence in names]
        text += f"## [{module}]({page})\n\n" + table(["name", "description"], rows) + "\n"
    return text
