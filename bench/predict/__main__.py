"""`python -m bench.predict` in a checkout; `ddp-bench predict` elsewhere."""

from ddp_bench.bench.predict.main import main

if __name__ == "__main__":
    raise SystemExit(main())
