from common import (
    D_LOSS,
    DETERMINISTIC,
    INDEX_GRADIENTS,
    K_INDEX,
    Q_INDEX,
    RELU,
    ROW_LOSS,
    ROW_WEIGHTS,
    SELECTION,
    WEIGHTS,
)
from declare import KEYWORD_ONLY, Operator, Output, Tensor

lightning_indexer_backward = Operator(
    "lightning_indexer_backward",
    "The indexer's loss against the attention distribution, and its gradients; or the gradients of any other loss.",
    formula="""
        row_loss[s]      = KL(target[s,:] || softmax over the selected entries of score[s,:])
        loss             = sum_s row_weights[s] * row_loss[s]
        g                = d_loss * row_weights * (softmax - target), or d_loss * row_weights * d_scores
        d_weights[s,j]   = sum_i g * relu(q . k)
        d_q_index[s,j,:] = sum_i g * w * 1[q . k > 0] * k
        d_k_index[t,:]  += sum   g * w * 1[q . k > 0] * q
    """,
    notes="""
        g is a number of fp32, and NaN if it is not finite. relu and 1[q . k > 0] are factors like any other: if g is
        NaN, which a NaN target or an infinite score causes, the loss, d_weights and d_q_index of the query in every
        head and d_k_index of the key are NaN, also where q . k <= 0. A row whose target is all zero adds neither loss
        nor gradient.
    """,
    arguments=(
        Tensor(
            "target",
            "The result of `attention_distribution` with normalize l1 for these indices. Absent with d_scores.",
            dtype="fp32",
            shape="[s_q, topk]",
            optional=True,
        ),
        Q_INDEX,
        K_INDEX,
        WEIGHTS,
        Tensor(
            "indices",
            "The selected keys. Entries outside 0 to s_kv - 1, or outside their query's key range, are invalid."
            " Entries that occur twice count twice.",
            dtype="int32",
            shape="[s_q, 1, topk] or [s_q, topk]",
        ),
        KEYWORD_ONLY,
        Tensor(
            "d_scores",
            "In place of target: the gradient of a loss of your own with respect to the entries' scores. Entries"
            " without a score are ignored, and infinities count as NaN.",
            dtype="fp32",
            shape="[s_q, topk]",
            optional=True,
        ),
        SELECTION.only("k_start", "k_end"),
        ROW_WEIGHTS,
        D_LOSS,
        RELU,
        DETERMINISTIC,
        Output(
            "loss",
            "Absent with d_scores.",
            dtype="fp32",
            shape="[]",
            optional=True,
            allocation="new",
            when="not d_scores",
        ),
        ROW_LOSS,
        *INDEX_GRADIENTS,
    ),
    returns=("loss", "d_q_index", "d_k_index", "d_weights"),
    returns_doc="With d_scores there is no loss: None.",
)
