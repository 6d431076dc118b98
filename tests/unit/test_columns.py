"""The tables of columns in `results/README.md`; `python tests/unit/test_columns.py` writes them anew."""

from pathlib import Path

from report_runs import case, dashed, measured, run

from ddp_bench.bench.results.case_columns import FILES
from ddp_bench.report.page import make_page

README = Path(__file__).parents[2] / "results" / "README.md"


def with_tables(page):
    """The page with a table of each file between `<!-- columns of FILE -->` and `<!-- end -->`."""
    for name, columns in FILES.items():
        # The ends of an interval stand beside what they belong to.
        ends = {f"{c.name}_{end}" for c in columns if c.has_interval for end in ("low", "high")}
        rows = "\n".join(
            f"| `{c.name}`{', `_low`, `_high`' if c.has_interval else ''} | {c.kind} | {c.meaning} |"
            for c in columns
            if c.name not in ends
        )
        before, start, rest = page.partition(f"<!-- columns of {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert start, f"the page has no place for the columns of {name}"
        assert end, f"the table of {name} has no end"
        page = f"{before}{start}\n| column | type | meaning |\n|---|---|---|\n{rows}\n\n{end}{after}"
    return page


def test_the_documented_columns_are_the_schemas():
    page = README.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run python tests/unit/test_columns.py"
    assert all(f"## `{name}`" in page for name in FILES)


def test_an_entry_is_all_that_a_metric_takes():
    """The share that communication adds is named in one file, and is on the page with heading and meaning."""
    name, root = "exposed_comm_pct", README.parents[1]
    files = (path for top in ("bench", "models", "report") for path in (root / top).rglob("*.py"))
    assert [path.name for path in files if name in path.read_text(encoding="utf-8")] == ["metrics.py"]
    share = 12.0
    shown = make_page(run([case("single", 1, 100.0), case("ddp", 2, 150.0, **measured(**{name: share}))]))
    (table,) = (table for fold in shown.folds for table in fold.tables if table.title == "Every column")
    place = [column.name for column in table.columns].index("Exposed share (%)")
    assert [row[place] for row in table.rows] == ["", dashed("12.0 (11.9--12.1)")]
    assert shown.terms["Exposed share"].startswith("share of the step that communication adds")


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
