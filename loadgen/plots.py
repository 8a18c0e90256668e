"""Draws line charts as SVG, because a plotting library would be several times the size of the rest of the image."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 34, 40
COLOURS = ("#2563eb", "#d97706", "#dc2626", "#059669", "#7c3aed", "#475569", "#db2777", "#0d9488")


@dataclass(frozen=True)
class Series:
    """A line, or dots."""

    name: str
    points: Sequence[tuple[float, float]]
    """(x, y), with x ascending."""
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """Series over one pair of axes. ``ticks``: labelled places on the x axis; chosen automatically if there are none."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log_y: bool = False
    ticks: Sequence[tuple[float, str]] = ()

    def svg(self) -> str:
        """Return the chart as SVG; empty if it has no points."""
        points = [point for line in self.series for point in line.points]
        if not points:
            return ""
        xs = [x for x, _ in points] + [place for place, _ in self.ticks]
        ys = [y for _, y in points if y > 0 or not self.log_y] or [1.0]
        low_y = min(ys) if self.log_y else 0.0
        frame = _Frame(min(xs), max(xs), low_y, max(ys), self.log_y)
        parts = [*self._axes(frame), *self._lines(frame), *self._legend()]
        label = html.escape(self.title, quote=True)
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'

    def _axes(self, frame: _Frame) -> Iterator[str]:
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        for value in frame.y_ticks():
            y = frame.y(value)
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>'
            yield _text(_LEFT - 6, y + 4, f"{value:g}", "end")
        for value, name in self.ticks or [(tick, f"{tick:g}") for tick in steps(frame.x_low, frame.x_high)]:
            yield f'<path class="grid" d="M{frame.x(value):.1f} {_TOP}V{bottom}"/>'
            yield _text(frame.x(value), bottom + 16, name, "middle")
        yield _text((_LEFT + right) / 2, HEIGHT - 6, self.x, "middle")
        yield _text(_LEFT, 14, f"{self.title} ({self.y})", "start", "title")

    def _lines(self, frame: _Frame) -> Iterator[str]:
        for line, colour in zip(self.series, _colours(len(self.series)), strict=True):
            places = [f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in line.points]
            if line.dots:
                path = "".join(f"M{place}h0" for place in places)
                yield f'<path d="{path}" stroke="{colour}" stroke-width="4" stroke-linecap="round" fill="none"/>'
            elif places:
                yield f'<path d="M{"L".join(places)}" stroke="{colour}" stroke-width="1.5" fill="none"/>'

    def _legend(self) -> Iterator[str]:
        right = WIDTH - _RIGHT
        for line, colour in zip(reversed(self.series), reversed(_colours(len(self.series))), strict=True):
            right -= 7 * len(line.name)
            yield _text(right, 14, line.name, "start")
            yield f'<rect x="{right - 14}" y="5" width="10" height="10" fill="{colour}"/>'
            right -= 26


@dataclass(frozen=True)
class _Frame:
    """Maps values to coordinates in the picture."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool

    def x(self, value: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (value - self.x_low) / ((self.x_high - self.x_low) or 1.0)

    def y(self, value: float) -> float:
        low, high = self._scale(self.y_low), self._scale(self.y_high)
        share = (self._scale(max(value, self.y_low)) - low) / ((high - low) or 1.0)
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * share

    def y_ticks(self) -> list[float]:
        if not self.log or self.y_high < 4 * self.y_low:
            return steps(self.y_low, self.y_high)
        powers = range(math.floor(math.log10(self.y_low)), math.ceil(math.log10(self.y_high)) + 1)
        values = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
        return [value for value in values if self.y_low <= value <= self.y_high]

    def _scale(self, value: float) -> float:
        return math.log10(value) if self.log else value


def steps(low: float, high: float) -> list[float]:
    """Return about five round numbers from ``low`` to ``high``."""
    rough = (high - low) / 5
    if rough <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * 0.999)
    return [round(step * place, 12) for place in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def _colours(count: int) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(count)]


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{html.escape(text)}</text>'
