"""`python -m bench.archive` in a checkout; `ddp-bench archive` elsewhere."""

import sys

from ddp_bench.bench.archive.main import main

if __name__ == "__main__":
    sys.exit(main())
