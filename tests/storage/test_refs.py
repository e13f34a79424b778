import os
import threading

import pytest

from zgstore.errors import Conflict, Corrupt, Invalid, NotFound
from zgstore.format.digest import digest_of
from zgstore.storage.refs import ANY, Ref

A, B, C = (digest_of("snapshot", name) for name in (b"a", b"b", b"c"))
TOLD = digest_of("record", b"told")


@pytest.fixture
def refs(store):
    return store.refs


def test_a_ref_is_one_text_digest_and_a_newline(refs):
    refs.move("team/main", "head", A)
    assert (refs.root / "refs" / "heads" / "team" / "main").read_text() == f"{A}\n"
    assert refs.get("team/main") == A


def test_a_move_compares_with_what_was_expected(refs):
    refs.move("main", "head", A, expect=None)
    with pytest.raises(Conflict):
        refs.move("main", "head", B, expect=None)
    with pytest.raises(Conflict) as caught:
        refs.move("main", "head", B, expect=C)
    assert caught.value.fields["actual"] == str(A)
    assert refs.get("main") == A
    refs.move("main", "head", B, expect=A)
    refs.move("main", "head", C, expect=ANY)
    assert refs.get("main") == C


def test_of_movers_at_once_each_expectation_holds_for_one(refs):
    refs.move("main", "head", A)
    won = []

    def race(number):
        new = digest_of("snapshot", bytes([number]))
        try:
            refs.move("main", "head", new, expect=A)
        except Conflict:
            return
        won.append(new)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [refs.get("main")] == won
    assert len(refs.log("main")) == 2


def test_the_log_tells_each_move_newest_first(refs):
    refs.move("main", "head", A, record=TOLD)
    refs.move("main", "head", B)
    refs.move("main", "head", B)  # no move
    assert [(entry.old, entry.new, entry.record) for entry in refs.log("main")] == [(A, B, None), (None, A, TOLD)]
    assert [refs.at("main", n) for n in range(2)] == [B, A]
    with pytest.raises(NotFound, match="older than its history"):
        refs.at("main", 2)


