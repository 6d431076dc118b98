"""`python -m bench.export` in a checkout; `ddp-bench export` elsewhere."""

import sys

from ddp_bench.bench.export.main import main

if __name__ == "__main__":
    sys.exit(main())
