"""`tritoncp check`: compares every schedule with dense float64 attention, over masks with different kernels.

cases.py       the cases, and their problems: tensors with exact results and allowed errors
comparison.py  running a schedule on the ranks of a world, and comparing each part with the exact results
run.py         running cases on one device or the ranks that torchrun started: limits, failures
report.py      a line a case, the machine, the verdict
command.py     the command
"""
