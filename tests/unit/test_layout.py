import ast

import pytest

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.layout import BucketCaps, BucketLayout


@pytest.mark.parametrize(
    ("text", "shown", "arguments"),
    [
        ("default", "default", {}),
        ("25", "25", {"bucket_cap_mb": 25.0}),
        ("25.0", "25", {"bucket_cap_mb": 25.0}),
        ("0", "0", {"bucket_cap_mb": 1e-6}),
        ("0.000001", "1e-06", {"bucket_cap_mb": 1e-6}),
        ("1/25/25", "1/25/25", {"bucket_cap_mb_list": [1.0, 25.0, 25.0]}),
        ("01/2.50", "1/2.5", {"bucket_cap_mb_list": [1.0, 2.5]}),
    ],
)
def test_caps_know_their_text_and_what_ddp_is_given(text, shown, arguments):
    caps = BucketCaps.parse(text)
    assert str(caps) == shown
    assert BucketCaps.parse(shown) == caps
    assert caps.arguments() == arguments


@pytest.mark.parametrize("text", ["default", "25", "2.5", "0", "0.000001", "1/25/25"])
def test_the_code_for_caps_is_the_call_that_a_run_makes(text):
    caps = BucketCaps.parse(text)
    call = ast.parse(f"DDP({caps.code()})", mode="eval").body
    assert isinstance(call, ast.Call)
    assert {given.arg: ast.literal_eval(given.value) for given in call.keywords} == caps.arguments()


def test_a_cap_of_0_is_one_byte_to_ddp():
    """DDP's constructor takes `int(bucket_cap_mb * 1024 * 1024)` bytes."""
    assert int(BucketCaps.parse("0").arguments()["bucket_cap_mb"] * 1024 * 1024) == 1


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1//2", "nan", "inf", "0/25", "00", "1e-3", "default/1", "٣", "1 "]
)
def test_other_text_is_no_cap(text):
    with pytest.raises(UsageError, match="write default, 25, 0 for a bucket per parameter, or a list"):
        BucketCaps.parse(text)


def test_a_layout_is_read_from_and_written_to_a_cell():
    layout = BucketLayout((8196000, 27260928))
    assert str(layout) == "8196000/27260928"
    assert BucketLayout.parse(str(layout)) == layout
    assert BucketLayout.of_cell("46758048") == BucketLayout((46758048,))


@pytest.mark.parametrize("cell", ["", None, float("nan"), "1//2", "/", "1/x", "-1", "٣"])
def test_a_broken_or_empty_cell_holds_no_layout(cell):
    assert BucketLayout.of_cell(cell) is None
    with pytest.raises(UsageError, match="bucket_bytes"):
        BucketLayout.parse(str(cell))
