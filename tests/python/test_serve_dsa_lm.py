"""The serving example of the sparse model: a shortened run with its claims, planted differences, and invalid inputs."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import serve_dsa_lm

    yield serve_dsa_lm
    torch.use_deterministic_algorithms(False)  # a run turns it on


@pytest.mark.parametrize("rows", ["bytes", "bf16"])
def test_shortened_run_keeps_its_claims(rows: str, example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status = example.main(["--rows", rows, "--steps", "6", "--requests", "5", "--running", "2"])
    out = capsys.readouterr().out
    assert status == 0, out
    assert out.count("PASS") == 6 and "FAIL" not in out


def served(example: ModuleType, change: str = "") -> tuple[object, list]:
    """A model of random weights and three requests that it served; `change` names a planted difference."""
    torch.manual_seed(0)
    model = example.CachedDecoder(example.QUICK)
    torch.nn.init.normal_(model.head.weight, std=0.3)
    model.set_exact()
    ids = torch.randint(0, example.QUICK.vocabulary, (400,))
    requests = example.make_requests(example.QUICK, ids, 3, seed=3)
    server = example.Server(model, 30, 8, 2, 0)
    if change == "a stale index key":
        append = server.forward

        def forward(fed):  # type: ignore[no-untyped-def]
            result = append(fed)
            server.index_keys[0][server.running[0].pages[0], :, : example.QUICK.d_index] ^= 1
            return result

        server.forward = forward
    example.serve(server, requests)
    return model, requests


def test_a_server_without_a_change_agrees(example: ModuleType) -> None:
    model, requests = served(example)
    compared, differ, logits_differ = example.differing_from_training(model, requests)
    tokens = sum(r.cached for r in requests)
    assert compared == 2 * tokens > 100 and differ == 0 and logits_differ == 0
    assert all(len(r.generated) == r.wanted and len(r.tokens) == r.cached + 1 for r in requests)
    again = example.serve_again(model, requests, 5, 3, 8)
    assert example.differing_logits(requests, again) == 0


def test_a_changed_key_is_noticed(example: ModuleType) -> None:
    model, requests = served(example, "a stale index key")
    _, differ, logits_differ = example.differing_from_training(model, requests)
    assert differ > 0 and logits_differ > 0


def test_a_logit_of_other_bits_is_noticed(example: ModuleType) -> None:
    model, requests = served(example)
    again = example.serve_again(model, requests, 16, 1, 8)
    again[1].logits[4] = again[1].logits[4].nextafter(torch.tensor(9.0))
    assert example.differing_logits(requests, again) == 1


def test_drafts_do_not_change_tokens(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad drafts are not accepted, and the model's own tokens remain."""
    import dsa_lm.serving

    model, requests = served(example)
    monkeypatch.setattr(dsa_lm.serving, "drafts", lambda tokens, count: [0] * count)
    again = example.serve_again(model, requests, 8, 2, 1)
    assert example.differing_logits(requests, again) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "/does/not/exist"], "cannot read text: /does/not/exist: no such file or directory"),
        (["--steps", "1"], "argument --steps: expected a whole number of at least 2; got '1'"),
        (["--rows", "fp4"], "argument --rows: invalid choice: 'fp4'"),
    ],
)
def test_invalid_inputs(
    options: list[str], message: str, example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"serve_dsa_lm: {message}") and error.count("\n") == 1
