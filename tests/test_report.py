"""`crosskv report`: a self-contained page of the committed results and of made-up rows, without any model's library."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from crosskv.errors import BadInput
from crosskv.evals import pages, report, retention, rows

RESULTS = Path(__file__).parent.parent / "results"
MACHINE = {"machine": "a machine, 2 cores", "system": "Linux", "versions": {"numpy": "2.0"}, "commit": "c0ffee"}
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Text, headings, images and attributes of a page; complains of tags that do not match."""

    def __init__(self, document: str):
        super().__init__()
        self.open: list[str] = []
        self.images: list[bytes] = []
        self.titles: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.headings: list[str] = []
        self.cells: list[str] = []
        self.text = ""
        self.feed(document)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(k, v or "") for k, v in attrs]
        if tag == "img":
            found = dict(attrs)
            kind, data = (found["src"] or "").split(",")
            assert kind == "data:image/png;base64"
            self.images.append(base64.b64decode(data, validate=True))
            self.titles.append(found["alt"] or "")
        if tag not in VOID:
            self.open.append(tag)
        for kind, into in (("h2", self.headings), ("td", self.cells)):
            if tag == kind:
                into.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text += data
        for kind, into in (("h2", self.headings), ("td", self.cells)):
            if kind in self.open:
                into[-1] += data

    def outside(self) -> list[str]:
        """What a browser would fetch from elsewhere."""
        links = [v for k, v in self.attributes if k in ("src", "href", "action") and not v.startswith("data:")]
        return links + [w for w in self.text.split() if "url(" in w or "@import" in w]


def case(number: int, task: str, arms: dict[str, float], metric: str = "accuracy", **more: Any) -> dict[str, Any]:
    setting = more.pop("setting", {"pair": "S->L", "host": "torch"})
    return {"claim": "case", "task": task, "case": number, "metric": metric, "floor": 0.0, "arms": arms, "seed": number,
            "setting": setting, **more, **MACHINE}  # fmt: skip


def plain(claim: str, setting: dict[str, Any], metric: str, value: float, **more: Any) -> dict[str, Any]:
    return {"claim": claim, "setting": setting, "metric": metric, "value": value, "unit": "s", **more, **MACHINE}


