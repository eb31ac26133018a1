"""`python -m tritoncp.demo`."""

from tritoncp.demo.command import demo

demo(prog_name="python -m tritoncp.demo")
