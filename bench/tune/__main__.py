"""`python -m bench.tune` in a checkout; `ddp-bench tune` elsewhere."""

import sys

from ddp_bench.bench.run.tune import main

if __name__ == "__main__":
    sys.exit(main())
