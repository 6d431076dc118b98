"""`python -m bench.export` in a checkout; `ddp-bench export` elsewhere."""

from ddp_bench.bench.export.main import main

if __name__ == "__main__":
    raise SystemExit(main())
