"""`tritoncp check`: compares every schedule with dense float64 attention, for masks that use different
kernels.

cases.py       the cases, and their problems: tensors with exact results and allowed errors
comparison.py  running a case on the ranks of a world, and comparing shards with the exact results
run.py         running all cases on one device or the ranks of torchrun: time limits, failures
report.py      a line for each case, the machine, the verdict
command.py     the command
"""
