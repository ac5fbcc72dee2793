"""`python -m hopwell.bench` notices peers that disagree or are missing, and slower results. No test judges a time."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hopwell import _ops
from hopwell.bench import check, command, compare, problem, record, scale
from hopwell.bench.operators import OPERATORS
from hopwell.compat import deep_gemm, flash_mla

ROOT = Path(__file__).parents[2]
SPARSE = "sparse_mla_forward"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a small ceiling and few bytes, as a dry run does."""
    for name in ("COLD_BYTES", "PRODUCT"):
        monkeypatch.setattr(scale, name, getattr(scale, name))  # so that monkeypatch restores them
    scale.shrink()


def measured(name: str, packages: Callable[[str], bool] | None) -> list[dict[str, Any]]:
    return compare.measure(name, [OPERATORS[name].tiny], 2, packages, lambda rows: None)


def test_it_knows_every_operator() -> None:
    assert set(OPERATORS) == set(_ops.OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_plain_pytorch_agrees_and_is_timed(name: str) -> None:
    rows = measured(name, lambda package: package == "torch")
    assert rows
    for row in rows:
        assert row["error"] < row["tolerance"], row
        assert min(row["us"], row["peer_us"], row["times_as_fast"], row["share"], row["peer_share"]) > 0
        assert row["settings"] == OPERATORS[name].settings(OPERATORS[name].tiny)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_wrong_result_is_noticed_whichever_it_is(name: str) -> None:
    problem = OPERATORS[name].problem(**OPERATORS[name].tiny)
    peer = next(peer for peer in problem.peers if peer.package == "torch")
    theirs, read = peer.prepare(), problem.read
    for wrong in range(len(read(problem.ours(0)))):

        def altered(results: Any, wrong: int = wrong) -> list[torch.Tensor]:
            return [1.1 * t.double() if i == wrong else t for i, t in enumerate(read(results))]

        problem.read = altered
        row = compare.compare(problem, peer, 1)
        assert "differs by" in row["disagrees"], (name, wrong)
        problem.read = read
    assert theirs is not None


# ---- packages that replace a peer ------------------------------------------------------------------------------------


def attention(q: Any, kv: Any, indices: Any, scale: float, d_v: int) -> tuple[torch.Tensor, None, None]:
    """Computes FlashMLA's function in float64."""
    k = kv[:, 0].double()[indices[:, 0].long()]
    p = (torch.einsum("shd,std->sht", q.double(), k) * scale).softmax(-1)
    return torch.einsum("sht,std->shd", p, k[..., :d_v]).to(q.dtype), None, None


def zeros(q: Any, kv: Any, indices: Any, scale: float, d_v: int) -> tuple[torch.Tensor]:
    return (torch.zeros_like(q[..., :d_v]),)


def unwritten(q: Any, kv: Any, indices: Any, scale: float, d_v: int) -> tuple[torch.Tensor]:
    out = torch.empty_like(q[..., :d_v])
    out[1:] = attention(q, kv, indices, scale, d_v)[0][1:]
    return (out,)


def of_another_shape(*arguments: Any) -> tuple[torch.Tensor]:
    return (attention(*arguments)[0][1:],)


def refusing(*_: Any) -> None:
    raise RuntimeError("h_q must be 64 or 128")


def beside(monkeypatch: pytest.MonkeyPatch, function: Callable[..., object]) -> dict[str, Any]:
    """Returns the row for a package `flash_mla` that has this function."""
    module = ModuleType("flash_mla")
    module.flash_mla_sparse_fwd = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    (row,) = measured(SPARSE, lambda package: package == problem.FLASH_MLA)
    assert row["peer"] == "FlashMLA"
    return row


def test_a_peer_that_agrees_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    row = beside(monkeypatch, attention)
    assert row["times_as_fast"] > 0 and row["error"] < row["tolerance"]
    assert compare.problems_of([row]) == []


@pytest.mark.parametrize(("function", "words"), [(zeros, "differs by"), (unwritten, "NaN")])
def test_a_peer_that_disagrees_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], function: Callable[..., object], words: str
) -> None:
    row = beside(monkeypatch, function)
    assert words in row["disagrees"] and "times_as_fast" not in row
    assert compare.problems_of([row]) == [row]
    assert "DISAGREES" in capsys.readouterr().out
    json.loads(compare.dump([row]))  # NaN is not valid JSON


