"""`python -m bench.doctor` in a checkout; `ddp-bench doctor` elsewhere."""

from ddp_bench.bench.doctor.main import main

if __name__ == "__main__":
    raise SystemExit(main())
