"""Rows divided by their sums."""

from torch import Tensor

import hopwell

from ._register import exporting, operator, stop_gradient

_normalize = exporting(hopwell.normalize_l1)


def _normalize_l1_fake(attn: Tensor, backend: str | None = None) -> Tensor:
    return attn.new_empty(attn.shape)


@operator("normalize_l1", _normalize_l1_fake)
def normalize_l1(attn: Tensor, backend: str | None = None) -> Tensor:
    """Divides the rows of attn float32 [rows, columns] by their sums; rows of zeros stay zero. Carries no gradient."""
    result: Tensor = _normalize(attn, backend=backend)
    return result


stop_gradient("normalize_l1")