def made_up() -> list[dict[str, Any]]:
    """Every kind of row; names with characters that HTML, Markdown and matplotlib would take for their own."""
    found = [case(i, "needle", {"own": 1.0, "mapped": float(i % 2), "none": 0.0, "source": 0.0}) for i in range(6)]
    found += [case(i, "a <b> $\\x$ & | task", {"own": 1.0, "mapped $<i>$": i % 2}) for i in range(6)]
    found += [
        case(i, "chat", {"own": 1.0, "mapped": float(i > t), "none": 0.0, "source": 0.5}, turn=t)
        for i in range(6)
        for t in range(4)
    ]
    size = {"own": 1024.0, "int4": 256.0, "tokens G=4 8x": 128.0}
    found += [
        case(i, "passage", {"own": 3.0 + i, "int4": 3.01 + i, "tokens G=4 8x": 3.2 + i}, "nll", bytes=size,
             setting={"model": "L", "host": "torch"})
        for i in range(4)
    ]  # fmt: skip
    found += [
        plain("screen", {"pair": "S->L", "arm": arm, "layer": y, "head": x}, "attention cosine", 0.1 * (x + y))
        for arm in ("mapped", "raw copy")
        for y in range(3)
        for x in range(2)
    ]
    found += [
        plain("retention time", {"pair": "S->L", "what": what, "length": n}, "time", n / 1e4, low=n / 2e4, high=n / 5e3)
        for what in ("own prefill", "handoff, warm")
        for n in (256, 512, 1024)
    ]
    return [*found, plain("<script>alert(1)</script>", {"what": "a & b"}, "x", 1.0)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows")
    rows.write(path / "cases.jsonl", made_up())
    return path


def crosskv(*args: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", "from crosskv.cli import main; main()", *map(str, args)], capture_output=True, text=True
    )


def test_the_committed_results_make_a_page() -> None:
    read = rows.read(RESULTS)
    shown = Page(pages.build(read))
    assert len(shown.images) >= 4 and all(i.startswith(b"\x89PNG") for i in shown.images)
    rest = [r for r in read if r["claim"] != "case"]
    for claim in {r["claim"] for r in rest}:
        assert f"{claim}: all rows" in shown.headings
    for pair in ("family:S->family:L", "family:M->family:L", "family:L->family:S"):
        assert any(h.startswith(f"Retention, {pair}") for h in shown.headings)
    for r in read:
        assert r["commit"] in shown.text and r["machine"] in shown.text
    assert shown.outside() == [] and "http" not in shown.text
    # every figure of every row is there, as often as it was measured
    figures = sum(len(c.split(" (")[0]) > 0 for c in shown.cells)
    assert figures >= len(rest)
    for r in rest:
        assert pages._value(r) in shown.cells


def test_made_up_rows_make_every_kind_of_plot(directory: Path) -> None:
    shown = Page(pages.build(rows.read(directory)))
    assert shown.outside() == []
    said = "\n".join(shown.headings)
    for heading in ("Retention, S->L, host torch", "Drift, S->L, host torch, chat", "screen: attention cosine, S->L",
                    "Ratio against NLL, case: L, host torch, passage", "Latency, retention time: S->L",
                    "retention time: all rows", "<script>alert(1)</script>: all rows"):  # fmt: skip
        assert heading in said
    for title in ("needle: retention (1: own cache)", "a <b> $\\x$ & | task: retention (1: own cache)",
                  "accuracy per turn", "mapped (layer x head)", "raw copy (layer x head)", "what fewer bytes cost",
                  "time against length"):  # fmt: skip
        assert title in shown.titles
    assert len(shown.images) == 4 + 1 + 2 + 1 + 1  # bars, drift, maps, ratio, latency
    assert "0.50 (0.17 to 0.83)" in shown.text  # 3 of 6
    assert "c0ffee" in shown.text


def test_what_the_plots_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers behind the pictures: planted curves, maps and ratios arrive as planted."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(report, "lines", lambda title, series, *a, **k: given.setdefault(title, series) and "")
    monkeypatch.setattr(report, "heat", lambda title, *a: given.setdefault(title, a) and "")
    monkeypatch.setattr(report, "bars", lambda title, *a, **k: given.setdefault(title, a) and "")
    pages.build(made_up())
    drift = given["accuracy per turn"]
    assert list(drift) == ["own", "mapped", "none", "source"]
    assert [p[0] for p in drift["mapped"]] == [0, 1, 2, 3]
    assert [p[1] for p in drift["mapped"]] == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6])
    assert all(low < y < high for _, y, low, high in drift["mapped"])
    layers, heads, grid = given["raw copy (layer x head)"]
    assert layers == ["0", "1", "2"] and heads == ["0", "1"] and grid[2] == pytest.approx([0.2, 0.3])
    ratio = given["what fewer bytes cost"]
    assert ratio["int"][0] == pytest.approx((4, 0.01, 0.01, 0.01))
    assert ratio["tokens G=4"][0] == pytest.approx((8, 0.2, 0.2, 0.2))
    assert given["time against length"]["own prefill"][1] == (512, 0.0512, 0.0256, 0.1024)
    assert given["needle: retention (1: own cache)"][:2] == (["mapped", "none", "source"], [0.5, 0, 0])


def test_committed_ratios_arrive_as_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(report, "lines", lambda title, series, *a, **k: given.append(series) or "")
    read = rows.read(RESULTS / "xkv.jsonl")
    pages.ratios(read, [])

    def value(metric: str) -> float:
        return next(r["value"] for r in read if r["metric"] == metric and r["setting"]["arm"] == "calibrated G=4 16x"
                    and r["setting"]["model"] == "L")  # fmt: skip

    x, y, low, high = given[0]["calibrated G=4"][-1]
    assert (x, y) == (value("ratio"), value("nll increase")) and low < y < high
    assert len(given[0]["int"]) == 3 and len(given) == 2


