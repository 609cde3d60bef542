"""python -m warpcheck."""

from warpcheck.cli import main

main(prog_name="warpcheck")
