"""`python -m tritoncp` is the command `tritoncp`."""

from tritoncp.cli import main

main(prog_name="tritoncp")
