"""The table of commands: what is typed, what it does, where it is."""

from __future__ import annotations

from typing import Final

from zgstore.cli.application import Entry

TRAIN, LOOK, USE = "Train", "Look", "Use"

COMMANDS: Final = (
    Entry(
        "plan", TRAIN, "plan:plan", "Say what there is to do; no teacher is loaded.",
        ("zgtrain plan job.toml", "zgtrain plan job.toml --set train.steps=64"),
    ),
    Entry(
        "run", TRAIN, "run:run", "Train one block; it resumes by itself.",
        (
            "zgtrain run job.toml --block 1",
            "zgtrain run job.toml --block 1 --device cuda:0",
            "zgtrain run job.toml --block 1 --source live",
        ),
    ),
    Entry(
        "launch", TRAIN, "launch:launch", "Train all blocks, each in a process of its own.",
        (
            "zgtrain launch job.toml --parallel 2",
            "zgtrain launch job.toml --devices cuda:0,cuda:1",
            "zgtrain launch job.toml --follow cache.toml --set train.order=sequential-first",
        ),
    ),
    Entry(
        "relay", TRAIN, "relay:relay", "Train blocks in depth order on the student's own states.",
        ("zgtrain relay job.toml --steps 192", "zgtrain relay job.toml --from-scratch"),
    ),
    Entry("status", LOOK, "status:status", "Show how far each block is."),
    Entry(
        "assemble", USE, "assemble:assemble", "Join the trained blocks into the whole student.",
        ("zgtrain assemble job.toml --output student/",),
    ),
    Entry(
        "evaluate", USE, "evaluate:evaluate", "Judge the assembled student by the gates.",
        ("zgtrain evaluate job.toml", "zgtrain evaluate job.toml --report-only"),
    ),
    Entry(
        "economics", USE, "economics:economics", "Show what the cache cost and saved.",
        ("zgtrain economics job.toml runs/live",),
    ),
    Entry(
        "report", USE, "report:report", "Write one self-contained page with plots.",
        ("zgtrain report job.toml runs/live --output report.html",),
    ),
)  # fmt: skip
