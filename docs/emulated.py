"""Runs the tutorial's kernels on the emulator, and makes the page about a launch and its picture.

    python docs/emulated.py FOLDER [STEP]

Needs a C++ compiler and CMake. The first run compiles the emulator into build/emulator, which takes a minute.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "emulator"


def run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")


def example() -> Path:
    """Builds the tutorial's program as the tutorial describes, and returns its path."""
    run("cmake", "-S", "src/arch", "-B", BUILD)
    run("cmake", "--build", BUILD, "--parallel", 2)
    run("cmake", "--install", BUILD, "--prefix", BUILD / "installed")
    run("cmake", "-S", "examples/emulator", "-B", BUILD / "example", f"-DCMAKE_PREFIX_PATH={BUILD / 'installed'}")
    run("cmake", "--build", BUILD / "example", "--parallel", 2)
    return BUILD / "example" / "emulator_example"


def picture(page: str) -> str:
    """Returns the timeline of a page's first launch as an SVG file's text."""
    style = re.search(r"<style>.*?</style>", page, re.DOTALL)
    timeline = re.search(r"<svg [^>]*role=\"img\">.*?</svg>", page, re.DOTALL)
    if style is None or timeline is None:
        raise ValueError("the page about a launch has no style or no timeline")
    head, rest = timeline[0].split(">", 1)
    return f"{head}>{style[0]}{rest}\n"


def draw(folder: Path, step: str = "pipeline") -> None:
    """Writes STEP.html and STEP.svg to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run(example(), step, "--report", folder / f"{step}.html")
    (folder / f"{step}.svg").write_text(picture((folder / f"{step}.html").read_text()))


if __name__ == "__main__":
    draw(Path(sys.argv[1]), *sys.argv[2:3])
