"""``python -m tests.benchmarks.plot``: what ``bench.json`` says of cost against size, as a plot for the docs."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tests.benchmarks.results import PATH
from zgtrain.plots import Line, plot

TARGET = Path("docs/explanation/cost-against-size.svg")


def drawn(points: list[dict[str, object]]) -> str:
    """An SVG file: seconds on a logarithmic axis against the objects' power of ten."""
    # Of `ls` the command is drawn, which is what people wait for: a plot has eight colours.
    names = [name for name in dict.fromkeys(str(point["operation"]) for point in points) if name != "ls"]
    lines = [
        Line(name, [(math.log10(p["objects"]), p["seconds"]) for p in points if p["operation"] == name], dots=True)
        for name in names
    ]
    svg = plot(lines, x="objects, as a power of ten", y="seconds", log_y=True, whole_x=True)
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(drawn(json.loads(PATH.read_text())["scale"]), encoding="utf-8")
    print(TARGET)
