"""The report on made-up rows: its files, their content, and the rules that figures follow."""

import dataclasses
import io
import json
import random
import re
from html.parser import HTMLParser

import matplotlib
import pytest
from rich.console import Console

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.comparisons import Cell, Matrix, StorageCost
from kvweave_lab.eval.report import About, rows_json, rows_table, write_report
from kvweave_lab.eval.report.curves import pareto_front, score_by_cost, score_by_ratio
from kvweave_lab.eval.report.figures import matrix_heat_map, score_per_task
from kvweave_lab.eval.rows import Row
from kvweave_lab.report import few_prompts_warning
from kvweave_lab.report.figures import DARK, LIGHT, rc_params, series_styles, to_png
from kvweave_lab.statistics import Estimate

ABOUT = About(
    model="tiny <model>",
    dtype="float32",
    device="cpu",
    split="dev",
    seeds=(3, 4),
    samples=200,
    left_out=0,
    chunk_tokens=96,
    context_tokens=(512,),
    command="kvweave eval --task coref --output 'a & b'",
    date="2026-01-02",
    version="0.1.0",
    minutes=1.5,
)
BASELINES = {"full": (1.0,), "naive": (0.0,), "direct": (0.0,), "reuse": (0.0,)}
SWEPT = {"picky": (0.1, 0.3, 1.0)}
FIFTEEN = BASELINES | {f"recipe{number:02}": (0.05, 0.2, 0.5, 1.0) for number in range(11)}


def about(value):
    return Estimate(value, value - 0.04, value + 0.02)


def row(task, recipe, ratio, score, *, context_tokens=512, samples=200, coverage=None):
    return Row(
        coverage=coverage,
        task=task,
        context_tokens=context_tokens,
        recipe=recipe,
        ratio=ratio,
        samples=samples,
        score=about(score),
        full_score=about(0.95),
        reuse_score=about(0.4),
        lost=about(0.95 - score),
        normalised=about((score - 0.4) / 0.55) if task != "easy" else None,
        agreement=about(score - 0.02),
        kl=about(1 - score),
        faithfulness=about(0.9),
        rows=Estimate(*(tokens * (0.37 if ratio is None else ratio) for tokens in (480, 470, 490))),
        selection=about(0.5) if ratio is None or 0 < ratio < 1 else None,
    )


def made_up(tasks=("easy", "coref"), recipes=None, **more):
    recipes = BASELINES | SWEPT if recipes is None else recipes
    rng = random.Random(0)
    return [
        row(task, recipe, ratio, 0.95 if ratio == 1 else rng.uniform(0.1, 0.9), **more)
        for task in (*tasks, "overall")
        for recipe, ratios in recipes.items()
        for ratio in ratios
    ]


def by_coverage(tasks=("easy", "coref")):
    """A recipe at a ratio, and the same at two coverages of which one is as large."""
    return [
        row(task, "picky", ratio, score, coverage=coverage)
        for task in (*tasks, "overall")
        for ratio, coverage, score in ((0.2, None, 0.5), (None, 0.2, 0.6), (None, 0.9, 0.8))
    ]


def crossed(selectors, preparations, context_tokens=512):
    cells = [
        Cell(
            *(selector, preparation, f"{preparation}+{selector}", 200, about(0.5 + place / 20), about(0.4)),
            gain=None if preparation == "isolated" else about(place / 10 - 0.2),
            rows=about(80),
        )
        for selector in selectors
        for place, preparation in enumerate(preparations)
    ]
    return Matrix(context_tokens, 0.15, tuple(selectors), tuple(preparations), tuple(cells))


def drawn(draw, rows, theme=LIGHT):
    with matplotlib.rc_context(rc_params(theme)):
        figure = draw(rows, series_styles(list(dict.fromkeys(row.series for row in rows)), theme), theme)
        figure.draw_without_rendering()
    return figure


def visible(figure):
    return [axes for axes in figure.axes if axes.axison]


