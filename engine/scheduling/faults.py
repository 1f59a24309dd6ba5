"""What a result that is not finite means, and to whom: knows rows, no device."""

from __future__ import annotations

from engine.errors import InvalidField
from engine.scheduling.row import Row


class NonFiniteLogits(ArithmeticError):
    """The runner returned a NaN or an infinity."""


def not_finite(row: Row) -> Exception:
    """Returns what ends a row whose logits, or vector, hold a NaN or an infinity.

    Adapters that are scaled beyond what the model's numbers hold are the request's own choice, or the
    server's; without adapters it is a fault.
    """
    if not row.adapters.members:
        return NonFiniteLogits(f"what the device made of request {row.request_id} is not finite")
    chosen = ", ".join(f"{entry.adapter_id} at {entry.scale:g}" for entry in row.adapters.scales)
    return InvalidField(
        "adapters",
        f"the result under adapters {chosen} is not finite: a scale is too large for this model",
    )
