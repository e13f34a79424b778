"""A row as text: its ids read from the store, decoded by the recipe's data factory."""

from __future__ import annotations

from typing import Any, Final

from zgstore.building.recipe import load_recipe
from zgstore.errors import Invalid
from zgstore.format.digest import Digest
from zgstore.reading.opening import read
from zgstore.storage.store import Store

IDS: Final = "input_ids"


def decode_row(store: Store, digest: Digest, row: int, recipe: str) -> dict[str, Any]:
    """One row's text.

    Args:
        store: Where the snapshot is.
        digest: Which.
        row: Its index, as a reader counts.
        recipe: The recipe whose data factory has ``.decode(ids)``.

    Raises:
        Invalid: if there is no such row, no column ``input_ids``, or no ``.decode``.
    """
    spec = load_recipe(recipe).data
    source = spec.batches().source
    decode = getattr(source, "decode", None)
    if not callable(decode):
        raise Invalid(f"{spec.factory.text!r} returned nothing with .decode(ids)", hint="give it that method")
    with read(store, digest, columns=[IDS]) as reader:
        if not -len(reader) <= row < len(reader):
            raise Invalid(f"there is no row {row}", hint=f"rows are 0 to {len(reader) - 1}")
        ids = reader[row][IDS]
    return {"snapshot": str(digest), "row": row, "tokens": ids.numel(), "text": str(decode(ids))}
