import contextlib
import errno
import itertools
import os
import stat
import sys

import pytest

from zgstore.errors import Corrupt, Invalid, NoSpace, Transient
from zgstore.storage import drafts, files


def test_a_link_below_the_root_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "inner").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Corrupt), files.directory(tmp_path / "root", "inner"):
        pass


def test_the_root_itself_may_be_a_link(tmp_path):
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with files.directory(tmp_path / "link", "inner") as handle:
        assert files.listing(handle) == []


@pytest.mark.parametrize("kind", ["link", "folder", "fifo", "device"])
def test_only_regular_files_are_opened(tmp_path, kind):
    path = tmp_path / "file"
    if kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("this user cannot make devices")
    with pytest.raises(Corrupt) as caught, files.directory(tmp_path) as handle:
        files.open_regular(handle, "file", path)
    assert str(path) in caught.value.message


def test_a_file_over_its_bound_is_not_read(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 101)
    with pytest.raises(Corrupt, match="bound"), files.directory(tmp_path) as handle:
        files.read_all(handle, "file", tmp_path / "file", limit_bytes=100)


def test_a_small_file_is_written_whole_with_its_own_mode(tmp_path):
    (tmp_path / "tmp").mkdir()
    old = os.umask(0o077)
    try:
        assert files.write_file(tmp_path, ("a", "b"), "name", b"text", mode=0o664, dir_mode=0o2775)
    finally:
        os.umask(old)
    assert (tmp_path / "a" / "b" / "name").read_bytes() == b"text"
    assert stat.S_IMODE((tmp_path / "a" / "b" / "name").stat().st_mode) == 0o664
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o2775
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_small_file_that_must_not_be_replaced_stays(tmp_path):
    (tmp_path / "tmp").mkdir()
    options = {"mode": 0o600, "dir_mode": 0o700}
    assert files.write_file(tmp_path, (), "name", b"first", replace=False, **options)
    assert not files.write_file(tmp_path, (), "name", b"second", replace=False, **options)
    assert (tmp_path / "name").read_bytes() == b"first"
    assert files.write_file(tmp_path, (), "name", b"second", **options)
    assert (tmp_path / "name").read_bytes() == b"second"
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("refused", [False, True])
def test_a_rename_replaces_nothing_even_where_renameat2_is_refused(tmp_path, monkeypatch, refused):
    if refused:
        monkeypatch.setattr(files, "libc", object)
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    with files.directory(tmp_path) as handle:
        with pytest.raises(FileExistsError):
            files.rename_new(handle, "a", handle, "b")
        files.rename_new(handle, "a", handle, "c")
    assert (tmp_path / "b").read_bytes() == b"b"
    assert (tmp_path / "c").read_bytes() == b"a"
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, NoSpace), (errno.EDQUOT, NoSpace), (errno.EIO, Transient), (errno.ESTALE, Transient),
        (errno.EROFS, Invalid), (errno.EMFILE, Transient), (errno.ENOTDIR, Invalid),
    ],
)  # fmt: skip
def test_what_the_system_says_becomes_a_typed_error_with_a_remedy(number, kind):
    with pytest.raises(kind) as caught, files.faults("writing it"):
        raise OSError(number, os.strerror(number))
    assert caught.value.message.startswith("writing it: ")
    assert caught.value.hint
    assert caught.value.fields["errno"] == errno.errorcode[number]


def test_removing_a_tree_follows_no_link(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"x")
    (tmp_path / "gone" / "deep").mkdir(parents=True)
    (tmp_path / "gone" / "deep" / "link").symlink_to(tmp_path / "kept")
    with files.directory(tmp_path) as handle:
        files.remove_tree(handle, "gone")
        files.remove_tree(handle, "never was")
    assert not (tmp_path / "gone").exists()
    assert (tmp_path / "kept" / "file").exists()


def test_the_clock_is_the_file_system_s(store):
    before = store.now()
    (store.path / "tmp" / "probe").write_bytes(b"")
    assert before <= (store.path / "tmp" / "probe").stat().st_mtime <= store.now()


@contextlib.contextmanager
def interrupted(module, at):
    """A KeyboardInterrupt before line ``at`` of those of a module that run in the block; yields how many ran."""
    ran = itertools.count()

    def trace(frame, event, _):
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line" and next(ran) == at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield ran
    finally:
        sys.settrace(before)


def walk(folder):
    with files.directory(folder, "a", "b"):
        pass


def write(folder):
    with files.directory(folder, "a") as handle, contextlib.ExitStack() as hold:
        draft = drafts.Draft(handle, mode=0o444)
        hold.callback(draft.discard)
        draft.write(b"x")
        draft.finish()


@pytest.mark.parametrize(("module", "work"), [(files, walk), (drafts, write)])
def test_an_interrupt_at_any_line_closes_no_descriptor_twice(tmp_path, monkeypatch, module, work):
    (tmp_path / "a" / "b").mkdir(parents=True)
    close, twice = os.close, []

    def counted(handle):
        try:
            close(handle)
        except OSError:
            twice.append(handle)

    monkeypatch.setattr(os, "close", counted)
    for at in itertools.count():
        with contextlib.suppress(KeyboardInterrupt), interrupted(module, at) as ran:
            work(tmp_path)
        assert not twice, f"interrupted before line {at} of those that ran"
        if next(ran) <= at:
            break
    assert at > 5
