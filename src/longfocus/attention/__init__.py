"""The primitive: attention over a union of key sets, computed set by set and merged exactly.

`reference` is the definition, `fused` the fast form, `select` chooses between them, `merge` joins partial
results, and `context` is the small contract that memory and crossbatch contexts fulfil.
"""

from longfocus.attention.merge import merge, share
from longfocus.attention.select import attend

__all__ = ["attend", "merge", "share"]
