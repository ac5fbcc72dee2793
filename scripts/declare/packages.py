"""The packages that have the operators in files of their names: hopwell.reference and hopwell.torch.ops."""

from __future__ import annotations

from pathlib import Path

from declare import Operator

EXPORTS = '''\
"""The operators in {folder}. Generated from the names of its files: do not edit."""

{imports}
__all__ = [
{names}]
'''


def file_of(operator: str, names: set[str]) -> str:
    """The file with the operator's name, or with the longest name that begins it, or ""."""
    words = operator.split("_")
    beginnings = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return next((name for name in beginnings if name in names), "")


def exports(operators: list[Operator], package: Path, folder: str, prefix: str = "") -> str:
    """A module that imports each operator from its file in this folder of the package."""
    files = {path.stem.removeprefix(prefix) for path in (package / folder).glob(f"{prefix}[a-z]*.py")}
    found = {name: file for name in sorted(o.name for o in operators) if (file := file_of(name, files))}
    imports = ""
    for file in sorted(set(found.values())):
        names = "".join(f"    {name},\n" for name in found if found[name] == file)
        imports += f"from .{folder.replace('/', '.')}.{prefix}{file} import (\n{names})\n"
    all_names = "".join(f'    "{name}",\n' for name in found)
    return EXPORTS.format(folder=f"python/hopwell/{folder}", imports=imports, names=all_names)