@pytest.mark.parametrize(
    ("function", "words"), [(refusing, "h_q must be 64 or 128"), (of_another_shape, "where ours is [16, 16, 512]")]
)
def test_a_peer_that_refuses_says_why(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., object], words: str
) -> None:
    row = beside(monkeypatch, function)
    assert words in row["failed"]
    assert compare.problems_of([row]) == []


@pytest.mark.parametrize(("row", "h_q", "idle"), [(656, 4, 0), (656, 64, 1), (584, 16, 1)])
def test_flash_mla_decodes_the_same(monkeypatch: pytest.MonkeyPatch, row: int, h_q: int, idle: int) -> None:
    def of_64_or_128_heads(q: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert q.shape[2] in (64, 128)
        return flash_mla.flash_mla_with_kvcache(q, *arguments, **options)

    module = ModuleType("flash_mla")
    module.get_mla_metadata = flash_mla.get_mla_metadata  # type: ignore[attr-defined]
    module.flash_mla_with_kvcache = of_64_or_128_heads  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    shape = {**OPERATORS["sparse_mla_decode"].tiny, "row": row, "h_q": h_q, "idle": idle}
    (found,) = compare.measure("sparse_mla_decode", [shape], 1, lambda p: p == problem.FLASH_MLA, lambda rows: None)
    assert found["error"] < found["tolerance"], found
    assert ("heads of zeros" in found["note"]) == (h_q < 64)


@pytest.mark.parametrize("name", ["fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits"])
def test_deep_gemm_selects_the_same(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module = ModuleType("deep_gemm")
    module.get_num_sms = lambda: 1  # type: ignore[attr-defined]
    module.get_paged_mqa_logits_metadata = deep_gemm.get_paged_mqa_logits_metadata  # type: ignore[attr-defined]
    setattr(module, name, deep_gemm.fp8_paged_mqa_logits)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    (row,) = measured("paged_lightning_indexer", lambda package: package == problem.DEEP_GEMM)
    assert row["peer"] == "DeepGEMM + torch.topk" and row["error"] < row["tolerance"], row


@pytest.mark.parametrize(
    ("operator", "shape"), [("sparse_mla_decode", {"row": 1152}), ("paged_lightning_indexer", {"fp8": 0})]
)
def test_bf16_rows_have_pytorch_alone_as_a_peer(operator: str, shape: dict[str, int]) -> None:
    rows = compare.measure(operator, [{**OPERATORS[operator].tiny, **shape}], 1, lambda _: True, lambda rows: None)
    assert [row["peer"] for row in rows] == ["torch eager"]


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    (row,) = measured("sparse_mla_backward", lambda package: package == problem.CUDNN)
    assert row["missing"].startswith("needs nvidia-cudnn-frontend[cutedsl]: ") and "cudnn" in row["missing"]
    assert compare.problems_of([row]) == []


def test_a_failure_of_hopwell_itself_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = compare.measure(SPARSE, [{**OPERATORS[SPARSE].tiny, "d": 0}], 1, lambda _: True, lambda rows: None)
    assert compare.problems_of(rows) == rows and "failed" in rows[0]


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [environment.get("PYTHONPATH")])])
    program = [sys.executable, "-m", "hopwell.bench", *map(str, arguments)]
    return subprocess.run(program, capture_output=True, text=True, check=False, env=environment, timeout=600)


