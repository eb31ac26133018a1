"""One call on one rank, in the order in which it runs:

- `read` sorts the arguments;
- `check_arguments` refuses wrong ones, before a plan is made, `check_shards` those that do not fit the plan;
- `plan_cache` finds or makes the plan, of a mask that `mask_source` reads;
- `prepare` checks what else needs the plan, makes the prepared call, with its `facts`, and compares ranks;
- `autograd` has the node and the two passes: a schedule of `distributed` runs an engine of `engine_factory`;
- `sinks` are applied to the results.

`traced` is the call in a graph, `op_arguments` its encoding, `expand` the engine for latents, `selected` what
selected keys add, among it the pass of their probabilities, `key_exchange` has the passes of chunked graphs.

May import: graph, selection, measured_tiles, distributed, reference, cpu, report, planning, masks, mods,
core, kernels.
"""
