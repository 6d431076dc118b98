"""`python -m bench.tune` in a checkout; `ddp-bench tune` elsewhere."""

from ddp_bench.bench.cluster.process import leave
from ddp_bench.bench.tune.main import main

if __name__ == "__main__":
    leave(main())
