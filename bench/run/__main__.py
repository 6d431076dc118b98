"""`python -m bench.run` in a checkout; `ddp-bench run` elsewhere."""

from ddp_bench.bench.run.main import main

if __name__ == "__main__":
    raise SystemExit(main())
