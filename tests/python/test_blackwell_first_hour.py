"""benchmarks/blackwell_first_hour.py without a Blackwell card: the emulator's results, and the report."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAM = BENCHMARKS / "blackwell_first_hour.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return pytest.importorskip("blackwell_first_hour")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a card")
def test_without_a_card_it_says_so(tmp_path: Path) -> None:
    result = run("--folder", str(tmp_path / "report"))
    assert result.returncode == 1
    assert result.stdout == ""
    assert "needs a Blackwell card (compute capability 10.x); there is no NVIDIA card" in result.stderr
    assert not (tmp_path / "report").exists()


def test_on_the_emulator_every_measurement_is_right_and_has_its_model(program: ModuleType, tmp_path: Path) -> None:
    if not program.EMULATED.exists():
        pytest.skip("built without the emulator's tests")
    assert run("--self-test", "--folder", str(tmp_path)).returncode == 0
    results = {result["name"]: result for result in program.emulated(tmp_path)}
    assert len(results) == len(program.emulated(tmp_path)) > 80
    # The model's rates, which a kernel cannot exceed.
    assert results["additions lines, 40 rows"]["model"] == pytest.approx(22)
    assert results["additions scalar, 40 rows"]["model"] == pytest.approx(18)
    assert 1 / results["M 128 N 256 TS"]["model"] == pytest.approx(128)
    assert 1 / results["pair M 256 N 256 SS"]["model"] == pytest.approx(128)
    assert 1 / results[".ws M 64 N 128 SS"]["model"] == pytest.approx(48)
    assert results["gather4 4 warps, 72 KB in flight, 40 rows"]["model"] == pytest.approx(8192 / 16 / 12)
    assert results["to the peer by st.async"]["model"] is None


def test_every_kernel_has_a_bound_of_its_own(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = {program.model.LONG: {"cap": 0.5, "binds": "shared memory"}}
    monkeypatch.setattr(program.model, "counted", lambda command, kernel, backend: bound)
    found = program.caps(Path())
    assert len({(c["operator"], c["h_q"], c["d_qk"]) for c in found}) == len(found) == len(program.model.BLACKWELL)


def test_the_report_has_every_part(program: ModuleType) -> None:
    report = {
        "card": "NVIDIA B200",
        "date": "2026-01-31",
        "failed": {"peers": "RuntimeError: python ended with 1"},
        "cases": [{"operator": "nvfp4_gemv", "passed": 18, "failed": ["basic"]}],
        "measurements": [
            {"name": "additions lines", "unit": "B", "per_cycle": 11.0, "model": 22.0, "right": True},
            {"name": "M 128 N 64 SS", "unit": "products", "per_cycle": 0.02, "model": 1 / 48, "right": False},
        ],
        "caps": [
            {"operator": "sparse_mla_forward", "h_q": 64, "d_qk": 576, "cap": 0.5, "binds": "shared memory"},
            {"operator": "sparse_mla_forward", "h_q": 64, "d_qk": 512, "cap": 0.6, "binds": "shared memory"},
        ],
        "times": [
            {
                "operator": "sparse_mla_forward",
                "shape": "h64-8k",
                "settings": {"h_q": "64", "d_qk": "576"},
                "backend": "sm100",
                "median_seconds": 1e-3,
                "share_of_matmul": 0.4,
                "share_of_read": 0.1,
                "ghz": 1.8,
                "watts": 900.0,
            }
        ],
    }
    text = program.markdown(report)
    assert "**peers failed**: RuntimeError: python ended with 1" in text
    assert "| nvfp4_gemv | 18 | basic |" in text
    assert "| additions lines | 11.0 B | – | 22.0 | 0.50 | yes |" in text
    assert "| M 128 N 64 SS | 0.0200 products | 50.0 | 0.0208 | 0.96 | **no** |" in text
    assert "| sparse_mla_forward | h64-8k | sm100 | 1.000 | 0.40 | 0.80 | 0.10 | 1.80 | 900 |" in text
