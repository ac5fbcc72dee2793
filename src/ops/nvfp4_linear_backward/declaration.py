from common import SCALE_LAYOUT, WEIGHT, WEIGHT_GLOBAL, WEIGHT_SCALE, reciprocal
from declare import KEYWORD_ONLY, Operator, Output, Tensor

nvfp4_linear_backward = Operator(
    "nvfp4_linear_backward",
    "The gradient of `nvfp4_linear` for its x.",
    formula="""
        d_x[i,k] = weight_global * sum_n d_out[i,n] * code[n,k] * scale[n,k/16]
    """,
    notes="""
        The weights are frozen: there is no gradient for them. The sum is in fp32, and the global scale is applied in
        fp32 before the rounding. A row of d_x has the same bits whatever other rows there are.
    """,
    arguments=(
        Tensor("d_out", "Gradient of out.", dtype="bf16 | fp16 | fp32 (CPU)", shape="[n, N]"),
        WEIGHT,
        WEIGHT_SCALE,
        WEIGHT_GLOBAL,
        KEYWORD_ONLY,
        reciprocal("The global scale"),
        SCALE_LAYOUT,
        Output("d_x", dtype="like d_out", shape="[n, K]", python="out"),
    ),
    returns=("out",),
)
