"""The installed package: its files, that its parts find each other, and that nothing was compiled twice for it."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import hopwell
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(hopwell.__file__).parent


def test_what_the_package_holds() -> None:
    package = importlib.metadata.distribution("hopwell")
    assert package.version == hopwell.__version__
    files = {str(file) for file in package.files or ()}
    assert files >= {
        "hopwell/py.typed",
        "hopwell/_hopwell.pyi",
        "hopwell/_operators.py",
        "hopwell/bin/hopwell",
        "hopwell/torch/nn/dsa.py",
    }
    assert files >= {"hopwell/commit.txt", "hopwell/bench/__main__.py"}
    libraries = [file for file in files if "libhopwell" in file]
    # A wheel has no links, so a second name would be a second copy. The name has the minor version, because argument
    # structs may grow with it.
    assert libraries == [f"hopwell/lib/libhopwell.so.{hopwell.__version__.rpartition('.')[0]}"]
    assert [file for file in files if file.startswith("hopwell/_hopwell.") and file.endswith(".so")]


def test_parts_are_there_without_an_import_of_their_own() -> None:
    code = "import hopwell; hopwell.reference.normalize_l1, hopwell.torch.sparse_mla, hopwell.compat"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "program", [[sys.executable, "-c", "import hopwell"], [FOLDER / "bin" / "hopwell", "--version"]]
)
def test_module_and_command_load_the_package_s_library(program: list[str | Path]) -> None:
    loader = subprocess.run(program, env={"LD_DEBUG": "libs"}, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("calling init: ")[2] for line in loader.stderr.splitlines() if "calling init: " in line}
    libraries = [Path(path).resolve() for path in loaded if "libhopwell" in path]
    assert len(libraries) == 1
    assert libraries[0].is_relative_to(FOLDER)


def test_it_was_packaged_where_the_library_was_built() -> None:
    """The module is one more target in the preset's build folder; pip did not compile the library again."""
    modules = [path.relative_to(ROOT).parts[1] for path in ROOT.glob("build/*/bindings/python/_hopwell.*.so")]
    assert {"cpu", "cuda"} & set(modules), modules
