"""scripts/hf_kernel.py: the layout of Hugging Face's `kernels`, loaded as that package loads it."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import hf_kernel

    return hf_kernel


# As `kernels` does: by path, under the id. Operators have a namespace of their own.
LOADS_THE_KERNEL = """
import importlib.util, sys
import hopwell.torch as hw, torch
identifier, path = sys.argv[1:]
spec = importlib.util.spec_from_file_location(identifier, path)
kernel = importlib.util.module_from_spec(spec)
sys.modules[identifier] = kernel
spec.loader.exec_module(kernel)
assert set(hw.__all__) == set(kernel.__all__) and kernel.nvfp4_linear is not hw.nvfp4_linear
ops = importlib.import_module("._ops", identifier)
name = ops.ops.nvfp4_linear.default.name()
assert name == ops.add_op_namespace_prefix("nvfp4_linear") == f"{identifier}::nvfp4_linear"
quantized, x = hw.nvfp4_quantize(torch.randn(32, 64)), torch.randn(3, 64, requires_grad=True)
assert torch.equal(kernel.nvfp4_linear(x, *quantized), hw.nvfp4_linear(x, *quantized))
kernel.nn.NVFP4Linear(*quantized)(x).sum().backward()
assert x.grad is not None
"""


def test_layout(script: Any, tmp_path: Path) -> None:
    assert script.main([str(tmp_path)]) == 0
    folder = tmp_path / "build" / script.default_variant()
    metadata = json.loads((folder / "metadata.json").read_text())
    identifier = metadata["id"]
    assert identifier.isidentifier() and metadata["name"] == "hopwell" and metadata["digest"]["algorithm"] == "sha256"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {"metadata.json"}
    assert files == metadata["digest"]["files"].keys()
    for name, digest in metadata["digest"]["files"].items():
        assert digest == base64.b64encode(hashlib.sha256((folder / name).read_bytes()).digest()).decode()
        if name.endswith(".py"):
            assert not re.search(r"^\s*(from|import) hopwell", (folder / name).read_text(), re.MULTILINE), name

    # In a process of its own, because two copies of the module share nanobind's table of exceptions.
    arguments = [identifier, str(folder / "__init__.py")]
    subprocess.run([sys.executable, "-W", "ignore::RuntimeWarning", "-c", LOADS_THE_KERNEL, *arguments], check=True)


def test_variants(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main([str(tmp_path), "torch-universal"])
    assert "VARIANT must be like torch213-cxx11-cu130-x86_64-linux; got torch-universal" in capsys.readouterr().err
    assert script.main([str(tmp_path), "torch212-cxx11-cu126-x86_64-linux"]) == 0
    metadata = json.loads((tmp_path / "build" / "torch212-cxx11-cu126-x86_64-linux" / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cuda", "archs": ["8.0", "9.0", "10.0"]}
    with pytest.raises(SystemExit):
        script.main([str(tmp_path), "torch212-cxx11-cu126-x86_64-linux"])
    assert "exists" in capsys.readouterr().err
