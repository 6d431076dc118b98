"""`python -m bench.tune` in a checkout; `ddp-bench tune` elsewhere."""

from ddp_bench.bench.run.tune import main

if __name__ == "__main__":
    raise SystemExit(main())
