"""What a machine must have for the installed package to load: the compiler's run-time libraries and nothing else."""

import re
import subprocess
from pathlib import Path

import hopwell
import pytest

PACKAGE = Path(hopwell.__file__).parent
ALLOWED = re.compile(r"(libhopwell|libstdc\+\+|libgcc_s|libm|libc|ld-linux-[\w-]+)\.so(\.\d+)*")


@pytest.mark.parametrize("file", ["lib*/libhopwell.so*", "_hopwell.*.so", "bin/hopwell"])
def test_needed_libraries(file: str) -> None:
    (path,) = PACKAGE.glob(file)
    dynamic = subprocess.run(["readelf", "-d", path], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert needed
    assert [name for name in needed if not ALLOWED.fullmatch(name)] == []
