"""Probes: random directions v with E[v vᵀ] = I, each a pure function of (seed, step, block, node, k) and its place.

R rows, d their width, k the number of a probe. A row is what is probed by itself: a token, a row of scores. A row may
have coordinates that are not active, where every probe is 0; d is then the number of those that are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

import zgstore
from zgtrain.gradient.philox import WORD, Key, philox

_SIGNS_OF_A_CALL: Final = 128  # four words of 32 bits
_NORMALS_OF_A_CALL: Final = 4
_CALLS_AT_ONCE: Final = 1 << 14
_VALUES, _OFFSETS = 0, 1  # what a counter is for


def key_of(*numbers: int) -> Key:
    """The key of one node's probes.

    Args:
        numbers: Seed, step, block, node and whatever else tells two estimates apart.
    """
    digest = zgstore.digest_of(None, b"zgtrain 1 probes\0", json.dumps(numbers).encode())
    number = int(str(digest).rpartition(":")[2][:16], 16)
    return number >> 32, number & WORD


@dataclass(frozen=True, slots=True)
class Rows:
    """What is probed.

    Args:
        count: R.
        width: Of all coordinates.
        device: Where.
        dtype: Of the probes.
        active: bool ``[R, width]``; None: all are.
    """

    count: int
    width: int
    device: torch.device
    dtype: torch.dtype
    active: Tensor | None = None

    @property
    def dimension(self) -> Tensor:
        """How many coordinates are active, at least 1: int64 ``[R, 1]``, or of one row for all."""
        if self.active is None:
            return torch.full((1, 1), self.width, device=self.device)
        return self.active.sum(-1, keepdim=True).clamp_min(1)

    def span(self, count: int) -> Tensor:
        """0 … count − 1."""
        return torch.arange(count, device=self.device)


def draw(kind: str, numbers: Sequence[int], key: Key, rows: Rows) -> Tensor:
    """Probes of the given numbers, independent of each other (unless orthogonal) and from row to row.

    Args:
        kind: One of ``KINDS``.
        numbers: k of each.
        key: Of `key_of`.
        rows: What is probed.

    Returns:
        ``[len(numbers), R, width]``.
    """
    k = torch.tensor(numbers, device=rows.device).view(-1, 1, 1)
    probes = KINDS[kind](k, key, rows)
    return probes if rows.active is None else probes.masked_fill_(~rows.active, 0.0)


def _rademacher(k: Tensor, key: Key, rows: Rows) -> Tensor:
    """±1, each with probability ½."""
    words = torch.stack(_words(k, key, rows, -(-rows.width // _SIGNS_OF_A_CALL)), dim=-1)
    octets = (words.unsqueeze(-1) >> rows.span(4) * 8) & 0xFF
    # Eight signs at a time, from a table of all 256 octets: a tenth of the time that single bits take.
    table = 1.0 - 2.0 * ((rows.span(256).unsqueeze(-1) >> rows.span(8)) & 1).to(rows.dtype)
    signs = functional.embedding(octets, table)
    return signs.flatten(2)[..., : rows.width]


def _gaussian(k: Tensor, key: Key, rows: Rows) -> Tensor:
    """Standard normal, by Box and Muller's transform."""
    words = _words(k, key, rows, -(-rows.width // _NORMALS_OF_A_CALL))
    unit = [(word.to(rows.dtype) + 0.5) / (WORD + 1) for word in words]
    radii = [(-2.0 * each.log()).clamp_min(0.0).sqrt() for each in unit[:2]]
    angles = [2.0 * math.pi * each for each in unit[2:]]
    pairs = [part for r, phi in zip(radii, angles, strict=True) for part in (r * phi.cos(), r * phi.sin())]
    return torch.stack(pairs, dim=-1).flatten(2)[..., : rows.width]


def _sphere(k: Tensor, key: Key, rows: Rows) -> Tensor:
    """Uniform on the sphere of radius √d."""
    normal = _gaussian(k, key, rows)
    if rows.active is not None:
        normal = normal.masked_fill(~rows.active, 0.0)
    length = normal.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    scale: Tensor = rows.dimension.to(rows.dtype).sqrt() / length
    return normal * scale


def _orthogonal(k: Tensor, key: Key, rows: Rows) -> Tensor:
    """Columns of Hartley's transform times √d, behind random signs: any d of them that follow each other are a basis.

    v_k[i] = s_i cas(2π i j / d), cas = cos + sin, j = (o + k) mod d, with signs s and an offset o that are drawn anew
    for each row and each d probes. The offset makes the squares' mean 1, the signs make the products' mean 0. It is
    what random signs before a Hadamard transform are, for every d and not for powers of two alone; unlike columns of a
    Haar matrix, each probe can be had without the others.
    """
    dimension = rows.dimension
    group = k // dimension
    nothing = torch.zeros_like(group)
    offset = philox((nothing, _row_numbers(rows), group, nothing + _OFFSETS), key)[0]
    column = (offset + k) % dimension
    place = rows.span(rows.width) if rows.active is None else (rows.active.cumsum(-1) - 1).clamp_min(0)
    turns = (place * column % dimension).to(rows.dtype) / dimension
    return math.sqrt(2.0) * torch.sin(2.0 * math.pi * turns + math.pi / 4) * _rademacher(group, key, rows)


KINDS: Final[Mapping[str, Callable[[Tensor, Key, Rows], Tensor]]] = {
    "rademacher": _rademacher, "gaussian": _gaussian, "sphere": _sphere, "orthogonal": _orthogonal,
}  # fmt: skip


def _words(k: Tensor, key: Key, rows: Rows, calls: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of each call: ``[…, R, calls]``; some rows at a time, for the rounds' numbers to stay in a cache."""
    several = max(1, _CALLS_AT_ONCE // (calls * len(k)))
    k = k.expand(-1, rows.count, 1)
    split = partial(torch.split, split_size_or_sections=several)
    pieces = zip(split(_row_numbers(rows)), split(k, dim=1), split(torch.full_like(k, _VALUES), dim=1), strict=True)
    parts = [philox((rows.span(calls), *piece), key) for piece in pieces]
    a, b, c, d = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    return a, b, c, d


def _row_numbers(rows: Rows) -> Tensor:
    return rows.span(rows.count).unsqueeze(-1)
