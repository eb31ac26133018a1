"""What torch.compile, make_fx and torch.export see of a call: registered ops and dispatch modes; mods and
masks in graphs, structure as constants and captures as inputs; ops of `reshard`, `roll`; checkpoint policies.

May import: distributed, planning, masks, mods, core.
"""
