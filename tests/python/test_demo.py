"""The language-model demo: a shortened run with its claims, resuming, and all invalid inputs."""

import dataclasses
import io
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_dsa_lm
from dsa_lm import model, text, training
from dsa_lm.report import DemoError, Reporter, console
from hopwell.torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"
PNG = b"\x89PNG\r\n\x1a\n"


def demo(folder: Path, *options: str, limit: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "train_dsa_lm.py"), *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, preexec_fn=limit, check=False)


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("train_dsa_lm: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.nightly
def test_shortened_run_keeps_its_claims(tmp_path: Path) -> None:
    result = demo(tmp_path, "--quick", "--name", "short", "--prompt", "import os")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("PASS") == 4
    assert "FAIL" not in result.stdout
    assert "\x1b" not in result.stdout  # no progress bar in a pipe
    assert "about 4 minutes on two idle cores" in result.stdout.partition("dense")[0]
    assert result.stdout.count(" left\n") > 40 and "0:00 left" in result.stdout

    run = tmp_path / "runs" / "short"
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["sparse"] < metrics["bigram"]
    assert metrics["sparse"] <= 1.03 * metrics["dense"]
    assert metrics["nvfp4"] < 1.03 * metrics["sparse"]
    assert metrics["keys_read"] == pytest.approx(sum(min(t, 32) for t in range(1, 129)) / (128 * 129 / 2))
    stages = [record["stage"] for record in metrics["steps"]]
    assert stages == ["dense"] * 50 + ["warm-up"] * 15 + ["sparse"] * 250
    assert [record["step"] for record in metrics["steps"]] == list(range(1, 316))
    assert all(record["tokens_per_s"] > 0 for record in metrics["steps"])
    warm_up = [record for record in metrics["steps"] if record["stage"] == "warm-up"]
    assert {record["update"] for record in warm_up} == {50}  # the main model is frozen
    assert warm_up[-1]["indexer_loss"] < warm_up[0]["indexer_loss"]
    assert len(metrics["dense_twin"]) == 250
    ends = {(v["model"], v["update"]): v["loss"] for v in metrics["validation"]}
    assert ends["sparse", 300] == metrics["sparse"]
    assert ends["sparse", 0] == pytest.approx(np.log(320), abs=1e-3)  # the head starts at zero

    assert (run / "loss.png").read_bytes().startswith(PNG)
    assert (run / "sample.txt").read_text().startswith("import os")
    tensors = safetensors.torch.load_file(run / "model.safetensors")
    assert sum(t.numel() for t in tensors.values()) > 100_000
    assert (run / "tokenizer.json").exists()


def test_claim_that_fails_fails_the_run(tmp_path: Path) -> None:
    """Two steps are too few to beat the bigram model."""
    result = demo(tmp_path, "--quick", "--steps", "2")
    assert result.returncode == 1, result.stderr
    assert result.stdout.count("FAIL") == 1
    assert next(line for line in result.stdout.splitlines() if "FAIL" in line).find("bigram") > 0
    claims = json.loads((tmp_path / "runs" / "dsa_lm" / "metrics.json").read_text())["claims"]
    assert [claim["holds"] for claim in claims] == [False, True, True, True]
    assert "\x1b" not in result.stdout  # no progress bar in a pipe
    run = tmp_path / "runs" / "dsa_lm"
    assert (run / "loss.png").read_bytes().startswith(PNG)
    assert (run / "sample.txt").stat().st_size > 0
    assert safetensors.torch.load_file(run / "model.safetensors")
    assert (run / "tokenizer.json").exists()


# ---- resuming ------------------------------------------------------------------------------------------------------


class InterruptedRunError(Exception):
    pass


@pytest.fixture
def determinism_restored() -> Iterator[None]:
    """Restores the settings that the demo changes for its process."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture
def deterministic(determinism_restored: None) -> None:
    torch.use_deterministic_algorithms(True)


def make_trainer(steps: int = 12, size: Any = None) -> Any:
    size = size or model.Size(vocabulary=300, context=32, layers=2, d_model=32, d_ff=32, d_v=32, topk=8)
    settings = training.Settings(size, steps, sequences=2, checkpoint_every=3, validate_every=5)
    corpus = text.load([EXAMPLES / "dsa_lm"], size.vocabulary, size.context)
    windows = text.validation_windows(corpus.validation, size.context, 4)
    return training.Trainer(settings, corpus, windows, torch.device("cpu"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.use_deterministic_algorithms(True)
    trainer = make_trainer(36)
    trainer.run(tmp_path_factory.mktemp("whole") / "checkpoint.pt", Reporter(console()))
    torch.use_deterministic_algorithms(False)
    return trainer


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("stage", ["dense", "warm-up", "sparse", "dense twin"])
def test_resumed_run_equals_uninterrupted_run(stage: str, uninterrupted: Any, tmp_path: Path) -> None:
    def interrupt(trainer: Any) -> None:
        if trainer.stage == stage and trainer.step == min(5, trainer.settings.lengths()[stage]):
            raise InterruptedRunError

    broken, resumed = make_trainer(36), make_trainer(36)
    with pytest.raises(InterruptedRunError):
        broken.run(tmp_path / "checkpoint.pt", Reporter(console()), interrupt)
    resumed.load(tmp_path / "checkpoint.pt")
    assert len(resumed.steps) + len(resumed.dense_twin) < len(uninterrupted.steps) + len(uninterrupted.dense_twin)
    resumed.run(tmp_path / "checkpoint.pt", Reporter(console()))

    def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in record.items() if key != "tokens_per_s"} for record in records]

    for name in ("steps", "dense_twin", "validation"):
        assert without_times(getattr(resumed, name)) == without_times(getattr(uninterrupted, name))
    for name in ("trained", "fork", "model"):
        states = [getattr(trainer, name) for trainer in (resumed, uninterrupted)]
        weights = [s if name == "trained" else s["model"] if name == "fork" else s.state_dict() for s in states]
        for parameter, tensor in weights[1].items():
            assert torch.equal(weights[0][parameter], tensor), (name, parameter)


def test_stages_train_what_they_should(tmp_path: Path) -> None:
    """The warm-up changes only the indexer, and the twin begins with the weights at the end of the dense stage."""
    trainer = make_trainer()
    states: dict[tuple[str, int], dict[str, torch.Tensor]] = {}

    def remember(t: Any) -> None:
        states[t.stage, t.step] = {name: p.detach().clone() for name, p in t.model.named_parameters()}

    trainer.run(tmp_path / "checkpoint.pt", Reporter(console()), remember)
    ends = {stage: states[stage, steps] for stage, steps in trainer.settings.lengths().items()}
    for name, before in ends["dense"].items():
        moved = not torch.equal(before, ends["warm-up"][name])
        assert moved == ("indexer" in name), name
        assert torch.equal(before, trainer.fork["model"][name])
    assert all(torch.equal(p, trainer.trained[name]) for name, p in ends["sparse"].items())
    # dense training changes all parameters except the indexer's
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, trainer.fork["model"][name]) == ("indexer" in name), name


@pytest.mark.parametrize("of", [model.GPU, model.LARGE])
def test_sizes_of_the_gpu_run_in_bfloat16(tmp_path: Path, of: Any) -> None:
    """d_v 512 with d_rope 64, h_index 16, bfloat16: training, NVFP4 and generation, with the CPU's operators."""
    size = dataclasses.replace(of, vocabulary=300, context=32, layers=1, d_model=64, d_ff=64, topk=8)
    trainer = make_trainer(12, size)
    trainer.run(tmp_path / "checkpoint.pt", Reporter(console()))
    before, _ = model.evaluate(trainer.model, trainer.windows, "sparse")
    assert model.quantize(trainer.model) == 9
    after, _ = model.evaluate(trainer.model, trainer.windows, "sparse")
    model.generate(trainer.model, trainer.windows[0][0, :5], 4, seed=0)
    assert trainer.steps[-1]["loss"] < 0.95 * trainer.steps[0]["loss"]
    assert after == pytest.approx(before, rel=0.05)


def test_interrupted_by_the_user(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_dsa_lm.py"), "--quick", "--steps", "3000"]

    def heed_interrupts() -> None:  # a shell starts background jobs with interrupts ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, preexec_fn=heed_interrupts, **pipes) as process:
        assert process.stdout is not None
        while "dense" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert errors == "train_dsa_lm: interrupted; --resume goes on from the last checkpoint\n"


# ---- invalid input -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("determinism_restored")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "nowhere.txt"], "cannot read text: nowhere.txt: no such file"),
        (["--text", "small.txt"], "too little text"),
        (["--text", "empty"], "too little text"),
        (["--text", "/proc/self/mem"], "cannot read text: /proc/self/mem: Input/output error"),
        (["--text", "latin1.txt"], "cannot read text: latin1.txt: not UTF-8"),
        (["--steps", "0"], "argument --steps: expected a whole number of at least 1; got '0'"),
        (["--steps", "many"], "argument --steps: expected a whole number of at least 1; got 'many'"),
        (["--seed", "-1"], "argument --seed"),
        (["--seed", str(2**64)], f"and below {2**64}; got '{2**64}'"),
        (["--name", "../elsewhere"], "argument --name: expected a plain name"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--quick", "--resume"], "nothing to resume: runs/dsa_lm/checkpoint.pt does not exist"),
        (["--quick", "--resume", "--name", "broken"], "cannot resume from runs/broken/checkpoint.pt"),
        (["--quick", "--resume", "--name", "empty"], "cannot resume from runs/empty/checkpoint.pt: EOFError"),
        (["--large"], "argument --large: expected a GPU that runs all of Hopwell's operators here; got none"),
        (["--quick", "--large"], "argument --large: not allowed with argument --quick"),
        (["--quick", "--prompt", ""], "argument --prompt: expected 1 to 127 tokens; got 0"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "small.txt").write_text("too small a text\n" * 20)
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9 " * 100_000)
    (tmp_path / "empty").mkdir()
    checkpoints = {"broken": b"no checkpoint", "empty": b""}
    for name, content in checkpoints.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "checkpoint.pt").write_bytes(content)
    assert train_dsa_lm.main(options) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("train_dsa_lm: ")
    assert message in errors
    assert errors.count("\n") == 1
    left = {path.name: (path / "checkpoint.pt").read_bytes() for path in (tmp_path / "runs").iterdir()}
    assert left == checkpoints


def test_resume_refuses_another_run(tmp_path: Path) -> None:
    trainer, checkpoint = make_trainer(), tmp_path / "runs" / "dsa_lm" / "checkpoint.pt"
    trainer.save(checkpoint)
    assert "it was written with other settings" in one_line(demo(tmp_path, "--quick", "--resume"))
    trainer.digest = "of another text"
    with pytest.raises(DemoError, match="it was written with other text"):
        trainer.load(checkpoint)
    incomplete = {name: value for name, value in trainer.state().items() if name != "optimizer"}
    for something_else in (["a list"], {}, incomplete):
        torch.save(something_else, checkpoint)
        with pytest.raises(DemoError, match=r"cannot resume from .*: it is no checkpoint of this demo"):
            trainer.load(checkpoint)


def test_full_disk_leaves_earlier_checkpoints_whole(tmp_path: Path) -> None:
    """A file-size limit simulates the full disk: the write fails half-way."""
    checkpoint = tmp_path / "runs" / "dsa_lm" / "checkpoint.pt"
    make_trainer().save(checkpoint)
    before = checkpoint.read_bytes()

    def no_space() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    message = one_line(demo(tmp_path, "--quick", "--steps", "2", limit=no_space))
    assert message == "train_dsa_lm: cannot write runs/dsa_lm/checkpoint.pt: File too large\n"
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint.pt"]
    assert checkpoint.read_bytes() == before


# ---- text ----------------------------------------------------------------------------------------------------------


def test_bigram_is_a_distribution_and_the_textbook_one() -> None:
    """Σ_y p(y | x) = 1 for every x, seen or not, and equals interpolated Kneser–Ney by hand on a small text."""
    ids = torch.from_numpy(np.random.default_rng().zipf(1.5, 3000).clip(max=30))  # 0 and 31 never occur
    bigram = text.Bigram(ids, 32)
    for x in range(32):
        losses = [bigram.loss(torch.tensor([x]), torch.tensor([y])) for y in range(32)]
        assert np.exp(-np.array(losses)).sum() == pytest.approx(1.0, abs=1e-9)

    tiny = text.Bigram(
        torch.tensor([1, 2, 1, 2, 1, 3]), 4
    )  # pairs: 12 twice, 21 twice, 13 once; too few to estimate discounts
    # p(2 | 1) = (2 − ¾)/3 + ¾·2/3 · continuation(2), which is (1 + ½)/(3 + 4·½)
    assert tiny.loss(torch.tensor([1]), torch.tensor([2])) == pytest.approx(-np.log(1.25 / 3 + 0.5 * 1.5 / 5))
    # an unseen context: the continuation distribution alone
    assert tiny.loss(torch.tensor([0]), torch.tensor([0])) == pytest.approx(-np.log(0.5 / 5))


def test_bigram_beats_simpler_smoothing() -> None:
    """The baseline is strong: on held-out text it is better than add-λ smoothing with the best λ."""
    corpus = text.load([], 400, 64, 600_000)  # with less text, the library of some Python versions is too small to tell
    tokens, following = text.validation_windows(corpus.validation, 64, 200)
    counts = np.zeros((400, 400))
    np.add.at(counts, (corpus.train[:-1].numpy(), corpus.train[1:].numpy()), 1)

    def add_lambda(value: float) -> float:
        p = (counts + value) / (counts + value).sum(1, keepdims=True)
        return float(-np.log(p[tokens.numpy(), following.numpy()]).mean())

    assert text.Bigram(corpus.train, 400).loss(tokens, following) < min(map(add_lambda, (0.001, 0.01, 0.03, 0.1, 0.3)))


def test_split_is_by_file_and_single_files_are_cut(tmp_path: Path) -> None:
    names = [f"{i}.txt" for i in range(200)]
    for name in names:
        (tmp_path / name).write_text(f"{name} é\n")
    (tmp_path / "picture.png").write_bytes(PNG)  # no text: skipped
    train, validation = text.read_split([tmp_path])
    assert sorted(train + validation) == sorted(f"{name} é\n" for name in names)
    assert 1 <= len(validation) <= 30
    assert text.read_split([tmp_path]) == (train, validation)

    whole = "0123456789" * 10
    for name in names:  # independent of the split that the hash of the name selects
        (tmp_path / name).write_text(whole)
        train, validation = text.read_split([tmp_path / name])
        assert train + validation == [whole[:90], whole[90:]]
        train, validation = text.read_split([tmp_path / name, tmp_path / "0.txt"])
        assert train == validation == [whole]


def test_batches_depend_on_seed_and_step_alone() -> None:
    ids = torch.arange(1000)
    tokens, following = text.batch(ids, 4, 16, seed=3, step=7)
    assert torch.equal(tokens[:, 1:], following[:, :-1])
    assert torch.equal(text.batch(ids, 4, 16, 3, 7)[0], tokens)
    assert not torch.equal(text.batch(ids, 4, 16, 3, 8)[0], tokens)
    assert not torch.equal(text.batch(ids, 4, 16, 4, 7)[0], tokens)


def test_generation_continues_what_the_model_computes() -> None:
    """Token by token with caches gives the logits of the whole sequence."""
    trainer = make_trainer()
    network, tokens = trainer.model, trainer.windows[0][0, :20]
    torch.nn.init.normal_(network.head.weight, std=0.1)
    with torch.no_grad():
        caches = [nn.KeyCache(32) for _ in network.blocks]
        one_by_one = [network.extend(tokens[:5], caches)] + [
            network.extend(tokens[i : i + 1], caches) for i in range(5, 20)
        ]
        expected, _ = network(tokens[None])
    torch.testing.assert_close(torch.stack(one_by_one), expected[0, 4:], rtol=1e-3, atol=1e-4)
    began = time.perf_counter()
    ids, per_s = model.generate(network, tokens[:5], 10, seed=0)
    assert ids.shape == (10,)
    assert per_s >= 10 / (time.perf_counter() - began)
    assert torch.equal(model.generate(network, tokens[:5], 10, seed=0)[0], ids)
    with pytest.raises(ValueError, match=f"{network.size.context} places"):
        model.generate(network, tokens[:5], network.size.context, seed=0)


def test_remaining_time_covers_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = Reporter(console())
    monkeypatch.setattr(time, "perf_counter", iter((0.0, 100.0, 190.0)).__next__)
    reporter.expect(3)
    reporter.finished = 1
    assert reporter.remaining() == "3:20 left"
    reporter.finished = 2
    assert reporter.remaining() == "1:35 left"


def test_progress_bar_on_a_terminal() -> None:
    screen = io.StringIO()
    reporter = Reporter(Console(file=screen, force_terminal=True, width=120))
    reporter.expect(3)
    reporter.begin("sparse", 0, 3)
    for done in (1, 2, 3):
        reporter.step(done, {"loss": 3.21, "indexer_loss": 0.5, "tokens_per_s": 4321.0})
    reporter.end()
    assert "3/3" in screen.getvalue()
    assert "loss 3.210  indexer 0.500  4,321 tokens/s  0:00 left" in screen.getvalue()
    reporter.say("x[red]y\x1b[2Jz")  # generated text is not markup and does not clear the screen
    assert "x[red]y\N{REPLACEMENT CHARACTER}[2Jz" in screen.getvalue()