@pytest.mark.parametrize(
    ("arm", "line"),
    [("tokens G=4 8x", "tokens G=4"), ("calibrated G=4, 4 bits each 16x", "calibrated G=4, 4 bits each"),
     ("int3", "int"), ("3", "int"), ("2, no sinks", "int, no sinks"), ("per-layer SVD", "per-layer SVD")],
)  # fmt: skip
def test_arms_of_a_method_make_one_line(arm: str, line: str) -> None:
    assert pages.method(arm) == line


def test_the_same_thing_measured_twice_is_shown_twice() -> None:
    again = [plain("speed", {"what": "x"}, "time", v) for v in (1.25, 2.5, 3.75)]
    assert Page(pages.build(again)).cells == ["1.25", "2.5", "3.75"]


def test_every_machine_and_commit_is_in_the_footer() -> None:
    other = MACHINE | {"machine": "another", "commit": "beef"}
    footer = report.origin([MACHINE, MACHINE, MACHINE | {"commit": "beef-dirty"}, other, {"claim": "x"}])
    assert footer.count("<p>") == 3 and "commit c0ffee, beef-dirty<" in footer and "another" in footer
    assert "unknown machine; commit unknown" in footer


def test_markdown_has_as_many_cells_in_every_line(directory: Path) -> None:
    done = crosskv("report", directory, "--markdown", "--out", directory / "other" / "page.html")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("| --- |") and len(lines) == 2 + 4 + 2 + 4 + 3
    assert {line.replace("\\|", "").count("|") for line in lines} == {len(pages.COLUMNS) + 1}
    assert "| S->L, host torch | needle | mapped | 6 | 0.50 (0.17 to 0.83) |" in done.stdout
    assert (directory / "other" / "page.html").exists()


def test_json_and_the_default_place(directory: Path) -> None:
    done = crosskv("report", directory, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["path"] == str(directory / "report.html") and Path(said["path"]).exists()
    assert said["rows"] == len(made_up()) and "screen" in said["claims"]
    assert said["retention"] == json.loads(json.dumps(retention.summary(made_up()[:40])))
    assert "S->L, host torch, needle, mapped (6 cases)" in said["verdict"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"claim": "case", "setting": {}}\n{"claim": "x', "bad.jsonl, line 2: not a JSON object"),
        ("\n[1, 2]\n", "bad.jsonl, line 2: not a JSON object but '[1, 2]'"),
        ('{"claim": "x", "value": 1}', "bad.jsonl, line 1: a row needs claim, metric, setting, value"),
        ('{"claim": "case", "setting": {"pair": "a"}, "arms": {}}', "A case row lacks case, metric, task"),
        (None, "holds no result rows (.jsonl)"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(content: str | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "bad.jsonl").write_text(content)
    done = crosskv("report", tmp_path)
    assert done.returncode == 1 and says in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "report.html").exists()


def test_wrong_usage_and_no_cases(tmp_path: Path) -> None:
    assert crosskv("report").returncode == 2
    rows.write(tmp_path / "x.jsonl", [plain("x", {"a": 1}, "m", 1.0)])
    assert crosskv("report", tmp_path, "--json", "--markdown").returncode == 2
    with pytest.raises(BadInput, match="no retention table"):
        pages.markdown([])
    assert Page(pages.build(rows.read(tmp_path))).images == []


def test_a_report_imports_no_model_library(directory: Path) -> None:
    code = (
        "import sys; sys.argv = ['crosskv', 'report', sys.argv[1]]\n"
        "from crosskv.cli import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "print({'torch', 'transformers', 'mlx', 'mlx_lm', 'jax'} & sys.modules.keys() or 'none')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "none", done.stdout + done.stderr
