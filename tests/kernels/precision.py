"""How far a kernel may be from the exact result: about as far as plain torch in the same number type."""

from __future__ import annotations

import torch


def assert_as_good(actual: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """`exact` comes of higher precision than `actual`, `plain` of torch operators in `actual`'s own."""
    assert actual.shape == exact.shape == plain.shape
    assert actual.dtype == plain.dtype
    assert actual.isfinite().all()
    allowed = 2.0 * (plain.double() - exact.double()).abs().max() + 1e-6 * exact.double().abs().max()
    error = (actual.double() - exact.double()).abs().max()
    assert error <= allowed, f"error {error:.3g}, plain torch has {(allowed / 2):.3g}"