class Cells(HTMLParser):
    """Texts of table cells by their class, and every address that the page refers to."""

    def __init__(self, page):
        super().__init__()
        self.heat, self.measures, self.addresses, self.tags = [], [], [], set()
        self._cell = None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.add(tag)
        self.addresses += [attributes[name] for name in ("src", "srcset", "href") if name in attributes]
        if tag == "td":
            self._cell = self.heat if attributes.get("class") == "heat" else self.measures
            self._cell.append("")

    def handle_data(self, data):
        if self._cell is not None:
            self._cell[-1] += data

    def handle_endtag(self, tag):
        if tag == "td":
            self._cell = None


@pytest.fixture(scope="module")
def rows():
    return made_up()


@pytest.fixture(scope="module")
def report(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "new" / "folder"
    return write_report(folder, rows, ABOUT)


@pytest.fixture(scope="module")
def page(report):
    return report[-1].read_text("utf-8")


def test_the_folder_contains_rows_figures_and_the_page_and_nothing_else(report):
    names = (
        "rows.json score-per-task-512.png score-by-ratio-512.png score-by-cost-512.png report.html".split()
    )
    assert [path.name for path in report] == names
    assert sorted(path.name for path in report[0].parent.iterdir()) == sorted(names)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in report[1:-1])


def test_rows_json_has_the_run_and_the_rows(report, rows):
    content = json.loads(report[0].read_text("utf-8"))
    assert content["about"]["seeds"] == [3, 4]
    assert content["rows"] == rows_json(rows)
    assert content["matrices"] == []


def test_the_page_needs_nothing_outside_itself(page):
    found = Cells(page)
    assert len(found.addresses) == 6  # three figures, light and dark
    assert all(address.startswith("data:image/png;base64,") for address in found.addresses)
    assert not found.tags & {"script", "link", "iframe"}
    text = re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)
    assert not re.search(r"https?:|@import|url\(", text)


def test_every_row_is_on_the_page(page, rows):
    found = Cells(page)
    assert sorted(found.heat) == sorted(f"{row.score.value:.2f}±.03" for row in rows)
    overall = [row for row in rows if row.task == "overall"]
    for row in overall:
        assert f"{row.score.value:.3f}±.030" in found.measures
        assert f"{row.kl.value:.3f}±.030" in found.measures
        assert f"{row.rows.value:,.0f}±{10 * row.ratio:.0f}" in found.measures
        assert row.selection is None or "0.50±.03" in found.measures


def test_the_page_has_the_loss_of_reuse_and_its_interval(page, rows):
    (reuse,) = (row for row in rows if (row.task, row.recipe) == ("overall", "reuse"))
    said = f'<span class="big">{reuse.lost.value:.3f}</span><span class="what">lost by reuse</span>'
    assert said + '<span class="what">±0.030</span>' in page


def test_the_description_of_the_run_is_escaped_and_complete(page):
    assert "tiny &lt;model&gt;" in page
    assert "kvweave eval --task coref --output &#x27;a &amp; b&#x27;" in page
    for said in ("float32", "cpu", "dev", "3, 4", "200 per length and seed", "2026-01-02", "1.5 minutes"):
        assert said in page


def test_the_page_warns_of_few_prompts(tmp_path, page):
    few = write_report(tmp_path, made_up(("coref",), {"full": (1.0,), "reuse": (0.0,)}, samples=12), ABOUT)
    assert few_prompts_warning(12) in few[-1].read_text("utf-8")
    assert "rest on 12 prompts; below 200" in few_prompts_warning(12)
    assert few_prompts_warning(200) is None
    assert "not to be quoted" not in page


@pytest.mark.usefixtures("undrawn")
def test_prompts_that_were_left_out_are_counted(tmp_path, page):
    assert "left out" not in page
    some = dataclasses.replace(ABOUT, left_out=3)
    files = write_report(tmp_path, made_up(("coref",), {"reuse": (0.0,)}), some)
    assert "<dt>left out</dt><dd>3 prompts, too long for the model</dd>" in files[-1].read_text("utf-8")


