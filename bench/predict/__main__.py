"""`python -m bench.predict` in a checkout; `ddp-bench predict` elsewhere."""

import sys

from ddp_bench.bench.predict.main import main

if __name__ == "__main__":
    sys.exit(main())
