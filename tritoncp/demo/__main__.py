"""`python -m tritoncp.demo`, and what torchrun starts."""

from tritoncp.cli import demo

demo(prog_name="python -m tritoncp.demo")
