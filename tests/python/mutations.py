"""Plants bugs in `hopwell.reference`, one at a time, and runs its tests, which must notice them.

    python tests/python/mutations.py        one line per bug: its number and pytest's exit code (1: caught)

The process imports the large packages once. Each bug then has a forked process, which imports the changed module.
"""

import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

HERE = Path(__file__).parent

# The tests that must notice a bug in a module.
TESTS = {
    "_visible": "test_reference_sparse_mla.py",
    "sparse_mla": "test_reference_sparse_mla.py",
    "attention_distribution": "test_reference_sparse_mla.py",
    "indexer_dense_loss": "test_reference_indexer_dense_loss.py",
    "paged_attention": "test_reference_paged_attention.py",
    "nvfp4": "test_reference_nvfp4.py",
    "lightning_indexer": "test_reference_lightning_indexer.py",
    "kv_compress": "test_reference_kv_compress.py",
    "mla_cache": "test_reference_mla_cache.py",
    "sparse_mla_decode": "test_reference_sparse_mla_decode.py",
    "paged_lightning_indexer": "test_reference_paged_lightning_indexer.py",
}


class Bug(NamedTuple):
    module: str
    right: str
    wrong: str
    meaning: str


BUGS = [
    Bug("_visible", "(positions + 1) // int(kv_stride)", "positions // int(kv_stride)", "causal limit off by one"),
    Bug("_visible", "(positions + 1) //", "(positions + int(kv_stride)) //", "keys visible before their last token"),
    Bug("_visible", "0, s_kv)", "0, s_kv - 1)", "the last key never visible"),
    Bug("_visible", "first + (positions", "(positions", "keys of a range counted from key 0"),
    Bug("_visible", "last = np.minimum(last, ", "last = (", "a range's end ignored beside positions"),
    Bug("_visible", "np.maximum(first, 0)", "np.zeros_like(first)", "a range's start ignored"),
    Bug("sparse_mla", "keys >= first", "keys > first", "the first visible key masked"),
    Bug("sparse_mla", "keys.shape[1]) < lengths", "keys.shape[1]) <= lengths", "topk_length off by one"),
    Bug(
        "sparse_mla",
        "np.where(empty, np.inf, row_max[s] + log_sum)",
        "row_max[s] + log_sum",
        "lse of an empty row −inf",
    ),
    Bug("sparse_mla", " * factor[:, None])", ")", "sink dropped from the output"),
    Bug("sparse_mla", "np.where(empty[:, None], 0.0, ", "(", "infinite values in a row whose scores are all −inf"),
    Bug("sparse_mla", "np.logaddexp(forward_lse[s], sink)", "forward_lse[s]", "sink dropped from the probabilities"),
    Bug("sparse_mla", ".sum(axis=1)\n", ".sum(axis=1) / (1 - sink_share)\n", "sink dropped from delta"),
    Bug("sparse_mla", "(dp - delta[:, None])", "dp", "delta dropped"),
    Bug("sparse_mla", "* selection.sm_scale\n", "\n", "sm_scale dropped from ds"),
    Bug(
        "sparse_mla",
        "np.add.at(sums, rows, ds.T @ selection.q[s])",
        "sums[rows] += ds.T @ selection.q[s]",
        "duplicates merged",
    ),
    Bug("sparse_mla", "np.add.at(sums[:, :d_v], rows, p.T @ gradient[s])", "pass", "dV dropped"),
    Bug("sparse_mla", "d_sink -= ", "d_sink += ", "sign of d_sink"),
    Bug("sparse_mla", "attn_with_sink else forward_lse[s]", "True else forward_lse[s]", "sink in the distribution"),
    Bug("sparse_mla", "if attn_with_sink else", "if False else", "attn_with_sink ignored"),
    Bug("sparse_mla", "d_kv = d_kv + dkv", "pass", "accumulate ignored"),
    Bug("sparse_mla", "d_window = d_window + d_window_kv", "pass", "accumulate ignored for window keys"),
    Bug("sparse_mla", "last - min(window, s_w)", "last - min(window + 1, s_w)", "the window one key too wide"),
    Bug("sparse_mla", "(np.clip(start, 0, s_w), ", "(0, ", "the previous document in the window"),
    Bug("sparse_mla", "s_w - s_q + np.arange", "np.arange", "the queries are the first rows of window_kv"),
    Bug(
        "sparse_mla",
        "np.arange(s_q, dtype=np.int64) + 1",
        "np.arange(s_q, dtype=np.int64)",
        "a query not in its own window",
    ),
    Bug("sparse_mla", "d_q[s] += ds @ values", "d_q[s] = ds @ values", "only the window in dq"),
    Bug(
        "attention_distribution",
        "rows.sum(axis=1, keepdims=True)",
        "rows.max(axis=1, keepdims=True)",
        "l1 over the largest",
    ),
    Bug(
        "attention_distribution",
        "np.logaddexp(row_lse, _sink(name, attn_sink, h_q))",
        "row_lse",
        "no sink in the target",
    ),
    Bug(
        "indexer_dense_loss",
        "np.logaddexp(row_lse, _sink(name, attn_sink, h_q))",
        "row_lse",
        "no sink in the target of the loss",
    ),
    Bug("indexer_dense_loss", 'h_q if normalize == "heads" else', "h_q if True else", "l1 ignored by the loss"),
    Bug("attention_distribution", ".sum(axis=0)\n", ".mean(axis=0)\n", "mean over heads for the sum"),
    Bug("sparse_mla", "np.arange(len(latent)), (", "np.arange(len(latent))[::-1], (", "absent indices backwards"),
    Bug("indexer_dense_loss", "target / (h_q if", "target / (1 if", "sum over heads for the mean"),
    Bug("indexer_dense_loss", "d_k[visible] += ", "d_k[visible] = ", "only the last query's d_k"),
    Bug("indexer_dense_loss", "- target)\n", ")\n", "target dropped from g"),
    Bug("indexer_dense_loss", "if of_row[s] == 0.0:", "if False:", "NaN of a row of weight 0"),
    Bug("indexer_dense_loss", "keys[first[s] :", "keys[0 :", "index scores of keys that are not seen"),
    Bug("paged_attention", "- q_len + i", "- q_len + i + 1", "a query sees the token after it"),
    Bug("paged_attention", "position - window + 1", "position - window", "window off by one"),
    Bug("paged_attention", "+ u[h])", ")", "pos_bias_u dropped"),
    Bug("paged_attention", "q + _per_head", "q * 0 + _per_head", "q dropped from the fused term"),
    Bug("paged_attention", "h // (h_q // h_kv)", "h % h_kv", "GQA heads interleaved"),
    Bug(
        "paged_attention",
        "scale * (content + bias_of) if pre_scale",
        "scale * content + bias_of if pre_scale",
        "pre_scale ignored",
    ),
    Bug("paged_attention", "position - keys if by_distance else keys", "keys", "distance taken for key"),
    Bug("paged_attention", "len(table) - 1)", "len(table) - 2)", "clamp off by one"),
    Bug("paged_attention", "logits - slopes", "logits + slopes", "sign of ALiBi"),
    Bug("paged_attention", "(pages < blocks)", "(pages < blocks - 1)", "the last page masked"),
    Bug("paged_attention", " + np.where(finite, 0.0, values).sum(axis=0)", "", "infinite values dropped"),
    Bug("paged_attention", "cache.shape[2] * cache.shape[4]", "-1", "no keys in layout vllm"),
    Bug("nvfp4", "E2M1[codes & 0xF], E2M1[codes >> 4]", "E2M1[codes >> 4], E2M1[codes & 0xF]", "wrong nibble first"),
    Bug("nvfp4", "lower % 2 == 1", "lower % 2 == 0", "ties to odd"),
    Bug(
        "nvfp4",
        "16 * (m % 32) + 4 * ((m % 128) // 32)",
        "4 * (m % 32) + 128 * ((m % 128) // 32)",
        "blocked scales in another order",
    ),
    Bug("nvfp4", "np.maximum(exponent, 1)", "exponent", "subnormals halved"),
    Bug("nvfp4", "np.asarray(1.0 / factor)", "np.asarray(factor)", "reciprocal global ignored"),
    Bug(
        "nvfp4", "amax / np.float32(CODE_MAX * SCALE_MAX)", "amax / np.float32(CODE_MAX * 256)", "another global scale"
    ),
    Bug("nvfp4", "factor * (_decode(codes_a", "1.0 * (_decode(codes_a", "alpha ignored by nvfp4_matmul"),
    Bug("nvfp4", "factor * (gradients @", "1.0 * (gradients @", "global ignored by nvfp4_linear_backward"),
    Bug("nvfp4", "(signs << 3)", "(signs << 2)", "sign in the wrong bit"),
    Bug("lightning_indexer", "np.maximum(dot, 0.0) if relu else dot)\n    return", "dot)\n    return", "relu dropped"),
    Bug("lightning_indexer", "w[s], relu, of_key[seen])", "w[s], True, of_key[seen])", "relu kept in the selection"),
    Bug("lightning_indexer", "(of_key * score), -np.inf, of_key * score", "(score), -np.inf, score", "k_scale dropped"),
    Bug("lightning_indexer", "w = w * of_head", "pass", "q_scale dropped"),
    Bug("lightning_indexer", "np.sort(best_first[:topk])", "best_first[:topk]", "keys in order of score"),
    Bug(
        "lightning_indexer",
        'np.argsort(-score, kind="stable")',
        'np.argsort(score, kind="stable")',
        "smallest scores chosen",
    ),
    Bug("lightning_indexer", "g = np.exp(log_prob) - p", "g = np.exp(log_prob)", "target dropped from the gradient"),
    Bug("lightning_indexer", "((dot > 0.0) if relu else 1.0)", "1.0", "relu's derivative dropped"),
    Bug("lightning_indexer", "((dot > 0.0) if relu else 1.0)", "(dot > 0.0)", "relu's derivative without a relu"),
    Bug(
        "lightning_indexer",
        "_gradient(factor * of_row[s], g)",
        "_gradient(factor, g)",
        "row_weights dropped from the gradient",
    ),
    Bug(
        "lightning_indexer", "(of_row[counts] * losses[counts])", "losses[counts]", "row_weights dropped from the loss"
    ),
    Bug("lightning_indexer", "if of_row[s] == 0.0:", "if False:", "rows of weight 0 make NaN"),
    Bug(
        "lightning_indexer",
        "np.add.at(d_k, keys, d_dot.T @ q[s])",
        "d_k[keys] += d_dot.T @ q[s]",
        "duplicates merged in dk",
    ),
    Bug("lightning_indexer", "keys_of[s] >= first[s]", "keys_of[s] >= 0", "keys before the range"),
    Bug("lightning_indexer", "keys_of[s] < last[s]", "keys_of[s] < len(k)", "keys after the range"),
    Bug("lightning_indexer", "some = p != 0.0", "some = p > 0.0", "NaN targets without a loss"),
    Bug("lightning_indexer", "if not p.any():", "if False:", "rows without a target counted"),
    Bug("kv_compress", "and j > 0:", "and first + j > 0:", "the previous block across a document's border"),
    Bug("kv_compress", "tokens - self.ratio]", "tokens]", "the own block taken for the previous one"),
    Bug("kv_compress", "self.d if self.overlap else 0", "0", "columns of the next block taken for the own ones"),
    Bug(
        "kv_compress", "np.concatenate([r, r])", "np.concatenate([r, r[::-1]])", "bias of the previous block backwards"
    ),
    Bug(
        "kv_compress",
        "max(end - first, 0) // self.ratio",
        "-(-max(end - first, 0) // self.ratio)",
        "a tail makes a key",
    ),
    Bug("kv_compress", "min(key_end, n)", "n", "keys beyond their document's rows"),
    Bug("kv_compress", "absent, 0.0, self.kv", "False, 0.0, self.kv", "values of absent entries"),
    Bug("kv_compress", "(values - out))\n    return", "values)\n    return", "out dropped from d_position_bias"),
    Bug("kv_compress", "= weighted * (values - out)", "= weighted * values", "out dropped from d_gate"),
    Bug(
        "kv_compress",
        "np.add.at(of_bias, (window.places[:, None], at), ",
        "of_bias.__setitem__((window.places[:, None], at), ",
        "d_position_bias of the last window alone",
    ),
    Bug("sparse_mla_decode", "visible - q_len + 1 +", "visible - q_len +", "a query does not see itself"),
    Bug("sparse_mla_decode", "as_array(context_lens).ndim == 1", "True", "counts of queries taken for a sequence's"),
    Bug("sparse_mla_decode", "min(visible, len(table) * block)", "len(table) * block", "context_lens ignored"),
    Bug("sparse_mla_decode", "pages < blocks", "pages <= blocks", "one page too many"),
    Bug("sparse_mla_decode", "entries < blocks * block", "entries <= blocks * block", "one slot too many"),
    Bug("sparse_mla_decode", "(pages >= 0) &", "", "negative pages count from the end"),
    Bug(
        "sparse_mla_decode",
        "pages * block + entries % block",
        "pages * block + entries // block",
        "the wrong row of a page",
    ),
    Bug("sparse_mla_decode", "[: max(length, 0)]", "[: max(length, 1)]", "topk_length 0 taken for 1"),
    Bug("sparse_mla_decode", "np.where(empty, np.inf, peak + log_sum)", "peak + log_sum", "lse of an empty row −inf"),
    Bug("sparse_mla_decode", " * factor[:, None])", ")", "sink dropped from the output"),
    Bug(
        "sparse_mla_decode",
        "extra_topk_length, extra_block_tables, None, b",
        "topk_length, extra_block_tables, None, b",
        "the other cache's lengths",
    ),
    Bug(
        "sparse_mla_decode",
        "extra_block_tables, None, b, q_len",
        "extra_block_tables, visible, b, q_len",
        "context_lens applied to the second cache",
    ),
    Bug(
        "sparse_mla_decode", "if more is not None and extra_cache is not None:", "if False:", "the second cache dropped"
    ),
    Bug("sparse_mla_decode", "cache, slots, width, kv_scale", "cache, slots, width", "kv_scale dropped"),
    Bug("paged_lightning_indexer", "lens - (q_len - 1 - i)", "lens - (q_len - i)", "a query does not see itself"),
    Bug("paged_lightning_indexer", "0 <= page < keys.blocks", "0 <= page <= keys.blocks", "one page too many"),
    Bug("paged_lightning_indexer", "0 <= page <", "page <", "negative pages count from the end"),
    Bug("paged_lightning_indexer", "self.d * self.block + 4 * row", "self.d * row", "scales beside their codes"),
    Bug("paged_lightning_indexer", "-math.inf if math.isnan(score) else score", "score", "NaN scores kept"),
    Bug("paged_lightning_indexer", "0.0 if relu and product < 0.0 else product", "product", "relu left out"),
    Bug("paged_lightning_indexer", "slot if slots else position", "position", "slots ignored"),
    Bug("paged_lightning_indexer", "-one[2])[:topk]", "(-one[2], -one[0]))[:topk]", "larger positions of equal scores"),
    Bug("paged_lightning_indexer", "w = w * of_head", "w = w + 0 * of_head", "q_scale dropped"),
    Bug("paged_lightning_indexer", "float(np.float64(scale) * np.float64(total))", "total", "scales of keys dropped"),
    Bug("paged_lightning_indexer", "if lens.ndim == 2:", "if False:", "counts of queries taken for a sequence's"),
    Bug("paged_lightning_indexer", "lengths[...] = counts", "lengths[...] = seen", "positions counted, not selected"),
    Bug("mla_cache", "2.0**exponent < amax", "2.0**exponent <= amax", "a scale too large where amax is 448 times it"),
    Bug("mla_cache", "np.where(np.isfinite(x), codes", "np.where(~np.isnan(x), codes", "infinities saturated"),
    Bug("mla_cache", "np.signbit(quotient)", "quotient < 0", "the sign of zero dropped"),
    Bug("mla_cache", '"ue8m0", -22', '"ue8m0", -13', "the least exponent of V3.2 for V4"),
    Bug("mla_cache", "max(amax, float(np.float32(1e-4)))", "amax", "a scale of 0 for zeros"),
    Bug("mla_cache", "block[place.unused] = 0", "pass", "unused bytes kept"),
    Bug("mla_cache", "576 * block + 8 * i", "576 * block + 7 * i", "scales of V4 without their padding"),
    Bug("mla_cache", "512 * block + 16 * i", "528 * i + 512", "scales of V4.1 beside their codes"),
    Bug("mla_cache", "self.d * block + 4 * i", "self.d * (i + 1) + 4 * i", "scales of index rows beside their codes"),
    Bug("mla_cache", "0 <= slot < self", "slot < self", "negative slots count from the end"),
    Bug("mla_cache", "not 0 <= position < len", "not position < len", "negative positions count from the end"),
    Bug(
        "mla_cache", "reshape(-1, 2).T if interleaved", "reshape(-1, 2).T if not interleaved", "the other kind of pairs"
    ),
    Bug("mla_cache", "x1 * cosine + x0", "x1 * cosine - x0", "a rotation that is none"),
    Bug("mla_cache", "first = d - r if", "first = 0 if", "RoPE of the first columns"),
    Bug("mla_cache", "row.append(_bf16_nearest(product))", "row.append(float(product))", "values not rounded to bf16"),
    Bug("mla_cache", "exponent == 255", "exponent == 256", "the exponent byte 255 taken for a number"),
]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, bug: Bug) -> None:
        self.bug = bug

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != f"hopwell.reference.{self.bug.module}":
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert found is not None
        assert found.origin is not None
        loader = _Loader(Path(found.origin), self.bug)
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=loader)


