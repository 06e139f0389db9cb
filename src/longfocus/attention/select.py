"""Which implementation of `attend` runs, and why."""

from __future__ import annotations

from torch import Tensor

from longfocus.attention import fused, reference


def choose(query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> tuple[str, str]:
    """The implementation's name and the reason, for instance ("reference", "softcap")."""
    if key.shape[2] == 0:
        return "reference", "no keys"
    if softcap is not None:
        return "reference", "softcap"
    if query.device.type != "cpu":
        return "reference", f"no fused kernel with lse is used on {query.device.type}"
    if query.dtype not in fused.DTYPES or not (query.dtype == key.dtype == value.dtype):
        return "reference", "mixed or unusual dtypes"
    if query.shape[-1] != value.shape[-1]:
        return "reference", "values are wider or narrower than keys"
    return "fused", "fused CPU kernel"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over one key set with its log-normaliser; see `reference.attend` for shapes and meaning."""
    if choose(query, key, value, softcap)[0] == "fused":
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return fused.attend(query, key, value, mask=mask, scale=scale)
    return reference.attend(query, key, value, mask=mask, scale=scale, softcap=softcap)