def test_a_record_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "a.json", tmp_path / "a.svg"
    result = run("normalize_l1", "--dry-run", "--rounds", "1", "--json", file, "--plot", picture)
    assert result.returncode == 0, result.stderr
    assert "1 compared\n" in result.stdout
    made = json.loads(file.read_text())
    assert made["device"] == record.device() and made["versions"] == {"torch": torch.__version__}
    said = "python -m hopwell.bench normalize_l1 --dry-run --rounds 1 --json a.json --plot a.svg"
    assert made["command"] == said  # without folders
    assert made.keys() >= {"date", "driver", "commit", "hopwell", "rounds"}
    (row,) = made["results"]
    assert row["operator"] == "normalize_l1" and row["times_as_fast"] > 0
    assert picture.read_text().rstrip().endswith("</svg>")


def test_the_command_compares_with_packages() -> None:
    command = Path(sys.executable).with_name("hopwell")
    for option in ("--peers", "--plot=a.xyz"):
        program = [command, "bench", "normalize_l1", option, "--shape", "row=1"]
        result = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
        assert result.returncode == 2 and result.stderr.startswith("hopwell.bench: "), result.stderr


def test_disagreement_ends_with_1_and_a_process_that_dies_takes_nothing_else_with_it(tmp_path: Path) -> None:
    (tmp_path / "flashinfer.py").write_text("import os\nos._exit(7)\n")
    (tmp_path / "flash_mla.py").write_text(
        "def flash_mla_sparse_fwd(q, kv, indices, scale, d_v):\n    return [q[..., :d_v].clone()]\n"
    )
    file = tmp_path / "a.json"
    result = run("paged_attention", SPARSE, "--peers", "--dry-run", "--rounds", "1", "--json", file, path=tmp_path)
    assert result.returncode == 1, result.stderr
    assert "the process ended with 7; later shapes and peers are missing" in result.stdout
    assert "DISAGREES: differs by" in result.stdout and "1 compared, 1 failed, 1 disagrees" in result.stdout
    made = json.loads(file.read_text())
    assert [row["operator"] for row in made["results"] if "times_as_fast" in row] == [SPARSE]
    assert set(record.PEERS) >= set(made["missing"]) and len(made["missing"]) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nvfp4"], "operator: expected one of attention_distribution"),
        (["normalize_l1", "--rounds", "0"], "--rounds: expected at least 1; got 0"),
        (["normalize_l1", "--limit", "0"], "--limit: expected more than 0 seconds; got 0"),
        (["normalize_l1", "--shape", "row=1"], "normalize_l1: --shape: expected NAME=N with NAME one of rows, columns"),
        (["normalize_l1", "--shape", "rows"], "got 'rows'"),
        (["normalize_l1", "--shape", "rows=-1"], "normalize_l1: --shape: expected a number for rows; got '-1'"),
        (["normalize_l1", "--json", "/nowhere/a.json"], "--json: expected a file in a folder that exists"),
        (["normalize_l1", "--plot", "a.xyz"], "--plot: expected a name that ends in .svg, .png, .pdf; got a.xyz"),
        (["--noise", "0.1"], "--noise: expected with --check only"),
        (["--check", "a.json", "--noise", "1"], "--noise: expected between 0 and 1; got 1"),
        (["--check", "a.json", "--peers"], "--check: expected without --peers"),
        (["--check", "a.json"], "--check: expected a record of hopwell.bench; a.json: "),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("hopwell.bench: ") and words in said.err and said.out == ""


def test_what_is_not_installed_is_said_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "hopwell.bench.plot", raising=False)
    monkeypatch.delattr("hopwell.bench.plot", raising=False)
    assert command.main(["normalize_l1", "--plot", str(tmp_path / "a.svg")]) == 2
    assert "hopwell's extra [bench]" in capsys.readouterr().err
    without = "import sys, runpy; sys.modules['torch'] = None; runpy.run_module('hopwell.bench', run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("hopwell.bench needs PyTorch") and "Traceback" not in result.stderr


def test_what_takes_long_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    with compare.progress("short"):
        pass
    with compare.progress("long"):
        time.sleep(2.2)
    assert capsys.readouterr().err == "… long\n"


