import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import block, made_manifest
from report_runs import case

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.results.schema import CASES, typed_frame
from ddp_bench.bench.results.store import RunWriter, claim, load_run
from ddp_bench.bench.text import csv_cell, csv_text, markdown, visible

HOSTILE = [
    "=cmd|'/C calc'!A0",
    "+1+1",
    "-1+1",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "'=1",
    "''@x",
    "\uff1d1+1",
    "a\x1b[31mred\x07",
    "\u202eevil",
    "C:\\new\\x41",
    "\\\\x0a",
    "line\nbreak\r\n",
    "\x00",
    "\udcff",
    "<script>alert(1)</script>\"'",
    'plain, "quoted" text\'s',
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_cell_begins_no_formula_and_holds_no_control_character(text):
    cell = csv_cell(text)
    assert cell.isprintable()
    assert cell[:1] not in set("=+-@\t\r\uff1d\uff0b\uff0d\uff20")
    assert csv_text(cell) == text


@pytest.mark.parametrize("number", ["-1", "+2.5", "-1e-05", "0.5"])
def test_a_number_is_not_disfigured(number):
    assert csv_cell(number) == number


@given(st.text(st.characters(codec=None), max_size=30) | st.text("'=+-@\\x0041 \t\r\n1.e", max_size=12))
def test_every_text_comes_back(text):
    cell = csv_cell(text)
    assert cell.isprintable()
    assert csv_text(cell) == text
    file = io.StringIO()
    csv.writer(file).writerow([cell, "x"])
    assert next(csv.reader([file.getvalue()])) == [cell, "x"]
    assert visible(text).isprintable()
    assert visible(visible(text)) == visible(text)


@given(st.text(max_size=40))
def test_markdown_is_one_line_without_markup(text):
    line = markdown(text)
    assert line.isprintable()
    assert not set("\\`*_<>!|~$@") & set(line)
    assert "://" not in line


def test_what_prints_stays_as_it_is():
    assert visible("C:\\runs, 火, naïve [95%]") == "C:\\runs, 火, naïve [95%]"
    assert csv_cell("it's 100%") == "it's 100%"


def test_an_error_message_is_one_harmless_line():
    message = str(UsageError("--name 'a\nb\x1b[31m\u202e' is wrong; name it a"))
    assert message == "--name 'a\\x0ab\\x1b[31m\\u202e' is wrong; name it a"


@pytest.mark.parametrize("text", HOSTILE)
def test_a_run_holds_what_a_host_or_a_model_said_and_opens_harmlessly(text, tmp_path):
    writer = RunWriter(claim(tmp_path / "run"))
    writer.write_manifest(made_manifest(environment={"host": text}))
    failed = case("single", 1, status="failed", reason=text, device_name=text)
    writer.replace("cases.csv", typed_frame([failed], CASES))
    writer.append("blocks.csv", [block(failed["case_id"], 1, 5.0, host=text)])
    for name in ("cases.csv", "blocks.csv"):
        with (tmp_path / "run" / name).open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        assert all(cell.isprintable() and cell[:1] not in set("=+-@") for row in rows for cell in row)
    run = load_run(tmp_path / "run")
    assert run.cases["reason"].tolist() == [text]
    assert run.cases["device_name"].tolist() == [text]
    assert run.blocks["host"].tolist() == [text]
    assert run.manifest.environment.host == text
