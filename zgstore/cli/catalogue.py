"""The table of commands: what is typed, what it does, where it is."""

from __future__ import annotations

from typing import Final

from zgstore.cli.application import Entry

START, LOOK, KEEP, CARRY, TEND = "Start", "Look", "Keep", "Carry", "Tend"

COMMANDS: Final = (
    Entry(
        "init", START, "init:init", "Make a store; one that is there stays as it is.",
        ("zgstore init", "zgstore init /data/cache --policy group", "zgstore init --example chat"),
    ),
    Entry(
        "points", START, "points:points", "List the hook points that a recipe's teacher offers.",
        ("zgstore points cache.toml",),
    ),
    Entry(
        "estimate", START, "estimate:estimate", "Say how many samples and bytes a build would store.",
        ("zgstore estimate cache.toml",),
    ),
    Entry(
        "build", START, "build:build", "Run the teacher where something is missing; publish.",
        (
            "zgstore build cache.toml --ref main",
            "zgstore build cache.toml --explain --dry-run",
            "zgstore build cache.toml --worker 0/4",
        ),
    ),
    Entry("ls", LOOK, "ls:ls", "List refs and tags."),
    Entry(
        "show", LOOK, "show:show", "Show a snapshot's pins, columns and statistics.",
        ("zgstore show main", "zgstore show main@{1}", "zgstore show main --decode 7 --recipe cache.toml"),
    ),
    Entry("log", LOOK, "log:log", "Show where a ref pointed, and who moved it."),
    Entry(
        "diff", LOOK, "diff:diff", "Compare two snapshots: pins, columns, shards, values.",
        ("zgstore diff main@{1} main", "zgstore diff a b --values --samples 64", "zgstore diff a b --exit-code -q"),
    ),
    Entry("du", LOOK, "du:du", "Show the bytes of each name, own and shared."),
    Entry("why", LOOK, "why:why", "Show what keeps an object.", ("zgstore why 3f9a61c2b07d",)),
    Entry(
        "tag", KEEP, "tag:tag", "Give a snapshot a name that does not move.",
        ("zgstore tag v1 main", "zgstore tag v1 main --force", "zgstore tag rm v1"),
    ),
    Entry("tag rm", KEEP, "tag:remove", "Remove a tag."),
    Entry(
        "ref set", KEEP, "ref:point", "Point a ref at a snapshot.",
        ("zgstore ref set main main@{1}", "zgstore ref set main v2 --expect v1"),
    ),
    Entry("ref rm", KEEP, "ref:remove", "Forget a ref and its reflog."),
    Entry(
        "lock", KEEP, "lock:lock", "Write a snapshot into zgstore.lock and hold it.",
        ("zgstore lock main", "zgstore lock teacher main@{1}"),
    ),
    Entry(
        "hold", KEEP, "hold:hold", "Keep a snapshot from gc for good.",
        ('zgstore hold paper main --reason "table 3"',),
    ),
    Entry("unhold", KEEP, "hold:unhold", "Let a held snapshot go."),
    Entry(
        "lease run", KEEP, "lease:run", "Keep a snapshot from gc while a command runs.",
        ("zgstore lease run main -- python train.py",),
    ),
    Entry("lease ls", KEEP, "lease:ls", "List who is using the store."),
    Entry(
        "copy", CARRY, "copy:copy", "Carry a snapshot to another store.",
        ("zgstore copy main --to /mnt/other", "zgstore copy main --to /mnt/other --columns model.norm:in,labels"),
    ),
    Entry(
        "export", CARRY, "export:export", "Write plain safetensors that need no zgstore.",
        ("zgstore export main out/",),
    ),
    Entry("import zerograph", CARRY, "imports:zerograph", "Bring in a zerograph cache, its digests checked."),
    Entry("import safetensors", CARRY, "imports:safetensors", "Bring in a folder of safetensors files."),
    Entry(
        "verify", TEND, "verify:verify", "Check that every byte is what its name says.",
        (
            "zgstore verify",
            "zgstore verify main --quick",
            "zgstore verify --part 3/20",
            "zgstore verify main --repair --recipe cache.toml",
        ),
    ),
    Entry(
        "gc", TEND, "gc:gc", "Delete what nothing needs any more, in two phases.",
        ("zgstore gc --dry-run", "zgstore gc", "zgstore gc --now"),
    ),
    Entry("reindex", TEND, "reindex:reindex", "Rebuild the index."),
)  # fmt: skip

TABLE: Final = {entry.name: entry for entry in COMMANDS}
