"""The results as a table, as CSV, and as a plot of the loss held out against processor seconds."""

from __future__ import annotations

import csv

from zgtrain.plots import Line, plot

PUBLISHED = {"n16": "8.7", "n64": "29"}  # times a step of backprop, at width 512, 8 layers, 1024 tokens


def write(found, folder):
    """``results.md``, ``curves.csv`` and ``loss-against-seconds.svg``.

    Args:
        found: Way → its result.
        folder: Where to.
    """
    text = "\n".join([*_head(found), *(_row(name, found) for name in found)]) + "\n"
    (folder / "results.md").write_text(text, encoding="utf-8")
    _curves(found, folder / "curves.csv")
    lines = [
        Line(name, [(step * each["step_seconds"], loss) for step, loss in each["held_out"]], dots=True)
        for name, each in found.items()
    ]
    picture = plot(lines, x="processor seconds of the steps", y="relative squared error, rows held out", log_y=True)
    picture = picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    (folder / "loss-against-seconds.svg").write_text(picture, encoding="utf-8")
    print(text)
    print(f"written to {folder}: results.md, curves.csv, loss-against-seconds.svg")


def _marks(found):
    """The steps at a quarter, at half, and at the end."""
    steps = [step for step, _ in next(iter(found.values()))["held_out"]]
    return [steps[(len(steps) - 1) * quarters // 4] for quarters in (1, 2, 4)]


def _head(found):
    marks = "".join(f" after {step} |" for step in _marks(found))
    return [
        f"| gradient | cosine |{marks} queries a step | s a step | × backprop | published × |",
        f"|---|---|{'---|' * len(_marks(found))}---|---|---|---|",
    ]


def _row(name, found):
    each, held_out = found[name], dict(map(tuple, found[name]["held_out"]))
    ratio = each["step_seconds"] / next(iter(found.values()))["step_seconds"]
    cells = [
        name, f"{each['cosine']:.3f}", *(f"{held_out[step]:.4f}" for step in _marks(found)),
        each["queries"] // each["steps"], f"{each['step_seconds']:.2f}", f"{ratio:.1f}", PUBLISHED.get(name, ""),
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _curves(found, path):
    rows = [("way", "step", "queries", "processor_seconds", "loss", "loss_held_out")]
    for name, each in found.items():
        held_out = dict(map(tuple, each["held_out"]))
        rows += [
            (name, step, each["queries"] * step // each["steps"], round(step * each["step_seconds"], 3), loss,
             held_out.get(step, ""))
            for step, loss in each["losses"]
        ]  # fmt: skip
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
