"""`--network FILE.toml`: networks of the user's own, in the form of those that predict knows by name."""

import json

import pytest
from test_predict_cli import SAMPLE, refused

from ddp_bench.bench.predict import main as command
from ddp_bench.bench.predict.networks import NETWORKS, named_networks, network

pytestmark = pytest.mark.usefixtures("few_resamples")

OWN = """
[fabric]
level = "inter"
busbw_gb_per_s = 46
high = 1.3
source = "as ib-400g, for a test"

[box]
level = "intra"
busbw_gb_per_s = 368.0
shape_of = "nvlink-h200"
hop_ms = 0.004
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return path


def test_a_network_of_the_same_figures_costs_the_same(own):
    (fabric,) = named_networks(f"{own}:fabric")
    (box,) = named_networks(str(own), level="intra")
    for size in (1, 2**20, 2**30):
        ours = network("ib-400g").band(16, nics=8)
        assert fabric.band(16, nics=8).high(size) == ours.high(size)
        assert box.band(8).estimate(size) == NETWORKS["nvlink-h100"].band(8).estimate(size)


def test_predict_takes_the_file_or_one_of_it(own, capsys):
    def steps(*given):
        assert command.main([str(SAMPLE), "--gpus", "16", *given, "--json"]) == 0
        lines = json.loads(capsys.readouterr().out)["lines"]
        asked = [p for line in lines for p in line["predictions"] if p["asked"]]
        return {p["network"]: p["step_ms"]["estimate"] for p in asked}

    alone = steps("--network", f"{own}:fabric,ib-400g")
    assert alone["fabric"] == alone["ib-400g"]
    assert steps("--network", str(own)) == {"fabric": alone["fabric"]}, "the box joins no nodes"
    inside = steps("--network", f"{own}:fabric", "--intra", str(own))
    assert list(inside) == ["box + fabric"]
    assert command.main([str(SAMPLE), "--gpus", "16", "--network", f"{own}:fabric"]) == 0
    assert "Network: fabric: as ib-400g, for a test." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "no table of a network"),
        ("[a", "no file of networks"),
        ('[a]\nlevel = "inter"', "a: Object missing required field `busbw_gb_per_s`"),
        ('[a]\nlevel = "inter"\nbusbw_gb_per_s = 0', "a: Expected `float` > 0"),
        ('[a]\nlevel = "inter"\nbusbw_gb_per_s = 4\nhop_us = 3', "unknown field `hop_us`"),
        ('[a]\nlevel = "rack"\nbusbw_gb_per_s = 4', "a: Invalid enum value 'rack'"),
        (
            '[a]\nlevel = "intra"\nbusbw_gb_per_s = [[4096, 1.0], [8192, 9.0]]',
            "a larger message takes longer",
        ),
        ('[a]\nlevel = "intra"\nbusbw_gb_per_s = [[8192, 1.0], [4096, 1.0]]', "from small to large"),
        ('[a]\nlevel = "inter"\nbusbw_gb_per_s = 4\nwhole_job = [[2, 9.0]]', "two numbers of nodes or more"),
        ('[a]\nlevel = "inter"\nbusbw_gb_per_s = 4\nshape_of = "ib-400g"', "shape_of names a network"),
        ("", "has no network"),
    ],
)
def test_what_is_no_network_is_one_line(own, text, message, capsys):
    own.write_text(text)
    said = refused([str(SAMPLE), "--gpus", "16", "--network", str(own)], capsys)
    assert message in said
    assert str(own) in said


def test_a_name_or_level_that_the_file_lacks_is_refused(own, capsys):
    given = [str(SAMPLE), "--gpus", "16"]
    assert "has no network 'fabrik'; it has fabric, box" in refused(
        [*given, "--network", f"{own}:fabrik"], capsys
    )
    assert "of level intra" in refused([*given, "--intra", f"{own}:fabric"], capsys)
    assert "is missing" in refused([*given, "--network", str(own.with_name("none.toml"))], capsys)
    own.write_text(OWN + OWN.replace("[fabric]", "[fabric2]").replace("[box]", "[box2]"))
    assert "has several networks" in refused([*given, "--intra", str(own)], capsys)