# ---- comparison with records -----------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a modified record of this machine; --check then measures in this process."""
    monkeypatch.setattr(
        command,
        "in_its_own_process",
        lambda name, shapes, options: compare.measure(name, shapes, options.rounds, None, lambda rows: None),
    )

    def write(times: float = 1.0, **more: object) -> Path:
        rows = [row for name in ("normalize_l1", "nvfp4_matmul") for row in measured(name, lambda p: p == "torch")]
        for row in rows:
            row["share"] *= times
        path = tmp_path / "record.json"
        path.write_text(json.dumps({**record.of(rows), **more}))
        return path

    return write


def test_a_share_that_fell_fails(recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--check", str(recorded(times=1e4)), "--rounds", "3"]) == check.SLOWER == 1
    said = capsys.readouterr().out
    assert said.count("SLOWER") == 2 and "NOT HELD" in said
    assert said.count("measured again") == 2 * check.AGAIN


def test_a_share_that_rose_passes_and_is_told(
    recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fresh = tmp_path / "fresh.json"
    assert command.main(["--check", str(recorded(times=1e-4)), "--rounds", "3", "--json", str(fresh)]) == 0
    said = capsys.readouterr().out
    assert said.count("faster: record it again") == 2 and "2 shapes" in said
    assert all("share" in row for row in json.loads(fresh.read_text())["results"])


def test_another_device_is_not_compared(recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--check", str(recorded(device="NVIDIA X1"))]) == check.OTHER_DEVICE == 3
    said = capsys.readouterr().out
    assert f"nothing was compared: the records are of NVIDIA X1; this is {record.device()}" in said


def test_rows_without_a_share_are_named(recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    row = {"operator": "normalize_l1", "shape": {"rows": 3}, "peer": "torch", "us": 1.0}
    path = recorded(results=[row])
    assert command.main(["--check", str(path)]) == 3
    said = capsys.readouterr().out
    assert "recorded without a share of a ceiling: 1 of normalize_l1" in said
    assert "nothing was compared" in said


def test_a_record_of_another_operator_is_an_error(
    recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--check", str(recorded(results=[{"operator": "dense", "shape": {}}]))]) == 2
    assert "the record has 'dense'" in capsys.readouterr().err


def test_a_share_that_was_small_once_is_not_held_against_it(
    recorded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, shares = recorded(), iter([0.1, 1.0])
    row = json.loads(path.read_text())["results"][0]
    path.write_text(json.dumps({**record.of([{**row, "share": 1.0}])}))
    monkeypatch.setattr(command, "in_its_own_process", lambda *_: [{**row, "share": next(shares)}])
    assert command.main(["--check", str(path)]) == 0
    assert capsys.readouterr().out.count("measured again") == 1


def test_noise_is_a_part_of_the_recorded_share() -> None:
    records = {"normalize_l1": {"rows=1": ({"rows": 1}, 0.5)}}

    def held(share: float | None, noise: float) -> tuple[str, bool]:
        fresh = [] if share is None else [{"operator": "normalize_l1", "settings": {"rows": 1}, "share": share}]
        (line,), good = check.verdicts(records, fresh, noise)
        return line, good

    assert held(0.44, 0.15) == (held(0.44, 0.15)[0], True) and "as recorded" in held(0.44, 0.15)[0]
    assert held(0.42, 0.15)[1] is False and "SLOWER" in held(0.42, 0.15)[0]
    assert held(0.42, 0.2)[1] is True
    assert held(0.7, 0.15)[1] is True and "record it again" in held(0.7, 0.15)[0]
    assert held(None, 0.15)[1] is False and "NOT MEASURED" in held(None, 0.15)[0]


def test_committed_records_can_be_compared_with() -> None:
    """Takes each machine's records together, because one record of the H200 has no shares of operators without
    products.
    """
    machines = {path.parent for path in (ROOT / "benchmarks" / "results").glob("*/peers*.json")}
    assert len(machines) >= 2
    for machine in sorted(machines):
        shares, _ = check.shares([check.read(path) for path in sorted(machine.glob("peers*.json"))], [])
        assert shares, machine
        for name, by_shape in shares.items():
            for shape, _ in by_shape.values():
                assert shape == OPERATORS[name].settings(shape), f"{machine}: {name} {shape}"
