"""Builds and runs the first kernel of docs/emulator.md from the page's text. `make test-docs` runs it."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PREFIX = ROOT / "build" / "emulator" / "installed"  # of `make docs`


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def blocks() -> tuple[str, str, str]:
    """Returns the kernel, its CMakeLists.txt and the output that the page shows."""
    page = (ROOT / "docs" / "emulator.md").read_text()
    section = page[page.index("## A first kernel") : page.index("## How it works")]
    found = [re.search(rf"```{language}\n(.*?)```", section, re.DOTALL) for language in ("cpp", "cmake", "text")]
    assert all(found)
    return tuple(match[1] for match in found if match)  # type: ignore[return-value]


def test_the_first_kernel_prints_what_the_page_says(tmp_path: Path) -> None:
    assert PREFIX.exists(), "run make docs first"
    kernel, cmake, expected = blocks()
    (tmp_path / "first.cu").write_text(kernel)
    (tmp_path / "CMakeLists.txt").write_text(cmake)
    build = tmp_path / "build"
    run("cmake", "-S", tmp_path, "-B", build, f"-DCMAKE_PREFIX_PATH={PREFIX}")
    run("cmake", "--build", build)
    kind_and_line = r"^\[.*?: (?:load|store) by"
    printed = run(build / "first")
    assert re.findall(kind_and_line, printed, re.MULTILINE) == re.findall(kind_and_line, expected, re.MULTILINE)
    assert len(printed.splitlines()) == 3

    store = "  number[thread_index()] = thread_index();\n"
    assert kernel.count(store) == 1
    (tmp_path / "first.cu").write_text(kernel.replace(store, store + "  syncthreads();\n"))
    run("cmake", "--build", build)
    assert run(build / "first").strip() == "no findings"
