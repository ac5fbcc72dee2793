from common import (
    ATTN_SINK,
    D_V,
    DETERMINISTIC,
    INDICES,
    INDICES_ASCENDING,
    KV,
    SELECTION,
    SM_SCALE,
    Q,
)
from declare import KEYWORD_ONLY, Boolean, Operator, Output, PythonOnly, Tensor

sparse_mla_backward = Operator(
    "sparse_mla_backward",
    "Gradients of `sparse_mla_forward` with respect to q, kv and attn_sink.",
    formula="""
        lse'   = log(exp(lse) + exp(attn_sink))          lse without a sink
        p      = exp(score - lse')
        delta  = sum_d out * d_out
        ds     = p * (d_out . v - delta) * sm_scale
        dq     = ds . kv
        dkv   += ds^T . q, and p^T . d_out in the first d_v columns
        d_sink = -sum_s exp(attn_sink - lse') * delta
    """,
    notes="""
        If out and lse are merged over shards of the keys, dq is the sum over the shards, and each call gives the
        whole d_sink: take it from one shard.
    """,
    arguments=(
        Tensor("d_out", "Gradient of out.", dtype="like q", shape="[s_q, h_q, d_v]"),
        Q,
        KV,
        INDICES,
        Tensor("out", "The forward's out.", dtype="like q", shape="[s_q, h_q, d_v]"),
        Tensor(
            "lse",
            "The forward's lse. No score may exceed it by more than 44: GPUs take exp(score - lse) as 2^64 there.",
            dtype="fp32",
            shape="[s_q, h_q]",
        ),
        SM_SCALE,
        D_V,
        KEYWORD_ONLY,
        ATTN_SINK,
        SELECTION,
        Boolean(
            "deterministic",
            DETERMINISTIC.doc
            + " It also gives the same dq of a query in every call that has the query. On a GPU it takes"
            " 4 * s_q * topk bytes of scratch.",
        ),
        PythonOnly(
            "dkv_dtype", "Dtype of dkv.", type="dtype", of="dkv", default="float32", choices=("float32", "bfloat16")
        ),
        Boolean("accumulate", "Adds into the given fp32 dkv instead of overwriting it."),
        INDICES_ASCENDING,
        Boolean(
            "share_keys",
            "A hint that neighbouring queries select mostly the same keys, as in `sparse_mla_forward`. dq may then"
            " differ in its last bits with the neighbours, and a NaN or infinity in a key reaches all queries that"
            " are computed together with one that selects it. It has no effect with deterministic or attn.",
        ),
        PythonOnly("need_dq", "False leaves dq out.", type="bool", default=True),
        PythonOnly("need_dkv", "False leaves dkv out.", type="bool", default=True),
        Output("dq", dtype="like q", shape="[s_q, h_q, d_qk]", optional=True, when="need_dq"),
        Output("dkv", dtype="fp32 | bf16", shape="the shape of kv", optional=True, when="need_dkv"),
        Output(
            "d_sink",
            "Needs attn_sink. A row adds to it unless its lse is +inf.",
            dtype="fp32",
            shape="[h_q]",
            optional=True,
            allocation="new",
            when="attn_sink",
        ),
        Output(
            "attn",
            "sum_h exp(score - lse), the attention distribution.",
            dtype="fp32",
            shape="[s_q, topk]",
            optional=True,
            allocation="given",
        ),
    ),
    python_check="check_accumulate(accumulate, dkv)",
    returns=("dq", "dkv", "d_sink"),
    returns_doc="None stands for an output that is not needed, and for d_sink without a sink.",
)
