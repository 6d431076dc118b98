"""`python -m report` in a checkout; `ddp-bench report` elsewhere."""

from ddp_bench.report.main import main

if __name__ == "__main__":
    raise SystemExit(main())
