from dataclasses import replace

from common import K_INDEX, Q_INDEX, RELU, SELECTION, WEIGHTS
from declare import KEYWORD_ONLY, Operator, Output, PythonOnly, Tensor

lightning_indexer = Operator(
    "lightning_indexer",
    "The topk visible keys of largest index score (DeepSeek Sparse Attention), in ascending order of key.",
    formula="""
        score[s,t] = k_scale[t] * sum_j weights[s,j] * q_scale[s,j] * relu(q_index[s,j,:] . k_index[t,:])
    """,
    notes="""
        The scores of all keys are never stored. Of equal scores the smaller keys are taken. A NaN score counts as
        -inf, and a key of score -inf is taken only where nothing better is left. A row that sees fewer than topk keys
        ends with indices -1 and scores -inf.
    """,
    arguments=(
        replace(Q_INDEX, dtype="bf16 | fp8 | fp32 (CPU, sm80)"),
        K_INDEX,
        WEIGHTS,
        PythonOnly("topk", "Number of keys for each query, 0 to 2^31 - 1.", type="int"),
        KEYWORD_ONLY,
        Tensor(
            "q_scale",
            "Scale of each query's head, of fp8 only; 1 if it is absent. Scales may have any values: relu applies"
            " to the product of the codes, so that a negative scale changes the sign of a head or a key. If a scale"
            " is NaN, or infinite times 0, the score is NaN.",
            dtype="fp32",
            shape="[s_q, h_index]",
            optional=True,
        ),
        Tensor("k_scale", "Scale of each key, as q_scale.", dtype="fp32", shape="[s_kv]", optional=True),
        SELECTION.without("topk_length"),
        RELU,
        Output("indices", dtype="int32", shape="[s_q, topk]", allocation="new"),
        Output("scores", dtype="fp32", shape="[s_q, topk]", optional=True, allocation="new"),
    ),
    returns=("indices", "scores"),
)
