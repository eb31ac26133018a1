"""`python -m tritoncp.demo`, also the entry point under torchrun."""

from tritoncp.demo.command import demo

demo(prog_name="python -m tritoncp.demo")
