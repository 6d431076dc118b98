"""`python -m bench.gate` in a checkout; `ddp-bench gate` elsewhere."""

from ddp_bench.bench.gate.main import main

if __name__ == "__main__":
    raise SystemExit(main())
