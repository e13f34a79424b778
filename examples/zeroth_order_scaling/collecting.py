"""Every run that is there, as a table and as plots: curves of each size, and the gap to backprop against scale."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from statistics import mean

from sizes import Run

from zgtrain.plots import Line, plot

COLUMNS = [
    "size", "parameters", "arm", "seed", "held-out loss", "gap", "s a step", "× backprop", "queries", "c", "cosine",
    "branch gain",
]  # fmt: skip


class Told:
    """What one run's folder says."""

    def __init__(self, folder):
        self.run = Run.from_value(json.loads((folder / "run.json").read_text(encoding="utf-8")))
        lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
        said = [json.loads(line) for line in lines]
        self.looks = [each for each in said if "heldout_loss" in each]
        self.steps = [each for each in said if "loss" in each]
        result = folder / "result.json"
        self.result = json.loads(result.read_text(encoding="utf-8")) if result.exists() else None

    @property
    def loss(self):
        return self.looks[-1]["heldout_loss"]

    @property
    def step_seconds(self):
        return self.steps[-1]["seconds"] / self.steps[-1]["step"]

    @property
    def noise_constant(self):
        """c of NSR ≈ c·d/n, d the width; the mean over all looks. None without probes."""
        noises = [each["noise_to_signal"] for each in self.looks if "noise_to_signal" in each]
        return mean(noises) * self.run.probes / self.run.shape.width if noises else None


def collect(home):
    """Write ``table.md``, ``gap.svg`` and a ``curves-SIZE.svg`` for each size; print the table."""
    found = [Told(folder) for folder in sorted((home / "runs").iterdir()) if (folder / "log.jsonl").exists()]
    found = sorted((each for each in found if each.steps), key=lambda each: (_scale(each), each.run.probes))
    base = {(each.run.size, each.run.seed): each for each in found if not each.run.probes}
    rows = [_row(each, base.get((each.run.size, each.run.seed))) for each in found]
    text = "\n".join(" | ".join(["", *row, ""]).strip() for row in [COLUMNS, ["---"] * len(COLUMNS), *rows]) + "\n"
    (home / "table.md").write_text(text, encoding="utf-8")
    print(f"\n{text}", end="")
    for size in dict.fromkeys(each.run.size for each in found):
        curves = [
            Line(f"{each.run.arm}, seed {each.run.seed}", [(look["step"], look["heldout_loss"]) for look in each.looks])
            for each in found
            if each.run.size == size
        ]
        _write(home / f"curves-{size}.svg", plot(curves, x="step", y=f"held-out loss, nats ({size})"))
    gaps = defaultdict(list)
    for each in found:
        same = base.get((each.run.size, each.run.seed))
        if each.run.probes and each.result and same and same.result:
            gaps[each.run.arm].append((math.log10(each.run.shape.parameters), each.loss - same.loss))
    lines = [Line(arm, points, dots=True) for arm, points in gaps.items()]
    _write(home / "gap.svg", plot(lines, x="parameters, log₁₀", y="held-out loss − backprop's, nats"))


def _scale(told):
    return told.run.shape.parameters, told.run.seed


def _row(told, base):
    run, last = told.run, told.looks[-1]
    compared = base is not None and base is not told
    constant = told.noise_constant
    return [
        run.size, f"{run.shape.parameters / 1e6:.1f} M", run.arm, str(run.seed),
        f"{told.loss:.3f}" + ("" if told.result else f" at {last['step']}"),
        f"{told.loss - base.loss:+.3f}" if compared else "",
        f"{told.step_seconds:.3f}", f"{told.step_seconds / base.step_seconds:.1f}" if compared else "",
        f"{told.steps[-1]['queries']:,}", "" if constant is None else f"{constant:.2f}",
        f"{last['cosine']:.3f}" if "cosine" in last else "", f"{mean(last['branch_gain']):.2f}",
    ]  # fmt: skip


def _write(path, text):
    path.write_text(text, encoding="utf-8")
