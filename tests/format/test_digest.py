"""Digests name bytes, and no kind can be read as another."""

from __future__ import annotations

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from zgstore.errors import Invalid
from zgstore.format.digest import KINDS, Digest, Hasher, digest_of, digest_prefix


def test_a_blobs_digest_is_the_plain_blake3_of_its_file():
    assert digest_of(None, b"abc").hex == blake3(b"abc").hexdigest()


def test_every_kind_names_the_same_bytes_differently():
    assert len({digest_of(kind, b"abc") for kind in (None, *KINDS)}) == len(KINDS) + 1


def test_an_unknown_kind_is_refused():
    with pytest.raises(Invalid, match="not a kind"):
        Hasher("blob")


@given(st.lists(st.binary(max_size=100), max_size=6))
def test_chunks_are_hashed_as_if_joined(chunks):
    assert digest_of("page", *chunks) == digest_of("page", b"".join(chunks))


def test_threads_change_no_digest():
    data = bytes(3 << 20)
    assert digest_of(None, data, threads=4) == digest_of(None, data)


@given(st.binary(min_size=32, max_size=32))
def test_the_text_form_is_read_back(raw):
    digest = Digest(raw)
    assert Digest.parse(str(digest)) == Digest.parse(digest.hex) == digest
    assert str(digest).startswith("blake3:")
    assert digest.hex.startswith(digest.short)
    assert len(digest.short) == 12


@pytest.mark.parametrize("text", ["", "blake3:", "0" * 63, "0" * 65, "G" * 64, "A" * 64, "sha256:" + "0" * 64])
def test_what_is_not_64_lowercase_hex_digits_is_no_digest(text):
    with pytest.raises(Invalid):
        Digest.parse(text)


def test_a_digest_has_32_bytes():
    with pytest.raises(Invalid, match="32 bytes"):
        Digest(b"short")


def test_prefixes_of_at_least_six_digits_are_accepted():
    assert digest_prefix("blake3:abcdef") == "abcdef"
    assert digest_prefix("abcdef0") == "abcdef0"
    assert digest_prefix("abcde") is None
    assert digest_prefix("ABCDEF") is None
    assert digest_prefix("main") is None
