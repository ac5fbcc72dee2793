from dataclasses import replace

from common import (
    ATTN_SINK,
    D_LOSS,
    DETERMINISTIC,
    INDEX_GRADIENTS,
    K_INDEX,
    KV,
    LSE,
    Q_INDEX,
    RELU,
    ROW_LOSS,
    ROW_WEIGHTS,
    SELECTION,
    SM_SCALE,
    WEIGHTS,
    Q,
)
from declare import KEYWORD_ONLY, Choice, Enum, Operator, Output

indexer_dense_loss = Operator(
    "indexer_dense_loss",
    "The indexer's loss over every visible key, as its dense warm-up needs it, and its gradients.",
    formula="""
        target[s,t] = sum_h exp(score[s,h,t] - lse[s,h]) / h_q        score of the attention, over the visible keys t
                      "l1": divided by its sum over t instead of h_q
        row_loss[s] = KL(target[s,:] || softmax over the visible keys of the index score)
        loss        = sum_s row_weights[s] * row_loss[s]
        g           = d_loss * row_weights * (softmax - target)
    """,
    notes="""
        `lightning_indexer_backward` defines the gradients. Nothing of size s_q x s_kv is stored: queries are
        taken in passes, whose scores and targets the workspace holds (256 MiB on a GPU). A query that sees no key, or
        whose target is all zero, adds neither loss nor gradient. Deterministic sums on a GPU have room for targets up
        to 256: where one is larger, d_k_index of the key is NaN.
    """,
    arguments=(
        Q,
        KV,
        replace(LSE, doc="lse of `sparse_mla_forward` without indices, with or without window keys."),
        Q_INDEX,
        K_INDEX,
        WEIGHTS,
        SM_SCALE,
        KEYWORD_ONLY,
        SELECTION.without("topk_length"),
        ROW_WEIGHTS,
        D_LOSS,
        RELU,
        DETERMINISTIC,
        replace(ATTN_SINK, doc="With it lse' = log(exp(lse) + exp(attn_sink)) is in the place of lse."),
        Choice(
            "normalize",
            "Divisor of the target's rows.",
            enum=Enum(
                "normalize_target",
                "HOPWELL_NORMALIZE_TARGET",
                {
                    "heads": "h_q; rows sum to 1 where lse is of the visible keys alone",
                    "l1": "their sums over the visible keys, as a softmax with window keys or a sink needs",
                },
            ),
        ),
        Output("loss", dtype="fp32", shape="[]", allocation="new"),
        ROW_LOSS,
        *INDEX_GRADIENTS,
    ),
    returns=("loss", "d_q_index", "d_k_index", "d_weights"),
)
