from dataclasses import replace

from common import ATTN_SINK, INDICES, INDICES_ASCENDING, KV, LSE, SELECTION, SM_SCALE, Q
from declare import KEYWORD_ONLY, Choice, Enum, Operator, Output

attention_distribution = Operator(
    "attention_distribution",
    "How much attention each selected key gets, summed over all heads given: the target of the indexer's loss.",
    formula="""
        out[s,i] = sum_h exp(score[s,h,i] - lse[s,h])   0 where the entry is invalid, and for rows without a valid entry
    """,
    notes="""
        `sparse_mla_forward` defines the score. V is not read. If lse is of a call with window keys, a head that
        spends its attention on the window counts less; with attn_sink also a head that spends it on the sink.
    """,
    arguments=(
        Q,
        KV,
        INDICES,
        LSE,
        SM_SCALE,
        KEYWORD_ONLY,
        SELECTION,
        Choice(
            "normalize",
            "Whether rows are normalised.",
            enum=Enum(
                "normalize",
                "HOPWELL_NORMALIZE",
                {
                    "none": "rows are sums over the heads",
                    "l1": "each row is divided by its sum; all-zero rows stay zero",
                },
            ),
        ),
        INDICES_ASCENDING,
        replace(ATTN_SINK, doc="With it lse' = log(exp(lse) + exp(attn_sink)) is in the place of lse."),
        Output(
            "out",
            "In the order of indices.",
            dtype="fp32",
            shape="[s_q, topk]",
            python_shape="selection_shape(q, kv, indices)",
        ),
    ),
    returns=("out",),
)
