"""`python -m bench.lab` in a checkout; `ddp-bench lab` elsewhere."""

from ddp_bench.bench.lab.main import main

if __name__ == "__main__":
    raise SystemExit(main())
