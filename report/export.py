"""The page in other forms: figures as PNG for slides, the whole as PDF through a browser's print."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bench.errors import UsageError
from bench.results.store import replace_file
from report.build import build, drawings, load, write
from report.draw import figures
from report.markdown import markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_PRINT_TIMEOUT_S = 120


def write_markdown(runs: Sequence[Path], out: Path | None) -> str:
    """The summary of `runs`: into `out`, whose path is returned, or returned itself."""
    text = markdown(load(runs, Path()))
    if out is None:
        return text.rstrip("\n")
    write(out, text)
    return str(out)


def write_png(runs: Sequence[Path], folder: Path, *, predictions: Path | None = None) -> list[Path]:
    """Every figure of `runs` as `folder`/KEY.png, on white; raises UsageError if one cannot be written."""
    drawn = drawings(load(runs, folder, predictions=predictions))
    if not drawn:
        raise UsageError("there is no figure to write: no case on several devices has a measurement")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in drawn:
            image = figures.png(figure)
            replace_file(folder / f"{figure.key}.png", lambda part, image=image: part.write_bytes(image))
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror}; name a folder with --png") from None
    return [folder / f"{figure.key}.png" for figure in drawn]


def write_pdf(runs: Sequence[Path], out: Path, *, predictions: Path | None = None) -> Path:
    """The page of `runs` as Chromium prints it. Raises UsageError without a browser, or if it fails."""
    browser = next((path for name in _BROWSERS if (path := shutil.which(name)) is not None), None)
    if browser is None:
        raise UsageError("--pdf needs Chromium or Chrome on the PATH; install chromium, or print the page")
    try:
        # Beside the result, not in /tmp: a browser from a snap sees nothing of that.
        with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix="report-") as name:
            scratch = Path(name)
            page = build(runs, scratch / "report.html", predictions=predictions)
            _print(browser, page, scratch / "report.pdf", scratch / "profile")
            (scratch / "report.pdf").replace(out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; name a writable file with --pdf") from None
    return out


def _print(browser: str, page: Path, pdf: Path, profile: Path) -> None:
    # Chromium refuses to sandbox for root, which is who runs in most containers.
    unboxed = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    quiet = ["--disable-gpu", "--disable-background-networking", "--no-first-run", "--no-pdf-header-footer"]
    command = [browser, "--headless", *unboxed, *quiet, f"--user-data-dir={profile}"]
    try:
        done = subprocess.run(
            [*command, f"--print-to-pdf={pdf}", page.as_uri()],
            capture_output=True,
            timeout=_PRINT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{browser} did not print within {_PRINT_TIMEOUT_S} s; print the page") from None
    if done.returncode != 0 or not pdf.exists():
        raise UsageError(f"{browser} printed nothing (exit status {done.returncode}); print the page by hand")
