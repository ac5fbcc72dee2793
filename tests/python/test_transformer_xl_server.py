"""The serving example: a shortened run with its claims, the model against a loop, and invalid inputs."""

import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import transformer_xl_server

    return transformer_xl_server


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "transformer_xl_server.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_shortened_run_keeps_its_claims() -> None:
    result = demo("--quick")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("PASS") == 4 and "FAIL" not in result.stdout
    assert "12 of 12" in result.stdout


def test_attention_with_memory_equals_a_loop_over_keys(server: ModuleType) -> None:
    torch.manual_seed(0)
    size = server.Size(16, 1, 2, 8, window=5)
    layer, x = server.Layer(size), torch.randn(2, 11, size.width)
    memory, segment = x[:, 3:7], x[:, 7:]
    q, _, _ = layer.project(segment)
    _, k, v = layer.project(x)
    r = layer.r()
    for b, i, h in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(2)).tolist():
        logits = []
        for delta in range(size.window):
            content = (q[b, i, h] + layer.u[h]) @ k[b, 7 + i - delta, h]
            logits.append((content + (q[b, i, h] + layer.v[h]) @ r[h, delta]) / math.sqrt(size.d))
        weights = torch.stack(logits).softmax(0)
        expected = sum(p * v[b, 7 + i - delta, h] for delta, p in enumerate(weights))
        torch.testing.assert_close(layer.attend(segment, memory)[b, i, h], expected)


def test_a_served_token_that_differs_is_noticed(server: ModuleType) -> None:
    """The comparison fails if the cache's pages are mixed up."""
    torch.manual_seed(0)
    plan = server.QUICK
    model = server.TransformerXL(plan.size).eval()
    torch.nn.init.normal_(model.head.weight)
    requests = [server.Request(list(range(40)), 12, 0), server.Request(list(range(50, 70)), 12, 1)]
    served, _ = server.serve(plan, model, requests, server.console())
    assert served.steps > 0 and sorted(served.free) == list(range(served.caches[0][0].shape[0]))
    alone = server.compare(model, requests, server.console())
    assert not alone.differing and alone.tokens == 24 and alone.difference < 1e-3
    requests[0].generated[5] = (requests[0].generated[5] + 1) % plan.size.vocabulary
    assert server.compare(model, requests, server.console()).differing[0].startswith("request 0, token 5: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "/does/not/exist"], "cannot read text: /does/not/exist: no such file or directory"),
        (["--steps", "0"], "argument --steps: expected a whole number of at least 1; got '0'"),
        (["--requests", "many"], "argument --requests: expected a whole number of at least 1; got 'many'"),
        (
            ["--seed", str(2**64)],
            f"argument --seed: expected a whole number of at least 0 and below {2**64}; got '{2**64}'",
        ),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_bad_input_is_one_line(
    server: ModuleType, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert server.main(options) == 2
    assert capsys.readouterr() == ("", f"transformer_xl_server: {message}\n")


def test_too_little_text_is_one_line(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a few words\n" * 10)
    result = demo("--quick", "--text", str(text))
    assert result.returncode == 2 and result.stderr.startswith("transformer_xl_server: too little text: ")
    assert result.stderr.count("\n") == 1


def test_help_says_what_it_does() -> None:
    result = demo("--help")
    assert result.returncode == 0 and "continuous batching" in result.stdout
