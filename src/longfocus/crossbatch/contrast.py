"""An explicit contrastive loss on a memory layer's scores. Ours, and off by default: the paper has the next-token loss alone
(arXiv 2307.03170, sections 3.2 and 6).

    contrast = mean over queries and heads of  -log( exp(lse_positive) / exp(lse_additional) )

the negative logarithm of what `Mass.positive` means: InfoNCE whose classes are keys, of which those of the own document's
windows are right. Unlike `attend`, it copies each row's windows and keeps them for the backward pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longfocus.attention import attend
from longfocus.crossbatch.attend import Table


def contrast_rows(
    outer_query: Tensor, context_key: Tensor, table: Table, *, scale: float, softcap: float | None = None
) -> Tensor:
    """The loss of one layer, over rows that see both positives and negatives.

    Args:
        outer_query: (R, Hq, T, D), the query as additional keys meet it.
        context_key: (S, Hkv, T, D), encoded as additional context.
        table: which source rows each row sees; negatives count as often there as in the attention.

    Returns:
        (), float32 or wider: 0 or more; 0 where no row sees both.
    """
    shift = math.log(table.negative_copies)
    found = []
    for row in range(outer_query.shape[0]):
        if not (table.positives[row] and table.negatives[row]):
            continue
        query = outer_query[row : row + 1, :, : table.row_tokens(row)]
        parts = []
        for sources, by in ((table.positives[row], 0.0), (table.negatives[row], shift)):
            keys = torch.cat([context_key[source, :, : table.lengths[source]] for source in sources], 1)[None]
            parts.append(attend(query, keys, keys, scale=scale, softcap=softcap)[1] + by)
        positive, negative = parts
        found.append((torch.logaddexp(positive, negative) - positive).mean())
    if not found:
        return outer_query.new_zeros((), dtype=torch.promote_types(outer_query.dtype, torch.float32))
    return torch.stack(found).mean()