class _Loader(importlib.abc.InspectLoader):
    def __init__(self, path: Path, bug: Bug) -> None:
        self.path, self.bug = path, bug

    def get_source(self, fullname: str) -> str:
        source = self.path.read_text()
        assert source.count(self.bug.right) >= 1, f"{self.bug.module} no longer holds {self.bug.right!r}"
        return source.replace(self.bug.right, self.bug.wrong, 1)

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_source(fullname), str(self.path))


class ShortestFirst:
    """A plugin of pytest: the run without a bug records the time of each test, other runs begin with the shortest."""

    def __init__(self, record: Path, *, writes: bool) -> None:
        self.record, self.writes = record, writes
        self.seconds: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if not self.writes and self.record.exists():
            seconds = json.loads(self.record.read_text())
            items.sort(key=lambda item: seconds.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        if self.writes:
            complete = self.record.with_suffix(".new")
            complete.write_text(json.dumps(self.seconds))
            complete.replace(self.record)


def start_tests(module: str, bug: Bug | None, records: Path) -> int:
    """Forks a process that plants the bug, runs the module's tests and exits with pytest's code. Returns its id."""
    import pytest

    child = os.fork()
    if child != 0:
        return child
    with contextlib.redirect_stdout(io.StringIO()):
        if bug is not None:
            sys.meta_path.insert(0, _Finder(bug))
        order = ShortestFirst(records / f"{module}.json", writes=bug is None)
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", str(HERE / TESTS[module])], plugins=[order])
    os._exit(int(code))


def main() -> None:
    import hypothesis  # noqa: F401  the tests import these; imported once for all processes below
    import ml_dtypes  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch.fx.experimental.symbolic_shapes  # otherwise the first gradient imports it, which takes seconds

    torch.set_num_threads(1)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins, which have imports of their own
    gc.freeze()  # otherwise each process scans all imported objects at exit
    waiting = [(str(number), bug.module, bug) for number, bug in reversed(list(enumerate(BUGS)))]
    waiting += [(module, module, None) for module in sorted(TESTS)]
    running: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as records:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                name, module, bug = waiting.pop()
                running[start_tests(module, bug, Path(records))] = name
            child, status = os.wait()
            print(running.pop(child), os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
