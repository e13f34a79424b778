"""Line plots as SVG, written by hand: axes, a legend, and nothing that a page would have to fetch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 520
HEIGHT: Final = 300
LEFT: Final = 62
RIGHT: Final = 14
TOP: Final = 34
BOTTOM: Final = 44
_ROW: Final = 16  # of the legend
COLOURS: Final = ("#2f6fde", "#e0792b", "#2a9d6f", "#b2459b", "#7a6ff0", "#c2362b", "#4b9fb8", "#8a7a3c")
INK: Final = "#5f6b7a"
FAINT: Final = "#e3e7ec"

Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot.

    Args:
        name: For the legend.
        points: (x, y); those whose y is no number are left out.
        dashed: Drawn so.
        dots: With a dot at each point.
    """

    name: str
    points: Points
    dashed: bool = False
    dots: bool = False


def plot(
    lines: Sequence[Line], *, x: str, y: str, log_y: bool = False, from_zero: bool = False, whole_x: bool = False,
    mark: float | None = None,
) -> str:  # fmt: skip
    """An SVG element.

    Args:
        lines: What is drawn.
        x: Name of that axis.
        y: Likewise.
        log_y: Logarithmic; values that are not positive are left out.
        from_zero: The y axis begins at 0.
        whole_x: Only whole numbers on the x axis.
        mark: An x to mark, the break-even.
    """
    drawn = [(line, [(a, b) for a, b in line.points if _drawable(b, log=log_y)]) for line in lines]
    everything = [point for _, points in drawn for point in points]
    if not everything:
        return f'<svg viewBox="0 0 {WIDTH} 40"><text y="24" fill="{INK}" font-size="13">nothing measured</text></svg>'
    across = _Axis.of([a for a, _ in everything])
    up = _Axis.of([b for _, b in everything if b is not None], log=log_y, zero=from_zero)

    def place(a: float, b: float) -> tuple[float, float]:
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return round(LEFT + across.fraction(a) * width, 1), round(TOP + (1 - up.fraction(b)) * height, 1)

    legend, above = _legend([line.name for line, _ in drawn], [line.dashed for line, _ in drawn])
    box = f'viewBox="0 {-above} {WIDTH} {HEIGHT + above}"'
    parts = [f'<svg {box} role="img" font-family="system-ui,sans-serif" font-size="11.5">']
    parts += _frame(across, up, place, x=x, y=y, whole_x=whole_x)
    if mark is not None and across.low <= mark <= across.high:
        at = place(mark, up.low)[0]
        parts.append(
            f'<line x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#1a7f4b" stroke-dasharray="3 3"/>'
        )
        parts.append(f'<text x="{at + 5}" y="{HEIGHT - BOTTOM - 8}" fill="#1a7f4b">pays from K = {mark:g}</text>')
    for number, (line, points) in enumerate(drawn):
        parts += _drawn(line, [place(a, b) for a, b in points if b is not None], COLOURS[number % len(COLOURS)])
    return "".join([*parts, *legend, "</svg>"])


def _drawable(value: float | None, *, log: bool) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not log)


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, values: Iterable[float], *, log: bool = False, zero: bool = False) -> _Axis:
        values = list(values)
        low, high = min(values), max(values)
        low = 0.0 if zero else low
        if log:
            low, high = (low / 1.3, high * 1.3) if high / low < 1.5 else (low / 1.1, high * 1.1)
        elif high - low < 1e-12 * max(1.0, abs(high)):
            low, high = low - 0.5, high + 0.5
        elif zero:
            high *= 1.06
        return cls(low, high, log)

    def fraction(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 5, *, whole: bool = False) -> list[float]:
        """Round numbers inside."""
        if self.log:
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for digits in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 4, 5, 7)):
                found = [d * 10.0**e for e in exponents for d in digits if self.low <= d * 10.0**e <= self.high]
                if len(found) >= 3:
                    return found[:: -(-len(found) // (most + 1))]
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= rough)
        step = max(1.0, round(step)) if whole else step
        first = math.ceil(self.low / step - 1e-9)
        return [at * step for at in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _frame(
    across: _Axis, up: _Axis, place: Callable[[float, float], tuple[float, float]], *, x: str, y: str, whole_x: bool
) -> list[str]:
    bottom, parts = HEIGHT - BOTTOM, []
    for tick in up.ticks():
        at = place(across.low, tick)[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}" stroke="{FAINT}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{at + 4}" text-anchor="end" fill="{INK}">{_number(tick)}</text>')
    for tick in across.ticks(whole=whole_x):
        at = place(tick, up.low)[0]
        parts.append(f'<line x1="{at}" x2="{at}" y1="{bottom}" y2="{bottom + 4}" stroke="{INK}"/>')
        parts.append(f'<text x="{at}" y="{bottom + 17}" text-anchor="middle" fill="{INK}">{_number(tick)}</text>')
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}" stroke="{INK}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle" fill="{INK}">{escape(x)}</text>')
    half = (TOP + bottom) / 2
    turned = f'transform="rotate(-90 14 {half})"'
    parts.append(f'<text x="14" y="{half}" text-anchor="middle" fill="{INK}" {turned}>{escape(y)}</text>')
    return parts


def _drawn(line: Line, points: Sequence[tuple[float, float]], colour: str) -> list[str]:
    path = " ".join(f"{a},{b}" for a, b in points)
    dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
    parts = [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"{dashes}/>'
    ]
    if line.dots:
        parts += [f'<circle cx="{a}" cy="{b}" r="2.8" fill="{colour}"/>' for a, b in points]
    return parts


def _legend(names: Sequence[str], dashed: Sequence[bool]) -> tuple[list[str], int]:
    """Its parts, and how far it stands out above the picture: rows upwards, for as many names as there are."""
    at, rows, places = float(LEFT), 0, []
    for name in names:
        width = 38 + 5.6 * len(name)
        if at > LEFT and at + width > WIDTH:
            at, rows = float(LEFT), rows + 1
        places.append((at, rows))
        at += width
    parts = []
    for number, (name, dash, (x, row)) in enumerate(zip(names, dashed, places, strict=True)):
        y = 14 - _ROW * (rows - row)
        colour, pattern = COLOURS[number % len(COLOURS)], ' stroke-dasharray="5 3"' if dash else ""
        parts.append(f'<line x1="{x}" x2="{x + 16}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2.4"{pattern}/>')
        parts.append(f'<text x="{x + 21}" y="{y + 4}" fill="{INK}">{escape(name)}</text>')
    return parts, _ROW * rows


def _number(value: float) -> str:
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.6g}"
