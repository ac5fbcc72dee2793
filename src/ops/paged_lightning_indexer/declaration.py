from common import RELU
from declare import KEYWORD_ONLY, Boolean, Operator, Output, PythonOnly, Tensor

PER_HEAD = "[b, q_len, h_index] or [b, h_index]"
SELECTED = "[b, q_len, topk] or [b, topk]"

paged_lightning_indexer = Operator(
    "paged_lightning_indexer",
    "The topk visible positions of largest index score, in ascending order, of one or a few query tokens a sequence"
    " over a paged cache of index keys.",
    formula="""
        score[s,i,p] = k_scale[p] * sum_j weights[s,i,j] * q_scale[s,i,j] * relu(q_index[s,i,j,:] . k[p,:])
    """,
    notes="""
        A cache is [blocks, block, row]: keys of bf16, or rows of d_index + 4 bytes that mla_cache_append writes. In a
        block, the codes of all rows come first, then an fp32 scale for each row. Position p of sequence s is row
        p mod block of block block_tables[s, p div block]. It is visible if p is less than the query's number of
        positions and its block exists. The rule is lightning_indexer's: of equal scores the smaller positions are
        taken, a NaN score counts as -inf, and a position of score -inf is taken only where nothing better is left. A
        row that sees fewer than topk positions ends with indices -1 and scores -inf. Indices and scores have the bits
        of lightning_indexer over the same keys, in any batch, on any pages and for any block.
    """,
    arguments=(
        Tensor(
            "q_index",
            "Index queries; the last q_len tokens of each sequence.",
            dtype="bf16 | fp8 | fp32 (CPU, sm80)",
            shape="[b, q_len, h_index, d_index] or [b, h_index, d_index]",
        ),
        Tensor(
            "cache",
            "Index keys: with q_index of fp8 rows of d_index + 4 bytes, otherwise rows of d_index elements of q_index's"
            " dtype.",
            dtype="bf16 | fp32 (CPU, sm80) | uint8 | int8 | fp8",
            shape="[blocks, block, row] or [blocks, block, 1, row]",
        ),
        Tensor("weights", "Weight of each index head, of any sign.", dtype="fp32 | bf16", shape=PER_HEAD),
        PythonOnly("topk", "Number of positions for each query, 0 to 2^31 - 1.", type="int"),
        Tensor("block_tables", "The blocks of each sequence's positions.", dtype="int32", shape="[b, max_blocks]"),
        Tensor(
            "context_lens",
            "Number of positions that are visible. [b] counts the query tokens: query i sees the first"
            " context_lens[s] - q_len + 1 + i. [b, q_len] is each query's own number.",
            dtype="int32",
            shape="[b] or [b, q_len]",
        ),
        KEYWORD_ONLY,
        Tensor(
            "q_scale",
            "Scale of each query's head, of fp8 only; 1 if it is absent. It may have any value.",
            dtype="fp32",
            shape=PER_HEAD,
            optional=True,
        ),
        RELU,
        Boolean("as_slots", "Gives slots of the cache instead of positions, in the same order.", python="slots"),
        Output("indices", dtype="int32", shape=SELECTED, python_shape="(*shape_of(q_index)[:-2], topk)"),
        Output(
            "scores",
            dtype="fp32",
            shape=SELECTED,
            optional=True,
            python_shape="(*shape_of(q_index)[:-2], topk)",
            may_be_false=True,
        ),
        Output(
            "lengths",
            "Number of positions that each query selects.",
            dtype="int32",
            shape="[b, q_len] or [b]",
            optional=True,
            allocation="given",
        ),
    ),
    returns=("indices", "scores"),
    python_check='check_columns("paged_lightning_indexer", topk, indices=indices, scores=scores)',
    returns_doc="Without q_len for a q_index [b, h_index, d_index].",
)
