"""The parts of a call that torch.compile, make_fx and torch.export see: registered ops and dispatch modes;
mods and masks in graphs, with structure as constants and captures as inputs; ops of `reshard` and `roll`;
checkpoint policies.

May import: distributed, planning, masks, mods, core.
"""
