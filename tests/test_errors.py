"""An error is two lines that people read, however long what it quotes is."""

from __future__ import annotations

import pickle

from zgstore.errors import MAX_CHARACTERS, Corrupt, Invalid


def test_a_message_keeps_its_ends_and_a_bounded_length():
    error = Invalid("the name " + "x" * 100_000 + " is none", hint="one of " + "y" * 100_000, name="x" * 100_000)
    for text, begin in ((error.message, "the name x"), (error.hint, "one of y"), (str(error), "the name x")):
        assert len(text) <= MAX_CHARACTERS
        assert text.startswith(begin)
    assert error.message.endswith("x is none")
    assert len(error.fields["name"]) == 100_000  # programs get all of it


def test_what_is_short_is_kept_as_it_is_through_a_worker_and_a_loader():
    error = Corrupt("a" * MAX_CHARACTERS, hint="b", object="c", expected=1, actual=2, path="d")
    for again in (error, pickle.loads(pickle.dumps(error)), Corrupt(str(error.carried()))):
        assert (again.message, again.hint, again.object, again.path) == (error.message, "b", "c", "d")
