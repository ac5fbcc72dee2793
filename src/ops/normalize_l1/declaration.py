from declare import KEYWORD_ONLY, Operator, Output, Tensor

normalize_l1 = Operator(
    "normalize_l1",
    "Rows divided by their sums; all-zero rows stay zero.",
    notes="Ranks that hold slices of the heads add their distributions, and then normalise the sum.",
    arguments=(
        Tensor("attn", "The rows.", dtype="fp32", shape="[rows, columns]"),
        KEYWORD_ONLY,
        Output("out", "May be attn itself.", dtype="fp32", shape="[rows, columns]"),
    ),
    returns=("out",),
)
