"""A project of a user's: a git repository with a workload, of which the second commit is slower."""

import subprocess

NET = """
import torch
PRODUCTS = {products}
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3 * 8 * 8, 4)
        self.factor = torch.full((64, 64), 1 / 64)
    def forward(self, images):
        with torch.no_grad():
            for _ in range(PRODUCTS):
                self.factor = self.factor @ self.factor
        return self.linear(images.flatten(1))
def make(): return Net()
"""
"""Nearly all of its step is matrix products, so that twice as many take twice as long on any machine.

They are small: a step of a few milliseconds is often done before a busy machine gives the core to another.
"""

RUN = (
    *("--image-size", "8", "--batch-size", "2", "--device", "cpu", "--modes", "single", "--gpus", "1"),
    *("--passes", "none", "--steps", "1"),
)


def git(folder, *arguments):
    """Git, as nobody in particular and without anybody's settings."""
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    return subprocess.check_output(["git", *who, *arguments], cwd=folder, text=True).strip()


def commit(folder, files):
    """Write these files into a repository, made where there is none, and commit them; the commit."""
    if not (folder / ".git").exists():
        folder.mkdir(parents=True, exist_ok=True)
        git(folder, "init", "--quiet", "--initial-branch", "main")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a change")
    return git(folder, "rev-parse", "HEAD")
