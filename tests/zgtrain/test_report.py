"""The page: everything that was measured is on it, nothing is fetched, and a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
from pruned import make_pruned, trained

import zgstore
from zgtrain import load_job
from zgtrain.evaluator import evaluate
from zgtrain.page import SAID
from zgtrain.plots import Line, plot
from zgtrain.report import write_report

pytest.importorskip("transformers")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    path = make_pruned(tmp_path_factory.mktemp("pruned"), module="reported_rows")
    return trained(path), trained(path, source="live", overrides=('output="live"',))


@pytest.fixture(scope="module")
def before(jobs, tmp_path_factory):
    """The page before anybody evaluated."""
    return write_report(jobs[0], tmp_path_factory.mktemp("page") / "before.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(jobs, before, tmp_path_factory):
    evaluate(jobs[0], device="cpu")
    return write_report(jobs[0], tmp_path_factory.mktemp("page") / "report.html", others=jobs[1:])


def test_the_page_fetches_nothing(page):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"https?://|src=|href=|@import|url\(", text)
    assert "<script" not in text


def test_gates_curves_boundaries_economics_and_pins_are_on_it(jobs, page):
    text = page.read_text(encoding="utf-8")
    report = json.loads((jobs[0].folder(1) / "report.json").read_text(encoding="utf-8"))
    for said in (
        "Gates",
        "Training",
        "Boundaries",
        "Economics",
        "Greedy generations",
        "Pins and sizes",
        "teacher.measured",
    ):
        assert said in text
    for said in (report["snapshot"], report["state_digest"], jobs[0].identity(), "prompt 3", "teacher.measured"):
        assert said in text
    assert text.count("<svg") == 6
    assert text.count("class=pass") + text.count("class=fail") == 11
    assert "T(16)" in text


def test_every_table_and_plot_says_what_it_shows(page):
    text = page.read_text(encoding="utf-8")
    assert [name for name, said in SAID.items() if said not in text] == []
    assert text.count("</svg><p class=soft>") == text.count("<svg")
    sections = re.findall(r"<section><h2>[^<]*</h2>(.{7})", text)
    assert sections == ["<p clas"] * 6


def test_what_is_not_measured_yet_is_said_and_not_made_up(before):
    assert "Not evaluated yet" in before
    assert "No live run is measured" in before
    assert "Boundaries" not in before


def test_an_evaluation_of_other_blocks_is_not_shown_as_theirs(jobs, page, tmp_path):
    folder = tmp_path / "again"
    shutil.copytree(jobs[0].output, folder)
    job = load_job(jobs[0].path, [f"output={json.dumps(str(folder))}"])
    path = folder / "block-001" / "report.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**report, "state_digest": "blake3:" + "5" * 64}), encoding="utf-8")
    text = write_report(job, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Not evaluated since these blocks were trained" in text
    assert "gates passed" in page.read_text(encoding="utf-8")
    assert "gates passed" not in text


def test_blocks_of_another_job_have_no_page_of_this_one(jobs, tmp_path):
    with pytest.raises(zgstore.Refused, match="of job") as caught:
        write_report(load_job(jobs[0].path, ["train.seed=9"]), tmp_path / "report.html")
    assert "--set" in caught.value.hint


def test_a_page_of_some_blocks_says_how_many_there_are(jobs, page, tmp_path):
    shutil.copytree(jobs[0].output, tmp_path / "some")
    (tmp_path / "some" / "block-000" / "report.json").unlink()
    job = load_job(jobs[0].path, [f"output={json.dumps(str(tmp_path / 'some'))}"])
    text = write_report(job, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "1 of 2 blocks" in text
    assert ">block 1<" in text
    assert "block 0 of 2 in" in text  # the economics say what they lack
    assert "1 of 2" not in page.read_text(encoding="utf-8")


def test_a_job_without_a_trained_block_has_no_page(jobs, tmp_path):
    with pytest.raises(zgstore.NotFound, match="no trained block"):
        write_report(load_job(jobs[0].path, ['output="nothing"']), tmp_path / "report.html")


def test_text_of_a_model_cannot_become_markup(jobs, page, tmp_path):
    path = jobs[0].output / "evaluation.json"
    whole = path.read_text(encoding="utf-8")
    value = json.loads(whole)
    value["generations"][0]["student"] = "<script>alert(1)</script>"
    path.write_text(json.dumps(value), encoding="utf-8")
    text = write_report(jobs[0], tmp_path / "report.html").read_text(encoding="utf-8")
    path.write_text(whole, encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_a_plot_leaves_out_what_is_no_number():
    svg = plot([Line("a", [(0, 1.0), (1, float("nan")), (2, None), (3, 4.0)])], x="x", y="y")
    (points,) = re.findall(r'polyline points="([^"]*)"', svg)
    assert len(points.split()) == 2
    assert "nothing measured" in plot([Line("a", [(0, None)])], x="x", y="y")
    assert "nothing measured" in plot([Line("a", [(0, -1.0)])], x="x", y="y", log_y=True)
    assert "pays from K = 2" in plot([Line("a", [(1, 5.0), (4, 5.0)])], x="K", y="s", mark=2)


def test_a_legend_of_many_names_has_rows_within_the_picture():
    names = [f"a line of name {number}" for number in range(9)]
    svg = plot([Line(name, [(0, 1.0), (1, 2.0)]) for name in names], x="x", y="y")
    (top, width, height) = map(float, re.findall(r'viewBox="0 (\S+) (\S+) (\S+)"', svg)[0])
    places = {
        name: (float(x), float(y)) for x, y, name in re.findall(r'<text x="(\S+)" y="(\S+)" fill="\S+">([^<]+)<', svg)
    }
    assert set(names) <= set(places)
    assert all(places[name][0] + 5.6 * len(name) <= width and top < places[name][1] < 34 for name in names)
    assert len({places[name] for name in names}) == 9
    assert top + height == 300


def browsed(page, folder, *options):
    """The document that a browser made of a page."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
        f"--user-data-dir={folder}/profile", *options, "--dump-dom", f"file://{page}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt install chromium)")
def test_a_browser_shows_it_whole(page, tmp_path):
    picture = tmp_path / "page.png"
    assert browsed(page, tmp_path, "--window-size=1200,1600", f"--screenshot={picture}").count("<svg") == 6
    assert picture.stat().st_size > 20_000


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt install chromium)")
def test_a_narrow_window_cuts_no_plot(page, tmp_path):
    asked = tmp_path / "asked.html"
    beyond = (
        "<script>document.title = [...document.querySelectorAll('svg')].map(each => "
        "each.getBoundingClientRect().right - each.closest('section').getBoundingClientRect().right).join()</script>"
    )
    asked.write_text(page.read_text(encoding="utf-8") + beyond, encoding="utf-8")
    title = re.search("<title>(.*)</title>", browsed(asked, tmp_path, "--window-size=500,1600"))[1]
    assert [float(each) < 0 for each in title.split(",")] == [True] * 6