@pytest.mark.usefixtures("undrawn")
def test_every_length_has_its_figures_and_tables(tmp_path):
    recipes = {"full": (1.0,), "reuse": (0.0,)}
    both = [
        *made_up(("coref",), recipes, context_tokens=0),
        *made_up(("coref",), recipes, context_tokens=2048),
    ]
    files = write_report(tmp_path, both, ABOUT)
    names = ["score-per-task", "score-by-ratio", "score-per-task-2048", "score-by-ratio-2048"]
    assert [path.stem for path in files[1:-1]] == names  # nothing was recomputed: no figure of its cost
    page = files[-1].read_text("utf-8")
    assert "<h2>Samples from a file</h2>" in page
    assert "<h2>2,048 tokens of context</h2>" in page


@pytest.mark.usefixtures("undrawn")
def test_samples_from_a_file_have_no_seed_and_no_split(tmp_path):
    about_file = dataclasses.replace(ABOUT, split="niah.jsonl", seeds=(), samples=None, context_tokens=())
    files = write_report(tmp_path, made_up(("niah",), {"reuse": (0.0,)}, context_tokens=0), about_file)
    page = files[-1].read_text("utf-8")
    assert "<dt>file</dt><dd>niah.jsonl</dd>" in page
    assert "<dt>prompts</dt><dd>all of the file</dd>" in page
    assert "<dt>seed" not in page
    assert "as in the file" in page


@pytest.mark.usefixtures("undrawn")
def test_only_figures_of_an_earlier_report_are_deleted(tmp_path):
    recipes = {"full": (1.0,), "reuse": (0.0,)}
    write_report(tmp_path, made_up(("coref",), BASELINES | SWEPT, context_tokens=2048), ABOUT)
    (tmp_path / "score-of-mine.png").write_bytes(b"mine")
    files = write_report(tmp_path, made_up(("coref",), recipes), ABOUT)
    assert {path.name for path in tmp_path.iterdir()} == {"score-of-mine.png", *(path.name for path in files)}


@pytest.mark.usefixtures("undrawn")
def test_a_coverage_is_a_separate_series_and_never_a_ratio(tmp_path, rows):
    files = write_report(tmp_path, [*rows, *by_coverage()], ABOUT)
    content = json.loads(files[0].read_text("utf-8"))
    found = [(one["recipe"], one["ratio"], one["coverage"]) for one in content["rows"][-3:]]
    assert found == [("picky", 0.2, None), ("picky", None, 0.2), ("picky", None, 0.9)]
    page = files[-1].read_text("utf-8")
    assert page.count("picky by coverage</th>") == 2  # overall, and task by task
    assert f"<td>{480 * 0.37:,.0f}<small>" in page
    [axes] = visible(drawn(score_by_ratio, by_coverage(("coref",))))
    assert [list(line.get_xdata()) for line in axes.get_lines() if line.get_marker() != "None"] == [[0.2]]
    [axes] = visible(drawn(score_by_cost, [one for one in by_coverage() if one.task == "overall"]))
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {"picky", "picky by coverage"} <= set(labels)


def test_a_matrix_is_drawn_tabulated_and_put_into_words(tmp_path, rows, request):
    matrix = crossed(["picky", "other"], ["isolated", "similar"])
    files = write_report(tmp_path, rows, ABOUT, [matrix])
    assert "matrix-0.15-512.png" in [path.name for path in files]
    assert len(json.loads(files[0].read_text("utf-8"))["matrices"][0]["cells"]) == 4
    page = files[-1].read_text("utf-8")
    assert "similar lifts 0 of 2 selectors and lowers 2" in page
    assert "-0.100±.030" in Cells(page).heat[-1]
    request.getfixturevalue("undrawn")
    write_report(tmp_path, rows, ABOUT)
    assert not (tmp_path / "matrix-0.15-512.png").exists()