def test_a_move_that_was_logged_and_never_took_place_is_no_history(refs, monkeypatch):
    refs.move("main", "head", A)
    real = os.rename

    def stop(source, target, **handles):
        if target == "main":
            raise KeyboardInterrupt
        real(source, target, **handles)

    monkeypatch.setattr(os, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        refs.move("main", "head", B)
    monkeypatch.undo()
    assert refs.get("main") == A
    assert [entry.new for entry in refs.log("main")] == [A]
    refs.move("main", "head", C)
    assert [entry.new for entry in refs.log("main")] == [C, A]


def test_a_tag_and_a_head_may_share_a_name_and_the_head_comes_first(refs):
    refs.move("one", "tag", A)
    assert refs.get("one") == A
    refs.move("one", "head", B)
    assert (refs.get("one"), refs.get("one", "tag")) == (B, A)
    assert refs.list() == [Ref("one", "head", B), Ref("one", "tag", A)]
    assert [entry.new for entry in refs.log("one", "tag")] == [A]


def test_names_of_one_kind_must_not_clash(refs):
    refs.move("team/main", "head", A)
    for name in ("team", "Team/main", "team/main/x"):
        with pytest.raises(Invalid):
            refs.move(name, "head", A)
    with pytest.raises(Invalid):
        refs.move("../../etc/passwd", "head", A)


def test_removing_forgets_the_name_its_history_and_empty_folders(refs):
    refs.move("team/main", "head", A)
    refs.move("team/main", "head", B)
    assert refs.remove("team/main", "head") == B
    assert refs.get("team/main") is None
    assert refs.list() == []
    with pytest.raises(NotFound):
        refs.remove("team/main", "head")
    refs.move("team", "head", C)
    assert [(entry.old, entry.new) for entry in refs.log("team")] == [(None, C)]


def test_a_ref_that_was_begun_and_abandoned_leaves_the_name_free(refs):
    (refs.root / "refs" / "heads" / "team" / "deep").mkdir(parents=True)
    refs.move("team", "head", A)
    assert refs.get("team") == A


def test_what_is_no_name_names_nothing(refs):
    refs.move("team/main", "head", A)
    for name in ("team", "team/main/x", "..", "", "team/main.lock"):
        assert refs.get(name) is None


def test_a_torn_ref_is_named_and_setting_it_mends_it(refs):
    refs.move("main", "head", A)
    refs.move("other", "head", B)
    path = refs.root / "refs" / "heads" / "main"
    path.write_text("blake3:12")
    with pytest.raises(Corrupt) as caught:
        refs.get("main")
    assert caught.value.path == str(path)
    damaged = []
    assert [ref.name for ref in refs.list(damaged=damaged)] == ["other"]
    assert [error.path for error in damaged] == [str(path)]
    assert refs.last_logged("main", "head") == A
    refs.move("main", "head", A)
    assert refs.get("main") == A
    assert [entry.new for entry in refs.log("main")][-1] == A


def test_a_torn_entry_does_not_end_the_history(refs):
    for digest in (A, B, C):
        refs.move("main", "head", digest)
    (refs.root / "reflog" / "heads" / "main" / "000000000002").write_text("torn")
    with pytest.raises(Corrupt):
        refs.log("main")
    damaged = []
    assert [entry.new for entry in refs.log("main", damaged=damaged)] == [C, A]
    assert len(damaged) == 1
    refs.move("main", "head", A)
    assert refs.remove("main", "head") == A


def test_a_link_in_the_place_of_a_ref_is_not_followed(refs, tmp_path):
    (tmp_path / "outside").write_text(f"{A}\n")
    (refs.root / "refs" / "heads" / "main").symlink_to(tmp_path / "outside")
    with pytest.raises(Corrupt):
        refs.get("main")


def test_forgotten_entries_are_no_history(refs):
    for digest in (A, B, C):
        refs.move("main", "head", digest)
    refs.forget("main", "head", through=refs.log("main")[1].number)
    assert [entry.new for entry in refs.log("main")] == [C]
    assert refs.at("main", 0) == C
    with pytest.raises(NotFound):
        refs.at("main", 1)


def entry_file(refs, number, name="main"):
    return refs.root / "reflog" / "heads" / name / f"{number:012d}"


def moved(refs, *digests, name="main"):
    for digest in digests:
        refs.move(name, "head", digest)


def test_a_history_that_follows_has_no_break_whatever_was_abandoned_or_forgotten(refs):
    moved(refs, A, B)
    entry_file(refs, 3).write_text(f"{B} {C} -\n")  # killed before the ref was written
    assert refs.history("main").breaks == ()
    moved(refs, A, C)
    assert [entry.new for entry in refs.log("main")] == [C, A, B, A]
    refs.forget("main", "head", through=4)
    assert [entry.number for entry in refs.history("main").entries] == [5]
    assert refs.history("main").breaks == ()


def test_a_history_read_while_the_name_moves_has_no_break(refs, monkeypatch):
    refs.move("main", "head", A)
    moves, read = [B, C], refs._read_entries

    def after_a_pause(*args, **keywords):
        while moves:  # by others, while this reader has seen the name and not yet its log
            with monkeypatch.context() as unpaused:
                unpaused.setattr(refs, "_read_entries", read)
                refs.move("main", "head", moves.pop(0))
        return read(*args, **keywords)

    monkeypatch.setattr(refs, "_read_entries", after_a_pause)
    history = refs.history("main")
    assert [entry.new for entry in history.entries] == [C, B, A]
    assert not history.breaks


def test_a_lost_entry_is_a_break_and_hides_nothing_before_it(refs):
    moved(refs, A, B, C)
    entry_file(refs, 2).unlink()
    history = refs.history("main")
    assert [entry.new for entry in history.entries] == [C, A]
    assert history.breaks == ((entry_file(refs, 3), B),)


@pytest.mark.parametrize("field", ["old", "new"])
def test_an_entry_that_names_another_is_a_break_and_hides_nothing(refs, field):
    moved(refs, A, B, C)
    other = digest_of("snapshot", b"other")
    entry_file(refs, 2).write_text(f"{other} {B} -\n" if field == "old" else f"{A} {other} -\n")
    history = refs.history("main")
    assert [entry.new for entry in history.entries] == [C, B if field == "old" else other, A]
    assert history.breaks == (
        ((entry_file(refs, 2), other),) if field == "old" else ((entry_file(refs, 3), B),)
    )  # fmt: skip


def test_two_entries_that_were_exchanged_are_a_break_and_hide_nothing(refs):
    moved(refs, A, B, C)
    first, second = entry_file(refs, 1), entry_file(refs, 2)
    text = first.read_text()
    first.write_text(second.read_text())
    second.write_text(text)
    history = refs.history("main")
    assert {entry.new for entry in history.entries} == {A, B, C}
    assert history.breaks[0] == (entry_file(refs, 3), B)


def test_two_names_that_were_exchanged_are_breaks_and_setting_them_again_ends_that(refs):
    moved(refs, A, B)
    moved(refs, C, name="other")
    here, there = (refs.root / "refs" / "heads" / name for name in ("main", "other"))
    text = here.read_text()
    here.write_text(there.read_text())
    there.write_text(text)
    assert refs.history("main").breaks == ((here, C),)
    assert [entry.new for entry in refs.log("main")] == [B, A]
    moved(refs, C)  # it is meant
    moved(refs, C, name="other")
    assert (refs.history("main").breaks, refs.history("other").breaks) == ((), ())
    assert [entry.new for entry in refs.log("main")] == [C, B, A]


def test_a_name_that_is_gone_and_has_a_log_is_told(refs):
    moved(refs, A, B)
    (refs.root / "refs" / "heads" / "main").unlink()
    ((name, kind, log),) = refs.lost()
    assert (name, kind, [entry.new for entry in log]) == ("main", "head", [B, A])
    moved(refs, B)
    assert refs.lost() == []


def test_a_name_that_is_given_and_moved_while_its_log_is_read_is_not_gone(refs, monkeypatch):
    moved(refs, A)
    (refs.root / "refs" / "heads" / "main").unlink()  # logged, and not yet written
    read = refs._read_entries

    def after_a_pause(*args, **keywords):
        monkeypatch.setattr(refs, "_read_entries", read)
        moved(refs, B, C)
        return read(*args, **keywords)

    monkeypatch.setattr(refs, "_read_entries", after_a_pause)
    assert refs.lost() == []


def test_a_removal_that_is_killed_leaves_a_name_that_follows(refs, monkeypatch):
    moved(refs, A, B, C)
    real, left = os.unlink, [2]

    def stop(name, **how):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        real(name, **how)

    monkeypatch.setattr(os, "unlink", stop)
    with pytest.raises(KeyboardInterrupt):
        refs.remove("main", "head")
    monkeypatch.undo()
    assert [entry.new for entry in refs.log("main")] == [C, B]
    assert refs.history("main").breaks == ()
    assert refs.remove("main", "head") == C
    assert refs.lost() == []


def test_a_name_whose_log_is_gone_is_logged_before_it_moves_on(refs):
    moved(refs, A)
    entry_file(refs, 1).unlink()  # a removal that was killed before it came to the name
    moved(refs, B)
    assert [(entry.old, entry.new) for entry in refs.log("main")] == [(A, B), (None, A)]
    assert refs.history("main").breaks == ()


def test_the_nearest_names_are_hinted_at(refs):
    refs.move("experiment-1", "head", A)
    with pytest.raises(NotFound) as caught:
        refs.log("experiment1")
    assert "experiment-1" in caught.value.hint


def test_a_hold_keeps_its_digest_and_its_reason(refs):
    refs.hold("lock/main/1", A, "paper\nfigure 2")
    (hold,) = refs.holds()
    assert (hold.name, hold.snapshot, hold.reason) == ("lock/main/1", A, "paper figure 2")
    refs.hold("lock/main/1", A)
    with pytest.raises(Conflict):
        refs.hold("lock/main/1", B)
    assert refs.unhold("lock/main/1") == A
    assert refs.holds() == []
    with pytest.raises(NotFound):
        refs.unhold("lock/main/1")
