"""Functions of the standard library that nvcc compiles wrongly in device code, without a message (docs/lessons.md)."""

import re
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "src"
WRONG = re.compile(r"\bstd::(countr_zero|countl_zero|countr_one|countl_one|bit_width|bit_floor|bit_ceil)\(")


def test_no_kernel_calls_them() -> None:
    """They become constants. tile::lowest_bit and arch::bfind are right; the emulator cannot show the difference."""
    device = [*SOURCES.glob("ops/**/*.cu"), *SOURCES.glob("ops/**/*.hpp"), *SOURCES.glob("tile/gpu/*.hpp")]
    assert len(device) > 100
    found = [f"{path.name}: {match[0]}" for path in device for match in WRONG.finditer(path.read_text())]
    assert not found
