"""One measured comparison: ours, the peer's, their ratio, and the bar it must reach. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Figure:
    """A line of the table.

    `ours` and `peer` are medians in `unit`; `peer` is None where no peer was measured, or where
    the bar is not about one. `bar` None: the figure is told, not judged. `is_ratio`: the bar is
    for ours over the peer's, else for `ours` itself. `is_at_most`: less is better.
    """

    measurement: str
    name: str
    unit: str
    ours: float
    peer: float | None = None
    bar: float | None = None
    is_ratio: bool = True
    is_at_most: bool = False

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's."""
        return None if not self.peer else self.ours / self.peer

    @property
    def is_met(self) -> bool | None:
        """Whether the bar is reached; None where there is nothing to judge."""
        value = self.ratio if self.is_ratio else self.ours
        if self.bar is None or value is None:
            return None
        return value <= self.bar if self.is_at_most else value >= self.bar

    def to_json(self) -> dict[str, object]:
        """All of it, derived values included."""
        return {**asdict(self), "ratio": self.ratio, "is_met": self.is_met}


HEAD = ("figure", "unit", "ours", "peer", "ratio", "bar", "met")


def cells(figure: Figure) -> tuple[str, ...]:
    """The figure as the cells of `HEAD`; an empty one where there is nothing to say."""
    bar = ""
    if figure.bar is not None:
        bar = f"{'<=' if figure.is_at_most else '>='} {figure.bar:g}"
    met = {True: "yes", False: "NO", None: ""}[figure.is_met]
    return (
        figure.name,
        figure.unit,
        _number(figure.ours),
        "" if figure.peer is None else _number(figure.peer),
        "" if figure.ratio is None else f"{figure.ratio:.2f}",
        bar,
        met,
    )


def _number(value: float) -> str:
    """Three digits that count, none after the point from a hundred on."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
