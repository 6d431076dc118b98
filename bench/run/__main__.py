"""`python -m bench.run` in a checkout; `ddp-bench run` elsewhere."""

import sys

from ddp_bench.bench.run.main import main

if __name__ == "__main__":
    sys.exit(main())
