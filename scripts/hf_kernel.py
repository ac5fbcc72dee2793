#!/usr/bin/env python3
"""Writes a package in the layout of Hugging Face's `kernels` from an installed hopwell.

    hf_kernel.py OUTPUT [VARIANT ...]
    OUTPUT/build/VARIANT/   __init__.py, _ops.py, metadata.json, package/ (library, module, operators in PyTorch)

A variant is named after PyTorch's version, a backend and a machine: torch213-cxx11-cu130-x86_64-linux. The default is
that of the PyTorch installed here. The library is not tied to a PyTorch version, so all variants have the same files.

`kernels` imports a variant by its path, and several versions in one process. So imports within the package become
relative, and the operators get a namespace of their own, torch.ops.<id>, whose end is a hash of the files.
"""

import argparse
import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

NAME, VERSION = "hopwell", 0  # `kernels` keeps version 0 for packages whose interface may change
ARCHS = ["8.0", "9.0", "10.0"]
# What needs only PyTorch, numpy and ml_dtypes. Entry points of other projects and the reference stay out.
PARTS = (
    *("__init__.py", "_arrays.py", "_checks.py", "_hooks.py", "_operators.py", "_ops.py", "_torch_ops.py"),
    *("lib", "torch"),
)
INIT = '''"""Hopwell's operators and modules in PyTorch: sparse MLA, the lightning indexer, paged attention, NVFP4."""

from .package.torch import *  # noqa: F403
from .package.torch import __all__  # noqa: F401
'''
OPS = '''import torch

from . import package  # registers the operators

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    """The operator's name with its namespace."""
    return f"{id}::{{op_name}}"
'''


def relative(source: str, depth: int, identifier: str) -> str:
    """A module's source with imports relative to the package, `depth` folders below its root, and its namespace."""
    dots = "." * (depth + 1)
    source = re.sub(r"^(\s*)from hopwell\.([\w.]+) import", rf"\1from {dots}\2 import", source, flags=re.MULTILINE)
    source = re.sub(r"^(\s*)from hopwell import", rf"\1from {dots} import", source, flags=re.MULTILINE)
    root = f'import importlib\n\nhopwell = importlib.import_module("{dots}", __package__)'
    source = re.sub(r"^import hopwell$", root, source, flags=re.MULTILINE)
    source = source.replace('import_module(f"hopwell.{name}")', 'import_module(f".{name}", __name__)')
    source = source.replace('Library("hopwell", "DEF")', f'Library("{identifier}", "DEF")')
    return source.replace("torch.ops.hopwell", f"torch.ops.{identifier}").replace("hopwell::", f"{identifier}::")


def files_of(package: Path) -> list[Path]:
    """The files that go into a variant, relative to the installed package."""
    paths = [package / part for part in PARTS] + list(package.glob("_hopwell.*.so"))
    found = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    return sorted(file.relative_to(package) for file in found if file.is_file() and "__pycache__" not in file.parts)


def default_variant() -> str:
    """The variant that `kernels` looks for with the PyTorch installed here."""
    import platform

    import torch

    major, minor = torch.__version__.split(".")[:2]
    backend = "cpu" if torch.version.cuda is None else "cu" + torch.version.cuda.replace(".", "")
    return f"torch{major}{minor}-cxx11-{backend}-{platform.machine()}-linux"


def write_variant(folder: Path, package: Path, backend: str) -> None:
    """Writes one variant. Its folder must not exist."""
    files = files_of(package)
    digest = hashlib.sha256(b"".join(hashlib.sha256((package / file).read_bytes()).digest() for file in files))
    identifier = f"_{NAME}_{digest.hexdigest()[:7]}"
    for file in files:
        target = folder / "package" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".py":
            target.write_text(relative((package / file).read_text(), len(file.parts) - 1, identifier))
        else:
            shutil.copyfile(package / file, target)
    for name, text in (("__init__.py", INIT), ("_ops.py", OPS.format(id=identifier))):
        (folder / name).write_text(text)
    kind = {"type": "cpu"} if backend == "cpu" else {"type": "cuda", "archs": ARCHS}
    written = sorted(file for file in folder.rglob("*") if file.is_file())
    hashes = {
        file.relative_to(folder).as_posix(): base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
        for file in written
    }
    metadata = {
        "name": NAME,
        "id": identifier,
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": kind,
        "digest": {"algorithm": "sha256", "files": hashes},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Writes the variants."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="folder of the package; build/VARIANT in it must not exist")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help="default: of the PyTorch installed here")
    options = parser.parse_args(arguments)
    import hopwell

    for variant in options.variants or [default_variant()]:
        match = re.fullmatch(r"torch\d+(?:-cxx11)?-(cpu|cu\d+)-\w+-linux", variant)
        if not match:
            parser.error(f"VARIANT must be like torch213-cxx11-cu130-x86_64-linux; got {variant}")
        folder = options.output / "build" / variant
        if folder.exists():
            parser.error(f"{folder} exists")
        write_variant(folder, Path(hopwell.__file__).parent, match[1])
        print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
