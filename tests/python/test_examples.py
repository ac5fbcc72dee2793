"""The small examples of the tutorials: shortened runs with their claims, and invalid inputs."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def quantize_checkpoint(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import quantize_checkpoint

    return quantize_checkpoint


@pytest.fixture
def swap_one_import(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import swap_one_import

    return swap_one_import


# ---- swap one import -------------------------------------------------------------------------------------------------


def test_both_curves_are_one(swap_one_import: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curves.png"
    assert swap_one_import.main(["--steps", "3", "--picture", str(picture)]) == 0
    assert "PASS" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_needs_a_folder(swap_one_import: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The error comes before the training."""
    with pytest.raises(SystemExit):
        swap_one_import.main(["--picture", "/no/such/folder/curves.png"])
    assert (
        "--picture: expected a file in a folder that exists; got /no/such/folder/curves.png" in capsys.readouterr().err
    )


def test_another_kernel_is_noticed(
    swap_one_import: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The comparison fails if attention has twice the scale."""
    apply = swap_one_import.plain_sparse_mla
    wrong = swap_one_import.SimpleNamespace(apply=lambda q, kv, i, scaling, d_v: apply(q, kv, i, 16 * scaling, d_v))
    monkeypatch.setattr(swap_one_import.PLAIN, "SparseMLA", wrong)
    assert swap_one_import.main(["--steps", "3", "--picture", str(tmp_path / "curves.png")]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_the_notebook_is_the_script(tmp_path: Path) -> None:
    script, notebook = EXAMPLES / "swap_one_import.py", tmp_path / "swap_one_import.ipynb"
    command = [sys.executable, str(ROOT / "docs" / "notebook.py"), str(script), str(notebook)]
    subprocess.run(command, check=True)
    cells = json.loads(notebook.read_text())["cells"]
    assert {cell["cell_type"] for cell in cells} == {"code", "markdown"}
    code = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "code")
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in code.splitlines() if line and not line.startswith("#")] == lines
    assert cells[0]["source"].startswith("# Swap one import")


# ---- quantise a checkpoint -------------------------------------------------------------------------------------------


def test_a_made_checkpoint_keeps_its_claims(quantize_checkpoint: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantize_checkpoint.main(["--tokens", "4"]) == 0
    assert capsys.readouterr().out.count("PASS") == 2


def test_a_checkpoint_in_pieces(quantize_checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several files with an index, and tied embeddings, as in larger checkpoints."""
    quantize_checkpoint.make_checkpoint(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    del state["lm_head.weight"]
    names = sorted(state)
    pieces = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in pieces.items():
        save_file({name: state[name] for name in own}, tmp_path / file)
    weight_map = {name: file for file, own in pieces.items() for name in own}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert quantize_checkpoint.main(["--model", str(tmp_path), "--tokens", "2"]) == 0, capsys.readouterr()
    written = load_file(tmp_path / "nvfp4" / "model.safetensors")
    assert written["model.layers.0.mlp.up_proj.weight_packed"].dtype == torch.uint8
    assert written["model.layers.0.mlp.up_proj.weight_packed"].shape == (384, 64)


def test_a_checkpoint_that_is_quantised_already(
    quantize_checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program's own, and the same by ModelOpt's names: the same tokens."""
    quantize_checkpoint.make_checkpoint(tmp_path)
    own, other = tmp_path / "own", tmp_path / "other"
    assert quantize_checkpoint.main(["--model", str(tmp_path), "--output", str(own), "--tokens", "2"]) == 0
    tokens = re.search(r"generated (.*) in", capsys.readouterr().out)
    state = {}
    for name, tensor in load_file(own / "model.safetensors").items():
        if name.endswith(".weight_global_scale"):
            name, tensor = name.replace("weight_global_scale", "weight_scale_2"), tensor.reciprocal().reshape(())
        state[name.replace("weight_packed", "weight")] = tensor
    config = json.loads((own / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]}
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    save_file(state, other / "model.safetensors")
    for folder in (own, other):
        assert quantize_checkpoint.main(["--model", str(folder), "--tokens", "2"]) == 0
        out = capsys.readouterr().out
        assert tokens and tokens[1] in out and out.count("PASS") == 1
    config["quantization_config"]["quant_algo"] = "FP8"
    (other / "config.json").write_text(json.dumps(config))
    assert quantize_checkpoint.main(["--model", str(other)]) == 2
    assert "quant_algo of the folder must be NVFP4 or W4A16_NVFP4; got FP8" in capsys.readouterr().err


def test_the_model_computes_what_a_loop_over_its_formulas_does(quantize_checkpoint: Any) -> None:
    """Causal attention with grouped heads and rotary positions, one query and one head at a time."""
    torch.manual_seed(0)
    config = quantize_checkpoint.Config()
    attention, x = quantize_checkpoint.Attention(config), torch.randn(5, config.hidden_size)
    d = config.head_dim
    q, k, v = (p(x).unflatten(-1, (-1, d)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))

    def turned(row: torch.Tensor, position: int) -> torch.Tensor:
        angle = position * config.rope_theta ** (-torch.arange(0, d, 2) / d)
        a, b = row.chunk(2)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])

    heads = []
    for head in range(4):
        rows = []
        for s in range(5):
            logits = torch.stack([turned(q[s, head], s) @ turned(k[t, head // 2], t) for t in range(s + 1)])
            rows.append((logits / d**0.5).softmax(0) @ v[: s + 1, head // 2])
        heads.append(torch.stack(rows))
    torch.testing.assert_close(attention(x), attention.o_proj(torch.cat(heads, dim=1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "config.json: model_type must be llama; got 'mixtral'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "config.json: rope_type must be default; got 'llama3'"),
        ({"hidden_act": "gelu"}, "config.json: hidden_act must be silu; got 'gelu'"),
        ({"num_hidden_layers": 4}, "the checkpoint does not fit its config.json: "),
        (None, "cannot read the checkpoint "),
    ],
)
def test_bad_input_is_one_line(
    changes: dict[str, Any] | None,
    message: str,
    quantize_checkpoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    quantize_checkpoint.make_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text("{" if changes is None else json.dumps({**config, **changes}))
    assert quantize_checkpoint.main(["--model", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"quantize_checkpoint: {message}") and errors.count("\n") == 1
    assert not (tmp_path / "nvfp4").exists()


def test_help_says_what_they_do(
    quantize_checkpoint: Any, swap_one_import: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, words in (
        (quantize_checkpoint, "Quantises a Llama-shaped checkpoint"),
        (swap_one_import, "loss curves"),
    ):
        with pytest.raises(SystemExit):
            module.main(["--help"])
        assert words in capsys.readouterr().out
