"""`tritoncp check`: every schedule over the masks that differ for kernels, compared with dense float64.

cases.py       the cases, and their problems: tensors with exact answers and allowed errors
comparison.py  a case run on the ranks of a world, each rank's part compared with the exact answer
attempts.py    cases one after the other: limits of time, failures, what the ranks say of each
workers.py     worker processes that share a device
run.py         one process with simulated worlds, or the ranks that torchrun started
facts.py       the machine: devices, driver, compilers, links
report.py      the table, the JSON object and the line for a report
command.py     the command
"""
