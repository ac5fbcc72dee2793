"""The DeepSeek-V4 example: a shortened run with its claims, and what each of its checks would notice."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_v4_lm
from dsa_lm import text
from dsa_lm.training import Settings
from v4_lm import checks, experiment, model, training

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = model.Size(
    vocabulary=300, context=48, d_model=32, d_ff=32, d=16, d_rope=8, q_rank=16, o_rank=8, topk=4, d_index=16
)


@pytest.fixture
def trainer() -> Any:
    torch.manual_seed(0)
    corpus = text.load([EXAMPLES / "dsa_lm"], TINY.vocabulary, TINY.context)
    return checks.few_steps(Settings(TINY, 20, sequences=2), corpus)


def test_a_run_of_a_few_steps_measures_every_claim(tmp_path: Path) -> None:
    """Ten steps may be too few for the claims about losses, not for those about equal results."""
    command = [sys.executable, str(EXAMPLES / "train_v4_lm.py"), "--quick", "--steps", "10"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    assert result.stdout.count("PASS") + result.stdout.count("FAIL") == 6
    metrics = json.loads((tmp_path / "runs" / "v4_lm" / "metrics.json").read_text())
    assert [record["stage"] for record in metrics["steps"]] == ["warm-up"] * 2 + ["sparse"] * 8
    assert len(metrics["windows_alone_steps"]) == 10
    failed = [line for line in result.stdout.splitlines() if "FAIL" in line]
    assert not any("bits" in line or "two ranks" in line or "packed" in line for line in failed)


@pytest.mark.nightly
def test_shortened_run_keeps_its_claims(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_v4_lm.py"), "--quick", "--name", "short"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("PASS") == 6 and "FAIL" not in result.stdout
    metrics = json.loads((tmp_path / "runs" / "short" / "metrics.json").read_text())
    assert [record["stage"] for record in metrics["steps"]] == ["warm-up"] * 40 + ["sparse"] * 160
    assert [record["update"] for record in metrics["windows_alone_steps"]] == list(range(1, 201))
    warm_up = [record["indexer_loss"] for record in metrics["steps"] if record["stage"] == "warm-up"]
    assert warm_up[-1] > 0 and all(record["indexer_loss"] == 0 for record in metrics["windows_alone_steps"])
    assert metrics["hybrid"] < 0.995 * metrics["windows_alone"]
    assert metrics["recall"] > metrics["recall_of_newest"]


GOOD = experiment.Results(5.0, 4.0, 3.5, 3.5, 0.9, 0.5, True, 1e-6, 1e-6, 1e-6)


@pytest.mark.parametrize(
    ("name", "value", "claim"),
    [
        ("hybrid", 3.97, "below windows alone"),
        ("bigram", 3.4, "bigram"),
        ("recall", 0.4, "indexer"),
        ("recall_of_newest", 0.95, "indexer"),
        ("same_bits", False, "same bits"),
        ("two_ranks_losses", 2e-4, "two ranks"),
        ("two_ranks_gradients", float("nan"), "two ranks"),
        ("packed", 2e-4, "packed documents"),
        ("packed", float("nan"), "packed documents"),
    ],
)
def test_a_bad_measurement_fails_its_claim(name: str, value: Any, claim: str) -> None:
    assert all(made.holds for made in experiment.claims(GOOD, quick=False))
    failed = [c for c in experiment.claims(dataclasses.replace(GOOD, **{name: value}), quick=False) if not c.holds]
    assert len(failed) == 1 and claim in failed[0].text


def test_the_same_bits_are_not_those_of_other_batches(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.same_bits(trainer.settings, trainer.corpus)
    settings = iter([trainer.settings, dataclasses.replace(trainer.settings, seed=1)])
    few_steps = checks.few_steps
    monkeypatch.setattr(checks, "few_steps", lambda _, corpus: few_steps(next(settings), corpus))
    assert not checks.same_bits(trainer.settings, trainer.corpus)


def test_packed_documents_that_see_each_other_are_noticed(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.nn.init.normal_(trainer.model.head.weight)
    assert checks.packed_documents(trainer.model, trainer.corpus.train) < 1e-5
    attend = model.HybridBlock.attend
    monkeypatch.setattr(model.HybridBlock, "attend", lambda self, x, mode, *_: attend(self, x, mode, None))
    assert checks.packed_documents(trainer.model, trainer.corpus.train) > 1e-3


def test_stages_train_what_they_should(trainer: Any) -> None:
    """Both stages train every parameter, the compressors' and the indexer's too."""
    assert [type(block.attention).__name__ for block in trainer.model.blocks] == ["HCA", "CSA", "HCA"]
    assert [block.attention.ratio for block in trainer.model.blocks] == [0, 4, 16]
    for stage in trainer.modes:
        trainer.enter(stage)
        trainer.train_step()  # the head starts at zero, so that the first step has no other gradients
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train_step()
        for name, p in trainer.model.named_parameters():
            assert not torch.equal(p, before[name]), (stage, name)


def test_recall_is_of_the_keys_of_most_attention(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query at a time, by a softmax over window keys, compressed keys and the sink."""
    csa = trainer.model.blocks[1].attention
    torch.nn.init.normal_(csa.attn_sink)
    x = torch.randn(2, TINY.context, TINY.d_model)
    with torch.no_grad():
        best, seen = model.most_attended(csa, x)
        for i in range(2):
            start = 0
            q = csa.queries(csa.query_latent(x[i : i + 1]), start).double()
            window, keys = csa.window_keys(x[i : i + 1], start).double(), csa.compressor(x[i : i + 1]).double()
            for t in range(TINY.context):
                count = (t + 1) // 4
                assert seen[i * TINY.context + t] == count
                if count < 4:
                    continue
                logits = torch.cat([keys[:count], window[max(0, t - 3) : t + 1]]) @ q[t].T * csa.sm_scale
                share = torch.cat([logits, csa.attn_sink[None].double()]).softmax(0)[:count].sum(1)
                own = best[i * TINY.context + t]
                assert set(own.tolist()) == set(share.topk(4).indices.tolist())
    # a selection of these keys has recall 1, and another selection 0
    tokens = trainer.corpus.train[: 2 * TINY.context].view(2, -1)
    selected = []
    csa.register_forward_hook(lambda *_: setattr(csa, "selected", selected[0]))
    for shift, expected in ((0, 1.0), (1000, 0.0)):
        hooked: list[Any] = []
        hook = csa.register_forward_pre_hook(lambda _, given, to=hooked: to.append(given[0]))
        selected[:] = [torch.zeros(2, TINY.context, 4)]
        with torch.no_grad():
            trainer.model(tokens)
            hook.remove()
            selected[:] = [(model.most_attended(csa, hooked[0])[0] + shift).view(2, TINY.context, 4)]
        assert model.recall(trainer.model, tokens)[0] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "nowhere.txt"], "cannot read text: nowhere.txt: no such file"),
        (["--steps", "4"], "argument --steps: expected a whole number of at least 5; got '4'"),
        (["--name", "a/b"], "argument --name: expected a plain name; got 'a/b'"),
    ],
)
def test_bad_input_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    filled = torch.utils.deterministic.fill_uninitialized_memory
    assert train_v4_lm.main(options) == 2
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    errors = capsys.readouterr().err
    assert errors.startswith("train_v4_lm: ") and message in errors and errors.count("\n") == 1


def test_largest_difference() -> None:
    assert training.largest_difference([1.0, 2.0, 0.0], [1.0, 2.002, 0.0]) == pytest.approx(1e-3)
