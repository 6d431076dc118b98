"""`python -m bench.watch` in a checkout; `ddp-bench watch` elsewhere."""

from ddp_bench.bench.watch.main import main

if __name__ == "__main__":
    raise SystemExit(main())
