"""One call on one rank, in the order in which it runs:

- `read` sorts the arguments, and has the records of a call;
- `validate` refuses wrong arguments, before a plan is made;
- `plan_cache` finds or makes the plan, of a mask that `mask_source` reads;
- `prepare` checks what needs the plan, makes the record of the call, with its `facts`, and compares ranks;
- `autograd` has the node and the two passes: a schedule of `distributed` runs an engine of `engine_factory`;
- `sinks` are applied to the results.

`traced` is the call in a graph, `expand` the engine for latents, `key_exchange` the passes of chunked graphs.

May import: graph, measured_tiles, distributed, reference, cpu, planning, masks, mods, core, kernels.
"""
