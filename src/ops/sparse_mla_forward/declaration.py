from common import ATTN_SINK, D_V, INDICES, KV, SELECTION, SM_SCALE, WINDOW, Q
from declare import KEYWORD_ONLY, Boolean, Operator, Output

sparse_mla_forward = Operator(
    "sparse_mla_forward",
    "Multi-query latent attention (MLA) of every query over the keys that its index row selects, and over its window.",
    formula="""
        score[s,h,i] = sm_scale * sum_d q[s,h,d] * kv[t,d]        t = indices[s,i]; -inf where the entry is invalid
        out          = softmax(score) . kv[:, :d_v] / (1 + exp(attn_sink - lse))
    """,
    notes="""
        This is DeepSeek-V2's MLA in its multi-query form, with the sparse selection of DeepSeek-V3.2. An entry is
        valid if 0 <= t < s_kv, it is among the first topk_length[s], and the query sees the key: the key is in the
        query's range and not in its future. Entries that occur twice count twice. A row without a valid entry gives
        out 0, max_logits -inf and lse +inf. With window_kv (DeepSeek-V4's hybrid attention) one softmax is over the
        window keys that the query sees and the valid entries. q_positions, q_start, kv_stride, k_start, k_end,
        topk_length and indices speak of kv alone.
    """,
    arguments=(
        Q,
        KV,
        INDICES,
        SM_SCALE,
        D_V,
        KEYWORD_ONLY,
        ATTN_SINK,
        SELECTION,
        Boolean(
            "share_keys",
            "A hint that neighbouring queries select mostly the same keys. A GPU may then compute neighbours with"
            " up to 32 heads together, over the union of their keys, where that is less work. Results may differ in"
            " their last bits with the neighbours, and a NaN or infinity in a key reaches the outputs of all queries"
            " that are computed together with one that selects it. It has no effect with a window.",
        ),
        *WINDOW,
        Output("out", dtype="like q", shape="[s_q, h_q, d_v]"),
        Output("max_logits", "Largest score of each row.", dtype="fp32", shape="[s_q, h_q]", optional=True),
        Output(
            "lse", "Log of the sum of exp(score), a natural logarithm.", dtype="fp32", shape="[s_q, h_q]", optional=True
        ),
    ),
    returns=("out", "max_logits", "lse"),
)