@pytest.mark.parametrize("selectors", [1, 14])
def test_a_matrix_figure_has_the_value_of_every_cell(selectors):
    matrix = crossed(
        [f"selector-{n:09}" for n in range(selectors)], ["bare", "isolated", "similar", "following"]
    )
    with matplotlib.rc_context(rc_params(LIGHT)):
        figure = matrix_heat_map(matrix, LIGHT)
        figure.draw_without_rendering()
    [axes] = figure.axes
    assert len(axes.texts) == 7 * selectors  # of isolated chunks no gain
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])
    paper = figure.bbox
    for box in [*boxes, axes.get_tightbbox(), *(text.get_window_extent() for text in figure.texts)]:
        assert paper.x0 <= box.x0
        assert box.x1 <= paper.x1
        assert paper.y0 <= box.y0
        assert box.y1 <= paper.y1


def test_a_report_needs_rows(tmp_path):
    with pytest.raises(InvalidRequest, match="no rows"):
        write_report(tmp_path, [], ABOUT)


@pytest.mark.usefixtures("undrawn")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidRequest, match=r"cannot be written to .*file.*--output"):
        write_report(tmp_path / "file" / "below", made_up(("coref",), {"reuse": (0.0,)}), ABOUT)


@pytest.mark.usefixtures("undrawn")
def test_a_file_that_cannot_be_replaced_leaves_no_temporary_file(tmp_path):
    (tmp_path / "report.html" / "inside").mkdir(parents=True)
    with pytest.raises(InvalidRequest, match="cannot be written"):
        write_report(tmp_path, made_up(("coref",), {"reuse": (0.0,)}), ABOUT)
    assert not list(tmp_path.glob(".*"))
    assert (tmp_path / "report.html" / "inside").is_dir()


def test_json_has_numbers_under_the_names_of_the_fields(rows):
    plain = rows_json(rows)[0]
    names = "task recipe ratio samples score full_score reuse_score normalised agreement kl rows selection".split()
    assert set(names) <= set(plain)
    assert plain["score"] == rows[0].score.value
    assert plain["score_interval"] == [rows[0].score.low, rows[0].score.high]
    assert (plain["rows"], plain["rows_interval"]) == (480.0, [470.0, 490.0])
    assert plain["lost_interval"] == [rows[0].lost.low, rows[0].lost.high]
    assert plain["normalised"] is plain["normalised_interval"] is None
    assert plain["selection"] is plain["selection_interval"] is None
    assert json.loads(json.dumps(rows_json(rows))) == rows_json(rows)


def test_the_table_fits_a_narrow_terminal_with_overall_last(rows):
    said = io.StringIO()
    Console(file=said, width=80).print(rows_table(rows))
    lines = said.getvalue().splitlines()
    assert "…" not in said.getvalue()
    assert [line.split()[0] for line in lines if line[:1].strip()][1:-1] == [
        "512",
        "easy",
        "coref",
        "overall",
    ]
    first = rows[0]
    assert f"{first.score.value:.3f} ±.030" in lines[2]
    assert len(lines) == len(rows) + 3  # head, length, explanation


def test_the_only_task_has_the_only_panel():
    figure = drawn(score_by_ratio, made_up(("coref",)))
    assert [axes.get_title(loc="left") for axes in visible(figure)] == ["coref"]


def test_a_swept_recipe_is_a_line_with_a_band_and_a_single_ratio_a_marker():
    [axes] = visible(
        drawn(score_by_ratio, made_up(("coref",), SWEPT | {"once": (0.25,), "ends": (0.0, 1.0)}))
    )
    assert len(axes.collections) == 1
    markers = [list(line.get_xdata()) for line in axes.get_lines() if line.get_marker() != "None"]
    assert markers == [[0.1, 0.3, 1.0], [0.25], [0.0], [1.0]]


