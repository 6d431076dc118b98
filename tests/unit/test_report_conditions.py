from report_runs import case, run, usual_cases

from ddp_bench.report.conditions import Fact, Group
from ddp_bench.report.page import page


def view(cases, manifest=None):
    return page([run(cases, manifest)]).runs[0]


def test_conditions_show_what_is_known_and_nothing_else():
    manifest = {
        "name": "nightly",
        "settings": {"gpus": [1, 2], "static_graph": False, "rounds": None},
        "model": {"num_params": 11_689_512, "gradient_bytes": 46_758_048},
        "environment": {
            "gpus": [{"name": "A", "memory_mib": 1000}] * 2,
            "topology": "GPU0 GPU1\n NV18",
            "governors": ["performance"],
            "huge_pages": "madvise",
            "cgroup": {"cpu_quota_cores": 2.5, "memory_limit_gib": "unlimited", "cpuset": None},
            "env": {"NCCL_DEBUG": "WARN", "BENCH_STARTED_S": "12.5"},
        },
        "timing": {"total_s": 186.2},
        "ranks": [{"rank": 0, "host": "h", "link": None}],
    }
    shown = view(usual_cases(), manifest)
    assert shown.title == "nightly"
    assert [caution.kind for caution in shown.cautions] == ["few rounds"]
    assert "bench.run --rounds 10" in shown.cautions[0].sentence
    run_group, settings, *others = shown.conditions
    assert run_group == Group("Run", (Fact("name", "nightly"), Fact("total time", "3 min 06 s")))
    assert {Fact("gpus", "1, 2"), Fact("static graph", "no"), Fact("seed", "0")} <= set(settings.facts)
    assert "rounds" not in {fact.name for fact in settings.facts}
    assert others == [
        Group("Model", (Fact("parameters", "11,689,512"), Fact("gradients per step", "44.6 MiB"))),
        Group(
            "Machine",
            (
                Fact("CPU governor", "performance"),
                Fact("transparent huge pages", "madvise"),
                Fact("container's CPU quota", "2.50 cores"),
                Fact("GPUs", "2 \N{MULTIPLICATION SIGN} A, 1,000 MiB"),
            ),
        ),
        Group("Environment variables", (Fact("NCCL_DEBUG", "WARN", code=True),)),
    ]
    assert [c.name for c in shown.ranks.columns] == ["Rank", "Host", "Local rank"]
    assert shown.topology == "GPU0 GPU1\n NV18"


def test_link_of_a_lab_is_named_first_and_among_the_conditions():
    shown = view([case("single", 1, 100.0, link="1gbit"), case("ddp", 2, 150.0, link="1gbit")])
    assert "link 1 Gbit/s" in shown.subtitle
    assert Group("Machine", (Fact("link between hosts", "1 Gbit/s"),)) in shown.conditions
    assert not [part for part in view(usual_cases()).subtitle if "link" in part]


def test_empty_manifest_shows_no_condition_but_the_usual_settings():
    shown = view(usual_cases())
    assert (shown.title, shown.ranks, shown.topology) == ("by-hand", None, "")
    assert [group.title for group in shown.conditions] == ["Settings"]


def test_the_workloads_code_and_ddp_benchs_own_are_shown_apart():
    workload = {"spec": "net:make", "file": "net.py", "repository": "mynet", "commit": "abc", "dirty": True}
    manifest = {
        "workload": {**workload, "code_sha256": "012"},
        "ddp_bench": {"version": "0.1.0"},
        "git": {"commit": "def", "dirty": False},
    }
    _, *shown = view(usual_cases(), manifest).conditions
    assert shown == [
        Group(
            "Workload's code",
            (
                Fact("workload", "net:make"),
                Fact("file", "net.py"),
                Fact("repository", "mynet"),
                Fact("commit", "abc"),
                Fact("uncommitted changes", "yes"),
                Fact("SHA-256 of all imported files", "012", code=True),
            ),
        ),
        Group(
            "ddp-bench", (Fact("version", "0.1.0"), Fact("commit", "def"), Fact("uncommitted changes", "no"))
        ),
    ]


def test_the_table_of_ranks_shows_the_cores_that_they_were_bound_to():
    ranks = [{"rank": 0, "device": "cuda:0", "bound_cores": "0-31"}, {"rank": 1, "bound_cores": ""}]
    table = view(usual_cases(), {"ranks": ranks}).ranks
    assert [column.name for column in table.columns] == ["Rank", "Local rank", "Device", "Bound cores"]
    assert [row[-1] for row in table.rows] == ["0-31", ""]
