"""Real labs, the program of their ranks, and what the machine shows of them."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

from commands import ROOT

PROGRAM = """
import json, os, pathlib, sys, time
host, rank = os.environ["BENCH_HOST"], int(os.environ["RANK"])
folder, action = pathlib.Path(sys.argv[1]), sys.argv[2]
facts = dict(os.environ)
facts |= {"NETNS": os.readlink("/proc/self/ns/net"), "CORES": sorted(os.sched_getaffinity(0))}
def tell(**more):
    path = folder / f"rank{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(facts | more))
    path.with_suffix(".part").rename(path)
if action == "transfer":
    import socket
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as peer:
        control = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\\0")[0].decode()
    data, times_s = torch.ones(int(sys.argv[3]) // 4), []
    for _ in range(int(sys.argv[4])):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(data)
        times_s.append(time.perf_counter() - started)
    tell(times_s=times_s, sum=float(data[0]), control=control)
    dist.destroy_process_group()
    time.sleep(0.2)  # torch aborts where a thread of gloo holds an all-reduce as Python ends
elif action == "exit":
    tell()
    sys.stdout.write(f"said by rank {rank}\\n")
    codes = sys.argv[3].split(",")
    if codes[rank] != "wait":
        sys.exit(int(codes[rank]))
    time.sleep(600)
else:
    tell()
    time.sleep(600)
"""


def least_s(num_bytes, bit_per_s):
    """The link's own time for an all-reduce of two ranks: every byte once each way, but for a burst."""
    burst_bytes = 2 * max(70_000, bit_per_s * 0.002 / 8)
    return (num_bytes - burst_bytes) * 8 / bit_per_s


def namespaces_in_use():
    """Network namespaces that any process of the machine is in."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(str((process / "ns/net").readlink()))
        except OSError:
            continue
    return found


class Lab:
    """A started `bench.lab` of 2 hosts whose ranks run PROGRAM."""

    def __init__(self, folder, rate, *arguments, options=(), starter=("python", "-m")):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        module = f"lab_program_{uuid.uuid4().hex}"
        (folder / f"{module}.py").write_text(PROGRAM)
        program = module if starter[-1] == "-m" else str(folder / f"{module}.py")
        lab = [sys.executable, "-m", "bench.lab", "--hosts", "2", "--rate", rate, *options]
        self.process = subprocess.Popen(
            [*lab, "--", *starter, program, str(folder), *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ranks_started(self, num_ranks=2):
        return all((self.folder / f"rank{rank}.json").exists() for rank in range(num_ranks))

    def namespaces(self):
        """The ranks' network namespaces."""
        return {facts["NETNS"] for facts in self.ranks()}

    def ranks(self, num_ranks=2):
        """What each rank wrote down: its environment, namespace, cores and times."""
        return [json.loads((self.folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]

    def fastest_s(self):
        """After its end: how long the fastest all-reduce took the slower of two ranks, in seconds."""
        return max(min(facts["times_s"]) for facts in self.ranks())

    def end(self):
        """Exit code, standard output and standard error."""
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate(timeout=60)


def machine_network():
    """What the machine's own namespace and its named ones look like."""
    views = (["ip", "-brief", "link"], ["ip", "-brief", "address"], ["ip", "netns", "list"])
    seen = [subprocess.run(view, capture_output=True, text=True, check=True).stdout for view in views]
    return "".join(seen)