def test_markers_at_the_same_ratio_are_apart():
    [axes] = visible(drawn(score_by_ratio, made_up(("coref",), dict.fromkeys("abc", (0.2,)))))
    places = [line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() != "None"]
    assert len(set(places)) == 3
    assert sum(places) / 3 == pytest.approx(0.2)


@pytest.mark.parametrize("draw", [score_by_ratio, score_by_cost, score_per_task])
@pytest.mark.parametrize("tasks", [1, 11])
def test_nothing_covers_data_or_leaves_the_figure(draw, tasks):
    rows = made_up([f"task{number:09}" for number in range(tasks)], FIFTEEN)
    if draw is score_by_cost:
        rows = [row for row in rows if row.task == "overall"]
    figure = drawn(draw, rows)
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    [legend] = [legend.get_window_extent() for legend in legends]
    assert not any(legend.overlaps(axes.get_window_extent()) for axes in visible(figure))
    paper = figure.bbox
    texts = [text.get_window_extent() for text in figure.texts]
    for box in [legend, *texts, *(axes.get_tightbbox() for axes in visible(figure))]:
        assert paper.x0 <= box.x0
        assert paper.y0 <= box.y0
        assert box.x1 <= paper.x1
        assert box.y1 <= paper.y1


def test_names_at_the_front_cover_neither_points_nor_each_other():
    rows = [row for row in made_up((), FIFTEEN) if row.task == "overall"]
    [axes] = visible(drawn(score_by_cost, rows))
    boxes = [text.get_window_extent() for text in axes.texts]
    points = axes.transData.transform(
        [(row.rows.value, row.score.value) for row in rows if row.recipe != "full"]
    )
    assert boxes
    assert not any(box.contains(x, y) for box in boxes for x, y in points)
    assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])


def test_the_front_keeps_what_nothing_beats_at_the_same_or_a_lower_cost():
    free, better, best = (
        row("overall", "a", ratio, score) for ratio, score in ((0, 0.4), (0.2, 0.6), (0.5, 0.9))
    )
    beaten = [row("overall", "b", 0, 0.3), row("overall", "b", 0.3, 0.6), row("overall", "b", 1, 0.9)]
    assert pareto_front([best, *beaten, better, free]) == [free, better, best]


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_fifteen_recipes_look_different_and_always_the_same(theme):
    chosen = series_styles(list(FIFTEEN), theme)
    assert len(set(chosen.values())) == len(FIFTEEN) == 15
    assert series_styles(list(FIFTEEN)[:7], theme).items() <= chosen.items()


def test_drawing_is_repeatable_and_leaves_matplotlib_as_it_was(rows):
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context(rc_params(LIGHT)):
        one, other = (to_png(score_per_task(rows, series_styles([], LIGHT), LIGHT)) for _ in range(2))
    assert one == other
    assert dict(matplotlib.rcParams) == before


@pytest.mark.usefixtures("undrawn")
def test_the_page_holds_what_fewer_bits_cost(tmp_path):
    rows = [row("coref", "picky", 0.1, 0.8)]
    costs = [
        StorageCost(512, "picky", 0.1, None, "int8", 40, about(0.8), about(0.79), about(0.01), about(0.975)),
        StorageCost(512, "sure & so", None, 0.4, "int4", 40, about(0.7), about(0.5), about(0.2), about(0.6)),
    ]
    write_report(tmp_path, rows, ABOUT, storages=costs)
    page = (tmp_path / "report.html").read_text()
    assert "Chunk KV in fewer bits" in page
    for said in ("<td>int8</td><td>0.800", "<td>0.010", "sure &amp; so", "0.4 by coverage", "<td>int4</td>"):
        assert said in page, said
    write_report(tmp_path, rows, ABOUT)
    assert "Chunk KV in fewer bits" not in (tmp_path / "report.html").read_text()
