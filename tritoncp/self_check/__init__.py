"""`tritoncp check`: compares every schedule with dense float64 attention, over masks with different kernels.

cases.py       the cases, and their problems: tensors with exact results and allowed errors
comparison.py  running a case on the ranks of a world, and comparing each part with the exact results
attempts.py    running cases in turn: time limits, failures, collecting the results of all ranks
workers.py     worker processes that share a device
run.py         one process with simulated worlds, or the ranks that torchrun started
facts.py       the machine: devices, driver, compilers, links
report.py      the table, the JSON object and the line for a report
command.py     the command
"""
