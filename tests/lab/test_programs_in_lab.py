"""Real labs on this machine: the link's physics, the job's ends, and what is left behind (nothing)."""

import os
import shutil
import signal
import sys

import pytest
from commands import ROOT, eventually, finished
from real_lab import least_s, machine_network, namespaces_in_use

pytestmark = pytest.mark.lab

NUM_BYTES = 20_000_000


def is_gone(lab):
    """Whether no process is left in the lab's network, and with them, by the kernel's count, no namespace."""
    return eventually(lambda: not lab.namespaces() & namespaces_in_use())


@pytest.mark.parametrize(
    ("rate", "bit_per_s", "starter"),
    [
        pytest.param("1gbit", 1e9, ("python",), marks=pytest.mark.smoke, id="script"),
        pytest.param("200mbit", 2e8, ("python", "-m"), id="module"),
        pytest.param("1gbit", 1e9, ("torchrun",), id="torchrun"),
        pytest.param("1gbit", 1e9, ("bash", "-c", 'torchrun "$0" "$@"'), id="torchrun in a shell"),
    ],
)
@pytest.mark.campaign
def test_a_program_of_the_user_trains_over_the_link_in_the_time_that_it_demands(
    start_lab, rate, bit_per_s, starter
):
    """At least; at most that is the machine's matter, but less than a link of a fifth could do it in."""
    lab = start_lab(rate, "transfer", str(NUM_BYTES), "3", starter=starter)
    code, _, err = lab.end()
    assert code == 0, err
    assert f"lab: 2 hosts of 1 rank each, link {rate} each way" in err.splitlines()[0]
    ranks = lab.ranks()
    assert [facts["sum"] for facts in ranks] == [2**3] * 2, "each all-reduce adds both ranks' values"
    assert ranks[1]["control"] == "reno", "BBR's probing would be measured as communication"
    assert [facts["BENCH_HOST"] for facts in ranks] == ["host0", "host1"]
    assert [facts["NODE_RANK"] for facts in ranks] == [facts["GROUP_RANK"] for facts in ranks] == ["0", "1"]
    assert {(facts["WORLD_SIZE"], facts["LOCAL_WORLD_SIZE"], facts["LOCAL_RANK"]) for facts in ranks} == {
        ("2", "1", "0")
    }
    assert least_s(NUM_BYTES, bit_per_s / 5) > lab.fastest_s() >= least_s(NUM_BYTES, bit_per_s)
    assert is_gone(lab)


@pytest.mark.campaign
def test_ranks_know_their_host_and_two_per_host_share_it(start_lab):
    before = machine_network()
    lab = start_lab("1gbit", "exit", "0,0,0,0", options=("--ranks-per-host", "2", "--quiet"))
    assert eventually(lambda: lab.ranks_started(4))
    assert machine_network() == before, "a running lab shows outside itself"
    code, out, err = lab.end()
    assert code == 0, err
    assert sorted(out.split("\n")) == ["", "said by rank 0", "said by rank 1"], (
        "host0 prints without a prefix"
    )
    assert sorted(err.splitlines()) == ["host1: said by rank 2", "host1: said by rank 3"]
    ranks = lab.ranks(4)
    assert [facts["BENCH_HOST"] for facts in ranks] == ["host0", "host0", "host1", "host1"]
    assert {facts["BENCH_LINK"] for facts in ranks} == {"1gbit"}
    assert [facts["LOCAL_RANK"] for facts in ranks] == ["0", "1", "0", "1"]
    assert ranks[0]["NETNS"] == ranks[1]["NETNS"] != ranks[2]["NETNS"] == ranks[3]["NETNS"]
    cores = len(os.sched_getaffinity(0))
    assert all(len(facts["CORES"]) == max(1, cores // 2) for facts in ranks)
    assert cores == 1 or not set(ranks[0]["CORES"]) & set(ranks[2]["CORES"])
    assert is_gone(lab)
    assert machine_network() == before


@pytest.mark.campaign
@pytest.mark.parametrize(("codes", "expected"), [("2,2", 2), ("wait,3", 3)])
def test_a_program_that_fails_gives_the_lab_its_exit_code(start_lab, codes, expected):
    lab = start_lab("1gbit", "exit", codes)
    code, out, err = lab.end()
    assert code == expected, err
    assert "said by rank 0" in out
    assert "host1: said by rank 1" in err
    assert len(err.splitlines()) == 2, "the launcher adds noise to what the program said"
    assert is_gone(lab)


@pytest.mark.campaign
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_whole_lab(start_lab, number):
    lab = start_lab("1gbit", "sleep")
    assert eventually(lab.ranks_started)
    assert lab.namespaces() <= namespaces_in_use()
    lab.process.send_signal(number)
    code, _, err = lab.end()
    assert code == 128 + number, err
    assert is_gone(lab)


@pytest.mark.campaign
def test_kill_9_takes_one_lab_down_and_leaves_its_neighbour_alone(start_lab):
    before = machine_network()
    killed, neighbour = start_lab("1gbit", "sleep"), start_lab("1gbit", "sleep")
    assert eventually(lambda: killed.ranks_started() and neighbour.ranks_started())
    assert not killed.namespaces() & neighbour.namespaces()
    killed.kill()
    assert is_gone(killed)
    assert neighbour.namespaces() <= namespaces_in_use()
    code, _, err = start_lab("1gbit", "exit", "0,0").end()
    assert code == 0, err
    assert neighbour.process.poll() is None
    neighbour.kill()
    assert is_gone(neighbour)
    assert machine_network() == before


@pytest.mark.campaign
def test_a_user_without_root_gets_a_lab_in_a_user_namespace(start_lab):
    del start_lab  # for its skip where labs cannot be made
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to become another user")
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    probe = f"import os, sys; os.chdir({str(ROOT)!r}); import ddp_bench.bench.lab.host; print('ready')"
    able = [*nobody, "unshare", "--user", "--map-root-user", "--net", "--mount-proc", "--pid", "--fork"]
    ready = finished([*able, sys.executable, "-c", probe])
    if "ready" not in ready.stdout:
        pytest.skip("other users may not make user namespaces here, or cannot read this checkout")
    command = [*nobody, sys.executable, "-m", "bench.lab", "--hosts", "2", "--rate", "1gbit", "--quiet"]
    done = finished([*command, "--", "python", "-m", "platform"])
    assert done.returncode == 0, done.stderr
    assert "Linux" in done.stdout
    assert done.stderr.startswith("host1: Linux")
