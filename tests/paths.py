"""Counts the files from a cap to DDP's constructor, from DDP to the page, from a timed block to images/s.

    python tests/paths.py [CHECKOUT]

A tiny run of the checkout (by default this one) is watched with `sys.setprofile` in all its processes. A way
is a list of stations: functions that are called as what is followed is handed on. A file of the product is on
it where one of its functions is on the call stack of a station's first call: who follows the way reads it.
Prints the files of each way. Functions that only older checkouts have are named too.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = (
    *("run", "--arch", "resnet20", "--modes", "ddp", "--gpus", "2", "--device", "cpu", "--batch-size", "4"),
    *("--bucket-cap-mb", "0.25", "--rounds", "1", "--passes", "none", "--quiet"),
)
WAYS = {
    "bucket_cap_mb from argv to DDP": {
        "parsed": r"parse_bucket_caps|BucketCaps\.parse",
        "planned": r"_plan_case",
        "sent": r"encode (Warm|Prepare)",
        "built": r"DistributedDataParallel\.__init__",
    },
    "from DDP to the page": {
        "read": r"DistributedMode\.read_bucket_layout",
        "answered": r"encode Report (Warmed|Prepared)",
        "noted": r"Recorder\.set_(outcome|layout)",
        "a row": r"make_case_rows",
        "shown": r"render_html",
    },
    "a timed block to images/s": {
        "timed": r"run_block",
        "answered": r"encode Report BlockTimes",
        "noted": r"Recorder\.add_block",
        "by round": r"RoundTimes\.add",
        "a row": r"make_case_rows",
    },
}
"""Stations by name: patterns of what `station_of` tells of a call."""


def watch(root, out):
    """Have every thread of this process, and of its forks, note the stacks of stations."""
    import threading

    whole = re.compile("|".join(p for stations in WAYS.values() for p in stations.values()))
    roots = tuple(f"{root}/{folder}/" for folder in ("bench", "models", "report"))

    def station_of(frame):
        """A function by its qualified name; of `encode` also what it sends."""
        name = frame.f_code.co_qualname
        if name != "encode":
            return name
        sent = frame.f_locals.get("message")
        kinds = [type(one).__name__ for one in (sent, getattr(sent, "value", None)) if one is not None]
        return " ".join(["encode", *kinds])

    def note(frame, event, _):
        if event != "call" or not whole.fullmatch(found := station_of(frame)):
            return
        own, here = [], frame
        while here is not None:
            path = os.path.realpath(here.f_code.co_filename)
            if path.startswith(roots):
                own.append((os.path.relpath(path, root), here.f_code.co_name))
            here = here.f_back
        if any(name == "<module>" for _, name in own[:-1]):
            return  # a default, made while its file is imported
        line = json.dumps([time.monotonic(), found, [file for file, _ in own]])
        with Path(out, str(os.getpid())).open("a") as file:
            file.write(f"{line}\n")

    threading.setprofile(note)
    sys.setprofile(note)


def main(checkout):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stacks"
        out.mkdir()
        hook = ["import sys", f"sys.path.append({str(ROOT / 'tests')!r})", "import paths"]
        hook.append(f"paths.watch({checkout!r}, {str(out)!r})")
        (Path(folder) / "sitecustomize.py").write_text("\n".join(hook))
        command = [sys.executable, f"{checkout}/ddp_bench/__main__.py", *RUN]
        environment = os.environ | {"PYTHONPATH": folder}
        subprocess.run([*command, "--out", f"{folder}/run"], env=environment, cwd=folder, check=True)
        lines = [json.loads(line) for file in out.iterdir() for line in file.read_text().splitlines()]
    for way, stations in WAYS.items():
        whole = set()
        for name, pattern in stations.items():
            first = next((files for _, found, files in sorted(lines) if re.fullmatch(pattern, found)), None)
            if first is None:
                sys.exit(f"{way}: nothing is called where it is {name} ({pattern})")
            whole.update(first)
        print(f"{len(whole):>3} files: {way}: {', '.join(sorted(whole))}")


if __name__ == "__main__":
    main(os.path.realpath(sys.argv[1] if len(sys.argv) > 1 else ROOT))
