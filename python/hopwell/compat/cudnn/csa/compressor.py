"""`cudnn.csa.compressor`: the two wrappers of `CSA`."""

# Absolute, so that it is found if this package is imported as `cudnn`.
from hopwell.compat.cudnn._compressor import csa_compressor_backward_wrapper, csa_compressor_forward_wrapper

__all__ = ["csa_compressor_backward_wrapper", "csa_compressor_forward_wrapper"]
