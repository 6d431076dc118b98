"""Tells environment variables that hold a credential, so that it is never written down."""

from __future__ import annotations

import re

HIDDEN = "(hidden)"

_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|BEARER|(API|ACCESS|PRIVATE|SSH)_?KEY|(^|_)KEYS?(_|$)",
    re.IGNORECASE,
)
"""Parts of names; a bare KEY only as a word of its own: NCCL_IB_PKEY is the number of a partition."""

_VALUE = re.compile(
    r"://[^/\s]*@"  # a URL with user, or user and password
    r"|\b(token|secret|passw(or)?d|passphrase|credentials?|auth(orization)?|api[_-]?key)\s*[=:]"
    r"|\bbearer\s"
    r"|-----BEGIN "
    r"|\b(gh[opsur]_|github_pat_|glpat-|hf_|xox[abprs]-|A[KS]IA[0-9A-Z]{8}|eyJ[\w-]{8,}\.|sk-)",
    re.IGNORECASE,
)
"""Values that give themselves away: URLs with a user, `password=…`, keys and tokens by their known heads."""


def is_credential(name: str, value: str) -> bool:
    """Whether a variable looks as if it held a credential; in doubt it does."""
    return _NAME.search(name) is not None or _VALUE.search(value) is not None
