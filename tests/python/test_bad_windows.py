"""Bad input: key ranges, causal positions and windows."""

from typing import Any

import numpy as np
import pytest
from bad_calls import check_message


@pytest.mark.parametrize(
    ("operator", "changes", "message"),
    [
        ("sparse_mla_forward", {"kv_stride": 0}, "kv_stride must be at least 1; got 0"),
        ("sparse_mla_forward", {"q_start": 0}, "q_positions and q_start exclude each other"),
        ("sparse_mla_forward", {"k_start": None}, "k_start and k_end are given together"),
        ("sparse_mla_forward", {"k_end": None}, "k_start and k_end are given together"),
        ("sparse_mla_backward", {"k_start": None}, "k_start and k_end are given together"),
        ("sparse_mla_backward", {"k_end": None}, "k_start and k_end are given together"),
        ("attention_distribution", {"k_start": None}, "k_start and k_end are given together"),
        ("attention_distribution", {"k_end": None}, "k_start and k_end are given together"),
        ("lightning_indexer", {"k_start": None}, "k_start and k_end are given together"),
        ("lightning_indexer_backward", {"k_end": None}, "k_start and k_end are given together"),
        ("indexer_dense_loss", {"k_end": None}, "k_start and k_end are given together"),
        ("indexer_dense_loss", {"q_start": 0}, "q_positions and q_start exclude each other"),
        ("sparse_mla_forward", {"indices": None}, "topk_length needs indices; without them every visible key counts"),
        ("sparse_mla_backward", {"indices": None}, "topk_length needs indices; without them every visible key counts"),
        ("attention_distribution", {"indices": None}, "topk_length needs indices; without them every visible"),
        *(
            (operator, changes, message)
            for operator in ("sparse_mla_forward", "sparse_mla_backward")
            for changes, message in (
                ({"window": None}, "window_kv and window are given together"),
                ({"window_kv": None}, "window_kv and window are given together"),
                ({"window": 0}, "window must be at least 1; got 0"),
                (
                    {"window_kv": np.zeros((17, 1, 41), np.float32)},
                    "window_kv must be float32 [s_w, h_kv=1, d_qk=40]; got",
                ),
                ({"window_kv": np.zeros((17, 1, 40))}, "window_kv must be float32 [s_w, h_kv=1, d_qk=40]; got float64"),
                ({"w_start": None}, "w_start and w_end are given together"),
                ({"w_end": None}, "w_start and w_end are given together"),
                ({"w_start": np.zeros(4, np.int32)}, "w_start must be int32 [s_q=5]; got int32 [4]"),
                ({"w_end": np.zeros(5, np.int64)}, "w_end must be int32 [s_q=5]; got int64 [5]"),
                ({"window_kv": None, "window": None}, "w_start and w_end need window_kv"),
            )
        ),
        ("sparse_mla_backward", {"d_window_kv": np.zeros((17, 40), np.float32)}, "d_window_kv must be float32"),
        (
            "sparse_mla_backward",
            {"d_window_kv": np.zeros((17, 1, 40), np.float32), "dkv_dtype": "bfloat16"},
            "d_window_kv must be bfloat16, as dkv_dtype says; got float32",
        ),
        (
            "sparse_mla_backward",
            {"d_window_kv": np.zeros((17, 1, 40), np.float32), "need_d_window_kv": False},
            "d_window_kv must be None where it is not needed",
        ),
        (
            "sparse_mla_backward",
            {"dkv": np.zeros((90, 1, 40), np.float32), "accumulate": True},
            "d_window_kv must be given to accumulate into; got None",
        ),
        ("lightning_indexer", {"kv_stride": -4}, "kv_stride must be at least 1; got -4"),
    ],
)
def test_messages(operator: str, changes: dict[str, Any], message: str) -> None:
    check_message(operator, changes, message)
