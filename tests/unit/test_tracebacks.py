"""Which line an error is put down to: the user's, whatever wraps, calls or compiles it."""

import importlib.util
import re

import pytest
import torch

from ddp_bench.bench.common import tracebacks as tb
from ddp_bench.bench.common.errors import UserCodeError
from ddp_bench.bench.measure.faults import LOST_PEER, classify_error
from ddp_bench.bench.results.block_times import Fault
from ddp_bench.bench.run.failures import find_failure
from ddp_bench.bench.worker.messages import Report
from ddp_bench.bench.worker.rank import make_report

NET = """\
import json
import torch
from torch._utils import ExceptionWrapper

def late(*_):
    raise ValueError("late bug")

def in_python(*_):
    json.loads("{")

def in_torch(x):
    return torch.nn.functional.linear(x, torch.ones(3, 3))

def from_cause(*_):
    try:
        late()
    except ValueError as error:
        raise RuntimeError("no batch") from error

def grouped(*_):
    found = []
    try:
        late()
    except ValueError as error:
        found.append(error)
    raise ExceptionGroup("two of them", found)

class Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        late()

def in_backward(x):
    Gradient.apply(x.requires_grad_()).sum().backward()

def installed(x):
    import their_library
    their_library.call(x)

class Odd(Exception):
    def __str__(self):
        raise KeyError("no text")

def odd(*_):
    raise Odd

def without_end(x):
    return without_end(x)

def in_replica(*_):
    try:
        late()
    except ValueError:
        wrapped = ExceptionWrapper(where="in replica 1 on device 1")
    wrapped.reraise()
"""


def lines(needle):
    """The line of NET that holds `needle`."""
    return next(number for number, line in enumerate(NET.splitlines(), 1) if needle in line)


LATE = f"net.py:{lines('late bug')}, in late"


@pytest.fixture
def net(tmp_path, monkeypatch):
    """A user's file in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    spec = importlib.util.spec_from_file_location("a_users_net", tmp_path / "net.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def raised(work):
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any
        work()
    # Without this file's own frames: a rank has none of them.
    error = caught.value
    while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next
    return error


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("late", LATE),
        ("in_python", f"net.py:{lines('json.loads')}, in in_python"),
        ("in_torch", f"net.py:{lines('functional.linear')}, in in_torch"),
        ("from_cause", f"net.py:{lines('no batch')}, in from_cause"),
        ("grouped", LATE),
        ("in_backward", LATE),
        ("odd", f"net.py:{lines('raise Odd')}, in odd"),
        ("without_end", f"net.py:{lines('return without_end')}, in without_end"),
        ("in_replica", LATE),
    ],
)
def test_an_error_is_put_down_to_the_users_line(net, name, place):
    error = raised(lambda: getattr(net, name)(torch.ones(2, 2)))
    assert tb.find_user_code(error) == place
    assert 'net.py", line' in tb.format_traceback(error)


def test_what_wraps_the_users_error_is_looked_through(net):
    def compile_backend():
        try:
            net.late()
        except ValueError as cause:
            raise UserCodeError("the model raised") from cause

    error = raised(compile_backend)
    error.__traceback__ = None  # of the wrapper, raised by the suite or by torch
    assert tb.find_user_code(error) == LATE


def test_an_error_of_the_compiler_is_put_down_to_what_it_traced(net):
    """`from user code` in its text; the frames lead to the call of the compiled module."""

    def compiled():
        torch.compile(net.in_torch, fullgraph=True, backend="eager")(torch.ones(2, 2))

    error = raised(compiled)
    assert tb.find_user_code(error) == f"net.py:{lines('functional.linear')}, in in_torch"
    assert re.fullmatch(r"\w+: RuntimeError: .*\[?2(x|, )2\]? .*3(x|, )3.*", classify_error(error).reason), (
        "what it met"
    )


def test_without_a_users_line_there_is_none(net, tmp_path, monkeypatch):
    place = tmp_path / "lib" / "site-packages"
    place.mkdir(parents=True)
    (place / "their_library.py").write_text("def call(x):\n    x.no_such_thing\n")
    monkeypatch.syspath_prepend(place)
    error = raised(lambda: net.installed(1))
    assert tb.find_user_code(error) == f"net.py:{lines('their_library.call')}, in installed"
    error.__traceback__ = error.__traceback__.tb_next
    assert tb.find_user_code(error) == ""
    assert tb.find_user_code(raised(lambda: torch.nn.Linear(3, 3)(torch.ones(2)))) == ""


def test_no_folder_of_a_home_is_shown(tmp_path, monkeypatch):
    (tmp_path / "home" / "me" / "project").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "home" / "me" / "project")
    assert tb.shorten_path(str(tmp_path / "home" / "me" / "project" / "train" / "net.py")) == "train/net.py"
    assert tb.shorten_path(str(tmp_path / "home" / "me" / "other" / "net.py")) == "other/net.py"


def test_whose_code_a_file_is():
    others = ("<eval_with_key>.3", torch.__file__, tb.format_traceback.__code__.co_filename, re.__file__)
    installed = "/opt/venv/lib/python3.12/site-packages/timm/net.py"
    assert not any(map(tb.is_users, (*others, installed, "/scratch/torchinductor_me/ab/c.py")))
    assert tb.is_users("/home/me/net.py")


def test_a_long_traceback_is_cut_in_the_middle_and_says_so(net):
    error = raised(net.late)
    error.args = ("x" * 3 * tb.MAX_CHARACTERS + " at the end",)
    text = tb.format_traceback(error)
    assert tb.MAX_CHARACTERS < len(text) < tb.MAX_CHARACTERS + 100
    assert text.startswith("Traceback (most recent call last):")
    assert text.endswith(" at the end\n")
    assert "characters are left out" in text
    assert "left out" not in tb.format_traceback(raised(lambda: net.without_end(0))), (
        "Python folds what repeats"
    )


def test_a_report_holds_the_place_and_the_traceback(net):
    found = make_report(raised(net.late))
    assert (found.fault.status, found.fault.reason, found.place) == ("failed", "ValueError: late bug", LATE)
    assert found.traceback.endswith("ValueError: late bug\n")
    assert make_report(raised(net.odd)).fault.reason == "Odd"


def test_a_rank_that_another_one_took_along_is_no_cause():
    def gone():
        raise RuntimeError(LOST_PEER[0])

    lost = make_report(raised(gone))
    late = Fault("failed", "ValueError: late bug")
    cause = Report(fault=late, place="net.py:6, in late", traceback="Traceback: it\n")
    found = find_failure({0: lost, 1: Report(), 2: cause})
    assert found.reason == "ValueError: late bug (net.py:6, in late)"
    assert found.ranks == {
        0: f"ended because another rank failed: {lost.fault.reason}",
        1: "did not fail",
        2: "raised\nTraceback: it\n",
    }
    only = find_failure({0: lost, 1: Report()})
    assert only.ranks[0] == f"raised\n{lost.traceback}", "nobody else has a reason"
    assert find_failure({0: Report(), 1: Report()}) is None
